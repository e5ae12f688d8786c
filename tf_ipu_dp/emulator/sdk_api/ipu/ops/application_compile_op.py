"""`tensorflow.python.ipu.ops.application_compile_op`: Poplar executables, which the emulator cannot make."""

from __future__ import annotations

from tf_ipu_dp.emulator.refusal import refused

__all__ = ["experimental_application_compile_op"]

experimental_application_compile_op = refused(
    "application_compile_op.experimental_application_compile_op", "it makes a Poplar executable, for IPUs only"
)
