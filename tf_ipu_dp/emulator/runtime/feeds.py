"""How programs of the device take their input: dealt to the replicas, and timed. Imports TensorFlow late.

Replicas that run together share one iterator: the first one draws an element for each, in order.
"""

from __future__ import annotations

import contextlib
from typing import Any, Iterator, List, Sequence

from tf_ipu_dp.emulator.runtime import wait_meter

_stock: List[Any] = []
_meter = wait_meter.Meter()
_told = [0.0]
_work_before: List[Any] = []


def extend_tensorflow() -> None:
    """Makes iterators look for a program of the device. Doing it twice is harmless."""
    from tensorflow.python.ops import gen_dataset_ops

    if not _stock:
        _stock.append(gen_dataset_ops.iterator_get_next)
        gen_dataset_ops.iterator_get_next = _get_next


def seconds_waited() -> float:
    """Returns the seconds of waiting since it was asked last. For when no program runs."""
    _meter.settle()
    seconds = seconds_waited_so_far()
    _told[0] += seconds
    return seconds


def seconds_waited_so_far() -> float:
    """Returns the same, and goes on counting from where it did."""
    return _meter.seconds() - _told[0]


def is_waiting() -> bool:
    """Whether the program of the device waits for its input right now."""
    return _meter.is_waiting()


@contextlib.contextmanager
def overlapping(results: Sequence[Any]) -> Iterator[None]:
    """In it, waiting counts only from when these results are there: until then the device is still at work."""
    _work_before.append(results)
    try:
        yield
    finally:
        _work_before.pop()


def _get_next(iterator: Any, output_types: Any, output_shapes: Any, name: Any = None) -> Any:
    import tensorflow as tf

    from tf_ipu_dp.emulator.runtime import replicas

    program = replicas.current()
    if program is None or tf.executing_eagerly() or not tf.compat.v1.executing_eagerly_outside_functions():
        return _stock[0](iterator, output_types, output_shapes, name=name)

    def draw() -> List[Any]:
        work = [tf.group(*_work_before[-1])] if _work_before and _work_before[-1] else []
        asked = wait_meter.now()
        # The draw does not wait for the work: the next element may be fetched meanwhile. But this reading of the clock
        # is traced before the one after the draw, since TensorFlow takes them in the order in which they are traced.
        began = tf.maximum(asked, wait_meter.now(work)) if work else asked
        _meter.begin([began])
        with tf.control_dependencies([asked]):
            element = _stock[0](iterator, output_types, output_shapes, name=name)
        got = wait_meter.now(element)
        _meter.spend(got - began)
        # Before anything is computed from it, which may keep the only thread for long.
        with tf.control_dependencies([_meter.end(element)]):
            return [tf.identity(part) for part in element]

    if not program.together:
        return draw()
    specs = [tf.TensorSpec(shape, dtype) for shape, dtype in zip(output_shapes, output_types)]
    return replicas.hand_out(draw, specs)
