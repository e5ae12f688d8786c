"""`tensorflow.python.ipu.ops.functional_ops`: functions whose code an IPU shares between calls."""

from __future__ import annotations

import functools
from typing import Any, Callable, Optional

import tensorflow as tf

__all__ = ["outlined_function"]


def outlined_function(
    func: Optional[Callable[..., Any]] = None,
    unique_sharding: bool = False,
    keep_input_layouts: Optional[bool] = None,
    name: Optional[str] = None,
) -> Any:
    """Decorates a function of tensors; the decorator's arguments are optional. Calls take positional arguments only."""
    del unique_sharding, keep_input_layouts

    def decorate(inner: Callable[..., Any]) -> Callable[..., Any]:
        label = name or getattr(inner, "__name__", "function").strip("<_>") or "function"

        @functools.wraps(inner)
        def call(*args: Any) -> Any:
            with tf.name_scope(label):
                return _as_tensors(inner(*args), label)

        return call

    return decorate if func is None else decorate(func)


def _as_tensors(result: Any, label: str) -> Any:
    """Converts numbers and variables to tensors; None and operations are not changed."""
    unchanged = (type(None), tf.Operation)
    if all(isinstance(leaf, unchanged) for leaf in tf.nest.flatten(result)):
        raise ValueError(f"{label} must return at least one tensor to be outlined.")
    return tf.nest.map_structure(
        lambda leaf: leaf if isinstance(leaf, unchanged) else tf.convert_to_tensor(leaf), result
    )
