"""`tensorflow.python.ipu.map_gradient_optimizer`: another name of `optimizers.map_gradient_optimizer`."""

from tf_ipu_dp.emulator.sdk_api.ipu.optimizers.map_gradient_optimizer import MapGradientOptimizer

__all__ = ["MapGradientOptimizer"]
