"""A program of the device knows how long its optimizer takes, without the passes before it."""

from __future__ import annotations

import time

import pytest
import tensorflow as tf

from tf_ipu_dp.emulator.runtime import optimizer_meter
from tf_ipu_dp.emulator.sdk_api.ipu.ops import cross_replica_ops

UPDATES = 4


class Slow:
    """Sleeps in a traced program, and adds up for how long."""

    def __init__(self, seconds):
        self.seconds, self.slept_s = seconds, []

    def __call__(self, value):
        def sleep(given):
            began = time.time()
            time.sleep(self.seconds)
            self.slept_s.append(time.time() - began)
            return given

        return tf.ensure_shape(tf.numpy_function(sleep, [value], value.dtype), value.shape)


@pytest.fixture(autouse=True)
def _asked(monkeypatch):
    monkeypatch.setenv(optimizer_meter.VARIABLE, "1")


def make_optimizer(slow, **options):
    keras = getattr(tf.keras.optimizers, "legacy", tf.keras.optimizers)

    class Optimizer(keras.SGD):
        def _resource_apply_dense(self, grad, var, apply_state=None):
            return super()._resource_apply_dense(slow(grad), var, apply_state)

    return Optimizer(0.1, **options)


def data():
    return tf.data.Dataset.from_tensors((tf.ones([2, 2]), tf.ones([2, 2]))).repeat()


def fit(model, replicas, accumulation):
    model.set_gradient_accumulation_options(gradient_accumulation_steps_per_replica=accumulation)
    began = optimizer_meter.seconds_in_optimizer()
    model.fit(data(), steps_per_epoch=UPDATES * replicas * accumulation, verbose=0)
    return optimizer_meter.seconds_in_optimizer() - began


@pytest.mark.parametrize(("replicas", "accumulation"), [(1, 1), (2, 1), (1, 2), (4, 2)])
def test_the_optimizer_is_timed_and_the_passes_are_not(scope, replicas, accumulation):
    in_optimizer, in_model = Slow(0.02), Slow(0.05)
    with scope(replicas).scope():
        inputs = tf.keras.Input([2], batch_size=2)
        dense = tf.keras.layers.Dense(2, use_bias=False)(inputs)
        model = tf.keras.Model(inputs, dense)
    model.compile(
        make_optimizer(in_optimizer),
        lambda given, made: tf.reduce_mean(made) + 0 * tf.reduce_mean(in_model(given)),
        steps_per_execution=UPDATES * accumulation,
    )
    began = time.monotonic()
    seconds = fit(model, replicas, accumulation)
    elapsed = time.monotonic() - began
    assert len(in_optimizer.slept_s) == UPDATES
    assert sum(in_optimizer.slept_s) < seconds < elapsed - sum(in_model.slept_s) / replicas


def test_a_single_replica_is_not_timed_unless_asked(scope, monkeypatch):
    monkeypatch.delenv(optimizer_meter.VARIABLE)
    with scope(1).scope():
        inputs = tf.keras.Input([2], batch_size=2)
        model = tf.keras.Model(inputs, tf.keras.layers.Dense(2)(inputs))
    model.compile("sgd", "mse", steps_per_execution=1)
    began = optimizer_meter.seconds_in_optimizer()
    model.fit(data(), steps_per_epoch=UPDATES, verbose=0)
    assert optimizer_meter.seconds_in_optimizer() == began


def test_an_update_is_counted_once_if_replicas_run_concurrently(scope):
    slow = Slow(0.05)

    class Crossing(tf.keras.layers.Layer):
        def call(self, x):
            return cross_replica_ops.cross_replica_sum(x)

    with scope(2).scope():
        inputs = tf.keras.Input([2], batch_size=2)
        model = tf.keras.Model(inputs, tf.keras.layers.Dense(2, use_bias=False)(Crossing()(inputs)))
    model.compile(make_optimizer(slow), "mse", steps_per_execution=UPDATES)
    seconds = fit(model, 2, 1)
    assert len(slow.slept_s) == 2 * UPDATES  # each replica makes it
    assert seconds < 1.5 * sum(slow.slept_s) / 2 + 0.2


def test_gradients_that_are_none_or_sparse_are_applied_as_given(scope):
    with scope(1).scope():
        inputs = tf.keras.Input([1], batch_size=2, dtype=tf.int32)
        layer = tf.keras.layers.Embedding(4, 3)
        model = tf.keras.Model(inputs, tf.keras.layers.Flatten()(layer(inputs)))
    model.compile("sgd", "mse", steps_per_execution=1)
    samples = tf.data.Dataset.from_tensors((tf.constant([[1], [2]]), tf.ones([2, 3]))).repeat()
    before = layer.get_weights()[0]
    began = optimizer_meter.seconds_in_optimizer()
    model.fit(samples, steps_per_epoch=2, verbose=0)
    changed = (layer.get_weights()[0] != before).any(axis=1).tolist()
    assert changed == [False, True, True, False]
    assert optimizer_meter.seconds_in_optimizer() > began


def test_an_update_waits_until_the_clock_is_read():
    """Otherwise a program with one thread reads the clock after the update, and finds that it takes no time."""
    variable = tf.Variable(1.0)

    @tf.function
    def program(gradient):
        optimizer_meter.timed([gradient], lambda: variable.assign_sub(gradient))

    graph = program.get_concrete_function(tf.TensorSpec([])).graph
    (update,) = [each for each in graph.get_operations() if each.type == "AssignSubVariableOp"]
    began, ended = (each for each in graph.get_operations() if each.type == "Timestamp")
    assert began in update.control_inputs
    assert update in ended.control_inputs
