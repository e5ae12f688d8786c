"""How programs of the device take their input: dealt to the replicas, and timed. Imports TensorFlow late.

Replicas that run together share one iterator: the first one draws an element for each, in order.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any, Iterator, List, Sequence

_stock: List[Any] = []
_waited: List[Any] = []
_told = [0.0]
_work_before: List[Any] = []


def extend_tensorflow() -> None:
    """Makes iterators look for a program of the device. Doing it twice is harmless."""
    from tensorflow.python.ops import gen_dataset_ops

    if not _stock:
        _stock.append(gen_dataset_ops.iterator_get_next)
        gen_dataset_ops.iterator_get_next = _get_next


def seconds_waited() -> float:
    """Returns the seconds of waiting since it was asked last."""
    seconds = seconds_waited_so_far()
    _told[0] += seconds
    return seconds


def seconds_waited_so_far() -> float:
    """Returns the same, and goes on counting from where it did."""
    return float(_waited[0].numpy()) - _told[0] if _waited else 0.0


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

    from tf_ipu_dp.emulator import replicas

    program = replicas.current()
    if program is None or tf.executing_eagerly():
        return _stock[0](iterator, output_types, output_shapes, name=name)

    def draw() -> List[Any]:
        began = _now()
        with tf.control_dependencies([began]):
            element = _stock[0](iterator, output_types, output_shapes, name=name)
        with tf.control_dependencies(element):
            got = _now()
        if _work_before and _work_before[-1]:
            with tf.control_dependencies([tf.group(*_work_before[-1])]):
                began = tf.maximum(began, _now())
        _variable().assign_add(tf.maximum(got - began, tf.zeros([], tf.float64)))
        return list(element)

    if not program.together:
        return draw()
    specs = [tf.TensorSpec(shape, dtype) for shape, dtype in zip(output_shapes, output_types)]
    return replicas.hand_out(draw, specs)


def _now() -> Any:
    """TensorFlow's own clock refuses to run where a program has asked for deterministic operations."""
    import tensorflow as tf
    from tensorflow.python.framework import config

    if not getattr(config, "is_op_determinism_enabled", bool)():
        return tf.timestamp()
    now = tf.numpy_function(time.time, [], tf.float64)
    now.set_shape([])
    return now


def _variable() -> Any:
    if not _waited:
        import tensorflow as tf
        from tensorflow.python.ops import resource_variable_ops

        from tf_ipu_dp.emulator import replicas

        with tf.init_scope():
            waited = resource_variable_ops.ResourceVariable(0.0, dtype=tf.float64, trainable=False)
        replicas.keep_on_host(waited)
        _waited.append(waited)
    return _waited[0]
