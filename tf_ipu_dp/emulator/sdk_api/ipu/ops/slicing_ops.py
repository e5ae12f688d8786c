"""`tensorflow.python.ipu.ops.slicing_ops`: copies many runs of rows in one operation, for packed sequences.

Where runs overlap, the later one is used. Rows outside the tensors are undefined on an IPU; here they are not written,
and copying from them repeats the nearest row.
"""

from __future__ import annotations

from typing import Any, Optional

import tensorflow as tf

from tf_ipu_dp.emulator.sdk_api.ipu.ops.embedding_ops import with_dense_gradient

__all__ = ["sequence_slice", "sequence_slice_pack", "sequence_slice_unpack"]


def sequence_slice(
    dst: Any,
    src: Any,
    num_elems: Any,
    src_offsets: Any,
    dst_offsets: Any,
    zero_unused: bool,
    name: Optional[str] = None,
) -> tf.Tensor:
    """Returns `dst` with rows of `src` copied to it, run by run; the other rows are kept or become zeros."""
    dst, src = tf.convert_to_tensor(dst), tf.convert_to_tensor(src)
    counts, from_rows, to_rows = (_indices(part) for part in (num_elems, src_offsets, dst_offsets))
    for label, offsets in (("src_offsets", from_rows), ("dst_offsets", to_rows)):
        if not offsets.shape.is_compatible_with(counts.shape):
            raise ValueError(f"{label} has shape {offsets.shape}, but num_elems has {counts.shape}.")
    if dst.dtype != src.dtype:
        raise ValueError(f"dst is {dst.dtype.name}, but src is {src.dtype.name}.")
    if not dst.shape.rank or dst.shape.rank != src.shape.rank:
        raise ValueError(f"dst and src must have the same rank of at least 1, not shapes {dst.shape} and {src.shape}.")
    if not dst.shape[1:].is_compatible_with(src.shape[1:]):
        raise ValueError(f"Rows of dst with shape {dst.shape[1:]} cannot hold rows of src with shape {src.shape[1:]}.")
    with tf.name_scope(name or "sequence_slice"):
        row = tf.range(tf.shape(dst)[0])[:, tf.newaxis]
        covered = (row >= to_rows) & (row < to_rows + counts)
        run = tf.reduce_max(tf.where(covered, tf.range(tf.size(counts)), -1), axis=1)
        used = tf.reshape(run >= 0, [-1] + [1] * (dst.shape.rank - 1))
        # A column for rows without a run, so that every row can be looked up.
        origin = tf.concat([from_rows - to_rows, [0]], axis=0)
        wanted = row[:, 0] + tf.gather(origin, tf.where(run >= 0, run, tf.size(counts)))
        copied = tf.gather(with_dense_gradient(src), tf.clip_by_value(wanted, 0, tf.shape(src)[0] - 1))
        return tf.where(used, copied, tf.zeros_like(dst) if zero_unused else dst)


def sequence_slice_unpack(
    src: Any, num_elems: Any, src_offsets: Any, total_elements: int, name: Optional[str] = None
) -> tf.Tensor:
    """Returns runs of rows of `src`, one after the other, then zeros: `total_elements` rows."""
    src, counts = tf.convert_to_tensor(src), _indices(num_elems)
    if not src.shape.rank:
        raise ValueError(f"src must have rows, but its shape is {src.shape}.")
    with tf.name_scope(name or "sequence_slice_unpack"):
        empty = tf.zeros(tf.concat([[total_elements], tf.shape(src)[1:]], axis=0), src.dtype)
        return sequence_slice(empty, src, counts, src_offsets, tf.cumsum(counts, exclusive=True), True)


def sequence_slice_pack(
    dst: Any, src: Any, num_elems: Any, dst_offsets: Any, zero_unused: bool, name: Optional[str] = None
) -> tf.Tensor:
    """Returns `dst` with the consecutive runs of rows of `src` copied to `dst_offsets`."""
    counts = _indices(num_elems)
    with tf.name_scope(name or "sequence_slice_pack"):
        return sequence_slice(dst, src, counts, tf.cumsum(counts, exclusive=True), dst_offsets, zero_unused)


def _indices(value: Any) -> tf.Tensor:
    tensor = tf.cast(tf.convert_to_tensor(value), tf.int32)
    if tensor.shape.rank != 1:
        raise ValueError(f"Counts and offsets of runs must have rank 1, not shape {tensor.shape}.")
    return tensor
