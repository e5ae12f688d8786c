"""Arguments of `compile`, `fit`, `evaluate` and `predict` in the forms that programs give them."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

RNG = np.random.RandomState(4)
X = RNG.randn(48, 3).astype("float32")
Y = RNG.randn(48, 1).astype("float32")
MICRO = 4


class Steps(tf.keras.callbacks.Callback):
    """Records the last step of every execution."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(batch)

    on_test_batch_end = on_train_batch_end
    on_predict_batch_end = on_train_batch_end


def make_model(steps_per_execution=2):
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(3,))])
    model.compile(tf.keras.optimizers.SGD(0.05), "mse", steps_per_execution=steps_per_execution)
    return model


@pytest.mark.parametrize(
    "make",
    [lambda: tf.constant(3), lambda: tf.constant(3, tf.int64), lambda: tf.Variable(3), lambda: np.int64(3)],
    ids=["int32", "int64", "variable", "numpy"],
)
def test_steps_per_execution_may_be_a_tensor(scope, make):
    steps = Steps()
    with scope(2).scope():
        model = make_model(make())
        model.fit(X, Y, batch_size=MICRO, verbose=0, callbacks=[steps])
    assert steps.seen == [2, 5]


def test_steps_and_batch_sizes_may_be_tensors(scope):
    four, twelve = tf.constant(MICRO), tf.constant(12)
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(MICRO, drop_remainder=True).repeat()
    with scope(2).scope():
        model, steps = make_model(), Steps()
        arguments = {"verbose": 0, "callbacks": [steps]}
        model.fit(X, Y, batch_size=four, **arguments)
        model.fit(data, steps_per_epoch=twelve, **arguments)
        model.fit(
            data, steps_per_epoch=twelve, validation_data=(X, Y), validation_batch_size=four, validation_steps=twelve,
            verbose=0,
        )  # fmt: skip
        model.evaluate(X, Y, batch_size=four, **arguments)
        model.evaluate(data, steps=twelve, **arguments)
        assert model.predict(X, batch_size=four, **arguments).shape == (48, 1)
    assert steps.seen == 5 * [1, 3, 5]


def test_a_batch_size_that_is_not_given_follows_from_the_steps_as_in_keras(scope):
    sizes = []

    class Sized(tf.keras.losses.Loss):
        def call(self, y_true, y_pred):
            sizes.append(y_pred.shape[0])
            return tf.square(y_true - y_pred)

    with scope(2).scope():
        model, steps = make_model(), Steps()
        model.compile("sgd", Sized(), steps_per_execution=2)
        model.fit(X, Y, steps_per_epoch=8, verbose=0, callbacks=[steps])
        assert set(sizes) == {6}
        sizes.clear()
        model.evaluate(X, Y, steps=12, verbose=0, callbacks=[steps])
        assert set(sizes) == {4}
        with pytest.raises(ValueError, match="48 samples do not fill batches of 10"):
            model.fit(X, Y, steps_per_epoch=5, verbose=0)
        with pytest.raises(ValueError, match="48 samples do not fill batches of 32"):
            model.fit(X, Y, verbose=0)
    assert steps.seen == [1, 3, 1, 3, 5]


def test_every_step_of_a_pipelines_predictions_is_told_even_if_other_outputs_are_accumulated(scope):
    told = []
    tell = tf.keras.callbacks.LambdaCallback()
    tell.on_predict_batch_end = lambda batch, logs: told.append((batch, logs["outputs"]))
    steps = Steps()
    with scope(4).scope():
        model = tf.keras.Sequential([tf.keras.layers.Dense(2, input_shape=(3,)), tf.keras.layers.Dense(1)])
        model.set_pipeline_stage_assignment([0, 1])
        model.set_pipelining_options(gradient_accumulation_steps_per_replica=4, accumulate_outfeed=True)
        model.set_asynchronous_callbacks(True)
        model.compile("sgd", "mse", steps_per_execution=4)
        outputs = model.predict(X[:32], batch_size=2, callbacks=[tell], verbose=0)
        model.fit(X[:32], Y[:32], batch_size=2, callbacks=[steps], verbose=0)
        model.evaluate(X[:32], Y[:32], batch_size=2, callbacks=[steps], verbose=0)
    assert [batch for batch, _ in told] == [step for step in range(8) for _ in range(2)]
    np.testing.assert_array_equal(np.concatenate([part for _, part in told]), outputs)
    assert steps.seen == 2 * [3, 7]
