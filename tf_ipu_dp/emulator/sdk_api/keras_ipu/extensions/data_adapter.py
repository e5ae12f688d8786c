"""`keras.ipu.extensions.data_adapter`: how Keras models on an IPU get their data.

The emulator distributes data to replicas inside `fit`, `evaluate` and `predict`, without a handler that programs could
use. Every name of the module can be imported; calling it is refused.
"""

from __future__ import annotations

from typing import Any

from tf_ipu_dp.emulator.refusal import refused


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return refused(f"data_adapter.{name}", "models distribute their data inside fit, evaluate and predict")
