"""`tensorflow.python.ipu.distributed.host_collective_ops`: collectives between the instances of a PopDist job.

Instances match their calls by name in a graph and by order elsewhere, so all of them must make the same calls.
"""

from __future__ import annotations

from typing import Any, Callable, Optional

import tensorflow as tf

from tf_ipu_dp.emulator.runtime import instances
from tf_ipu_dp.emulator.sdk_api import popdist

__all__ = ["allgather", "allreduce", "broadcast"]

# Horovod cannot sum these types, and does not support the last two at all.
_CARRIERS = {tf.int16: tf.int32, tf.uint16: tf.int32, tf.uint32: tf.int64, tf.uint64: tf.int64}


def allreduce(value: Any, reduce_op: tf.distribute.ReduceOp, tensor_name: Optional[str] = None) -> Any:
    """Returns the sum or mean over all instances."""
    if reduce_op.value not in ("SUM", "MEAN"):
        raise ValueError(f"{reduce_op} is not a reduction; it is tf.distribute.ReduceOp.SUM or MEAN.")

    def reduce(tensor: Any, name: str) -> Any:
        (total,) = instances.sum_over_instances([tensor], name)
        if reduce_op.value == "SUM":
            return tf.identity(total)
        if tensor.dtype.is_integer:
            return total // tf.cast(instances.count(), total.dtype)
        return total / tf.cast(instances.count(), total.dtype)

    return _exchange(value, tensor_name, reduce)


def allgather(value: Any, tensor_name: Optional[str] = None) -> Any:
    """Returns the tensors of all instances, stacked."""
    return _exchange(value, tensor_name, instances.all_gather)


def broadcast(value: Any, root_rank: int = 0, tensor_name: Optional[str] = None) -> Any:
    """Returns the value of instance 0; `root_rank` is ignored."""
    del root_rank
    return _exchange(value, tensor_name, lambda *given: tf.identity(instances.broadcast(*given)), or_bool=True)


def _exchange(value: Any, given_name: Optional[str], call: Callable[[Any, str], Any], or_bool: bool = False) -> Any:
    if not popdist.isBackendInitialized():
        raise RuntimeError("Collectives between instances need popdist.init() first.")
    eager = tf.executing_eagerly()
    name = "Default" if given_name or eager else value.name.replace(":", "_")
    tensor = tf.convert_to_tensor(value)
    dtype = tensor.dtype
    if not (dtype.is_integer or dtype in (tf.float16, tf.float32) or (or_bool and dtype.is_bool)):
        raise tf.errors.InvalidArgumentError(
            None, None, f"Instances cannot exchange {dtype.name}: cast it to float32 or an integer type."
        )
    try:
        return tf.cast(call(tf.cast(tensor, _CARRIERS.get(dtype, dtype)), name), dtype)
    except tf.errors.OpError as error:
        if "ismatched" not in error.message:
            raise
        raise tf.errors.UnknownError(
            None, None, f"Tensor layouts did not match on all instances: {error.message}"
        ) from error
