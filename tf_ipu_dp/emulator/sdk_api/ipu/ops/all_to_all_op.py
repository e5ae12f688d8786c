"""`tensorflow.python.ipu.ops.all_to_all_op`: tensors exchanged between all replicas."""

from __future__ import annotations

from typing import Any, List, Optional

import tensorflow as tf

from tf_ipu_dp.emulator.runtime import collectives


def all_gather(x: Any, replication_factor: int, name: Optional[str] = None) -> Any:
    """Returns the tensors of all replicas, stacked, on each of them. A list gives a list."""
    check_factor(replication_factor)
    if isinstance(x, (list, tuple)):
        return collectives.all_reduce([tf.convert_to_tensor(tensor) for tensor in x], tf.stack)
    return tf.identity(collectives.all_reduce([tf.convert_to_tensor(x)], tf.stack)[0], name=name)


def all_to_all(
    x: Any, split_dimension: int, concat_dimension: int, replication_factor: int, name: Optional[str] = None
) -> Any:
    """Splits each replica's tensor, sends part i to replica i, and joins what arrives."""
    gathered = all_gather(x, replication_factor)
    parts: List[Any] = [
        tf.gather(tf.stack(tf.split(one, replication_factor, axis=split_dimension)), collectives.index())
        for one in tf.unstack(gathered, num=replication_factor)
    ]
    return tf.concat(parts, axis=concat_dimension, name=name or "all_to_all")


def check_factor(replication_factor: int) -> None:
    """The factor must be the number of replicas."""
    if replication_factor != collectives.count():
        raise tf.errors.InvalidArgumentError(
            None, None, f"replication_factor={replication_factor}, but the program has {collectives.count()} replicas."
        )
