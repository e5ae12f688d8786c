"""`tensorflow.python.ipu.ops.f8_ops`: 8-bit floating point, which the emulator does not compute with.

Every name of the module can be imported; calling it is refused.
"""

from __future__ import annotations

import enum
from typing import Any

from tf_ipu_dp.emulator.refusal import refused


class Format(enum.Enum):
    """The two formats: bits of sign, exponent and mantissa."""

    F143 = 0
    F152 = 1


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return refused(f"f8_ops.{name}", "8-bit floats are not emulated")
