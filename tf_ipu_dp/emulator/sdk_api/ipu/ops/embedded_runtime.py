"""`tensorflow.python.ipu.ops.embedded_runtime`: running Poplar executables, which the emulator cannot do."""

from __future__ import annotations

from tf_ipu_dp.emulator.refusal import refused

__all__ = [
    "RuntimeContext",
    "embedded_runtime_call",
    "embedded_runtime_start",
    "embedded_runtime_start_and_call",
    "embedded_runtime_stop",
]

_WHY = "it runs a Poplar executable, which needs an IPU"
RuntimeContext = refused("embedded_runtime.RuntimeContext", _WHY)
embedded_runtime_start = refused("embedded_runtime.embedded_runtime_start", _WHY)
embedded_runtime_call = refused("embedded_runtime.embedded_runtime_call", _WHY)
embedded_runtime_stop = refused("embedded_runtime.embedded_runtime_stop", _WHY)
embedded_runtime_start_and_call = refused("embedded_runtime.embedded_runtime_start_and_call", _WHY)
