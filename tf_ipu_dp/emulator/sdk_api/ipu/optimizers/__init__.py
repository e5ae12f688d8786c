"""`tensorflow.python.ipu.optimizers`: wrappers of TF1 optimizers (`tf.compat.v1.train.Optimizer`) only."""

from tf_ipu_dp.emulator.sdk_api.ipu.gradient_accumulation import GradientAccumulationReductionMethod
from tf_ipu_dp.emulator.sdk_api.ipu.optimizers.cross_replica_optimizer import CrossReplicaOptimizer
from tf_ipu_dp.emulator.sdk_api.ipu.optimizers.gradient_accumulation_optimizer import (
    CrossReplicaGradientAccumulationOptimizer,
    CrossReplicaGradientAccumulationOptimizerV2,
    GradientAccumulationOptimizer,
    GradientAccumulationOptimizerV2,
)
from tf_ipu_dp.emulator.sdk_api.ipu.optimizers.ipu_optimizer import IpuOptimizer
from tf_ipu_dp.emulator.sdk_api.ipu.optimizers.map_gradient_optimizer import MapGradientOptimizer
from tf_ipu_dp.emulator.sdk_api.ipu.optimizers.sharded_optimizer import ShardedOptimizer

__all__ = [
    "CrossReplicaGradientAccumulationOptimizer",
    "CrossReplicaGradientAccumulationOptimizerV2",
    "CrossReplicaOptimizer",
    "GradientAccumulationOptimizer",
    "GradientAccumulationOptimizerV2",
    "GradientAccumulationReductionMethod",
    "IpuOptimizer",
    "MapGradientOptimizer",
    "ShardedOptimizer",
]
