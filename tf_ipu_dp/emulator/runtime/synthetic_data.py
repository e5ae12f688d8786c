"""Synthetic data: what the device makes for itself instead of exchanging it with the host, as TF_POPLAR_FLAGS asks.

Input is made by the initializer, or zero where the SDK would leave memory as it is. Output does not arrive: Keras
reports zeros, and outfeed queues stay empty. Synthetic parameters are emulated for Keras models only: an execution
computes with made weights, and the host's weights stay as they are.
"""

from __future__ import annotations

import contextlib
from typing import Any, FrozenSet, Iterator, List, Mapping

import tensorflow as tf

from tf_ipu_dp.emulator.runtime import poplar_flags

_categories: FrozenSet[str] = frozenset()
_initializer = "0"


def configure(flags: Mapping[str, str]) -> None:
    """Sets which data is synthetic; programs that are traced from now on use it."""
    global _categories, _initializer  # noqa: PLW0603
    _categories = poplar_flags.synthetic_categories(flags)
    _initializer = flags.get("synthetic_data_initializer", "0")


def is_used_for(category: str) -> bool:
    """Whether data of a category is synthetic."""
    return category in _categories


def make(shape: Any, dtype: Any) -> Any:
    """Returns a tensor that the initializer makes."""
    if _initializer == "normal":
        return tf.cast(tf.random.normal(shape), dtype)
    if _initializer in ("random", "uniform"):
        if not dtype.is_integer:
            return tf.cast(tf.random.uniform(shape), dtype)
        # Of the whole type: integers that are labels do not stay among the classes.
        return tf.cast(tf.random.uniform(shape, tf.int32.min, tf.int32.max, tf.int32), dtype)
    return tf.cast(tf.fill(shape, int(_initializer)), dtype)


@contextlib.contextmanager
def replaced_weights(model: Any) -> Iterator[None]:
    """Inside, a Keras model and its optimizer have synthetic weights if parameters are synthetic."""
    variables = _variables(model) if is_used_for("parameters") else []
    before = [variable.read_value() for variable in variables]
    for variable in variables:
        variable.assign(make(variable.shape, variable.dtype))
    try:
        yield
    finally:
        for variable, value in zip(variables, before):
            variable.assign(value)


def _variables(model: Any) -> List[Any]:
    optimizer = getattr(model, "optimizer", None)
    of_optimizer = getattr(optimizer, "variables", [])
    return [*model.weights, *(of_optimizer() if callable(of_optimizer) else of_optimizer)]
