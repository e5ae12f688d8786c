"""`keras.ipu.extensions.sequential_extensions`."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_ipu_dp.emulator.sdk_api.keras_ipu.extensions.model_extensions import ModelExtension


class SequentialExtension(ModelExtension):
    """A `Sequential` model on an IPU."""

    @classmethod
    def _extends(cls, model: Any) -> bool:
        return isinstance(model, tf.keras.Sequential)
