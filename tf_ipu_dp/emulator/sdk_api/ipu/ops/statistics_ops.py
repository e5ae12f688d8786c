"""`tensorflow.python.ipu.ops.statistics_ops`: histograms of tensors of rank 1."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

__all__ = ["fixed_width_bins", "histogram", "histogram_normalize", "histogram_update"]


def histogram(inputs: Any, levels: Any, absolute_of_input: bool = False) -> tf.Tensor:
    """Returns how many inputs are below, between and from the sorted levels on: float32 `[len(levels) + 1]`.

    A level is the lower bound of its bin and belongs to it.
    """
    inputs = _vector("inputs", inputs)
    levels = levels if tf.is_tensor(levels) else tf.convert_to_tensor(levels, inputs.dtype)
    levels = _vector("levels", levels)
    if levels.dtype != inputs.dtype:
        raise ValueError(f"inputs of {inputs.dtype.name} cannot have levels of {levels.dtype.name}.")
    values = tf.cast(tf.abs(inputs) if absolute_of_input else inputs, tf.float32)
    bins = tf.searchsorted(tf.cast(levels, tf.float32), values, side="right")
    counts = tf.math.unsorted_segment_sum(tf.ones_like(bins), bins, tf.size(levels) + 1)
    counts.set_shape([None if levels.shape[0] is None else levels.shape[0] + 1])
    return tf.cast(counts, tf.float32)


def histogram_update(hist: Any, inputs: Any, levels: Any, absolute_of_input: bool = False) -> tf.Tensor:
    """Returns a histogram with the inputs added to it."""
    hist = _vector("hist", hist)
    if hist.dtype != tf.float32:
        raise ValueError(f"hist must be float32, not {hist.dtype.name}.")
    new = histogram(inputs, levels, absolute_of_input)
    if not hist.shape.is_compatible_with(new.shape):
        raise ValueError(f"hist has {hist.shape[0]} bins, but the levels make {new.shape[0]}.")
    return hist + new


def fixed_width_bins(inputs: Any, n_bins: int) -> tf.Tensor:
    """Returns `n_bins - 1` evenly spaced levels from the smallest to the largest input."""
    inputs = _vector("inputs", inputs)
    if n_bins < 2:
        raise ValueError(f"n_bins={n_bins} must be at least 2.")
    bounds = tf.cast(tf.stack([tf.reduce_min(inputs), tf.reduce_max(inputs)]), tf.float32)
    return tf.cast(tf.linspace(bounds[0], bounds[1], n_bins - 1), inputs.dtype)


def histogram_normalize(hist: Any) -> tf.Tensor:
    """Returns the shares of a histogram's bins."""
    hist = _vector("hist", hist)
    return hist / tf.reduce_sum(hist)


def _vector(label: str, value: Any) -> tf.Tensor:
    tensor = tf.convert_to_tensor(value)
    if tensor.shape.rank != 1:
        raise ValueError(f"{label} must have rank 1, but the shape is {tensor.shape}.")
    if tensor.dtype not in (tf.float16, tf.float32):
        raise ValueError(f"{label} must be float16 or float32, not {tensor.dtype.name}.")
    return tensor
