"""`keras.ipu.optimizers`: gradient accumulation and automatic loss scaling (ALS) around Keras optimizers."""

from tf_ipu_dp.emulator.keras.accumulating_optimizers import (
    ALSGradientAccumulationOptimizer,
    GradientAccumulationOptimizer,
)
from tf_ipu_dp.emulator.keras.loss_scaling import ALSOptimizer, ALSOptimizerAdam, ALSOptimizerRMSProp, ALSOptimizerSGD

__all__ = [
    "ALSGradientAccumulationOptimizer",
    "ALSOptimizer",
    "ALSOptimizerAdam",
    "ALSOptimizerRMSProp",
    "ALSOptimizerSGD",
    "GradientAccumulationOptimizer",
]
