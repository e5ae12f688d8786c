"""`tensorflow.python.ipu.keras_extensions`: what both IPU strategies have in common for Keras."""

from __future__ import annotations

from tf_ipu_dp.emulator.sdk_api.ipu import config as ipu_config


class KerasExtensions:
    """A strategy in whose scope Keras models get the IPU's methods."""

    enable_keras_extensions = True
    enable_dataset_iterators = True
    has_pipeline_stages = False  # whether PipelineStage can be used in its scope
    device_ordinal = 0

    def ipus(self) -> int:
        """Returns the IPUs of the strategy's device."""
        return ipu_config.ipus_of_device(self.device_ordinal)


def ordinal_of(ipu_device: str) -> int:
    """Returns the number of a device like /device:IPU:0."""
    tail = ipu_device.rsplit(":", 1)[-1]
    if not tail.isdigit():
        raise ValueError(f"{ipu_device!r} does not name an IPU device; it is like /device:IPU:0.")
    return int(tail)
