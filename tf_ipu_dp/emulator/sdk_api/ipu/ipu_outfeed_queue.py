"""`tensorflow.python.ipu.ipu_outfeed_queue`: queues that pass results from the replicas to the host.

The tensors wait in queues of TensorFlow, so that enqueueing is an operation of the graph like any other. Replicas that
run concurrently have a queue each; time-sliced ones share one, in the order step by step, replica by replica.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
import threading
import time
import weakref
from typing import Any, List, Optional, Union

import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from tf_ipu_dp.emulator.runtime import replica_handles, replicas, synthetic_data

_PAUSE_S = 0.001  # a thread that polls an empty queue must not block the tracing of the program that fills it
_SHAPE_INFERENCE = "_scratch_graph"  # ends the names of the graphs in which Keras infers shapes
FEED_TYPES = (tf.int32, tf.float32, tf.float16, tf.bool, tf.int8, tf.uint8)


class IPUOutfeedMode(enum.Enum):
    """Whether the host gets everything that was enqueued, or only the last element."""

    ALL = "all"
    LAST = "get_last"


class IPUOutfeedQueue:
    """A queue that a program of the device fills and the host empties."""

    def __init__(
        self,
        outfeed_mode: Optional[IPUOutfeedMode] = None,
        device_ordinal: Optional[int] = None,
        buffer_depth: int = 3,
        optimise_latency: bool = False,
    ) -> None:
        del optimise_latency
        mode = IPUOutfeedMode.ALL if outfeed_mode is None else outfeed_mode
        if not isinstance(mode, IPUOutfeedMode):
            raise ValueError(f"outfeed_mode must be an IPUOutfeedMode, not {outfeed_mode!r}.")
        if device_ordinal is not None and (type(device_ordinal) is not int or device_ordinal < 0):
            raise ValueError(f"device_ordinal must be an int of 0 or more, not {device_ordinal!r}.")
        if buffer_depth <= 0:
            raise ValueError(f"buffer_depth must be larger than 0, not {buffer_depth}.")
        self._mode = mode
        self._store: Union[_Store, _LastStore, None] = None
        self._graphs: Any = weakref.WeakSet()
        self._was_traced = False

    @property
    def enqueued(self) -> bool:
        """Whether an enqueue was traced in the current graph or in one nested in it; in eager code, anywhere."""
        if tf.executing_eagerly():
            return self._was_traced
        return tf.compat.v1.get_default_graph() in self._graphs

    def enqueue(self, tensors: Any) -> Any:
        """Adds one structure of tensors. Can be called once per graph."""
        if not tf.executing_eagerly():
            self._note_graph()
        flat = [tf.convert_to_tensor(tensor) for tensor in tf.nest.flatten(tensors)]
        for tensor in flat:
            check_feed_type(tensor.dtype, "An outfeed queue")
            check_feed_shape(tensor.shape)
        program = replicas.current()
        wanted = _Layout.of(tensors, flat, program)
        store = self._store
        if store is None or store.layout != wanted:
            executed = store is not None and store.was_executed()
            if store is not None and executed and program is not None:
                raise tf.errors.FailedPreconditionError(
                    None, None, f"The outfeed queue carries {store.layout}, but the program enqueues {wanted}."
                )
            store = _Store(wanted) if self._mode is IPUOutfeedMode.ALL else _LastStore(wanted)
            if not executed:  # otherwise Keras traces a layer to find its shapes
                self._store = store
        if synthetic_data.is_used_for("outfeed"):
            return tf.no_op()
        return store.enqueue(flat, for_all=program is not None and program.updating)

    def dequeue(self, wait_for_completion: bool = False) -> Any:
        """Removes and returns everything that has arrived, or what arrived last."""
        del wait_for_completion
        if self._store is None:
            if tf.executing_eagerly():
                return []
            raise ValueError("Nothing has been enqueued into the outfeed queue, so there is nothing to dequeue.")
        return self._store.take()

    def __iter__(self) -> IPUOutfeedQueueIterator:
        return IPUOutfeedQueueIterator(self)

    @property
    def deleter(self) -> Any:
        """Deletes the queue's content."""
        self._store = None
        self._was_traced = False
        self._graphs.clear()
        return tf.no_op()

    def _note_graph(self) -> None:
        graph = tf.compat.v1.get_default_graph()
        if graph in self._graphs:
            raise ValueError("An outfeed queue can be enqueued into once per graph, and this one has been already.")
        self._was_traced = True
        while graph is not None:
            self._graphs.add(graph)
            # Keras infers a layer's shapes in a graph that is never executed: the program around it may enqueue.
            is_inference = str(getattr(graph, "name", "")).endswith(_SHAPE_INFERENCE)
            graph = None if is_inference else getattr(graph, "outer_graph", None)


class ScopedIPUOutfeedQueue(IPUOutfeedQueue):
    """An outfeed queue that is deleted with its object."""

    def __init__(self, outfeed_mode: Optional[IPUOutfeedMode] = None, device_ordinal: Optional[int] = None) -> None:
        if not tf.executing_eagerly():
            raise RuntimeError("ScopedIPUOutfeedQueue can be used in eager mode only.")
        super().__init__(outfeed_mode, device_ordinal)


class IPUOutfeedQueueIterator:
    """The structures in an outfeed queue, step by step, until it is empty. Can be continued after another run."""

    def __init__(self, outfeed_queue: IPUOutfeedQueue) -> None:
        if not tf.executing_eagerly():
            raise RuntimeError("An outfeed queue can be iterated over in eager mode only.")
        if outfeed_queue._mode is not IPUOutfeedMode.ALL:
            raise RuntimeError("Only an outfeed queue of the mode ALL can be iterated over.")
        self._outfeed_queue = outfeed_queue
        self._everything: Any = None
        self._step = self._steps = 0

    def __iter__(self) -> IPUOutfeedQueueIterator:
        return self

    def __next__(self) -> Any:
        if self._step == self._steps:
            self._dequeue()
        step, self._step = self._step, self._step + 1
        return tf.nest.map_structure(lambda tensor: tensor[step], self._everything)

    def _dequeue(self) -> None:
        store = self._outfeed_queue._store
        if not isinstance(store, _Store):
            raise StopIteration
        self._everything = store.take(warn=False)
        self._step, self._steps = 0, int(tf.nest.flatten(self._everything)[0].shape[0])
        if not self._steps:
            raise StopIteration


def check_feed_type(dtype: Any, what: str) -> None:
    """Refuses what cannot cross between host and device."""
    if dtype not in FEED_TYPES:
        raise tf.errors.FailedPreconditionError(
            None,
            None,
            f"{what} cannot carry {dtype.name}: only {', '.join(kind.name for kind in FEED_TYPES)}. Cast it first.",
        )


def check_feed_shape(shape: Any) -> None:
    """Refuses a shape with a dimension of size 0."""
    if shape.rank and 0 in shape.as_list():
        raise tf.errors.InvalidArgumentError(None, None, f"A feed cannot carry the empty shape {shape}.")


@dataclasses.dataclass(frozen=True)
class _Layout:
    """The structure of one enqueue, and the replicas that make it."""

    structure: Any
    types: Any
    shapes: Any
    count: int
    concurrent: bool

    @classmethod
    def of(cls, tensors: Any, flat: List[Any], program: Optional[replicas.Program]) -> _Layout:
        structure = tf.nest.map_structure(lambda _: 0, tensors)
        shapes = tuple(tuple(tensor.shape) if tensor.shape.rank is not None else None for tensor in flat)
        count, concurrent = (program.replicas, program.concurrent) if program else (1, False)
        return cls(structure, tuple(tensor.dtype for tensor in flat), shapes, count, concurrent)

    def __str__(self) -> str:
        leaves = ", ".join(f"{dtype.name}{list(shape or ())}" for dtype, shape in zip(self.types, self.shapes))
        return f"{leaves} of {replicas_text(self.count)}"

    @property
    def is_static(self) -> bool:
        return all(shape is not None and None not in shape for shape in self.shapes)


def replicas_text(count: int) -> str:
    """Returns a number of replicas as text."""
    return "1 replica" if count == 1 else f"{count} replicas"


class _Store:
    """The queues behind an outfeed."""

    def __init__(self, layout: _Layout) -> None:
        self.layout = layout
        self._seen = False
        self._taking = threading.Lock()  # several threads may poll: each must get what it has counted
        with tf.init_scope():
            self._queues = [self._queue() for _ in range(layout.count if layout.concurrent else 1)]
            self._entry = self._queue() if layout.concurrent else self._queues[0]
        if layout.concurrent:
            handles = [queue.queue_ref for queue in self._queues]
            replica_handles.assign(self._entry.queue_ref, handles)
            weakref.finalize(self, replica_handles.unassign, self._entry.queue_ref)

    def _queue(self) -> Any:
        shapes = self.layout.shapes if self.layout.is_static else None
        return tf.queue.FIFOQueue(-1, self.layout.types, shapes)

    def enqueue(self, flat: List[Any], for_all: bool) -> Any:
        """Adds one structure: this replica's, or that of all of them."""
        if not for_all or self.layout.count == 1 or self.layout.concurrent:
            return self._entry.enqueue(flat)
        before: List[Any] = []
        for _ in range(self.layout.count):
            with tf.control_dependencies(before):
                before = [self._entry.enqueue(flat)]
        return before[0]

    def was_executed(self) -> bool:
        """Whether anything has ever been enqueued."""
        with tf.init_scope():
            self._seen = self._seen or any(int(queue.size()) for queue in self._queues)
        return self._seen

    def take(self, warn: bool = True) -> Any:
        """Removes and returns everything; the first dimension is the steps."""
        count = self.layout.count
        with self._taking:
            # While the program runs, replicas may be ahead of the slowest one. Their surplus is left in the queues.
            steps = tf.reduce_min([queue.size() for queue in self._queues])
            steps = steps if self.layout.concurrent else steps // count
            shares = [self._take(queue, steps if self.layout.concurrent else steps * count) for queue in self._queues]
        if self.layout.concurrent:
            flat = [tf.stack(leaves, axis=1) for leaves in zip(*shares)]
        elif count > 1:
            flat = [
                tf.reshape(leaf, tf.concat([[tf.shape(leaf)[0] // count, count], tf.shape(leaf)[1:]], axis=0))
                for leaf in shares[0]
            ]
        else:
            flat = shares[0]
        if tf.executing_eagerly():
            if int(flat[0].shape[0]):
                self._seen = True
                return self._pack(flat)
            time.sleep(_PAUSE_S)
            if warn and not self._seen:
                logging.getLogger("tensorflow").warning("The outfeed queue is empty: its program has not run yet.")
        return self._pack(flat)

    def _take(self, queue: Any, size: Any) -> List[Any]:
        if self.layout.is_static:
            taken = queue.dequeue_many(size)
            return list(taken) if isinstance(taken, (list, tuple)) else [taken]
        rows = [queue.dequeue() for _ in range(int(size))]
        rows = [row if isinstance(row, (list, tuple)) else [row] for row in rows]
        if not rows:
            shapes = [[0, *(dimension or 0 for dimension in shape or ())] for shape in self.layout.shapes]
            return [tf.zeros(shape, dtype) for shape, dtype in zip(shapes, self.layout.types)]
        return [tf.stack(leaves) for leaves in zip(*rows)]

    def _pack(self, flat: List[Any]) -> Any:
        return tf.nest.pack_sequence_as(self.layout.structure, flat)


class _LastStore:
    """The last structure of each replica, in variables of the host."""

    def __init__(self, layout: _Layout) -> None:
        self.layout = layout
        self._variables: List[Any] = []
        self._seen = False
        if layout.is_static:  # otherwise Keras traces a layer to find its shapes
            with tf.init_scope():
                self._count = self._variable([], tf.int32)
                self._variables = [
                    self._variable([layout.count, *shape], dtype) for shape, dtype in zip(layout.shapes, layout.types)
                ]

    @staticmethod
    def _variable(shape: Any, dtype: Any) -> Any:
        # In no collection: a session's program neither initialises nor saves what is not its own.
        variable = resource_variable_ops.ResourceVariable(tf.zeros(shape, dtype), trainable=False, collections=[])
        replica_handles.keep_on_host(variable)
        return variable

    def _initialised(self) -> List[Any]:
        """Returns what has to run before the variables are used in a graph of TensorFlow 1."""
        if tf.compat.v1.executing_eagerly_outside_functions():
            return []
        variables = [self._count, *self._variables]

        def start() -> Any:
            return tf.group(*(variable.assign(tf.zeros(variable.shape, variable.dtype)) for variable in variables))

        return [tf.cond(self._count.is_initialized(), tf.no_op, start)]

    def enqueue(self, flat: List[Any], for_all: bool) -> Any:
        """Overwrites this replica's structure, or that of all of them."""
        if not self._variables:
            return tf.no_op()
        rows = tf.range(self.layout.count) if for_all else tf.reshape(replicas.index(), [1])
        with tf.control_dependencies(self._initialised()):
            written = [
                variable.scatter_update(tf.IndexedSlices(tf.stack([tensor] * int(rows.shape[0])), rows))
                for variable, tensor in zip(self._variables, flat)
            ]
        with tf.control_dependencies(written):
            return tf.group(self._count.assign_add(1))

    def was_executed(self) -> bool:
        """Whether anything has ever been enqueued."""
        with tf.init_scope():
            self._seen = self._seen or (bool(self._variables) and int(self._count.read_value()) > 0)
        return self._seen

    def take(self) -> Any:
        """Returns what was enqueued last."""
        if tf.executing_eagerly() and not (self._variables and int(self._count.read_value())):
            raise tf.errors.FailedPreconditionError(
                None, None, "The outfeed queue is empty: its program has not run since the last dequeue."
            )
        self._seen = True
        values = [variable.read_value() for variable in self._variables]
        with tf.control_dependencies(values):
            self._count.assign(0)
        return tf.nest.pack_sequence_as(
            self.layout.structure, values if self.layout.count > 1 else [value[0] for value in values]
        )
