"""Outfeeds and iterators: shapes, empty cases and rules of the SDK."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import tensorflow as tf

from tf_ipu_dp.emulator.sdk_api.ipu import ipu_infeed_queue, ipu_outfeed_queue, loops, scopes
from tf_ipu_dp.emulator.sdk_api.ipu.ops import cross_replica_ops, replication_ops

ALL, LAST = ipu_outfeed_queue.IPUOutfeedMode.ALL, ipu_outfeed_queue.IPUOutfeedMode.LAST


def counted(replicas, elements=64):
    """The numbers 0, 1, 2 ... one by one."""
    return tf.data.Dataset.range(elements).map(lambda number: tf.cast(number, tf.float32))


def make_program(queue):
    @tf.function
    def program(iterator, steps):
        for _ in tf.range(steps):
            number = next(iterator)
            queue.enqueue({"number": number, "pair": (number, [replication_ops.replication_index()] * 2)})

    return program


@pytest.mark.parametrize("replicas", [1, 4])
def test_everything_comes_out_in_the_enqueued_structure_with_steps_and_replicas_in_front(scope, replicas):
    strategy, queue = scope(replicas), ipu_outfeed_queue.IPUOutfeedQueue()
    front = [3] if replicas == 1 else [3, replicas]
    with strategy.scope():
        iterator, program = iter(counted(replicas)), make_program(queue)
        for run in range(2):  # the second run goes on with the data
            strategy.run(program, args=[iterator, 3])
            out = queue.dequeue()
            numbers = run * 3 * replicas + np.arange(3 * replicas, dtype="float32").reshape(front)
            np.testing.assert_array_equal(out["number"], numbers)
            np.testing.assert_array_equal(out["pair"][0], numbers)
            indices = np.zeros(front) if replicas == 1 else np.tile(np.arange(replicas), (3, 1))
            np.testing.assert_array_equal(out["pair"][1][1], indices)
        assert list(queue.dequeue()["number"].shape) == [0, *front[1:]]


@pytest.mark.parametrize("replicas", [1, 4])
def test_the_last_is_what_each_replica_enqueued_last_and_nothing_is_an_error(scope, replicas):
    strategy, queue = scope(replicas), ipu_outfeed_queue.IPUOutfeedQueue(LAST)
    with strategy.scope():
        strategy.run(make_program(queue), args=[iter(counted(replicas)), 3])
    last = np.arange(2 * replicas, 3 * replicas, dtype="float32")
    np.testing.assert_array_equal(queue.dequeue()["number"], last[0] if replicas == 1 else last)
    with pytest.raises(tf.errors.FailedPreconditionError):
        queue.dequeue()
    with pytest.raises(RuntimeError, match="ALL"):
        next(iter(queue))


def test_a_queue_that_was_never_traced_gives_an_empty_list_and_can_be_iterated_over():
    queue = ipu_outfeed_queue.IPUOutfeedQueue()
    assert queue.dequeue() == [] and list(queue) == [] and not queue.enqueued


@pytest.mark.parametrize("replicas", [1, 2])
def test_iterating_gives_step_by_step_and_can_be_done_again(scope, replicas):
    strategy, queue = scope(replicas), ipu_outfeed_queue.IPUOutfeedQueue()
    with strategy.scope():
        iterator, program = iter(counted(replicas)), make_program(queue)
        for _ in range(2):
            strategy.run(program, args=[iterator, 5])
            steps = [step["number"] for step in queue]
            assert len(steps) == 5 and list(steps[0].shape) == ([] if replicas == 1 else [replicas])
    assert queue.enqueued


def test_an_iterator_over_a_queue_ends_when_it_is_empty_and_continues_after_another_run(scope):
    strategy, queue = scope(1), ipu_outfeed_queue.IPUOutfeedQueue()
    with strategy.scope():
        iterator, program = iter(counted(1)), make_program(queue)
        results = iter(queue)
        assert isinstance(results, ipu_outfeed_queue.IPUOutfeedQueueIterator) and iter(results) is results
        for run in range(2):
            with pytest.raises(StopIteration):
                next(results)
            strategy.run(program, args=[iterator, 3])
            assert [float(next(results)["number"]) for _ in range(3)] == [3.0 * run, 3.0 * run + 1, 3.0 * run + 2]
    last = ipu_outfeed_queue.IPUOutfeedQueue(ipu_outfeed_queue.IPUOutfeedMode.LAST)
    with pytest.raises(RuntimeError, match="mode ALL"):
        ipu_outfeed_queue.IPUOutfeedQueueIterator(last)


def test_a_second_enqueue_in_a_graph_or_around_one_is_refused_and_another_trace_is_not(scope):
    strategy, queue = scope(1), ipu_outfeed_queue.IPUOutfeedQueue()

    @tf.function
    def twice():
        queue.enqueue(1)
        queue.enqueue(2)

    @tf.function
    def around():
        for _ in tf.range(2):
            queue.enqueue(1)
        queue.enqueue(2)

    for program in (twice, around):
        with pytest.raises(ValueError, match="once per graph"):
            strategy.run(program)

    @tf.function
    def once(x):
        queue.enqueue(tf.reduce_sum(x))

    strategy.run(once, args=[tf.zeros([2])])
    strategy.run(once, args=[tf.ones([3])])
    np.testing.assert_array_equal(queue.dequeue(), [0.0, 3.0])


def test_other_shapes_after_the_first_run_are_a_failed_precondition(scope):
    strategy, queue = scope(1), ipu_outfeed_queue.IPUOutfeedQueue()

    @tf.function
    def program(x):
        queue.enqueue(x)

    strategy.run(program, args=[tf.zeros([2])])
    with pytest.raises(tf.errors.FailedPreconditionError):
        strategy.run(program, args=[tf.zeros([3])])


@pytest.mark.parametrize("arguments", [{"outfeed_mode": "all"}, {"buffer_depth": 0}, {"device_ordinal": -1}], ids=str)
def test_impossible_options_of_an_outfeed_are_value_errors(arguments):
    with pytest.raises(ValueError):
        ipu_outfeed_queue.IPUOutfeedQueue(**arguments)


def test_types_that_a_feed_cannot_carry_are_a_failed_precondition(scope):
    strategy = scope(1)
    with strategy.scope(), pytest.raises(tf.errors.FailedPreconditionError, match="int64"):
        iter(tf.data.Dataset.range(4))
    queue = ipu_outfeed_queue.IPUOutfeedQueue()
    with pytest.raises(tf.errors.FailedPreconditionError, match="int64"):
        strategy.run(tf.function(lambda: queue.enqueue(tf.constant(1, tf.int64))))


def test_an_iterator_of_the_device_is_for_functions_of_the_device(scope):
    strategy = scope(2)
    with strategy.scope():
        iterator = iter(counted(2))
        assert isinstance(iterator, ipu_infeed_queue.IPUOwnedIterator)
        for get in (lambda: next(iterator), iterator.get_next, iterator.next):
            with pytest.raises(RuntimeError, match=r"tf\.function"):
                get()
        with pytest.raises(NotImplementedError):
            iterator.get_next_as_optional()
        with pytest.raises(ValueError, match="drop_remainder"):
            iter(counted(2).batch(3))
    assert float(next(iter(counted(2)))) == 0.0  # outside the scope it is the stock one


@pytest.mark.parametrize("kind", [ipu_infeed_queue.IPUOwnedIterator, ipu_infeed_queue.IPUIterator])
def test_an_iterator_is_made_from_a_dataset_with_the_options_of_its_queue(kind):
    assert kind(counted(1), prefetch_depth=5).element_spec == counted(1).element_spec
    with pytest.raises(ValueError, match="prefetch_depth"):
        kind(dataset=counted(1), prefetch_depth=256)
    spec = counted(1).element_spec
    for wrong in ({}, {"element_spec": spec}, {"dataset": counted(1), "element_spec": spec}):
        with pytest.raises(ValueError, match="either a dataset, or infeed_spec and element_spec"):
            kind(**wrong)
    with pytest.raises(NotImplementedError, match="from a dataset only"):
        kind(infeed_spec=spec, element_spec=spec)


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_end_of_the_data_is_an_error_and_the_next_run_is_in_order(scope, replicas):
    strategy, queue = scope(replicas), ipu_outfeed_queue.IPUOutfeedQueue()

    @tf.function
    def program(iterator, steps):
        for _ in tf.range(steps):
            queue.enqueue(cross_replica_ops.cross_replica_sum(next(iterator)))

    with strategy.scope():
        with pytest.raises(tf.errors.OutOfRangeError):
            strategy.run(program, args=[iter(counted(replicas, elements=3 * replicas)), 4])
        queue.dequeue()
        strategy.run(program, args=[iter(counted(replicas)), 4])
    sums = np.arange(4 * replicas).reshape(4, replicas).sum(axis=1)
    np.testing.assert_array_equal(np.reshape(queue.dequeue(), [4, -1])[:, 0], sums)


def test_results_can_be_taken_by_another_thread_while_the_program_runs(scope):
    strategy, queue = scope(2), ipu_outfeed_queue.IPUOutfeedQueue()
    taken = []

    def take():
        while len(taken) < 50:
            taken.extend(queue)

    with strategy.scope():
        iterator, program = iter(counted(2, 200)), make_program(queue)
        strategy.run(program, args=[iterator, 1])
        thread = threading.Thread(target=take)
        thread.start()
        strategy.run(program, args=[iterator, 49])
        thread.join(30)
    assert not thread.is_alive() and len(taken) == 50


def test_an_infeed_queue_feeds_a_loop_and_can_be_restarted(scope):
    strategy = scope(2)
    named = tf.data.Dataset.zip({"left": counted(2), "right": counted(2).map(lambda number: 10 * number)})
    queue = ipu_infeed_queue.IPUInfeedQueue(named)

    @tf.function
    def program():
        return loops.repeat(3, lambda total, left, right: total + left + right, [tf.constant(0.0)], queue)

    with strategy.scope():
        with pytest.raises(tf.errors.FailedPreconditionError):
            queue._dequeue()
        queue.initializer  # noqa: B018 reading it is what initialises
        assert float(strategy.run(program)) == 11 * (0 + 2 + 4)  # replica 0's elements
        queue.deleter  # noqa: B018
        with pytest.raises(tf.errors.NotFoundError):
            queue.deleter  # noqa: B018


class SendsSums(tf.keras.layers.Layer):
    def __init__(self, queue):
        super().__init__()
        self.queue = queue

    def call(self, x):
        self.queue.enqueue(tf.reduce_sum(x))
        return x


@pytest.mark.parametrize(("replicas", "steps_per_execution"), [(1, 1), (1, 2), (1, 4), (2, 2)])
def test_a_layer_may_enqueue_although_it_is_traced_again_for_its_shapes_and_its_steps(
    scope, replicas, steps_per_execution
):
    strategy, queue = scope(replicas), ipu_outfeed_queue.IPUOutfeedQueue()
    x = np.arange(8, dtype="float32").reshape(8, 1)
    with strategy.scope():
        model = tf.keras.Sequential([SendsSums(queue), tf.keras.layers.Dense(1)])  # built by the first batch
        model.compile("sgd", "mse", steps_per_execution=steps_per_execution)
        model.predict(x, batch_size=2)
        np.testing.assert_array_equal(np.ravel(queue.dequeue()), [1, 5, 9, 13])
        model.fit(x, x, batch_size=2, shuffle=False, verbose=0)
        np.testing.assert_array_equal(np.ravel(queue.dequeue()), [1, 5, 9, 13])


def test_an_iterator_feeds_programs_of_one_number_of_replicas_only(scope):
    dataset = tf.data.Dataset.range(16).map(lambda x: tf.cast(x, tf.float32))

    def take(iterator):
        return next(iterator)

    with scope(4).scope():
        by_argument, captured = iter(dataset), iter(dataset)
        take_captured = tf.function(lambda: next(captured))

        def sharded(iterator):
            with scopes.ipu_shard(1):  # so that a replica has two IPUs
                return next(iterator)

        strategy = tf.distribute.get_strategy()
        first = [strategy.run(tf.function(take), args=[by_argument]) for _ in range(2)]
        assert [float(each) for each in first] == [0, 4] and float(strategy.run(take_captured)) == 0
        for iterator in (by_argument, captured):
            with pytest.raises(tf.errors.FailedPreconditionError, match="of 4 replicas, and cannot feed one of 2"):
                strategy.run(tf.function(sharded), args=[iterator])
        assert float(strategy.run(tf.function(sharded), args=[iter(dataset)])) == 0


def test_an_outfeed_cannot_carry_an_empty_dimension(scope):
    queue = ipu_outfeed_queue.IPUOutfeedQueue()
    with pytest.raises(tf.errors.InvalidArgumentError, match="empty shape"):
        scope(1).run(tf.function(lambda: queue.enqueue(tf.zeros([2, 0])) and None))
