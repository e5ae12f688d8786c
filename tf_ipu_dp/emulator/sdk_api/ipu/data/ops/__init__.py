"""`tensorflow.python.ipu.data.ops`."""

from tf_ipu_dp.emulator.sdk_api.ipu.data.ops import dataset_ops

__all__ = ["dataset_ops"]
