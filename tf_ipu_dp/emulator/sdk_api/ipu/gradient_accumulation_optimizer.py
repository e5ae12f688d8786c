"""`tensorflow.python.ipu.gradient_accumulation_optimizer`: another name of that module in `optimizers`."""

from tf_ipu_dp.emulator.sdk_api.ipu.gradient_accumulation import GradientAccumulationReductionMethod
from tf_ipu_dp.emulator.sdk_api.ipu.optimizers.gradient_accumulation_optimizer import (
    CrossReplicaGradientAccumulationOptimizer,
    CrossReplicaGradientAccumulationOptimizerV2,
    GradientAccumulationOptimizer,
    GradientAccumulationOptimizerV2,
)

__all__ = [
    "CrossReplicaGradientAccumulationOptimizer",
    "CrossReplicaGradientAccumulationOptimizerV2",
    "GradientAccumulationOptimizer",
    "GradientAccumulationOptimizerV2",
    "GradientAccumulationReductionMethod",
]
