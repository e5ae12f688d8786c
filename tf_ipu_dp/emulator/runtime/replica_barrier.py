"""Barriers between the replicas of one process: each submits its tensors, and replica 0 combines them for all.

Replicas that run concurrently execute the same graph, in one thread per replica.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Sequence, Set, Tuple

import tensorflow as tf

from tf_ipu_dp.emulator.runtime.replica_handles import handle_id

# A function that programs share is traced once, with the barriers of its first program. So barriers are shared by all
# programs with the same number of replicas, which is the key.
_barriers: Dict[int, List[ReplicaBarrier]] = {}


def barriers_of(replicas: int) -> List[ReplicaBarrier]:
    """Returns all barriers of programs with this number of replicas."""
    return _barriers.get(replicas, [])


class ReplicaBarrier:
    """One place in a program where the replicas wait for each other.

    The graph is the same for all of them. It holds placeholder queues; `handles` returns what replaces them in
    each replica's call. Waiting for a queue blocks no thread of TensorFlow's pool.
    """

    def __init__(self, replicas: int, tensors: Sequence[Any]) -> None:
        self._replicas = replicas
        self._specs = [(tensor.dtype, tensor.shape) for tensor in tensors]
        with tf.init_scope():
            self._own_up, self._own_down = self._queue(), self._queue()
            self._all_up = [self._queue() for _ in range(replicas)]
            self._all_down = [self._queue() for _ in range(replicas)]
        self.reset()
        _barriers.setdefault(replicas, []).append(self)

    def _queue(self) -> Any:
        return tf.queue.FIFOQueue(1, [dtype for dtype, _ in self._specs])

    def reset(self) -> None:
        """Makes new queues, after a failed run that left elements in the old ones."""
        with tf.init_scope():
            self._up = [self._queue() for _ in range(self._replicas)]
            self._down = [self._queue() for _ in range(self._replicas)]

    def close(self) -> None:
        """Cancels the waiting of all replicas."""
        for queue in (*self._up, *self._down):
            queue.close(cancel_pending_enqueues=True)

    def handles(self) -> Dict[int, List[Any]]:
        """Returns for each placeholder's handle the handle of each replica."""
        return self._table(self._up, self._down)

    def make_handles(self, captured: Set[int]) -> Tuple[Dict[int, List[Any]], List[Any]]:
        """Returns the same with new queues for one graph, and these queues; none for a barrier that is not captured."""
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
        for placeholder, queue in zip((*self._all_up, *self._all_down), (*up, *down)):
            table[handle_id(placeholder.queue_ref)] = [queue.queue_ref] * self._replicas
        return table

    def combine(self, tensors: Sequence[Any], index: Any, combine: Callable[[List[List[Any]]], List[Any]]) -> List[Any]:
        """Submits this replica's tensors and waits for replica 0's combination of all replicas' tensors."""
        shapes: List[Any] = []

        def combine_all() -> List[List[Any]]:
            submitted = [_as_list(queue.dequeue()) for queue in self._all_up]
            for values in submitted:
                for value, (_, shape) in zip(values, self._specs):
                    value.set_shape(shape)
            combined = combine([list(values) for values in zip(*submitted)])
            shapes.extend(value.shape for value in combined)
            return [combined] * self._replicas

        results = self.run_on_leader(combine_all, index, [self._own_up.enqueue(list(tensors))])
        for result, shape in zip(results, shapes):
            result.set_shape(shape)
        return results

    def run_on_leader(self, make: Callable[[], List[List[Any]]], index: Any, after: List[Any]) -> List[Any]:
        """Replica 0 makes the tensors of every replica after these operations; returns those of this replica."""

        def lead() -> Any:
            with tf.control_dependencies([queue.enqueue(own) for queue, own in zip(self._all_down, make())]):
                return tf.constant(0)

        with tf.control_dependencies(after):
            led = tf.cond(tf.equal(index, 0), lead, lambda: tf.constant(0))
        with tf.control_dependencies([led]):
            return _as_list(self._own_down.dequeue())


def _as_list(value: Any) -> List[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
