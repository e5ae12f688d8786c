"""The program being traced: how many replicas it runs on, the index of the current one, and collectives between them.

Replicas of one process run in one of two ways. A Keras model's are *time-sliced*: their micro batches go one after the
other through one graph, which is fast and costs no memory, but the model cannot use another replica's value.
All others run *concurrently* (see `concurrent_function`): one traced function is called once per replica, at the same
time, and each call gets its own copies of the variables, its shard of the data and its own queues.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import threading
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import tensorflow as tf

from tf_ipu_dp.emulator.runtime import floating_point
from tf_ipu_dp.emulator.runtime.replica_barrier import ReplicaBarrier


class CollectiveInSlicedProgramError(RuntimeError):
    """A time-sliced program needs a value of another replica."""


@dataclasses.dataclass(frozen=True)
class DrawsOfParts:
    """The random draws of one micro batch in a fused pass: the same operations as in the others, with its own numbers.

    `made` has each operation's key and the tensor that counts its executions, by the operation's position.
    """

    number: int
    count: int
    made: Dict[int, Tuple[int, Any]]


@dataclasses.dataclass
class Program:
    """The program that a traced function is part of. `index` returns the replica's index as a tensor of the graph."""

    replicas: int
    index: Callable[[], Any] = lambda: tf.constant(0)
    concurrent: bool = False
    updating: bool = False  # in a time-sliced program's weight update, which is made once for all replicas
    needs_collectives: bool = False  # set when tracing finds a collective in a time-sliced program
    fitting_replicas: int = 0  # set when tracing finds that the device holds another number of replicas
    ipus_per_replica: int = 1  # that the pipelines and shards traced so far take
    in_session: bool = False  # in a graph of TensorFlow 1: the device is known only when a session runs it
    random_ops: int = 0
    draws_of_parts: Optional[DrawsOfParts] = None  # in a fused pass, for what is traced for one of its micro batches
    iterators: List[Any] = dataclasses.field(default_factory=list)  # of the host, that the program takes elements from


_tracing = threading.local()


def current() -> Optional[Program]:
    """Returns the program that is being traced in this thread, if one is."""
    stack = getattr(_tracing, "stack", None)
    return stack[-1] if stack else None


def count() -> int:
    """Returns the replicas of the program that is being traced; 1 outside of one."""
    program = current()
    return program.replicas if program else 1


def index() -> Any:
    """Returns the number of the replica as an int32 scalar."""
    program = current()
    return program.index() if program else tf.constant(0)


@contextlib.contextmanager
def traced_as(program: Program) -> Iterator[Program]:
    """Everything traced inside belongs to the program."""
    stack = _tracing.__dict__.setdefault("stack", [])
    stack.append(program)
    try:
        yield program
    finally:
        stack.pop()


@contextlib.contextmanager
def tracing(program: Program) -> Iterator[None]:
    """The same, for tracing a whole program.

    Garbage collection is off meanwhile: the graph is not garbage, and scanning it takes a sixth of the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        with traced_as(program), floating_point.examining():
            yield
    finally:
        if enabled:
            gc.enable()


def all_reduce(tensors: Sequence[Any], combine: Callable[[List[Any]], Any]) -> List[Any]:
    """Returns, on every replica, each tensor's values on all replicas combined into one tensor."""
    return all_reduce_jointly(tensors, lambda columns: [combine(values) for values in columns])


def all_reduce_jointly(tensors: Sequence[Any], combine: Callable[[List[List[Any]]], List[Any]]) -> List[Any]:
    """Returns, on every replica, what a function makes of all tensors; it gets each tensor's values on all replicas."""
    program = current()
    if program is None or program.replicas == 1:
        return combine([[tensor] for tensor in tensors])
    if not program.concurrent:
        program.needs_collectives = True
        raise CollectiveInSlicedProgramError("The replicas of a time-sliced program have no collectives.")
    if not tensors:  # called only for the check above
        return []
    return ReplicaBarrier(program.replicas, tensors).combine(tensors, program.index(), combine)


def shard_from_leader(draw: Callable[[], Any], spec: Any) -> Any:
    """Returns this replica's shard of what replica 0 draws: the i-th structure goes to replica i."""
    program = current()
    assert program is not None and program.concurrent
    flat = tf.nest.flatten(spec)
    barrier = ReplicaBarrier(program.replicas, flat)
    drawn = barrier.run_on_leader(
        lambda: [tf.nest.flatten(draw()) for _ in range(program.replicas)], program.index(), []
    )
    for tensor, known in zip(drawn, flat):
        tensor.set_shape(known.shape)
    return tf.nest.pack_sequence_as(spec, drawn)


def sum_values(values: List[Any]) -> Any:
    """Returns the sum of the replicas' values, added in the order of the replicas."""
    return values[0] if len(values) == 1 else tf.add_n(values)
