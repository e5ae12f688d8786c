"""`tensorflow.python.ipu.distributed`: the strategy of a PopDist job, and collectives between its instances."""

from __future__ import annotations

from typing import Any, Optional

import tensorflow as tf

from tf_ipu_dp.emulator import instances, popdist
from tf_ipu_dp.emulator.ipu.distributed import popdist_strategy

__all__ = ["PopDistStrategy", "allgather", "allreduce", "broadcast", "popdist_strategy"]

PopDistStrategy = popdist_strategy.PopDistStrategy


def allreduce(value: Any, reduce_op: tf.distribute.ReduceOp, tensor_name: Optional[str] = None) -> Any:
    """Returns the sum or mean over all instances."""
    if reduce_op.value not in ("SUM", "MEAN"):
        raise ValueError(f"{reduce_op} is not a reduction; it is tf.distribute.ReduceOp.SUM or MEAN.")
    tensor = _checked(value)
    (total,) = instances.sum_over_instances([tensor], _wire_name(tensor, tensor_name))
    if reduce_op.value == "SUM":
        return tf.identity(total)
    return total // instances.count() if tensor.dtype.is_integer else total / tf.cast(instances.count(), total.dtype)


def allgather(value: Any, tensor_name: Optional[str] = None) -> Any:
    """Returns the tensors of all instances, stacked."""
    tensor = _checked(value)
    return instances.gather(tensor, _wire_name(tensor, tensor_name))


def broadcast(value: Any, root_rank: int = 0, tensor_name: Optional[str] = None) -> Any:
    """Returns the value of instance 0, whatever `root_rank` says."""
    del root_rank
    tensor = _checked(value, or_bool=True)
    return tf.identity(instances.broadcast(tensor, _wire_name(tensor, tensor_name)))


def _wire_name(tensor: Any, given: Optional[str]) -> str:
    """Returns the name that instances match their calls by; where it is the same for all, their order does."""
    return "Default" if given or tf.executing_eagerly() else tensor.name.replace(":", "_")


def _checked(value: Any, or_bool: bool = False) -> Any:
    if not popdist.isBackendInitialized():
        raise RuntimeError("Collectives between instances need popdist.init() first.")
    tensor = tf.convert_to_tensor(value)
    if not (tensor.dtype.is_integer or tensor.dtype in (tf.float16, tf.float32) or (or_bool and tensor.dtype.is_bool)):
        raise tf.errors.InvalidArgumentError(
            None, None, f"Instances cannot exchange {tensor.dtype.name}: cast it to float32 or an integer type."
        )
    return tensor
