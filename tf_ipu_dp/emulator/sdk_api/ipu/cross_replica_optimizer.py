"""`tensorflow.python.ipu.cross_replica_optimizer`: another name of `optimizers.cross_replica_optimizer`."""

from tf_ipu_dp.emulator.sdk_api.ipu.optimizers.cross_replica_optimizer import CrossReplicaOptimizer

__all__ = ["CrossReplicaOptimizer"]
