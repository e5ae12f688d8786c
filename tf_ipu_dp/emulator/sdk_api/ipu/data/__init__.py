"""`tensorflow.python.ipu.data`."""

from tf_ipu_dp.emulator.sdk_api.ipu.data import ops

__all__ = ["ops"]
