"""Collectives of the device: over the replicas of a program, in one instance or across all of them.

They span all instances if `popdist.tensorflow.set_ipu_config` or PopDistStrategy has configured it.
"""

from __future__ import annotations

from typing import Any, Callable, List, Sequence

import tensorflow as tf

from tf_ipu_dp.emulator.runtime import instances, replicas
from tf_ipu_dp.emulator.sdk_api.ipu import config as ipu_config

_NAME = "replicas"


def count() -> int:
    """Returns the replicas that take part."""
    return replicas.count() * (instances.count() if _spans_instances() else 1)


def index() -> Any:
    """Returns the index of this replica among them, as an int32 scalar."""
    return replicas.index() + (instances.position() * replicas.count() if _spans_instances() else 0)


def all_reduce(tensors: Sequence[Any], combine: Callable[[List[Any]], Any]) -> List[Any]:
    """Returns, on every replica, each tensor's values on all that take part combined into one tensor."""
    if not _spans_instances():
        return replicas.all_reduce(tensors, combine)
    instances.connect()

    def combine_all(columns: List[List[Any]]) -> List[Any]:
        if combine is replicas.sum_values:
            return instances.sum_over_instances([replicas.sum_values(local) for local in columns], _NAME)
        return [combine(_gather(local)) for local in columns]

    return replicas.all_reduce_jointly(tensors, combine_all)


def _gather(local: List[Any]) -> List[Any]:
    """Returns the values of all instances' replicas, in order."""
    gathered = instances.all_gather(tf.stack(local), _NAME)
    joined = tf.reshape(gathered, tf.concat([[count()], tf.shape(local[0])], axis=0))
    return [tf.ensure_shape(value, local[0].shape) for value in tf.unstack(joined, num=count())]


def _spans_instances() -> bool:
    if replicas.current() is None or instances.count() == 1:
        return False
    return bool(ipu_config.configured_system().config.experimental.multi_replica_distribution.process_count > 1)
