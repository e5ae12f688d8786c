"""`tensorflow.python.ipu.ops.embedding_ops`: lookups with dense gradients, and embeddings that stay on the host.

A host embedding is a variable whose gradient never reaches the program's optimizer: plain SGD is applied to it while
gradients are computed, and the optimizer sees zeros. The variable must be among those whose gradients are computed.
"""

from __future__ import annotations

import contextlib
from typing import Any, Iterator, Optional, Sequence

import tensorflow as tf

from tf_ipu_dp.emulator.runtime import replica_handles

__all__ = [
    "HostEmbedding",
    "HostEmbeddingOptimizerSpec",
    "HostEmbeddingSGDGAOptimizerSpec",
    "create_host_embedding",
    "embedding_lookup",
    "with_dense_gradient",
]

_PARTITION_STRATEGIES = ("TOKEN", "ENCODING")


def embedding_lookup(
    params: Any,
    ids: Any,
    serialization_factor: Any = 1,
    indices_are_sorted: Any = False,
    name: Optional[str] = None,
) -> tf.Tensor:
    """Returns the rows `ids` of `params`; the gradient is dense.

    SDK 2.6's order `(params, ids, name, serialization_factor)` is accepted if the third is a name or None.
    """
    if serialization_factor is None or isinstance(serialization_factor, str):
        name = serialization_factor if name is None else name
        serialization_factor = 1 if indices_are_sorted is False else indices_are_sorted
    params = tf.convert_to_tensor(params)
    ids = ids if tf.is_tensor(ids) else tf.convert_to_tensor(ids, tf.int32)
    if serialization_factor < 1:
        raise ValueError(f"embedding_lookup: serialization_factor={serialization_factor} must be at least 1.")
    if not params.shape.rank:
        raise ValueError(f"embedding_lookup: params needs rows, but its shape is {params.shape}.")
    rows = params.shape[0]
    if rows is not None and rows % serialization_factor:
        raise ValueError(f"embedding_lookup: serialization_factor={serialization_factor} does not divide {rows} rows.")
    with tf.name_scope(name or "embedding_lookup"):
        return tf.gather(with_dense_gradient(params), ids)


def with_dense_gradient(params: Any) -> tf.Tensor:
    """Returns the value of `params`; gradients through it become dense tensors."""

    @tf.custom_gradient
    def identity(value: tf.Tensor) -> Any:
        return tf.identity(value), tf.convert_to_tensor

    return identity(tf.convert_to_tensor(params))


class HostEmbeddingOptimizerSpec:
    """The optimizer of a host embedding: SGD with this learning rate, a number or a tensor."""

    def __init__(self, learning_rate: Any, optimizer_name: Optional[str] = None) -> None:
        self.learning_rate = learning_rate
        self.optimizer_name = optimizer_name or "SGD"


class HostEmbeddingSGDGAOptimizerSpec(HostEmbeddingOptimizerSpec):
    """SGD that adds up the gradients of `accumulation_factor` micro batches and applies the sum."""

    def __init__(self, learning_rate: Any, accumulation_factor: int) -> None:
        super().__init__(learning_rate, "SGD+GA")
        self.accumulation_factor = accumulation_factor


class HostEmbedding:
    """An embedding in host memory that programs on the device look up. Make it with `create_host_embedding`."""

    def __init__(
        self,
        name: str,
        embedding_tensor: Any,
        partition_strategy: str = "TOKEN",
        optimizer_spec: Optional[HostEmbeddingOptimizerSpec] = None,
    ) -> None:
        if partition_strategy not in _PARTITION_STRATEGIES:
            raise ValueError(
                f"partition_strategy={partition_strategy!r} is not one of {', '.join(_PARTITION_STRATEGIES)}."
            )
        if optimizer_spec is not None and optimizer_spec.optimizer_name not in ("SGD", "SGD+GA"):
            raise ValueError(f"A host embedding supports SGD only, not {optimizer_spec.optimizer_name!r}.")
        self._name = name
        self._table = embedding_tensor
        self._spec = optimizer_spec
        self._window = getattr(optimizer_spec, "accumulation_factor", 1)
        if self._window < 1:
            raise ValueError(f"accumulation_factor={self._window} must be at least 1.")
        if self._window > 1:
            shape, dtype = embedding_tensor.shape, embedding_tensor.dtype
            self._sum = _make_variable(f"{name}_accumulator", shape, dtype, tf.zeros_initializer(), trainable=False)
            self._count = _make_variable(f"{name}_count", [], tf.int32, tf.zeros_initializer(), trainable=False)

    @contextlib.contextmanager
    def register(self, session: Any = None) -> Iterator[HostEmbedding]:
        """The time during which programs may look up the embedding."""
        del session
        yield self

    def lookup(self, indices: Any, clip_indices: bool = True) -> tf.Tensor:
        """Returns the rows `indices`; those that do not exist are clipped to those that do."""
        indices = tf.convert_to_tensor(indices)
        if clip_indices:
            indices = tf.clip_by_value(indices, 0, self._table.shape[0] - 1)
        if self._spec is None:
            return tf.stop_gradient(tf.gather(self._table, indices))

        @tf.custom_gradient
        def gather(table: tf.Tensor) -> Any:
            def gradient(upstream: tf.Tensor) -> tf.Tensor:
                rows = tf.reshape(upstream, tf.concat([[-1], tf.shape(table)[1:]], axis=0))
                with tf.control_dependencies([self._apply_gradient(tf.IndexedSlices(rows, tf.reshape(indices, [-1])))]):
                    return tf.zeros_like(table)

            return tf.gather(table, indices), gradient

        return gather(tf.convert_to_tensor(self._table))

    def _apply_gradient(self, gradient: tf.IndexedSlices) -> tf.Operation:
        assert self._spec is not None
        rate = tf.cast(self._spec.learning_rate, self._table.dtype)
        if self._window == 1:
            changed = self._table.scatter_sub(tf.IndexedSlices(gradient.values * rate, gradient.indices))
            return tf.group(changed)

        def update() -> tf.Tensor:
            with tf.control_dependencies([self._table.assign_sub(self._sum.read_value() * rate)]):
                emptied = self._sum.assign(tf.zeros_like(self._sum))
            with tf.control_dependencies([emptied]):
                return tf.constant(True)

        with tf.control_dependencies([self._sum.scatter_add(gradient)]):
            count = self._count.assign_add(1, read_value=True)
        return tf.group(tf.cond(tf.equal(count % self._window, 0), update, lambda: tf.constant(False)))


def create_host_embedding(
    name: str,
    shape: Sequence[int],
    dtype: Any,
    partition_strategy: str = "TOKEN",
    optimizer_spec: Optional[HostEmbeddingOptimizerSpec] = None,
    initializer: Any = None,
) -> HostEmbedding:
    """Returns a new host embedding; its table is the TF1 variable `name`. Without an optimizer it is constant."""
    if initializer is not None and not callable(initializer):
        initializer = tf.constant_initializer(initializer)
    table = _make_variable(name, shape, dtype, initializer, trainable=True)
    return HostEmbedding(name, table, partition_strategy, optimizer_spec)


def _make_variable(name: str, shape: Any, dtype: Any, initializer: Any, trainable: bool) -> Any:
    variable = tf.compat.v1.get_variable(
        name, shape=shape, dtype=dtype, initializer=initializer, trainable=trainable, use_resource=True
    )
    replica_handles.keep_on_host(variable)
    return variable
