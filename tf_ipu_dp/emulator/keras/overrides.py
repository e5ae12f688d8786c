"""Which methods of models and optimizers a program may override, by the SDK's rules."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

_REFUSED = ("train_step", "make_train_function", "make_test_function", "make_predict_function")


def check_model(model: Any) -> None:
    """Raises RuntimeError if the model overrides a method that the SDK replaces."""
    for name in _REFUSED:
        if getattr(type(model), name) is not getattr(tf.keras.Model, name):
            raise RuntimeError(f"{type(model).__name__} overrides {name}, which an IPU strategy does not support.")


def check_optimizer(optimizer: Any) -> None:
    """Raises ValueError if the optimizer overrides `minimize`, for gradients that are accumulated.

    The SDK compares the class with its first base only. So a class that inherits an overridden `minimize`, like one
    with decoupled weight decay, is accepted.
    """
    kind = type(getattr(optimizer, "inner_optimizer", optimizer))  # of a LossScaleOptimizer
    inherited = getattr(kind.__bases__[0], "minimize", None)
    if inherited is not None and kind.minimize is not inherited:
        raise ValueError(f"{kind.__name__} overrides minimize, which cannot be used with accumulated gradients.")
