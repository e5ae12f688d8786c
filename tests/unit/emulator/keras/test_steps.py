"""The rules of steps, against an independent model of them: the SDK's fact sheet in a few lines of arithmetic."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

ENDLESS = -1
SETTINGS = settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])


def expected(replicas, accumulation, per_execution, length, steps):
    """What `fit` does: the type of its refusal, or (steps per replica, steps per execution)."""
    if per_execution % accumulation:
        return RuntimeError
    total = length if steps is None else steps
    if total == ENDLESS:
        return ValueError
    per_replica = total // replicas
    if per_replica == 0 or (length != ENDLESS and length < per_replica):
        return ValueError
    executed = min(per_execution, per_replica)
    if per_replica % executed:
        return ValueError
    if executed % accumulation:
        return RuntimeError
    return per_replica, executed


class Recorder(tf.keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.begins, self.ends = [], []

    def on_train_batch_begin(self, batch, logs=None):
        self.begins.append(batch)

    def on_train_batch_end(self, batch, logs=None):
        self.ends.append(batch)


@given(
    replicas=st.sampled_from([1, 2, 4]),
    accumulation=st.sampled_from([1, 2, 3]),
    per_execution=st.integers(1, 6),
    length=st.one_of(st.just(ENDLESS), st.integers(1, 24)),
    steps=st.one_of(st.none(), st.integers(1, 24)),
)
@SETTINGS
def test_fit_takes_or_refuses_steps_as_the_model_says(scope, replicas, accumulation, per_execution, length, steps):
    one = tf.data.Dataset.from_tensors((tf.ones([2, 3]), tf.ones([2, 1])))
    data = one.repeat() if length == ENDLESS else one.repeat(length)
    recorder = Recorder()
    outcome = expected(replicas, accumulation, per_execution, length, steps)
    with scope(replicas).scope():
        model = tf.keras.Sequential([tf.keras.layers.Dense(1, kernel_initializer="zeros", input_shape=(3,))])
        model.compile(tf.keras.optimizers.SGD(0.0), "mse", steps_per_execution=per_execution)
        model.set_gradient_accumulation_options(accumulation)

        def fit():
            model.fit(data, steps_per_epoch=steps, epochs=1, verbose=0, callbacks=[recorder])

        if isinstance(outcome, type):
            with pytest.raises(outcome):
                fit()
            return
        if length != ENDLESS and steps is not None and length < steps // replicas * replicas:
            return  # too short for all replicas: the SDK does not see it, and hangs or aborts
        fit()
    per_replica, executed = outcome
    assert recorder.params["steps"] == per_replica
    assert recorder.begins == list(range(0, per_replica, executed))
    assert recorder.ends == [begin + executed - 1 for begin in recorder.begins]
    assert int(model.optimizer.iterations) == per_replica // accumulation


@pytest.mark.parametrize("replicas", [1, 4])
def test_an_epoch_that_is_the_dataset_begins_at_the_beginning_and_one_that_is_not_goes_on(scope, replicas):
    seen = []

    class Keep(tf.keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append(logs["loss"])

    data = tf.data.Dataset.from_tensor_slices(np.arange(16, dtype="float32").reshape(16, 1, 1))
    data = data.map(lambda x: (x, x))
    with scope(replicas).scope():
        model = tf.keras.Sequential([tf.keras.layers.Dense(1, kernel_initializer="zeros", input_shape=(1,))])
        model.compile(tf.keras.optimizers.SGD(0.0), "mae")
        model.set_replication_options("MEAN")
        model.fit(data, epochs=2, verbose=0, callbacks=[Keep()])
        model.fit(data, epochs=2, steps_per_epoch=8, verbose=0, callbacks=[Keep()])
    np.testing.assert_allclose(seen, [7.5, 7.5, 3.5, 11.5])


def test_the_functions_of_a_dataset_are_freed_after_fit(scope, wait_until):
    def double(x, y):
        return 2 * x, y

    function = weakref.ref(double)
    with scope(2).scope():
        model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(3,))])
        model.compile("sgd", "mse")
        data = tf.data.Dataset.from_tensors((tf.ones([2, 3]), tf.ones([2, 1]))).repeat(4).map(double)
        model.fit(data, verbose=0)
        other = tf.data.Dataset.from_tensors((tf.ones([2, 3]), tf.ones([2, 1]))).repeat(4)
        model.fit(other, verbose=0)
    del double, data

    def is_freed():
        gc.collect()
        return function() is None

    wait_until(is_freed, limit_s=30.0, pause_s=0.1)  # the iterator is deleted by a thread
