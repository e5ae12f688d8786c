"""Schedules, optimizers and the loss: by hand in numpy, and in `fit` on emulated replicas against plain Keras."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tf_ipu_dp.config.recipe import OPTIMIZERS
from tf_ipu_dp.emulator.sdk_api import on_import
from tf_ipu_dp.emulator.sdk_api.ipu import config as ipu_config
from tf_ipu_dp.planning import plan
from tf_ipu_dp.training import optimizers

on_import.apply_patches()
POLICIES = {"32.32": "float32", "16.32": "mixed_float16", "16.16": "float16"}
TOLERANCE = {"16.32": 0.01, "16.16": 0.1}
X = np.random.RandomState(0).randn(64, 5).astype("float32")
Y = np.argmax(X[:, :3], axis=1).astype("int32")
GRADIENTS = [np.random.RandomState(seed).randn(3, 2).astype("float32") for seed in range(4)]
KERNEL = np.array([[1.0, -2.0], [0.5, 3.0], [-1.5, 0.25]], "float32")


def recipe(**changes):
    values = {
        "optimizer": "sgd", "learning_rate": 0.1, "schedule": "constant", "warmup_updates": 0, "updates": 10,
        "drops": (), "momentum": 0.9, "weight_decay": 0.0, "l2": 0.0, "label_smoothing": 0.0, "loss_scale": 1.0,
        "reduction": "mean", "precision": "32.32",
    }  # fmt: skip
    return plan.Recipe(**{**values, **changes})


@pytest.fixture(autouse=True)
def full_precision():
    yield
    tf.keras.mixed_precision.set_global_policy("float32")


# Schedules


def rate_by_hand(r, update):
    if update < r.warmup_updates:
        return r.learning_rate * (update + 1) / r.warmup_updates
    done = min(1.0, (update - r.warmup_updates) / max(1, r.updates - r.warmup_updates))
    return (
        r.learning_rate
        * {
            "constant": 1.0,
            "step": 0.1 ** len([drop for drop in r.drops if drop <= update]),
            "cosine": (1 + math.cos(math.pi * done)) / 2,
            "polynomial": (1 - done) ** 2,
        }[r.schedule]
    )


@given(
    st.sampled_from(["constant", "step", "cosine", "polynomial"]),
    st.floats(1e-4, 10),
    st.integers(0, 2000),
    st.integers(1, 100_000),
    st.lists(st.integers(0, 100_000), max_size=4),
    st.integers(0, 110_000),
)
def test_the_rate_of_every_update_is_the_formulas(schedule, rate, warmup, updates, drops, update):
    r = recipe(
        schedule=schedule, learning_rate=rate, warmup_updates=warmup, updates=updates, drops=tuple(sorted(drops))
    )
    found = optimizers.Schedule(r)(tf.constant(update, tf.int64))
    assert found.dtype == tf.float32
    assert float(found) == pytest.approx(rate_by_hand(r, update), rel=1e-4, abs=1e-6 * rate)


@pytest.mark.parametrize("schedule", ["constant", "step", "cosine", "polynomial"])
def test_a_schedule_rises_to_the_highest_rate_and_never_again(schedule):
    r = recipe(schedule=schedule, learning_rate=2.0, warmup_updates=4, updates=12, drops=(8, 10))
    rates = [float(optimizers.Schedule(r)(update)) for update in range(13)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert all(after <= before for before, after in zip(rates[3:], rates[4:]))
    ends = {"constant": 2.0, "step": 0.02, "cosine": 0.0, "polynomial": 0.0}
    assert rates[12] == pytest.approx(ends[schedule], abs=1e-6)


def test_a_schedule_computes_in_float32_only():
    r = recipe(schedule="cosine", warmup_updates=3)
    concrete = tf.function(optimizers.Schedule(r)).get_concrete_function(tf.TensorSpec([], tf.int64))
    types = {t.dtype for op in concrete.graph.get_operations() for t in op.outputs if op.type != "Placeholder"}
    assert types <= {tf.float32, tf.bool}


def test_a_schedule_survives_its_config():
    r = recipe(schedule="step", warmup_updates=2, drops=(5, 7))
    config = optimizers.Schedule(r).get_config()
    again = optimizers.Schedule.from_config(config)
    assert again.get_config() == config
    assert [float(again(u)) for u in range(9)] == [float(optimizers.Schedule(r)(u)) for u in range(9)]


# Single updates, by hand


def updated(optimizer, start=KERNEL, gradients=GRADIENTS, dtype=tf.float32):
    """Returns the variable after updates with the gradients, from one traced function."""
    variable = tf.Variable(start, dtype=dtype)

    @tf.function
    def apply(gradient):
        optimizer.apply_gradients([(gradient, variable)])

    for gradient in gradients:
        apply(tf.constant(gradient, dtype))
    return variable.numpy()


def sgd_by_hand(weights, gradients, r, scale):
    weights, velocity = weights.astype("float64"), np.zeros(weights.shape)
    kernel = weights.ndim > 1
    for update, gradient in enumerate(gradients):
        rate = rate_by_hand(r, update)
        velocity = r.momentum * velocity - rate * (scale * gradient + kernel * r.l2 * weights)
        weights = weights - kernel * rate * r.weight_decay * weights + velocity
    return weights


def adam_by_hand(weights, gradients, r, scale):
    weights, m, v = weights.astype("float64"), np.zeros(weights.shape), np.zeros(weights.shape)
    kernel = weights.ndim > 1
    for update, gradient in enumerate(gradients):
        rate, total = rate_by_hand(r, update), scale * gradient + kernel * r.l2 * weights
        m, v = 0.9 * m + 0.1 * total, 0.999 * v + 0.001 * total**2
        corrected = rate * math.sqrt(1 - 0.999 ** (update + 1)) / (1 - 0.9 ** (update + 1))
        weights = weights - kernel * rate * r.weight_decay * weights - corrected * m / (np.sqrt(v) + 1e-7)
    return weights


def lars_by_hand(weights, gradients, r, scale):
    weights, velocity = weights.astype("float64"), np.zeros(weights.shape)
    kernel = weights.ndim > 1
    for update, gradient in enumerate(gradients):
        step = scale * gradient
        if kernel:
            gradient_with_l2, length = step + r.l2 * weights, np.linalg.norm(weights)
            ratio = 0.001 * length / (np.linalg.norm(gradient_with_l2) + r.weight_decay * length)
            step = ratio * (gradient_with_l2 + r.weight_decay * weights)
        velocity = r.momentum * velocity + rate_by_hand(r, update) * step
        weights = weights - velocity
    return weights


BY_HAND = {"sgd": sgd_by_hand, "adam": adam_by_hand, "lars": lars_by_hand}


@pytest.mark.parametrize("optimizer", BY_HAND)
@pytest.mark.parametrize(
    ("l2", "decay", "scale"), [(0, 0, 1.0), (0, 0, 0.25), (0.3, 0, 0.25), (0, 0.5, 0.25), (0.3, 0.5, 8.0)]
)
def test_updates_are_those_made_by_hand(optimizer, l2, decay, scale):
    r = recipe(optimizer=optimizer, l2=l2, weight_decay=decay, schedule="polynomial", warmup_updates=2)
    kernel = updated(optimizers.make_optimizer(r, gradient_scale=scale))
    np.testing.assert_allclose(kernel, BY_HAND[optimizer](KERNEL, GRADIENTS, r, scale), rtol=1e-5, atol=1e-6)
    bias = [gradient[0] for gradient in GRADIENTS]
    found = updated(optimizers.make_optimizer(r, gradient_scale=scale), KERNEL[0], bias)
    np.testing.assert_allclose(found, BY_HAND[optimizer](KERNEL[0], bias, r, scale), rtol=1e-5, atol=1e-6)
    unregularised = recipe(optimizer=optimizer, schedule="polynomial", warmup_updates=2)
    without = updated(optimizers.make_optimizer(unregularised, gradient_scale=scale), KERNEL[0], bias)
    np.testing.assert_array_equal(found, without)


def test_lars_moves_weights_that_are_all_zero_and_survives_gradients_that_are():
    r = recipe(optimizer="lars", momentum=0.0)
    zeros = np.zeros((3, 2), "float32")
    moved = updated(optimizers.make_optimizer(r, gradient_scale=1.0), zeros, GRADIENTS[:1])
    np.testing.assert_allclose(moved, -0.1 * GRADIENTS[0], rtol=1e-6)
    np.testing.assert_array_equal(updated(optimizers.make_optimizer(r, gradient_scale=1.0), KERNEL, [zeros]), KERNEL)


@pytest.mark.parametrize("optimizer", BY_HAND)
def test_updates_are_counted_beyond_the_largest_number_of_half_precision(optimizer):
    r = recipe(optimizer=optimizer, schedule="polynomial", updates=200_000, precision="16.16", momentum=0.0)
    made = optimizers.make_optimizer(r, gradient_scale=1.0)
    made.iterations.assign(100_000)
    with tf.device("/cpu:0"):
        found = float(made._decayed_lr(tf.float16))
    assert found == pytest.approx(0.025, rel=1e-3)
    weights = updated(made, gradients=GRADIENTS[:1], dtype=tf.float16)
    assert np.all(np.isfinite(weights)) and weights.dtype == np.float16


@pytest.mark.parametrize("size", [1.0, 1e-2, 1e-4])
def test_adam_in_half_precision_makes_its_steps_where_squares_of_gradients_vanish(size):
    r = recipe(optimizer="adam", precision="16.16", weight_decay=0.1)
    gradients = [size * gradient for gradient in GRADIENTS]
    found = updated(optimizers.make_optimizer(r, gradient_scale=1.0), gradients=gradients, dtype=tf.float16)
    assert found.dtype == np.float16
    np.testing.assert_allclose(found, adam_by_hand(KERNEL, gradients, r, 1.0), atol=5e-3)


@pytest.mark.parametrize("optimizer", BY_HAND)
def test_an_optimizer_survives_its_config(optimizer):
    r = recipe(optimizer=optimizer, l2=0.3, weight_decay=0.5, schedule="cosine", loss_scale=64.0)
    made = optimizers.make_optimizer(r, gradient_scale=0.25)
    again = type(made).from_config(made.get_config())
    by_hand = BY_HAND[optimizer](KERNEL, GRADIENTS, r, 0.25)
    np.testing.assert_allclose(updated(again), by_hand, rtol=1e-5)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_of_the_flags_is_made_and_keeps_the_declared_values_per_weight(name):
    optimizer = optimizers.make_optimizer(recipe(optimizer=name), gradient_scale=1.0)
    weight = tf.Variable(KERNEL)
    optimizer.apply_gradients([(GRADIENTS[0], weight)])
    kept = [variable for variable in optimizer.variables() if variable.shape == weight.shape]
    assert len(kept) == OPTIMIZERS[name].slots
    assert hasattr(optimizer, "momentum") is OPTIMIZERS[name].has_momentum


def test_only_the_optimizers_that_the_sdk_can_drive_are_made():
    for name in BY_HAND:
        made = type(optimizers.make_optimizer(recipe(optimizer=name), gradient_scale=1.0))
        assert made.minimize is optimizers._KerasOptimizer.minimize
        assert issubclass(made, optimizers._KerasOptimizer)


@pytest.mark.parametrize(
    ("precision", "scale", "found"),
    [
        ("32.32", 1.0, None),
        ("16.16", 1.0, None),
        ("16.16", 128.0, (False, 128.0)),
        ("16.32", 128.0, (False, 128.0)),
        ("16.32", 1.0, (False, 1.0)),
        ("16.32", None, (True, 2.0**15)),
    ],
)
def test_the_loss_is_scaled_as_the_recipe_says_and_keras_adds_nothing(precision, scale, found):
    tf.keras.mixed_precision.set_global_policy(POLICIES[precision])
    try:
        model = tf.keras.Sequential([tf.keras.layers.Dense(2, input_shape=(3,))])
        r = recipe(precision=precision, loss_scale=scale)
        model.compile(optimizers.make_optimizer(r, gradient_scale=1.0), "mse")
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")
    scaled = isinstance(model.optimizer, tf.keras.mixed_precision.LossScaleOptimizer)
    assert ((model.optimizer.dynamic, float(model.optimizer.initial_scale)) if scaled else None) == found


# Replicas and accumulation


def make_model(policy="float32"):
    tf.keras.mixed_precision.set_global_policy(policy)
    layers = tf.keras.layers
    first, second = layers.Dense(4, activation="tanh", input_shape=(5,)), layers.Dense(3)
    model = tf.keras.Sequential([first, second, layers.Activation("linear", dtype="float32")])
    tf.keras.mixed_precision.set_global_policy("float32")
    draw = np.random.RandomState(7)
    model.set_weights([0.5 * draw.randn(*weight.shape) for weight in model.get_weights()])
    return model


def weights_of(model):
    return np.concatenate([weight.astype("float64").ravel() for weight in model.get_weights()])


def train_on_replicas(scope, r, replicas, accumulation, updates=4, x=X):
    """Trains with a global batch of 16, divided over replicas and accumulation."""
    micro = 16 // (replicas * accumulation)
    with scope(replicas).scope():
        model = make_model(POLICIES[r.precision])
        scale, method = optimizers.gradient_scale(
            r.reduction, replicas=replicas, local_replicas=replicas, distributed=False
        )
        model.set_gradient_accumulation_options(accumulation, gradient_accumulation_reduction_method=method)
        optimizer = optimizers.make_optimizer(r, gradient_scale=scale)
        model.compile(optimizer, optimizers.Crossentropy(r.label_smoothing), steps_per_execution=accumulation * updates)
    data = tf.data.Dataset.from_tensor_slices((x, Y)).batch(micro, drop_remainder=True).repeat()
    model.fit(data, steps_per_epoch=updates * replicas * accumulation, verbose=0)
    ipu_config.reset_ipu_configuration()
    return model


def train_plainly(r, gradient_scale=1.0):
    """Trains with one big batch, without any strategy."""
    model = make_model()
    model.compile(
        optimizers.make_optimizer(r, gradient_scale=gradient_scale), optimizers.Crossentropy(r.label_smoothing)
    )
    model.fit(X, Y, batch_size=16, shuffle=False, verbose=0)
    return model


@pytest.mark.parametrize("optimizer", BY_HAND)
def test_replicas_and_accumulation_end_where_one_big_batch_does(scope, optimizer):
    r = recipe(
        optimizer=optimizer, l2=0.01, weight_decay=0.02, label_smoothing=0.1, schedule="cosine", warmup_updates=2
    )
    expected = weights_of(train_plainly(r))
    assert np.abs(expected - weights_of(make_model())).max() > 1e-3
    layouts = [(1, 1), (4, 1), (1, 2), (4, 2)]
    for replicas, accumulation in layouts if optimizer == "sgd" else layouts[-1:]:
        found = weights_of(train_on_replicas(scope, r, replicas, accumulation))
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_a_sum_is_that_of_the_micro_batches_mean_gradients(scope):
    r = recipe(reduction="sum", learning_rate=0.01, l2=0.01, weight_decay=0.02)
    expected = weights_of(train_plainly(r, gradient_scale=8.0))  # 8 micro batches: the mean of means, times 8
    np.testing.assert_allclose(weights_of(train_on_replicas(scope, r, 4, 2)), expected, rtol=1e-5, atol=1e-6)
    assert np.abs(expected - weights_of(train_plainly(r))).max() > 1e-3


@pytest.mark.parametrize("replicas", [1, 4, 16])
@pytest.mark.parametrize("instances", [1, 2])
@pytest.mark.parametrize("accumulation", [1, 8])
@pytest.mark.parametrize("distributed", [False, True])
def test_scales_undo_what_each_strategy_does_to_the_gradients(replicas, instances, accumulation, distributed):
    if distributed or instances == 1:
        total = replicas * instances if distributed else replicas
        gradients = np.random.RandomState(0).randn(total, accumulation)
        for reduction, wanted in [("mean", gradients.mean()), ("sum", gradients.sum())]:
            scale, method = optimizers.gradient_scale(
                reduction, replicas=total, local_replicas=replicas, distributed=distributed
            )
            lost = gradients / total if distributed else gradients
            assert scale * getattr(lost, method)(axis=1).sum() == pytest.approx(wanted)


@pytest.mark.parametrize(("replicas", "accumulation"), [(1, 1), (4, 2)])
def test_a_static_loss_scale_changes_nothing_in_float32(scope, replicas, accumulation):
    plain, scaled = (
        weights_of(
            train_on_replicas(scope, recipe(l2=0.01, weight_decay=0.02, loss_scale=loss_scale), replicas, accumulation)
        )
        for loss_scale in (1.0, 128.0)
    )
    np.testing.assert_allclose(scaled, plain, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("replicas", "accumulation"), [(1, 1), (4, 2)])
def test_a_dynamic_loss_scale_skips_an_update_that_overflows(scope, replicas, accumulation):
    r = recipe(loss_scale=None, weight_decay=0.02)
    broken = X.copy()
    broken[17] = np.inf  # a sample of the second update
    once = weights_of(train_on_replicas(scope, r, replicas, accumulation, updates=1))
    model = train_on_replicas(scope, r, replicas, accumulation, updates=2, x=broken)
    np.testing.assert_allclose(weights_of(model), once, rtol=1e-6)
    assert (float(model.optimizer.loss_scale), int(model.optimizer.iterations)) == (2.0**14, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "precision", "loss_scale"),
    [
        ("sgd", "16.32", 1.0),
        ("adam", "16.32", 128.0),
        ("lars", "16.32", None),
        ("sgd", "16.16", None),
        ("adam", "16.16", 1.0),
        ("lars", "16.16", 128.0),
    ],
)
def test_half_precision_trains_like_single_precision(scope, optimizer, precision, loss_scale):
    r = recipe(optimizer=optimizer, precision=precision, loss_scale=loss_scale, l2=0.01, weight_decay=0.02)
    single = weights_of(train_plainly(recipe(optimizer=optimizer, l2=0.01, weight_decay=0.02)))
    model = train_on_replicas(scope, r, 4, 2)
    assert {weight.dtype.name for weight in model.get_weights()} == {"float16" if precision == "16.16" else "float32"}
    start = weights_of(make_model())
    assert np.abs(weights_of(model) - single).max() < TOLERANCE[precision] * np.abs(single - start).max()


# The loss


def test_the_loss_is_keras_own_without_smoothing_and_with_it_that_of_smoothed_labels():
    logits = np.random.RandomState(0).randn(6, 4).astype("float32") * 5
    labels = np.array([0, 3, 1, 2, 2, 0], "int32")
    losses = tf.keras.losses
    stock = losses.SparseCategoricalCrossentropy(from_logits=True)(labels, logits)
    for shape in [(6,), (6, 1)]:
        found = optimizers.Crossentropy()(labels.reshape(shape), logits)
        assert float(found) == pytest.approx(float(stock), rel=1e-6)
    smoothed = losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)(np.eye(4)[labels], logits)
    assert float(optimizers.Crossentropy(0.1)(labels, logits)) == pytest.approx(float(smoothed), rel=1e-6)
    assert optimizers.Crossentropy(0.1)(labels, logits.astype("float16")).dtype == tf.float32


def test_the_loss_survives_its_config_and_lets_keras_divide_it_by_the_replicas():
    config = optimizers.Crossentropy(0.1).get_config()
    again = optimizers.Crossentropy.from_config(config)
    assert (again.label_smoothing, again.reduction) == (0.1, tf.keras.losses.Reduction.AUTO)
    assert again.get_config() == config
