"""`keras.ipu.extensions.extensions_base`: the class that all models on an IPU are instances of."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_ipu_dp.emulator.keras import model_options


class _ModelsOnIpu(type):
    """Makes models on an IPU instances of a class, although the emulator does not change their classes."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, tf.keras.Model) and model_options.is_on_ipu(instance) and cls._extends(instance)

    def _extends(cls, model: Any) -> bool:
        raise NotImplementedError


class KerasExtensionBase(metaclass=_ModelsOnIpu):
    """Any model on an IPU."""

    @classmethod
    def _extends(cls, model: Any) -> bool:
        return True
