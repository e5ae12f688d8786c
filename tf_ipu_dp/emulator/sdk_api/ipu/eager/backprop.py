"""`tensorflow.python.ipu.eager.backprop`: capture of gradients in the backward pass, refused."""

from __future__ import annotations

from tf_ipu_dp.emulator.refusal import refused

_WHY = "how captured gradients are returned is not documented, and no public program uses it"

GradientCaptureContext = refused("ipu.eager.backprop.GradientCaptureContext", _WHY)
GradientCaptureTape = refused("ipu.eager.backprop.GradientCaptureTape", _WHY)

__all__ = [
    "GradientCaptureContext",
    "GradientCaptureTape",
]
