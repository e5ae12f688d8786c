"""`tensorflow.python.ipu.eager.backprop`: capture of gradients in the backward pass."""

from tf_ipu_dp.emulator.runtime.gradient_capture import GradientCaptureContext, GradientCaptureTape

__all__ = ["GradientCaptureContext", "GradientCaptureTape"]
