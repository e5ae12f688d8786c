"""`tensorflow.python.ipu.ops.internal_ops`: layout hints, printing, FIFOs and the loop counter.

A FIFO belongs to the traced function it is in. In eager mode no program stores it, so it is always empty.
"""

from __future__ import annotations

import sys
from typing import Any, Optional

import tensorflow as tf
from tensorflow.python.ops import control_flow_v2_func_graphs, resource_variable_ops

from tf_ipu_dp.emulator.runtime import replicas

__all__ = ["fifo", "get_current_iteration_counter", "print_tensor", "remap", "remap_deduce"]


def remap(x: Any, name: Optional[str] = None) -> tf.Tensor:
    """Returns `x`; an IPU redistributes it over its tiles."""
    return tf.identity(x, name=name)


def remap_deduce(x: Any, name: Optional[str] = None) -> tf.Tensor:
    """Returns `x`; an IPU lays it out over its tiles for its use."""
    return tf.identity(x, name=name)


def print_tensor(input: Any, name: str = "") -> Any:
    """Returns an operation that prints all of a tensor to stderr."""
    tensor = tf.convert_to_tensor(input)
    if name:
        return tf.print(f"{name}:", tensor, output_stream=sys.stderr, summarize=-1)
    return tf.print(tensor, output_stream=sys.stderr, summarize=-1)


def fifo(x: Any, depth: int, offload: bool = False, name: Optional[str] = None) -> tf.Tensor:
    """Returns what `x` was `depth` steps ago, and zeros before that. It has no gradient."""
    del offload
    x = tf.convert_to_tensor(x)
    if depth < 1:
        raise ValueError(f"fifo: depth={depth} must be at least 1.")
    if not x.shape.is_fully_defined():
        raise ValueError(f"fifo: the shape must be known, but it is {x.shape}.")
    if tf.executing_eagerly():
        return tf.zeros_like(x)
    _require_concurrent_replicas()
    # Made outside of tf.function, which would refuse to make a second FIFO when the program is traced again.
    make = resource_variable_ops.ResourceVariable
    with tf.init_scope():
        buffer = make(tf.zeros([depth, *x.shape], x.dtype), trainable=False, name="fifo")
        position = make(tf.constant(0), trainable=False, name="fifo_position")
    _keep_alive(buffer, position)
    with tf.name_scope(name or "fifo"):
        slot = position.read_value()
        oldest = tf.stop_gradient(tf.gather(buffer.read_value(), slot))
        with tf.control_dependencies([oldest]):
            filled = buffer.scatter_update(tf.IndexedSlices(x[tf.newaxis], slot[tf.newaxis]))
            moved = position.assign((slot + 1) % depth)
        with tf.control_dependencies([filled, moved]):
            return tf.identity(oldest)


def get_current_iteration_counter(name: Optional[str] = None) -> tf.Tensor:
    """Returns the finished iterations of the innermost loop around it, as an int32 scalar."""
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    _require_concurrent_replicas()
    while graph is not None:
        if isinstance(graph, control_flow_v2_func_graphs.WhileBodyFuncGraph):
            return tf.identity(graph.inputs[0], name=name)  # TensorFlow's own counter comes before the loop's variables
        graph = getattr(graph, "outer_graph", None)
    raise tf.errors.FailedPreconditionError(None, None, "There is no loop whose iterations could be counted.")


def _require_concurrent_replicas() -> None:
    """Refuses time-sliced replicas, which share their state and loops: the program is then run concurrently."""
    replicas.all_reduce([], replicas.sum_values)


def _keep_alive(*variables: Any) -> None:
    """Stores variables in the functions being traced, which refer to them only weakly."""
    graph = tf.compat.v1.get_default_graph()
    while hasattr(graph, "outer_graph"):
        graph._ipu_emulator_state = [*getattr(graph, "_ipu_emulator_state", []), *variables]
        graph = graph.outer_graph
