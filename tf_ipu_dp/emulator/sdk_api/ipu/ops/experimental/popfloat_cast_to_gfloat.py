"""`tensorflow.python.ipu.ops.experimental.popfloat_cast_to_gfloat`: floats of any format, which are not emulated.

Every name of the module can be imported; calling it is refused.
"""

from __future__ import annotations

from typing import Any

from tf_ipu_dp.emulator.refusal import refused


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return refused(f"popfloat_cast_to_gfloat.{name}", "generic floats of Poplar are not emulated")
