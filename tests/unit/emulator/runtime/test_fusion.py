"""Fused passes give what one micro batch after the other gives, and programs that they cannot compute are not fused."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tf_ipu_dp.emulator.runtime.fusion import sample_independence, step
from tf_ipu_dp.emulator.runtime.fusion.passes import SLICED, plan_passes
from tf_ipu_dp.emulator.sdk_api.ipu import utils

MICRO = 4
UPDATES = 3
COUNTS = st.integers(1, 24)
layers = tf.keras.layers


@given(COUNTS, COUNTS, COUNTS, st.integers(1, 300), st.integers(1, 2))
def test_passes_divide_an_update_and_are_as_large_as_they_may_be(micro, replicas, accumulation, most, fewest):
    def fits(steps, of_replicas):
        count = steps * of_replicas
        divides = accumulation % steps == 0 and replicas % of_replicas == 0 and (steps == 1 or of_replicas == replicas)
        return divides and count * micro <= most and count * fewest <= replicas * accumulation

    passes = plan_passes(
        micro_batch_size=micro, replicas=replicas, accumulation=accumulation, most_samples=most, fewest_passes=fewest
    )
    possible = [(a, r) for a in range(1, accumulation + 1) for r in range(1, replicas + 1) if fits(a, r)]
    assert passes == SLICED if not possible else fits(passes.steps, passes.replicas)
    assert passes.micro_batches == max((a * r for a, r in possible), default=1)


class Shift(layers.Layer):
    """A layer of a user that treats samples independently."""

    def build(self, input_shape):
        self.shift = self.add_weight("shift", [input_shape[-1]], initializer="ones")

    def call(self, inputs):
        return inputs + self.shift * tf.reduce_mean(inputs, axis=1, keepdims=True)


class CentredBatch(layers.Layer):
    """A layer of a user that does not."""

    def call(self, inputs):
        return inputs - tf.reduce_mean(inputs, axis=0, keepdims=True)


class SharedOut(layers.Layer):
    """A layer that computes with the size of its batch."""

    def call(self, inputs):
        return inputs / tf.cast(tf.shape(inputs)[0], inputs.dtype)


class Counting(layers.Layer):
    """A layer with state of its own."""

    def build(self, input_shape):
        self.calls = self.add_weight("calls", [], initializer="zeros", trainable=False)

    def call(self, inputs):
        self.calls.assign_add(1.0)
        return inputs


class LargestLoss(tf.keras.metrics.Metric):
    """A metric that does more than adding up."""

    def __init__(self):
        super().__init__("largest")
        self.largest = self.add_weight("largest", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.largest.assign(tf.maximum(self.largest, tf.reduce_max(tf.abs(y_true - y_pred))))

    def result(self):
        return self.largest

    def reset_state(self):
        self.largest.assign(0.0)


def contrast(y_true, y_pred):
    """A loss that compares the samples of a batch with each other."""
    return tf.reduce_mean(tf.square(y_pred - tf.reverse(y_pred, [0]))) + tf.reduce_mean(tf.square(y_pred - y_true))


def batch_norm():
    image = tf.keras.Input((6, 6, 2))
    x = layers.Conv2D(4, 3, padding="same", kernel_regularizer="l2")(image)
    x = layers.ReLU()(layers.BatchNormalization(momentum=0.8)(x))
    x = layers.Flatten()(layers.MaxPooling2D()(x))
    x = layers.BatchNormalization(momentum=0.7)(layers.Dense(8)(x))
    return tf.keras.Model(image, layers.Dense(1)(x))


def nested():
    inner = tf.keras.Sequential(
        [layers.Dense(6, "relu"), layers.BatchNormalization(momentum=0.5), layers.Dropout(0.4, seed=2)]
    )
    return tf.keras.Sequential([tf.keras.Input((5,)), inner, layers.LayerNormalization(), layers.Dense(1)])


def dropout():
    return tf.keras.Sequential(
        [
            tf.keras.Input((5,)),
            layers.Dense(16, "tanh"),
            layers.Dropout(0.5, seed=3),
            layers.Dropout(0.2, seed=4),
            layers.Dense(1),
        ]
    )


def words():
    ids = tf.keras.Input((7,), dtype="int32")
    x = layers.LSTM(6)(layers.Embedding(11, 4)(ids))
    return tf.keras.Model(ids, layers.Dense(1)(x))


def of_layer(layer):
    def make():
        return tf.keras.Sequential([tf.keras.Input((5,)), layers.Dense(6), layer(), layers.Dense(1)])

    return make


def operations():
    given = tf.keras.Input((5,))
    x = tf.nn.relu(layers.Dense(6)(given)) * 2.0 + 1.0
    return tf.keras.Model(given, layers.Dense(1)(layers.Concatenate()([x, given])))


def attention():
    given = tf.keras.Input((4, 6))
    x = layers.MultiHeadAttention(2, 3)(given, given)
    return tf.keras.Model(given, layers.Dense(1)(layers.GlobalAveragePooling1D()(x)))


FUSED = {
    "batch norm": (batch_norm, {}),
    "nested models": (nested, {}),
    "dropout": (dropout, {}),
    "words": (words, {}),
    "a user's layer": (of_layer(Shift), {}),
    "operations": (operations, {}),
    "attention": (attention, {}),
    "a loss over the batch": (dropout, {"loss": contrast}),
    "several metrics": (dropout, {"metrics": ["mae", tf.keras.metrics.RootMeanSquaredError, tf.keras.metrics.Poisson]}),
}
NOT_FUSED = {
    "a layer over the batch": (of_layer(CentredBatch), {}),
    "a layer that knows the batch": (of_layer(SharedOut), {}),
    "a layer with state": (of_layer(Counting), {}),
    "an activity regulariser": (of_layer(lambda: layers.Dense(3, activity_regularizer="l2")), {}),
    "a metric that does not add": (operations, {"metrics": [LargestLoss]}),
    "half precision": (of_layer(lambda: layers.Dense(3, dtype="mixed_float16")), {}),
}


def train(scope, make, compiled, replicas, accumulation, weighted=True):
    """Returns the weights and logs of a model after some updates, and the passes that it was traced with."""
    tf.keras.backend.clear_session()
    strategy, numbers = scope(replicas), np.random.RandomState(5)
    utils.reset_ipu_seed(11)
    tf.random.set_seed(3)
    options = dict(compiled)
    with strategy.scope():
        model = make()
        model.set_weights([numbers.standard_normal(w.shape) * 0.3 if w.ndim > 1 else w for w in model.get_weights()])
        metrics = [each if isinstance(each, str) else each() for each in options.pop("metrics", ["mae"])]
        legacy = getattr(tf.keras.optimizers, "legacy", tf.keras.optimizers)
        model.compile(
            legacy.SGD(0.05, momentum=0.9), options.pop("loss", "mse"), metrics=metrics,
            steps_per_execution=accumulation,
        )  # fmt: skip
        model.set_replication_options("MEAN")
        model.set_gradient_accumulation_options(
            gradient_accumulation_steps_per_replica=accumulation, gradient_accumulation_reduction_method="mean"
        )
        count = MICRO * replicas * accumulation * UPDATES
        shape = [count, *model.input_shape[1:]]
        is_words = model.inputs[0].dtype == tf.int32
        x = numbers.randint(11, size=shape) if is_words else numbers.standard_normal(shape)
        data = [x.astype(model.inputs[0].dtype.name), numbers.standard_normal([count, 1]).astype("float32")]
        data += [numbers.uniform(size=[count]).astype("float32")] if weighted else []
        dataset = tf.data.Dataset.from_tensor_slices(tuple(data)).batch(MICRO, drop_remainder=True)
        history = model.fit(dataset, verbose=0).history
    return model.get_weights(), {name: values[-1] for name, values in history.items()}


@pytest.fixture
def planned(monkeypatch):
    """The passes of all executions traced so far, and a function that makes them all sliced."""
    found, stock = [], step.plan

    def plan(*arguments):
        found.append(stock(*arguments))
        return found[-1]

    monkeypatch.setattr(step, "plan", plan)
    monkeypatch.setattr(step, "_MOST_SAMPLES", 4 * MICRO)
    return found, lambda: monkeypatch.setattr(step, "plan", lambda *arguments: SLICED)


def assert_alike(one, other):
    for first, second in zip(one[0], other[0]):
        np.testing.assert_allclose(first, second, rtol=2e-4, atol=2e-5)
    assert one[1].keys() == other[1].keys()
    for name in one[1]:
        np.testing.assert_allclose(one[1][name], other[1][name], rtol=2e-4)


@pytest.mark.parametrize("name", FUSED)
def test_a_fused_pass_updates_as_the_replicas_would(scope, planned, name):
    make, compiled = FUSED[name]
    found, slice_all = planned
    fused = train(scope, make, compiled, replicas=4, accumulation=2)
    assert [each.micro_batches for each in found] == [4], "traced once, and fused"
    slice_all()
    assert_alike(fused, train(scope, make, compiled, replicas=4, accumulation=2))


@pytest.mark.parametrize(("replicas", "accumulation", "most"), [(8, 1, 2), (8, 2, 4), (2, 4, 4), (1, 8, 2), (1, 4, 4)])
def test_all_layouts_of_passes_give_the_same(scope, planned, monkeypatch, replicas, accumulation, most):
    monkeypatch.setattr(step, "_MOST_SAMPLES", most * MICRO)
    found, slice_all = planned
    fused = train(scope, nested, {}, replicas, accumulation)
    assert found[-1].micro_batches == min(most, replicas * accumulation // 2)
    slice_all()
    assert_alike(fused, train(scope, nested, {}, replicas, accumulation))


@pytest.mark.parametrize("name", NOT_FUSED)
def test_what_cannot_be_fused_is_computed_one_micro_batch_after_the_other(scope, planned, name):
    make, compiled = NOT_FUSED[name]
    _, slice_all = planned
    result = train(scope, make, compiled, replicas=4, accumulation=1, weighted=name != "a metric that does not add")
    assert all(np.isfinite(each).all() for each in result[0])
    slice_all()
    expected = train(scope, make, compiled, replicas=4, accumulation=1, weighted=name != "a metric that does not add")
    assert_alike(result, expected)


def test_deterministic_programs_are_not_fused(scope, planned, monkeypatch):
    monkeypatch.setenv("TF_DETERMINISTIC_OPS", "1")
    found, _ = planned
    train(scope, dropout, {}, replicas=4, accumulation=1)
    assert set(found) == {SLICED}


INDEPENDENT = {
    "elementwise": lambda x: tf.nn.relu(x) * 2 + x,
    "mean of other axes": lambda x: x - tf.reduce_mean(x, [1, 2], keepdims=True),
    "reshape of a sample": lambda x: tf.reshape(x, [-1, 12]),
    "matrix product": lambda x: tf.matmul(tf.reshape(x, [-1, 12]), tf.ones([12, 2])),
    "transposed sample": lambda x: tf.transpose(x, [0, 2, 1]),
    "product of own parts": lambda x: tf.einsum("bij,bik->bjk", x, x),
    "softmax": tf.nn.softmax,
    "joined channels": lambda x: tf.concat([x, x], axis=-1),
}
DEPENDENT = {
    "mean of the batch": lambda x: x - tf.reduce_mean(x),
    "mean along the batch": lambda x: x - tf.reduce_mean(x, axis=0),
    "size of the batch": lambda x: x / tf.cast(tf.shape(x)[0], tf.float32),
    "static size of the batch": lambda x: x / x.shape[0],
    "reshape over samples": lambda x: tf.reshape(x, [-1, 6]),
    "reversed batch": lambda x: tf.reverse(x, [0]),
    "products of samples": lambda x: tf.einsum("bij,cij->bc", x, x),
    "samples in the other operand": lambda x: tf.matmul(tf.ones([2, 3, 3]), x),
    "joined samples": lambda x: tf.concat([x, x], axis=0),
    "transposed batch": lambda x: tf.transpose(x, [1, 0, 2]),
    "rows of a table": lambda x: x[:1] + x,
    "random numbers": lambda x: x + tf.random.normal([3, 4]),
    "weights per sample": lambda x: x * tf.ones([8, 3, 4]),
}


@pytest.mark.parametrize("name", INDEPENDENT)
def test_independent_samples_are_recognised(name):
    assert sample_independence.is_independent(lambda given: INDEPENDENT[name](given[0]), [tf.ones([8, 3, 4])])


@pytest.mark.parametrize("name", DEPENDENT)
def test_dependent_samples_are_recognised(name):
    assert not sample_independence.is_independent(lambda given: DEPENDENT[name](given[0]), [tf.ones([8, 3, 4])])
