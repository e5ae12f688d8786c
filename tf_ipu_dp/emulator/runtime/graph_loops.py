"""Loops of the graph over micro batches, so that tracing does not grow with replicas, accumulation or steps.

Two micro batches may be in flight at a time, but operations with side effects keep the order of the steps.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterator, List, Sequence

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps_utils

IN_FLIGHT = 2
# Random operations have separate streams, whose order no program relies on.
_UNORDERED = ("RandomUniform", "RandomUniformInt", "RandomStandardNormal", "TruncatedNormal", "VarHandleOp")


def repeat(
    count: int,
    body: Callable[..., Sequence[Any]],
    carried: Sequence[Any] = (),
    in_flight: int = 1,
    until: Sequence[Any] = (),
) -> List[Any]:
    """Repeats the body and returns the carried values. Repetitions may overlap; side effects keep their order.

    The body puts into `until` what a repetition must have computed before the side effects of the next one begin.
    """
    if count == 1:
        return list(body(tf.constant(0), *carried))
    return _loop(count, body, carried, in_flight, until)


def _loop(
    count: int, body: Callable[..., Sequence[Any]], carried: Sequence[Any], in_flight: int, until: Sequence[Any]
) -> List[Any]:
    def ordered(number: Any, turn: Any, *values: Any) -> List[Any]:
        graph = tf.compat.v1.get_default_graph()
        made_before = len(graph.get_operations())
        gate = tf.identity(turn)
        results = list(body(number, *values))
        changes = effects(graph.get_operations()[made_before:])
        for operation in changes:
            operation._add_control_input(gate.op)
        with tf.control_dependencies([*changes, *until]):
            turn = tf.identity(gate)
        return [number + 1, turn, *results]

    results = tf.while_loop(
        lambda number, *_: number < count,
        ordered,
        [tf.constant(0), tf.constant(0), *carried],
        parallel_iterations=in_flight,
        maximum_iterations=count,
    )
    return list(results[2:])


@contextlib.contextmanager
def fitting_control_flow() -> Iterator[None]:
    """Inside, loops and conditions are those of TensorFlow 1 in a graph of TensorFlow 1, as in the SDK.

    The others are functions. What is made outside of a function, like variables and iterators, may be made eagerly
    then, and a graph that a session runs cannot use it.
    """
    is_function = tf.executing_eagerly() or tf.compat.v1.get_default_graph().building_function
    if is_function or not tf.compat.v1.control_flow_v2_enabled():
        yield
        return
    tf.compat.v1.disable_control_flow_v2()
    try:
        yield
    finally:
        tf.compat.v1.enable_control_flow_v2()


def is_in_loop() -> bool:
    """Whether what is traced now is in the body of a loop of the graph."""
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        scope = graph._get_control_flow_context()
        while scope is not None:
            if scope.IsWhileContext():
                return True
            scope = scope.outer_context
        if type(graph).__name__ == "WhileBodyFuncGraph":
            return True
        graph = getattr(graph, "outer_graph", None)
    return False


def stack(count: int, step: Callable[[Any], Any], like: Any) -> List[Any]:
    """Returns the stacked results of the steps 1 to `count`, which have the types and shapes of `like`."""
    arrays = [tf.TensorArray(each.dtype, count, element_shape=each.shape) for each in tf.nest.flatten(like)]

    def write(number: Any, *written: Any) -> List[Any]:
        return [array.write(number, each) for array, each in zip(written, tf.nest.flatten(step(number + 1)))]

    # A loop even for one step: `like` is of another step, and a queue is enqueued into once per graph.
    return [array.stack() for array in _loop(count, write, arrays, IN_FLIGHT, ())]


def effects(operations: Sequence[Any]) -> List[Any]:
    """Returns the operations that change something outside the graph, and those that read what is changed."""
    touching = []
    changed = set()
    for operation in operations:
        if not operation.op_def.is_stateful or operation.type in _UNORDERED:
            continue
        reads, writes = auto_control_deps_utils.get_read_write_resource_inputs(operation)
        changed |= {id(handle) for handle in writes}
        touching.append((operation, {id(handle) for handle in (*reads, *writes)}))
    return [operation for operation, handles in touching if not handles or changed & handles]
