"""`tensorflow.python.ipu.keras.optimizers` of releases up to 3.0."""

from tf_ipu_dp.emulator.keras.accumulating_optimizers import GradientAccumulationOptimizer
from tf_ipu_dp.emulator.refusal import refused

__all__ = ["CrossReplicaOptimizer", "GradientAccumulationOptimizer", "IpuOptimizer", "MapGradientOptimizer"]

_PACKAGE = "tensorflow.python.ipu.keras.optimizers"
_REMOVED = "release 3.1 removed it; Keras' optimizers sum over the replicas, and take gradient_transformers"
CrossReplicaOptimizer = refused(f"{_PACKAGE}.CrossReplicaOptimizer", _REMOVED)
IpuOptimizer = refused(f"{_PACKAGE}.IpuOptimizer", _REMOVED)
MapGradientOptimizer = refused(f"{_PACKAGE}.MapGradientOptimizer", _REMOVED)
