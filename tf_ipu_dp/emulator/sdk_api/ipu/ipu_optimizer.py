"""`tensorflow.python.ipu.ipu_optimizer`: another name of `optimizers.ipu_optimizer`."""

from tf_ipu_dp.emulator.sdk_api.ipu.optimizers.ipu_optimizer import IpuOptimizer

__all__ = ["IpuOptimizer"]
