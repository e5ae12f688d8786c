"""`tensorflow.python.ipu.ops.math_ops`: serialised matrix products and sums of segments.

On an IPU a serialised product saves memory and gives the same numbers; here it is one product, after the SDK's checks.
"""

from __future__ import annotations

from typing import Any, Optional

import tensorflow as tf

__all__ = ["segment_sum", "serialized_matmul"]

_DIMENSIONS = ("a_columns", "a_rows_b_columns", "b_rows")


def serialized_matmul(
    a: Any,
    b: Any,
    serialization_factor: int,
    serialization_dimension: str,
    transpose_a: bool = False,
    transpose_b: bool = False,
    name: Optional[str] = None,
) -> tf.Tensor:
    """Returns the product of `a` `[..., m, k]` and `b` `[..., k, n]`, computed in parts along m, k or n on an IPU."""
    a, b = tf.convert_to_tensor(a), tf.convert_to_tensor(b)
    if serialization_dimension not in _DIMENSIONS:
        raise ValueError(f"serialization_dimension={serialization_dimension!r} is not one of {', '.join(_DIMENSIONS)}.")
    if serialization_factor < 1:
        raise ValueError(f"serialization_factor={serialization_factor} must be at least 1.")
    for label, tensor in (("a", a), ("b", b)):
        if tensor.shape.rank is None or tensor.shape.rank < 2:
            raise ValueError(f"serialized_matmul: {label} must have at least two dimensions, not shape {tensor.shape}.")
    rows, inner = a.shape[-2:][::-1] if transpose_a else a.shape[-2:]
    columns = b.shape[-2 if transpose_b else -1]
    size = dict(zip(_DIMENSIONS, (rows, inner, columns)))[serialization_dimension]
    if size is not None and size % serialization_factor:
        raise ValueError(
            f"serialization_factor={serialization_factor} does not divide the {size} of {serialization_dimension}."
        )
    return tf.matmul(a, b, transpose_a=transpose_a, transpose_b=transpose_b, name=name)


def segment_sum(data: Any, segment_ids: Any, num_segments: int, name: Optional[str] = None) -> tf.Tensor:
    """Returns the sums of the rows of `data` that share an id; `segment_ids` is sorted and as long as `data`."""
    data = tf.convert_to_tensor(data)
    segment_ids = segment_ids if tf.is_tensor(segment_ids) else tf.convert_to_tensor(segment_ids, tf.int32)
    for label, tensor in (("data", data), ("segment_ids", segment_ids)):
        if not tensor.shape.is_fully_defined() or not tensor.shape.rank:
            raise ValueError(f"segment_sum: {label} must have a known shape of at least one dimension.")
    if data.shape[0] != segment_ids.shape[0]:
        raise ValueError(f"segment_sum: {data.shape[0]} rows of data cannot have {segment_ids.shape[0]} segment_ids.")
    if num_segments <= 0:
        raise ValueError(f"segment_sum: num_segments={num_segments} must be at least 1.")
    return tf.math.unsorted_segment_sum(data, segment_ids, num_segments, name=name)
