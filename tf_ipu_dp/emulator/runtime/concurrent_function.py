"""A function of the device that runs on all replicas at the same time, in one thread per replica."""

from __future__ import annotations

import threading
from typing import Any, Callable, Dict, List, Sequence

import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from tf_ipu_dp.emulator.runtime import replica_barrier, replica_handles, replicas
from tf_ipu_dp.emulator.runtime.replica_handles import handle_id

_indices: Dict[int, List[Any]] = {}  # by number of replicas: one variable per replica, which holds its index


class ConcurrentFunction:
    """A function of the device, called once per replica at the same time. Replica 0's result is the result.

    It is traced once, for tensors like those given, which all replicas get. A handle among them or in the graph that is
    assigned to the replicas (see `replica_handles`) is replaced by the replica's own.
    """

    def __init__(self, function: Callable[..., Any], tensors: Sequence[Any], program: replicas.Program) -> None:
        count = program.replicas
        if count not in _indices:
            with tf.init_scope():
                # Not tf.Variable, which a function that is being traced may forbid even here.
                make = resource_variable_ops.ResourceVariable
                _indices[count] = [make(index, dtype=tf.int32, trainable=False) for index in range(count)]
        self._indices = _indices[count]
        self._program = program
        program.index, program.concurrent = self._indices[0].read_value, True
        with replicas.tracing(self._program):
            self.concrete = tf.function(function, autograph=False).get_concrete_function(*tensors)
        self._copies: Dict[int, List[Any]] = {}
        # The values of replica 0's variables after the last run. The host sees these variables and may change them.
        self._after_last_run: Dict[int, Any] = {}

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
                for barrier in self._barriers():
                    barrier.close()

        threads = [threading.Thread(target=run, args=(replica,)) for replica in range(1, self._program.replicas)]
        for thread in threads:
            thread.start()
        run(0)
        for thread in threads:
            thread.join()
        if errors:
            for barrier in self._barriers():
                barrier.reset()
            self._after_last_run = {}
            raise errors[0]
        self._after_last_run = {handle_id(one): _read(one) for one in captured if handle_id(one) in self._copies}
        return results[0]

    def call_in_graph(self, tensors: Sequence[Any]) -> Any:
        """Makes a run of all replicas a part of the graph around it. Every run begins with replica 0's variables."""
        captured = self.concrete.captured_inputs
        table, queues, copies = self._assigned(tensors), [], []
        for barrier in self._barriers():
            handles, own_queues = barrier.make_handles({handle_id(one) for one in captured})
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
        for queue in queues:  # a failed run may have left elements
            tf.cond(queue.size() > 0, lambda queue=queue: tf.group(queue.dequeue()), tf.no_op)
        structure: List[Any] = []

        def run() -> List[Any]:
            results = [self._call(replica, tensors, captured, table) for replica in range(self._program.replicas)]
            structure.append(None if isinstance(results[0], tf.Operation) else results[0])
            graph = tf.compat.v1.get_default_graph()
            calls = [one for one in graph.get_operations() if "PartitionedCall" in one.type]
            graph.control_outputs.extend(calls)  # they are run even if their results are not used
            with tf.control_dependencies(calls):
                return [tf.identity(leaf) for leaf in _leaves(results[0])]

        # A TF1 function: in one of TF2, TensorFlow would run the replicas one after the other.
        run_all = tf.compat.v1.wrap_function(run, [])
        graph = tf.compat.v1.get_default_graph()
        needed = (self, run_all, queues, copies)  # kept alive as long as the graph exists
        graph._ipu_replicas = [*getattr(graph, "_ipu_replicas", []), needed]
        leaves = iter(run_all())
        return tf.nest.map_structure(lambda leaf: next(leaves) if tf.is_tensor(leaf) else leaf, structure[0])

    def _call(self, replica: int, tensors: Sequence[Any], captured: Sequence[Any], table: Dict[int, List[Any]]) -> Any:
        own = [[table.get(handle_id(one), [one] * (replica + 1))[replica] for one in group]
               for group in (tensors, captured)]  # fmt: skip
        return self.concrete._call_flat(own[0], own[1])

    def _barriers(self) -> List[replica_barrier.ReplicaBarrier]:
        return replica_barrier.barriers_of(self._program.replicas)

    def _handles(self, tensors: Sequence[Any]) -> Dict[int, List[Any]]:
        """Returns what each replica gets in place of a handle, with fresh copies of the host's variables."""
        table = self._assigned(tensors)
        for barrier in self._barriers():
            table.update(barrier.handles())
        for handle in self.concrete.captured_inputs:
            if handle_id(handle) not in table and _is_variable(handle):
                table[handle_id(handle)] = [handle, *self._copies_of(handle)]
        return table

    def _assigned(self, tensors: Sequence[Any]) -> Dict[int, List[Any]]:
        table = {handle_id(self._indices[0].handle): [variable.handle for variable in self._indices]}
        for handle in (*tensors, *self.concrete.captured_inputs):
            own = replica_handles.assigned_to(handle)
            if own is not None:
                table[handle_id(handle)] = own
        return table

    def _copies_of(self, handle: Any) -> List[Any]:
        """Returns the other replicas' copies of a variable, which get the host's value if it has changed."""
        key = handle_id(handle)
        if key in self._after_last_run and bool(tf.reduce_all(tf.equal(_read(handle), self._after_last_run[key]))):
            return [copy.handle for copy in self._copies[key]]
        value = _read(handle)
        if key not in self._copies:
            with tf.init_scope():
                self._copies[key] = [tf.Variable(value, trainable=False) for _ in range(1, self._program.replicas)]
        for copy in self._copies[key]:
            copy.assign(value)
        return [copy.handle for copy in self._copies[key]]


def _is_variable(handle: Any) -> bool:
    """Whether a captured tensor is the handle of a variable, of which each replica has its own."""
    if handle.dtype != tf.resource or replica_handles.is_on_host(handle):
        return False
    data = getattr(handle, "_handle_data", None)
    return data is not None and data.is_set and len(data.shape_and_type) == 1


def _read(handle: Any) -> Any:
    dtype = tf.as_dtype(handle._handle_data.shape_and_type[0].dtype)
    return tf.identity(tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype))


def _leaves(structure: Any) -> List[Any]:
    return [leaf for leaf in tf.nest.flatten(structure) if tf.is_tensor(leaf)]
