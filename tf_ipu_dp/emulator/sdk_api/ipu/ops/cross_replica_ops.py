"""`tensorflow.python.ipu.ops.cross_replica_ops`: values combined over all replicas."""

from __future__ import annotations

from typing import Any, Optional

import tensorflow as tf

from tf_ipu_dp.emulator.runtime import collectives, replicas


def cross_replica_sum(x: Any, replica_group_size: Optional[int] = None, name: Optional[str] = None) -> Any:
    """Returns the sum over all replicas, on each; its gradient is the sum of the incoming gradients."""
    check_group(replica_group_size)

    @tf.custom_gradient
    def reduce(value: Any) -> Any:
        return collectives.all_reduce([value], replicas.sum_values)[0], lambda dy: collectives.all_reduce(
            [dy], replicas.sum_values
        )[0]

    return tf.identity(reduce(tf.convert_to_tensor(x)), name=name)


def cross_replica_mean(x: Any, replica_group_size: Optional[int] = None, name: Optional[str] = None) -> Any:
    """Returns the mean over all replicas, on each. The SDK has no gradient for it."""
    check_group(replica_group_size)

    @tf.custom_gradient
    def reduce(value: Any) -> Any:
        def refuse(dy: Any) -> Any:
            raise LookupError("cross_replica_mean has no gradient.")

        # Scaled first, so that half precision does not overflow.
        scaled = value / tf.cast(collectives.count(), value.dtype) if value.dtype.is_floating else value
        result = _sum(scaled)
        return (result if value.dtype.is_floating else result // collectives.count()), refuse

    return tf.identity(reduce(tf.convert_to_tensor(x)), name=name)


def assume_equal_across_replicas(tensors: Any, inplace: bool = False) -> Any:
    """Returns the tensors. Whether they differ between replicas is not checked."""
    del inplace
    return tf.nest.map_structure(tf.identity, tensors)


def check_group(size: Optional[int]) -> None:
    """Accepts all replicas as one group; the SDK supports no other."""
    if not size or size == collectives.count():
        return
    if size < 0 or collectives.count() % size:
        raise tf.errors.InvalidArgumentError(
            None, None, f"replica_group_size={size} does not divide the {collectives.count()} replicas."
        )
    raise NotImplementedError(
        f"replica_group_size={size} of {collectives.count()} replicas: the emulator reduces over all replicas only."
    )


def _sum(value: Any) -> Any:
    return collectives.all_reduce([value], replicas.sum_values)[0]
