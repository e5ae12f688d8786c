"""`tensorflow.python.ipu.ops.reduce_scatter_op`: a reduction whose result is divided between the replicas."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional

import tensorflow as tf

from tf_ipu_dp.emulator.runtime import collectives, replicas
from tf_ipu_dp.emulator.sdk_api.ipu.ops import all_to_all_op

_REDUCTIONS: Dict[str, Callable[[List[Any]], Any]] = {
    "COLLECTIVE_OP_ADD": replicas.sum_values,
    "COLLECTIVE_OP_MUL": lambda values: tf.reduce_prod(tf.stack(values), axis=0),
    "COLLECTIVE_OP_MIN": lambda values: tf.reduce_min(tf.stack(values), axis=0),
    "COLLECTIVE_OP_MAX": lambda values: tf.reduce_max(tf.stack(values), axis=0),
    "COLLECTIVE_OP_LOGICAL_AND": lambda values: tf.reduce_all(tf.stack(values), axis=0),
    "COLLECTIVE_OP_LOGICAL_OR": lambda values: tf.reduce_any(tf.stack(values), axis=0),
    "COLLECTIVE_OP_SQUARE_ADD": lambda values: replicas.sum_values([value * value for value in values]),
    "COLLECTIVE_OP_MEAN": lambda values: tf.reduce_mean(tf.stack(values), axis=0),
}


def reduce_scatter(x: Any, replication_factor: int, op: str = "COLLECTIVE_OP_ADD", name: Optional[str] = None) -> Any:
    """Returns each replica's part of vectors reduced over the replicas, padded with zeros. A list gives a list."""
    all_to_all_op.check_factor(replication_factor)
    if op not in (*_REDUCTIONS, "COLLECTIVE_OP_LOCAL"):
        raise ValueError(f"{op!r} is not a reduction; it is one of {', '.join(_REDUCTIONS)}, COLLECTIVE_OP_LOCAL.")
    if isinstance(x, (list, tuple)):
        return [_reduce_scatter_one(tf.convert_to_tensor(tensor), replication_factor, op) for tensor in x]
    return tf.identity(_reduce_scatter_one(tf.convert_to_tensor(x), replication_factor, op), name=name)


def _reduce_scatter_one(tensor: Any, parts: int, op: str) -> Any:
    if tensor.shape.rank != 1:
        raise ValueError(f"reduce_scatter takes vectors, not rank {tensor.shape.rank}.")
    reduced = tensor if op == "COLLECTIVE_OP_LOCAL" else collectives.all_reduce([tensor], _REDUCTIONS[op])[0]
    length = -(-int(tensor.shape[0]) // parts)
    padded = tf.pad(reduced, [[0, length * parts - int(tensor.shape[0])]])
    return tf.gather(tf.reshape(padded, [parts, length]), collectives.index())
