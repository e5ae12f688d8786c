"""Barriers between the replicas of one process: each hands in its tensors, replica 0 combines them for all.

Replicas that run concurrently execute the same graph, each in a thread of its own.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Sequence, Set, Tuple

import tensorflow as tf

from tf_ipu_dp.emulator.runtime.replica_handles import handle_id

# A function that programs share is traced once, with the barriers of its first program: so all programs of as many
# replicas know all of these.
_barriers: Dict[int, List[ReplicaBarrier]] = {}


def barriers_of(replicas: int) -> List[ReplicaBarrier]:
    """Returns all barriers of programs with so many replicas."""
    return _barriers.get(replicas, [])


class ReplicaBarrier:
    """One place in a program where the replicas wait for each other.

    The graph is the same for all of them. It holds placeholder queues; `handles` says what each replica's call gets in
    their place. Waiting for a queue blocks no thread of TensorFlow's pool.
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
        """Returns the same with queues of a graph's own, and these queues; none for a barrier that is not captured."""
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
        """Hands in this replica's tensors and waits for what replica 0 makes of all replicas' tensors."""
        shapes: List[Any] = []

        def combine_all() -> List[List[Any]]:
            handed_in = [_as_list(queue.dequeue()) for queue in self._all_up]
            for values in handed_in:
                for value, (_, shape) in zip(values, self._specs):
                    value.set_shape(shape)
            combined = combine([list(values) for values in zip(*handed_in)])
            shapes.extend(value.shape for value in combined)
            return [combined] * self._replicas

        results = self.run_on_leader(combine_all, index, [self._own_up.enqueue(list(tensors))])
        for result, shape in zip(results, shapes):
            result.set_shape(shape)
        return results

    def run_on_leader(self, make: Callable[[], List[List[Any]]], index: Any, after: List[Any]) -> List[Any]:
        """Lets replica 0 make the tensors of every replica, after these operations; returns this replica's own."""

        def lead() -> Any:
            with tf.control_dependencies([queue.enqueue(own) for queue, own in zip(self._all_down, make())]):
                return tf.constant(0)

        with tf.control_dependencies(after):
            led = tf.cond(tf.equal(index, 0), lead, lambda: tf.constant(0))
        with tf.control_dependencies([led]):
            return _as_list(self._own_down.dequeue())


def _as_list(value: Any) -> List[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
