"""Gradients and outputs of a pipeline's micro batches, accumulated in the loop over them.

The variables of a loop must be known before it is traced, but its gradients are known only afterwards. So the loop
carries one vector for each type, which is the concatenation of all tensors of the type.
"""

from __future__ import annotations

from typing import Any, Callable, List, Sequence, Tuple

import tensorflow as tf

from tf_ipu_dp.emulator.runtime.accumulation import accumulator_dtype, add_gradient
from tf_ipu_dp.emulator.sdk_api.ipu.gradient_accumulation import GradientAccumulationReductionMethod as Method

SUMMABLE = (tf.float32, tf.float16, tf.bfloat16, tf.float64, tf.int32, tf.int64)


class GradientAccumulation:
    """The gradients of the micro batches of one update, reduced by the given method, and the update."""

    def __init__(self, count: int, method: Method, dtype: Any) -> None:
        self._count, self._method, self._dtype = count, method, dtype

    def add(
        self,
        vectors: List[Any],
        position: Any,
        gradients_and_variables: Sequence[Tuple[Any, Any]],
        captured: Sequence[Any],
        apply_gradients: Callable[[List[Any], List[Any]], Any],
    ) -> Tuple[List[Any], Any]:
        """Returns the accumulators with one more micro batch, and the update, which happens with the last one.

        `captured` gradients are accumulated like those of variables.
        """
        pairs = [(gradient, variable) for gradient, variable in gradients_and_variables if gradient is not None]
        gradients = [
            tf.cast(tf.convert_to_tensor(gradient), accumulator_dtype(self._dtype, like))
            for gradient, like in (*pairs, *zip(captured, captured))
        ]
        reduced = [
            add_gradient(self._method, self._count, _accumulated_so_far(vector, arrived, position), arrived, position)
            for vector, arrived in zip(vectors, _to_vectors(gradients))
        ]

        def update() -> Any:
            tensors = _from_vectors(reduced, gradients)
            applied = apply_gradients(list(zip(tensors, [variable for _, variable in pairs])), tensors[len(pairs) :])
            with tf.control_dependencies([applied] if isinstance(applied, (tf.Operation, tf.Tensor)) else []):
                return tf.constant(0)

        return reduced, _with_last_micro_batch(position, self._count, update)


class OutfeedSums:
    """The outputs of the micro batches of one update, added up."""

    def __init__(self, count: int, dtype: Any) -> None:
        self._count, self._dtype = count, dtype

    def add(self, vectors: List[Any], position: Any, feed: Any, enqueue: Callable[[Any], Any]) -> Tuple[List[Any], Any]:
        """Returns the sums with one more micro batch, and the enqueueing, which happens with the last one."""
        tensors = [tf.cast(tensor, accumulator_dtype(self._dtype, tensor)) for tensor in tf.nest.flatten(feed)]
        summed = [
            _accumulated_so_far(vector, arrived, position) + arrived
            for vector, arrived in zip(vectors, _to_vectors(tensors))
        ]

        def send() -> Any:
            sent = enqueue(tf.nest.pack_sequence_as(feed, _from_vectors(summed, tensors)))
            with tf.control_dependencies([sent] if isinstance(sent, (tf.Operation, tf.Tensor)) else []):
                return tf.constant(0)

        return summed, _with_last_micro_batch(position, self._count, send)


def _with_last_micro_batch(position: Any, count: int, act: Callable[[], Any]) -> Any:
    """Calls the function with the last of `count` micro batches.

    It is a condition in the loop over micro batches rather than code after it, because what the function uses may
    come from that micro batch: a learning rate does.
    """
    return act() if count == 1 else tf.cond(tf.equal(position, count - 1), act, lambda: tf.constant(0))


def empty_vectors() -> List[Any]:
    """Returns what the loop carries before the first micro batch."""
    return [tf.zeros([0], dtype) for dtype in SUMMABLE]


def _to_vectors(tensors: Sequence[Any]) -> List[Any]:
    for tensor in tensors:
        if tensor.dtype not in SUMMABLE:
            raise ValueError(f"{tensor.dtype.name} cannot be accumulated.")
    parts = [[tf.reshape(tensor, [-1]) for tensor in tensors if tensor.dtype == dtype] for dtype in SUMMABLE]
    return [tf.concat(part, axis=0) if part else tf.zeros([0], dtype) for part, dtype in zip(parts, SUMMABLE)]


def _from_vectors(vectors: Sequence[Any], like: Sequence[Any]) -> List[Any]:
    place = dict(zip(SUMMABLE, vectors))
    start = {dtype: tf.constant(0) for dtype in SUMMABLE}
    tensors = []
    for tensor in like:
        dtype, size = tensor.dtype, tf.size(tensor)
        part = tf.slice(place[dtype], [start[dtype]], [size])
        start[dtype] += size
        tensors.append(tf.ensure_shape(tf.reshape(part, tf.shape(tensor)), tensor.shape))
    return tensors


def _accumulated_so_far(vector: Any, arrived: Any, position: Any) -> Any:
    """Returns the accumulated values: zeros before the first micro batch of an update."""
    return tf.cond(tf.equal(position, 0), lambda: tf.zeros_like(arrived), lambda: vector)
