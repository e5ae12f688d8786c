"""The input of programs of the device: distributed to the replicas, and timed.

Replicas that run concurrently share one iterator: replica 0 draws an element for each, in order.
"""

from __future__ import annotations

import contextlib
from typing import Any, Iterator, List, Sequence

import tensorflow as tf
from tensorflow.python.ops import gen_dataset_ops

from tf_ipu_dp.emulator import patches
from tf_ipu_dp.emulator.runtime import replicas, synthetic_data, wait_meter

_PATCH = "input wait"
_stock: List[Any] = []
_meter = wait_meter.Meter()
_reported_s = [0.0]
_work_before: List[Any] = []
_groups: List[_DrawnTogether] = []


class _DrawnTogether:
    """Elements that a program draws one after the other, and computes with when it has all of them."""

    def __init__(self, count: int) -> None:
        self.count, self.drawn = count, 0
        self.began: Any = None  # when the program began to wait


def extend_tensorflow() -> None:
    """Makes iterators feed the replicas of a program of the device. Calling it twice is harmless."""
    if not patches.is_applied(_PATCH):
        _stock[:] = [gen_dataset_ops.iterator_get_next]
        patches.set_attribute(_PATCH, gen_dataset_ops, "iterator_get_next", _get_next)


def seconds_waited() -> float:
    """Returns the seconds of waiting since the last call. Must be called between executions."""
    _meter.clear_unfinished()
    seconds = seconds_waited_so_far()
    _reported_s[0] += seconds
    return seconds


def seconds_waited_so_far() -> float:
    """Returns the same without starting a new count."""
    return _meter.seconds() - _reported_s[0]


def is_waiting() -> bool:
    """Whether the program of the device is waiting for its input now."""
    return _meter.is_waiting()


@contextlib.contextmanager
def overlapping(results: Sequence[Any]) -> Iterator[None]:
    """Inside, waiting counts only after these results are computed: until then the device is still busy."""
    _work_before.append(results)
    try:
        yield
    finally:
        _work_before.pop()


def draw_together(iterator: Any, count: int, after: Sequence[Any]) -> List[Any]:
    """Returns the next elements. Waiting for all of them is timed as one wait, after these results are computed."""
    _groups.append(_DrawnTogether(count))
    try:
        with overlapping(after):
            return [next(iterator) for _ in range(count)]
    finally:
        _groups.pop()


def _get_next(iterator: Any, output_types: Any, output_shapes: Any, name: Any = None) -> Any:
    program = replicas.current()
    if program is None or tf.executing_eagerly() or not tf.compat.v1.executing_eagerly_outside_functions():
        return _stock[0](iterator, output_types, output_shapes, name=name)
    if synthetic_data.is_used_for("infeed"):
        return [synthetic_data.make(shape, tf.as_dtype(dtype)) for shape, dtype in zip(output_shapes, output_types)]

    def draw() -> List[Any]:
        group = _groups[-1] if _groups else _DrawnTogether(1)
        if group.drawn == 0:
            work = [tf.group(*_work_before[-1])] if _work_before and _work_before[-1] else []
            asked = wait_meter.now()
            # The draw does not wait for the work: the next element may be fetched meanwhile. But this reading of the
            # clock is traced before the one after the draw, since TensorFlow runs them in the order of tracing.
            group.began = tf.maximum(asked, wait_meter.now(work)) if work else asked
            _meter.begin([group.began])
            with tf.control_dependencies([asked]):
                element = _stock[0](iterator, output_types, output_shapes, name=name)
        else:
            element = _stock[0](iterator, output_types, output_shapes, name=name)
        group.drawn += 1
        if group.drawn < group.count:
            return list(element)
        got = wait_meter.now(element)
        _meter.spend(got - group.began)
        # Recorded before anything is computed from the element, which may occupy the only thread for long.
        with tf.control_dependencies([_meter.end(element)]):
            return [tf.identity(part) for part in element]

    if not program.concurrent:
        return draw()
    specs = [tf.TensorSpec(shape, dtype) for shape, dtype in zip(output_shapes, output_types)]
    return replicas.shard_from_leader(draw, specs)
