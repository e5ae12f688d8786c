"""`tensorflow.python.ipu.horovod` of releases up to 3.0: who and how many the instances are, and collectives.

Where releases from 3.1 on have a function of the same name in `ipu.distributed`, it differs: there `allgather` stacks.
"""

from __future__ import annotations

from typing import Any, Optional

import tensorflow as tf

from tf_ipu_dp.emulator.runtime import instances
from tf_ipu_dp.emulator.sdk_api import popdist
from tf_ipu_dp.emulator.sdk_api.ipu.distributed import host_collective_ops

__all__ = [
    "Adasum",
    "Average",
    "Sum",
    "allgather",
    "allreduce",
    "broadcast",
    "init",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
]

Average, Sum, Adasum = range(3)


def init() -> None:
    """Starts the communication between the instances. Calling it again is harmless."""
    popdist.init()


def shutdown() -> None:
    """Ends the communication."""
    popdist.finalizeBackend()


def size() -> int:
    """Returns the number of instances."""
    _require()
    return popdist.getNumInstances()


def rank() -> int:
    """Returns the number of this instance."""
    _require()
    return popdist.getInstanceIndex()


def local_size() -> int:
    """Returns the number of instances on this host."""
    _require()
    return instances.count_on_host()


def local_rank() -> int:
    """Returns the number of this instance on its host."""
    _require()
    return popdist.getLocalInstanceIndex()


def allreduce(
    tensor: Any, op: Optional[int] = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0
) -> Any:
    """Returns the mean over all instances, or the sum if `op` is Sum."""
    if op not in (None, Average, Sum):
        raise NotImplementedError("The emulator's instances have no Adasum: use Average or Sum.")
    given = tf.convert_to_tensor(tensor)
    reduction = tf.distribute.ReduceOp.SUM if op == Sum else tf.distribute.ReduceOp.MEAN
    reduced = host_collective_ops.allreduce(_scaled(given, prescale_factor), reduction)
    return _scaled(reduced, postscale_factor)


def allgather(tensor: Any) -> Any:
    """Returns the tensors of all instances, one after the other along the first dimension."""
    gathered = host_collective_ops.allgather(tf.convert_to_tensor(tensor))
    return tf.reshape(gathered, tf.concat([[-1], tf.shape(gathered)[2:]], axis=0))


def broadcast(tensor: Any, root_rank: int, name: Optional[str] = None) -> Any:
    """Returns the value of instance `root_rank`."""
    given = tf.convert_to_tensor(tensor)
    if root_rank == 0:
        return host_collective_ops.broadcast(given, tensor_name=name)
    return host_collective_ops.allgather(given, tensor_name=name)[root_rank]


def _scaled(tensor: Any, factor: float) -> Any:
    return tensor if factor == 1.0 else tensor * tf.cast(factor, tensor.dtype)


def _require() -> None:
    if not popdist.isBackendInitialized():
        raise ValueError("The instances are not connected: call init() of tensorflow.python.ipu.horovod first.")
