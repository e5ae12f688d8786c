"""`tensorflow.python.ipu.sharded_optimizer`: another name of `optimizers.sharded_optimizer`."""

from tf_ipu_dp.emulator.sdk_api.ipu.optimizers.sharded_optimizer import ShardedOptimizer

__all__ = ["ShardedOptimizer"]
