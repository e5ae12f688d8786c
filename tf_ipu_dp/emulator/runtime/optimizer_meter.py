"""How long the optimizer takes: from when all gradients of an update are there until its variables are assigned.

Counted are the updates of Keras models, by the program itself as it runs. A custom training loop calls its optimizer on
its own, and is not timed. Where one backward pass gives all gradients of an update, it updates the first variables
while it still computes the gradients of others. To be timed it must wait for all of them, which costs a small model
some per cent of its speed: that is done only where IPU_EMULATOR_TIME_OPTIMIZER=1 asks for it.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any, Callable, Iterator, Sequence

import tensorflow as tf

from tf_ipu_dp.emulator.runtime import graph_loops, replicas, wait_meter

VARIABLE = "IPU_EMULATOR_TIME_OPTIMIZER"
_meter = wait_meter.Meter()


def seconds_in_optimizer() -> float:
    """Returns the time that optimizers of this process have taken so far."""
    return _meter.seconds()


def timed(tensors: Sequence[Any], update: Callable[[], Any]) -> Any:
    """Returns what an update made of these tensors returns, and makes a traced program record its time.

    The update begins once all of the tensors are computed and the clock is read. Otherwise a program with one thread
    would read the clock after the update.
    """
    if tf.executing_eagerly() or not tf.compat.v1.executing_eagerly_outside_functions():
        return update()
    began = wait_meter.now(tensors)
    graph = tf.compat.v1.get_default_graph()
    made_before = len(graph.get_operations())
    with tf.control_dependencies([began]):
        result = update()
    ended = wait_meter.now(graph_loops.effects(graph.get_operations()[made_before:]))
    _meter.spend(_once(ended - began))
    return result


def is_asked() -> bool:
    """Whether the environment asks for the time of updates that begin before all gradients are computed."""
    return os.environ.get(VARIABLE) == "1"


@contextlib.contextmanager
def timing_where_asked(optimizer: Any) -> Iterator[None]:
    """Inside, `apply_gradients` of an optimizer records its time, if the environment asks for it."""
    if not is_asked():
        yield
        return
    given = optimizer.apply_gradients

    def apply_gradients(grads_and_vars: Any, *arguments: Any, **options: Any) -> Any:
        pairs = list(grads_and_vars)
        gradients = tf.nest.flatten([gradient for gradient, _ in pairs], expand_composites=True)
        known = [gradient for gradient in gradients if gradient is not None]
        return timed(known, lambda: given(pairs, *arguments, **options))

    with replaced(optimizer, "apply_gradients", apply_gradients):
        yield


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replaces an attribute of an object without Keras' tracking of attributes."""
    before = {name: vars(owner)[name]} if name in vars(owner) else {}
    vars(owner)[name] = value
    try:
        yield
    finally:
        del vars(owner)[name]
        vars(owner).update(before)


def _once(seconds: Any) -> Any:
    """Returns the time on replica 0 alone: concurrent replicas make the same update at the same time."""
    program = replicas.current()
    if program is None or not program.concurrent:
        return seconds
    return tf.where(tf.equal(program.index(), 0), seconds, tf.zeros_like(seconds))
