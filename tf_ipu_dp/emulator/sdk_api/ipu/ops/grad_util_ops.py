"""`tensorflow.python.ipu.ops.grad_util_ops`: captures gradients in the backward pass."""

from tf_ipu_dp.emulator.runtime.gradient_capture import capture_upstream_gradients

__all__ = ["capture_upstream_gradients"]
