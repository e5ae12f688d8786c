"""`keras.ipu.extensions.functional_extensions`."""

from __future__ import annotations

from typing import Any

from tf_ipu_dp.emulator.keras.stage_assignments import FUNCTIONAL, SEQUENTIAL
from tf_ipu_dp.emulator.sdk_api.keras_ipu.extensions.model_extensions import ModelExtension


class FunctionalExtension(ModelExtension):
    """A functional model on an IPU."""

    @classmethod
    def _extends(cls, model: Any) -> bool:
        return isinstance(model, FUNCTIONAL) and not isinstance(model, SEQUENTIAL)
