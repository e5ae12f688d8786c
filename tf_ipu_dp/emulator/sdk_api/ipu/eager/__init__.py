"""`tensorflow.python.ipu.eager`."""

from tf_ipu_dp.emulator.sdk_api.ipu.eager import backprop

__all__ = ["backprop"]
