"""A program of the device knows how long it waits for its input, and whether it does right now."""

from __future__ import annotations

import os
import threading
import time

import pytest
import tensorflow as tf

from tf_ipu_dp.emulator.devices import registry
from tf_ipu_dp.emulator.runtime import feeds, graph_loops, wait_meter

TRACING_S = 0.5


traced_s = []


def slow_to_trace(value):
    if not tf.executing_eagerly():
        began = time.monotonic()
        time.sleep(TRACING_S)
        traced_s.append(time.monotonic() - began)
    return value


def run_a_function(strategy):
    strategy.run(tf.function(slow_to_trace), args=[tf.constant(1)])


def run_keras(strategy):
    inputs = tf.keras.Input([2], batch_size=1)
    with strategy.scope():
        model = tf.keras.Model(inputs, tf.keras.layers.Lambda(slow_to_trace)(inputs))
    model.compile(loss=lambda given, made: slow_to_trace(tf.reduce_mean(made)))
    model.evaluate(tf.data.Dataset.from_tensors((tf.zeros([1, 2]), tf.zeros([1, 2]))).repeat(8), steps=8, verbose=0)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("run", [run_a_function, run_keras])
def test_ipus_do_not_work_while_a_program_is_traced(scope, replicas, run):
    strategy = scope(replicas)
    traced_s.clear()
    began = time.monotonic()
    run(strategy)
    elapsed = time.monotonic() - began
    (holding,) = registry.Partition.from_environment(os.environ).holdings()
    assert holding.meter.heartbeat - holding.meter.attached > TRACING_S
    assert traced_s and 0 < holding.meter.busy < elapsed - sum(traced_s)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_program_whose_input_does_not_come_says_that_it_waits(scope, replicas):
    come, strategy = threading.Event(), scope(replicas)

    def draw(number):
        if number >= 2 * replicas:
            come.wait(240)
        return number

    data = tf.data.Dataset.range(4 * replicas).map(lambda number: tf.py_function(draw, [number], tf.int64))

    @tf.function
    def program(iterator):
        total = tf.constant(0, tf.int64)
        for _ in tf.range(4):
            total += tf.ensure_shape(next(iterator), [])
        return total

    running = threading.Thread(target=lambda: strategy.run(program, args=[iter(data)]))
    assert not feeds.is_waiting()
    running.start()
    deadline, seen = time.monotonic() + 120, 0
    while seen < 20 and time.monotonic() < deadline:
        seen = seen + 1 if feeds.is_waiting() else 0
        time.sleep(0.01)
    come.set()
    running.join(120)
    assert seen == 20 and not feeds.is_waiting()


@pytest.mark.parametrize(("replicas", "accumulation"), [(1, 1), (2, 1), (1, 2), (4, 2)])
def test_a_model_tells_how_long_it_has_waited_for_slow_data(scope, replicas, accumulation):
    drawing_s = []

    def draw(value):
        began = time.time()
        time.sleep(0.02)
        drawing_s.append(time.time() - began)
        return value

    data = tf.data.Dataset.from_tensors(tf.zeros([2, 2])).repeat()
    data = data.map(lambda value: tf.ensure_shape(tf.numpy_function(draw, [value], tf.float32), [2, 2]))
    unbuffered = tf.data.Options()
    unbuffered.experimental_optimization.apply_default_optimizations = False
    data = tf.data.Dataset.zip((data, data)).with_options(unbuffered)
    with scope(replicas).scope():
        model = tf.keras.Sequential([tf.keras.layers.Dense(2, input_shape=[2])])
    model.compile("sgd", "mse", steps_per_execution=4)
    model.set_gradient_accumulation_options(gradient_accumulation_steps_per_replica=accumulation)
    model.fit(data, steps_per_epoch=4 * replicas, verbose=0)
    (before,) = registry.Partition.from_environment(os.environ).holdings()
    drawing_s.clear()
    began = time.time()
    model.fit(data, steps_per_epoch=4 * replicas, verbose=0)
    elapsed = time.time() - began
    (after,) = registry.Partition.from_environment(os.environ).holdings()
    assert len(drawing_s) == 2 * 4 * replicas
    assert sum(drawing_s) < after.meter.waiting - before.meter.waiting < elapsed


@pytest.mark.parametrize("count", [1, 3, 4, 5, 11])
def test_a_program_keeps_the_times_of_its_last_waits_in_their_order(count):
    recent = wait_meter.RecentTimes(kept=4)
    assert recent.read() == (0, [])

    @tf.function
    def program():
        def wait(number):
            recent.add(tf.cast(number, tf.float64))
            return []

        graph_loops.repeat(count, wait)

    program()
    assert recent.read() == (count, [float(number) for number in range(count)][-4:])
    program()
    assert recent.read() == (2 * count, [float(number) for number in [*range(count), *range(count)]][-4:])


def test_a_program_whose_data_end_does_not_wait_for_ever(scope):
    strategy = scope(1)

    @tf.function
    def program(iterator):
        return next(iterator) + next(iterator)

    with pytest.raises((tf.errors.OutOfRangeError, StopIteration)):
        strategy.run(program, args=[iter(tf.data.Dataset.range(1).map(lambda n: tf.cast(n, tf.int32)))])
    assert not feeds.is_waiting()


def test_a_program_does_not_wait_for_what_it_already_computes_with(scope):
    strategy, seen = scope(1), []

    def compute(number):
        seen.append(feeds.is_waiting())
        return number

    @tf.function
    def program(iterator):
        return tf.py_function(compute, [next(iterator)], tf.int32)

    iterator = iter(tf.data.Dataset.range(40).map(lambda number: tf.cast(number, tf.int32)))
    for _ in range(40):
        strategy.run(program, args=[iterator])
    assert seen == 40 * [False]
