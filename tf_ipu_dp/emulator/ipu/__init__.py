"""`tensorflow.python.ipu` on stock TensorFlow."""

from tf_ipu_dp.emulator.ipu import config

__all__ = ["config"]
