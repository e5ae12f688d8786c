"""The program being traced: on how many replicas it runs, which of them is meant, and how they meet.

Replicas of one process run in one of two ways. A Keras model's are *sliced*: their micro batches go one after the other
through one graph, which is fast and costs no memory, but nothing in the model may ask for another replica's value.
Everything else runs *together*: one traced function is called once per replica, at the same time, and each call gets
its own copies of the variables, its share of the data and its places in the queues. Where replicas meet, each hands in
its tensors, the first one combines them and hands the result to all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import threading
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Set, Tuple

import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops


class ReplicasMustMeetError(RuntimeError):
    """A sliced program needs a value of another replica."""


@dataclasses.dataclass
class Program:
    """What a traced function is part of. `index` gives the replica's number as a tensor of the graph."""

    replicas: int
    index: Callable[[], Any] = lambda: tf.constant(0)
    together: bool = False
    updating: bool = False  # a sliced program's weight update, which is made once and stands for all replicas
    must_meet: bool = False
    fitting_replicas: int = 0  # set when tracing finds that the device holds another number of replicas
    random_ops: int = 0


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
    """The same, for when a whole program is traced.

    No garbage is looked for meanwhile: what is traced stays, and to look through it again and again takes a sixth of
    the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        with traced_as(program):
            yield
    finally:
        if enabled:
            gc.enable()


def meet(tensors: Sequence[Any], combine: Callable[[List[Any]], Any]) -> List[Any]:
    """Returns, on every replica, each tensor's values on all replicas combined into one tensor."""
    return meet_once(tensors, lambda columns: [combine(values) for values in columns])


def meet_once(tensors: Sequence[Any], combine: Callable[[List[List[Any]]], List[Any]]) -> List[Any]:
    """Returns the same, of a function that combines all of them: it has each tensor's values on all replicas."""
    program = current()
    if program is None or program.replicas == 1:
        return combine([[tensor] for tensor in tensors])
    if not program.together:
        program.must_meet = True
        raise ReplicasMustMeetError("The replicas of a sliced program cannot meet.")
    if not tensors:  # asked for the sake of the refusal above
        return []
    return ReplicaBarrier(program.replicas, tensors).pass_through(tensors, program.index(), combine)


def hand_out(draw: Callable[[], Any], spec: Any) -> Any:
    """Returns this replica's share of what the first replica draws: the i-th structure goes to replica i."""
    program = current()
    assert program is not None and program.together
    flat = tf.nest.flatten(spec)
    meeting = ReplicaBarrier(program.replicas, flat)
    drawn = meeting.lead(lambda: [tf.nest.flatten(draw()) for _ in range(program.replicas)], program.index(), [])
    for tensor, known in zip(drawn, flat):
        tensor.set_shape(known.shape)
    return tf.nest.pack_sequence_as(spec, drawn)


def total(values: List[Any]) -> Any:
    """Adds up the replicas' values, in the order of the replicas."""
    return values[0] if len(values) == 1 else tf.add_n(values)


class ReplicaBarrier:
    """One place in a program where the replicas wait for each other.

    The graph is the same for all of them. It holds stand-ins for the queues; `handles` says what each replica's call
    gets in their place. Queues block no thread of TensorFlow's pool while they wait.
    """

    def __init__(self, replicas: int, tensors: Sequence[Any]) -> None:
        self._replicas = replicas
        self._given = [(tensor.dtype, tensor.shape) for tensor in tensors]
        with tf.init_scope():
            self._own_up, self._own_down = self._queue(), self._queue()
            self._all_up = [self._queue() for _ in range(replicas)]
            self._all_down = [self._queue() for _ in range(replicas)]
        self.reset()
        _meetings.setdefault(replicas, []).append(self)

    def _queue(self) -> Any:
        return tf.queue.FIFOQueue(1, [dtype for dtype, _ in self._given])

    def reset(self) -> None:
        """Makes new queues, after a run that left the old ones in disorder."""
        with tf.init_scope():
            self._up = [self._queue() for _ in range(self._replicas)]
            self._down = [self._queue() for _ in range(self._replicas)]

    def close(self) -> None:
        """Sends everybody home who still waits."""
        for queue in (*self._up, *self._down):
            queue.close(cancel_pending_enqueues=True)

    def handles(self) -> Dict[int, List[Any]]:
        """Returns for each stand-in's handle the handle of each replica."""
        return self._table(self._up, self._down)

    def make_handles(self, captured: Set[int]) -> Tuple[Dict[int, List[Any]], List[Any]]:
        """Returns the same with queues of a graph's own, and these queues; none for a meeting that is not captured."""
        if handle_id(self._own_down.queue_ref) not in captured:
            return {}, []
        with tf.init_scope():
            up, down = ([self._queue() for _ in range(self._replicas)] for _ in range(2))
        return self._table(up, down), [*up, *down]

    def _table(self, up: List[Any], down: List[Any]) -> Dict[int, List[Any]]:
        table = {
            handle_id(self._own_up.queue_ref): [queue.queue_ref for queue in up],
            handle_id(self._own_down.queue_ref): [queue.queue_ref for queue in down],
        }
        for stand_in, queue in zip((*self._all_up, *self._all_down), (*up, *down)):
            table[handle_id(stand_in.queue_ref)] = [queue.queue_ref] * self._replicas
        return table

    def pass_through(
        self, tensors: Sequence[Any], number: Any, combine: Callable[[List[List[Any]]], List[Any]]
    ) -> List[Any]:
        """Hands in the tensors and waits for the combined ones."""
        shapes: List[Any] = []

        def combine_all() -> List[List[Any]]:
            handed_in = [_as_list(queue.dequeue()) for queue in self._all_up]
            for values in handed_in:
                for value, (_, shape) in zip(values, self._given):
                    value.set_shape(shape)
            combined = combine([list(values) for values in zip(*handed_in)])
            shapes.extend(value.shape for value in combined)
            return [combined] * self._replicas

        results = self.lead(combine_all, number, [self._own_up.enqueue(list(tensors))])
        for result, shape in zip(results, shapes):
            result.set_shape(shape)
        return results

    def lead(self, make: Callable[[], List[List[Any]]], number: Any, after: List[Any]) -> List[Any]:
        """Lets the first replica make everybody's tensors; returns one's own."""

        def first() -> Any:
            with tf.control_dependencies([queue.enqueue(own) for queue, own in zip(self._all_down, make())]):
                return tf.constant(0)

        with tf.control_dependencies(after):
            led = tf.cond(tf.equal(number, 0), first, lambda: tf.constant(0))
        with tf.control_dependencies([led]):
            return _as_list(self._own_down.dequeue())


class TogetherFunction:
    """A function of the device, called once per replica at the same time. Replica 0's result is the result.

    It is traced once, for tensors like those given, which all replicas get; a feed's handle among them is dealt.
    """

    def __init__(self, function: Callable[..., Any], tensors: Sequence[Any], program: Program) -> None:
        replicas = program.replicas
        if replicas not in _numbers:
            with tf.init_scope():
                # Not tf.Variable, which a function that is being traced may forbid even here.
                make = resource_variable_ops.ResourceVariable
                _numbers[replicas] = [make(one, dtype=tf.int32, trainable=False) for one in range(replicas)]
        self._numbers = _numbers[replicas]
        self._program = program
        program.index, program.together = self._numbers[0].read_value, True
        with tracing(self._program):
            self.concrete = tf.function(function, autograph=False).get_concrete_function(*tensors)
        self._copies: Dict[int, List[Any]] = {}
        self._left: Dict[int, Any] = {}  # what the last run left in replica 0's variables, which the host sees

    def __call__(self, tensors: Sequence[Any]) -> Any:
        """Runs all replicas and waits for them."""
        table = self._handles(tensors)
        captured = self.concrete.captured_inputs
        results: List[Any] = [None] * self._program.replicas
        errors: List[BaseException] = []

        def run(replica: int) -> None:
            try:
                results[replica] = self._call(replica, tensors, captured, table)
            except BaseException as error:
                errors.append(error)
                for meeting in self._meetings():
                    meeting.close()

        threads = [threading.Thread(target=run, args=(replica,)) for replica in range(1, self._program.replicas)]
        for thread in threads:
            thread.start()
        run(0)
        for thread in threads:
            thread.join()
        if errors:
            for meeting in self._meetings():
                meeting.reset()
            self._left = {}
            raise errors[0]
        self._left = {handle_id(one): _read(one) for one in captured if handle_id(one) in self._copies}
        return results[0]

    def call_in_graph(self, tensors: Sequence[Any]) -> Any:
        """Makes a run of all replicas a part of the graph around it. Every run begins with replica 0's variables."""
        captured = self.concrete.captured_inputs
        table, queues, copies = self._dealt(tensors), [], []
        for meeting in self._meetings():
            handles, own_queues = meeting.make_handles({handle_id(one) for one in captured})
            table.update(handles)
            queues += own_queues
        for handle in captured:
            if handle_id(handle) not in table and _is_variable(handle):
                value = _read(handle)
                with tf.init_scope():
                    zeros = tf.zeros(value.shape, value.dtype)
                    own = [resource_variable_ops.ResourceVariable(zeros) for _ in range(1, self._program.replicas)]
                for copy in own:
                    copy.assign(value)
                table[handle_id(handle)] = [handle, *(copy.handle for copy in own)]
                copies += own
        for queue in queues:  # a run that failed may have left something
            tf.cond(queue.size() > 0, lambda queue=queue: tf.group(queue.dequeue()), tf.no_op)
        structure: List[Any] = []

        def run() -> List[Any]:
            results = [self._call(replica, tensors, captured, table) for replica in range(self._program.replicas)]
            structure.append(None if isinstance(results[0], tf.Operation) else results[0])
            graph = tf.compat.v1.get_default_graph()
            calls = [one for one in graph.get_operations() if "PartitionedCall" in one.type]
            graph.control_outputs.extend(calls)  # they are run even if nobody wants the results
            with tf.control_dependencies(calls):
                return [tf.identity(leaf) for leaf in _leaves(results[0])]

        # A function of the old kind: in others TensorFlow would let the replicas run one after the other.
        together = tf.compat.v1.wrap_function(run, [])
        graph = tf.compat.v1.get_default_graph()
        needed = (self, together, queues, copies)  # as long as the graph is
        graph._ipu_replicas = [*getattr(graph, "_ipu_replicas", []), needed]
        leaves = iter(together())
        return tf.nest.map_structure(lambda leaf: next(leaves) if tf.is_tensor(leaf) else leaf, structure[0])

    def _call(self, replica: int, tensors: Sequence[Any], captured: Sequence[Any], table: Dict[int, List[Any]]) -> Any:
        own = [[table.get(handle_id(one), [one] * (replica + 1))[replica] for one in group]
               for group in (tensors, captured)]  # fmt: skip
        return self.concrete._call_flat(own[0], own[1])

    def _meetings(self) -> List[ReplicaBarrier]:
        return _meetings.get(self._program.replicas, [])

    def _handles(self, tensors: Sequence[Any]) -> Dict[int, List[Any]]:
        """Returns what each replica gets in place of a handle, with fresh copies of the host's variables."""
        table = self._dealt(tensors)
        for meeting in self._meetings():
            table.update(meeting.handles())
        for handle in self.concrete.captured_inputs:
            if handle_id(handle) not in table and _is_variable(handle):
                table[handle_id(handle)] = [handle, *self._copies_of(handle)]
        return table

    def _dealt(self, tensors: Sequence[Any]) -> Dict[int, List[Any]]:
        table = {handle_id(self._numbers[0].handle): [variable.handle for variable in self._numbers]}
        for handle in (*tensors, *self.concrete.captured_inputs):
            if handle_id(handle) in _dealt_handles:
                table[handle_id(handle)] = _dealt_handles[handle_id(handle)]
        return table

    def _copies_of(self, handle: Any) -> List[Any]:
        """Returns the other replicas' copies of a variable. What the host has changed since the last run, all get."""
        key = handle_id(handle)
        if key in self._left and bool(tf.reduce_all(tf.equal(_read(handle), self._left[key]))):
            return [copy.handle for copy in self._copies[key]]
        value = _read(handle)
        if key not in self._copies:
            with tf.init_scope():
                self._copies[key] = [tf.Variable(value, trainable=False) for _ in range(1, self._program.replicas)]
        for copy in self._copies[key]:
            copy.assign(value)
        return [copy.handle for copy in self._copies[key]]


# A function that programs share is traced once, with the meetings of its first program: so they are everybody's.
_meetings: Dict[int, List[ReplicaBarrier]] = {}
_numbers: Dict[int, List[Any]] = {}
_dealt_handles: Dict[int, List[Any]] = {}
_host_handles: Set[int] = set()


def deal(handle: Any, handles: List[Any]) -> None:
    """Says which handle each replica gets where the program has this one."""
    _dealt_handles[handle_id(handle)] = handles


def undeal(handle: Any) -> None:
    """Forgets a feed."""
    _dealt_handles.pop(handle_id(handle), None)


def keep_on_host(variable: Any) -> None:
    """Says that there is one of a variable, whichever replica uses it."""
    if hasattr(variable.handle, "_id"):  # not in a graph of TensorFlow 1, which has no replicas here
        _host_handles.add(handle_id(variable.handle))


def _is_variable(handle: Any) -> bool:
    """Whether a captured tensor is the handle of a variable, of which each replica has its own."""
    if handle.dtype != tf.resource or handle_id(handle) in _host_handles:
        return False
    data = getattr(handle, "_handle_data", None)
    return data is not None and data.is_set and len(data.shape_and_type) == 1


def _read(handle: Any) -> Any:
    dtype = tf.as_dtype(handle._handle_data.shape_and_type[0].dtype)
    return tf.identity(tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype))


def handle_id(tensor: Any) -> int:
    """Returns the number by which TensorFlow knows an eager tensor."""
    return int(tensor._id)


def _leaves(structure: Any) -> List[Any]:
    return [leaf for leaf in tf.nest.flatten(structure) if tf.is_tensor(leaf)]


def _as_list(value: Any) -> List[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
