"""`tensorflow.python.ipu.loops`: loops of a program, fed from an infeed queue."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from typing import Any, Callable, Iterator, List, Optional

import tensorflow as tf

from tf_ipu_dp.emulator.runtime import graph_loops


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop whose body is being traced."""

    iterations: Optional[int]  # None if the number depends on data
    is_counted: bool = True  # rather than ended by a condition


_loops: List[Loop] = []


def repeat(
    n: int, body: Callable[..., Any], inputs: Any = None, infeed_queue: Any = None, use_while_v1: bool = True
) -> Any:
    """Calls the body n times; its outputs are the inputs of the next iteration."""
    del use_while_v1
    return _loop(lambda *_: tf.constant(True), body, inputs, infeed_queue, limit=n)


def while_loop(
    condition: Callable[..., Any],
    body: Callable[..., Any],
    inputs: Any = None,
    infeed_queue: Any = None,
    maximum_iterations: Optional[int] = None,
    use_while_v1: bool = True,
) -> Any:
    """Calls the body while the condition holds. The condition gets the inputs without the feed's element."""
    del use_while_v1
    return _loop(condition, body, inputs, infeed_queue, limit=maximum_iterations, is_counted=False)


def _loop(
    condition: Callable[..., Any],
    body: Callable[..., Any],
    inputs: Any,
    infeed_queue: Any,
    limit: Any,
    is_counted: bool = True,
) -> Any:
    given = [] if inputs is None else list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]
    start = [tf.convert_to_tensor(value) for value in given]
    _check_signature(body, len(start), infeed_queue)

    known = tf.get_static_value(tf.convert_to_tensor(limit)) if is_counted else None
    loop = Loop(None if known is None else int(known), is_counted)

    def step(count: Any, *values: Any) -> List[Any]:
        with tracing_body_of(loop):
            outputs = _call(body, values, infeed_queue)
        tensors, operations = split_outputs(outputs)
        if len(tensors) != len(start):
            raise TypeError(f"The body of a loop returned {len(tensors)} tensors, but takes {len(start)} inputs.")
        for number, (tensor, before) in enumerate(zip(tensors, start)):
            if tensor.dtype != before.dtype:
                raise TypeError(f"Output {number} of the loop's body is {tensor.dtype.name}, not {before.dtype.name}.")
        with tf.control_dependencies(operations):
            return [count + 1, *(tf.identity(tensor) for tensor in tensors)]

    def continues(count: Any, *values: Any) -> Any:
        holds = tf.cast(condition(*values), tf.bool)
        return holds if limit is None else tf.logical_and(count < tf.cast(limit, tf.int32), holds)

    # One step at a time: a step may read what the previous one has written.
    with graph_loops.fitting_control_flow():
        count, *results = tf.while_loop(continues, step, [tf.constant(0), *start], parallel_iterations=1)
    if not results:
        return count if tf.executing_eagerly() else count.op
    return results[0] if len(results) == 1 else results


@contextlib.contextmanager
def tracing_body_of(loop: Loop) -> Iterator[None]:
    """Inside, the body of a loop is traced."""
    _loops.append(loop)
    try:
        yield
    finally:
        _loops.pop()


def innermost() -> Optional[Loop]:
    """Returns the loop whose body is being traced, if it is one of this module."""
    return _loops[-1] if _loops else None


def split_outputs(outputs: Any) -> Any:
    """Returns the tensors and the operations of a function's outputs; tensors come first."""
    flat = [] if outputs is None else list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
    flat = [output for output in flat if output is not None]
    is_operation = [isinstance(output, tf.Operation) for output in flat]
    if is_operation != sorted(is_operation):
        raise ValueError("A function of the device must return its tensors first, and its operations after them.")
    tensors = [tf.convert_to_tensor(output) for output, other in zip(flat, is_operation) if not other]
    return tensors, [output for output, other in zip(flat, is_operation) if other]


def _call(body: Callable[..., Any], values: Any, infeed_queue: Any) -> Any:
    if infeed_queue is None:
        return body(*values)
    element = infeed_queue._dequeue()
    if isinstance(element, dict) and all(isinstance(key, str) for key in element):
        return body(*values, **element)
    return body(*values, *(element if isinstance(element, (list, tuple)) else [element]))


def _check_signature(body: Callable[..., Any], values: int, infeed_queue: Any) -> None:
    """Refuses a body that cannot take the inputs and the feed, before it is traced."""
    arguments: List[Any] = [None] * values
    keywords = {}
    if infeed_queue is not None:
        element = infeed_queue.element_spec
        if isinstance(element, dict) and all(isinstance(key, str) for key in element):
            keywords = dict.fromkeys(element)
        else:
            arguments += [None] * (len(element) if isinstance(element, (list, tuple)) else 1)
    function = getattr(body, "python_function", body)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*arguments, **keywords)
    except TypeError as error:
        raise TypeError(f"The loop's body cannot take its inputs and the feed's element: {error}.") from error
