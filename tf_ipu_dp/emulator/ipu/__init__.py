"""`tensorflow.python.ipu` on stock TensorFlow."""

from tf_ipu_dp.emulator.ipu import config, gradient_accumulation, ipu_strategy, utils

__all__ = ["config", "gradient_accumulation", "ipu_strategy", "utils"]
