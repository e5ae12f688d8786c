"""`tensorflow.python.ipu.ops.within_replica_ops`: collectives between the shards of one replica, a list of tensors."""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict, List

import tensorflow as tf

__all__ = ["all_gather", "all_reduce", "reduce_scatter"]


def _fold(pair: Callable[[Any, Any], Any]) -> Callable[[List[tf.Tensor]], tf.Tensor]:
    return lambda shards: functools.reduce(pair, shards)


_REDUCTIONS: Dict[str, Callable[[List[tf.Tensor]], tf.Tensor]] = {
    "COLLECTIVE_OP_ADD": tf.add_n,
    "COLLECTIVE_OP_MUL": _fold(tf.multiply),
    "COLLECTIVE_OP_MIN": _fold(tf.minimum),
    "COLLECTIVE_OP_MAX": _fold(tf.maximum),
    "COLLECTIVE_OP_LOGICAL_AND": _fold(tf.logical_and),
    "COLLECTIVE_OP_LOGICAL_OR": _fold(tf.logical_or),
    "COLLECTIVE_OP_SQUARE_ADD": lambda shards: tf.add_n([tf.square(shard) for shard in shards]),
    "COLLECTIVE_OP_MEAN": lambda shards: tf.add_n([shard / len(shards) for shard in shards]),
}
_LOCAL = "COLLECTIVE_OP_LOCAL"


def all_gather(input_shards: Any, axis: int = 0) -> List[tf.Tensor]:
    """Returns, for each shard, all of them joined along an axis."""
    shards = _shards(input_shards)
    joined = tf.concat(shards, axis=axis)
    return [tf.identity(joined) for _ in shards]


def all_reduce(input_shards: Any, op: str) -> List[tf.Tensor]:
    """Returns, for each shard, the reduction of all of them."""
    return [tf.identity(value) for value in _reduced(_equal_shards(input_shards), op)]


def reduce_scatter(input_shards: Any, op: str) -> List[tf.Tensor]:
    """Returns, for each shard of rank 1, its part of their reduction; zeros fill the last part."""
    shards = _equal_shards(input_shards)
    if shards[0].shape.rank != 1:
        raise ValueError(f"reduce_scatter takes shards of rank 1, not shape {shards[0].shape}.")
    length = int(shards[0].shape[0])
    share = -(-length // len(shards))
    padding = [[0, share * len(shards) - length]]
    return [
        tf.pad(value, padding)[index * share : (index + 1) * share] for index, value in enumerate(_reduced(shards, op))
    ]


def _reduced(shards: List[tf.Tensor], op: str) -> List[tf.Tensor]:
    """Returns the reduction as each shard sees it."""
    if op == _LOCAL:
        return shards
    if op not in _REDUCTIONS:
        raise ValueError(f"op={op!r} is not one of {', '.join([*_REDUCTIONS, _LOCAL])}.")
    return [_REDUCTIONS[op](shards)] * len(shards)


def _shards(given: Any) -> List[tf.Tensor]:
    if not isinstance(given, (list, tuple)) or not given:
        raise ValueError("input_shards must be a list of at least one tensor.")
    return [tf.convert_to_tensor(shard) for shard in given]


def _equal_shards(given: Any) -> List[tf.Tensor]:
    shards = _shards(given)
    for shard in shards:
        if not shard.shape.is_fully_defined() or shard.shape != shards[0].shape or shard.dtype != shards[0].dtype:
            raise ValueError(
                f"All shards must have the same known shape and type, but one is {shard.dtype.name} {shard.shape} "
                f"beside {shards[0].dtype.name} {shards[0].shape}."
            )
    return shards
