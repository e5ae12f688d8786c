"""`tensorflow.python.ipu.vertex_edsl`: expressions compiled to code for the IPU, refused."""

from __future__ import annotations

from tf_ipu_dp.emulator.refusal import refused

_WHY = "its expressions are compiled to code for the IPU's tiles"

PlaceholderVertexExpr = refused("ipu.vertex_edsl.PlaceholderVertexExpr", _WHY)

__all__ = [
    "PlaceholderVertexExpr",
]
