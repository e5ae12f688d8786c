"""Automatic loss scaling of float16 models: it stays finite, and its wrappers behave as the optimizer they wrap."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tf_ipu_dp.emulator.sdk_api.ipu import config as ipu_config
from tf_ipu_dp.emulator.sdk_api.ipu import ipu_strategy
from tf_ipu_dp.emulator.sdk_api.keras_ipu import optimizers

v2 = getattr(tf.keras.optimizers, "legacy", tf.keras.optimizers)
RNG = np.random.RandomState(3)
X = RNG.randn(96, 8).astype("float16")
Y = RNG.randint(0, 4, 96).astype("int32")
RULES = {
    "sgd": lambda **als: optimizers.ALSOptimizer(v2.SGD(0.05), **als),
    "adam": lambda **als: optimizers.ALSOptimizer(v2.Adam(0.002, epsilon=1e-4), **als),
    "own sgd": lambda **als: optimizers.ALSOptimizerSGD(0.005, 0.9, **als),
    "own adam": lambda **als: optimizers.ALSOptimizerAdam(0.002, **als),
    "own rmsprop": lambda **als: optimizers.ALSOptimizerRMSProp(0.002, **als),
    "own centered": lambda **als: optimizers.ALSOptimizerRMSProp(0.002, momentum=0.5, centered=True, **als),
}


@pytest.mark.parametrize("initial", [1, 8192])
@pytest.mark.parametrize("rule", RULES)
def test_a_float16_model_whose_gradients_overflow_ends_with_a_finite_and_smaller_loss(rule, initial):
    tf.random.set_seed(5)
    rng = np.random.RandomState(4)
    dense = [tf.keras.layers.Dense(32, activation="relu", dtype="float16"), tf.keras.layers.Dense(4, dtype="float16")]
    model = tf.keras.Sequential([tf.keras.Input((8,), dtype="float16"), *dense])
    model.set_weights([rng.uniform(-0.4, 0.4, weight.shape) for weight in model.get_weights()])
    als = RULES[rule](initial_loss_scaling_factor=initial, update_frequency=1)
    # The sum over the batch, so that a factor of 16384 is too large.
    model.compile(als, tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum"))
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(24, drop_remainder=True)
    losses = model.fit(data, epochs=8, verbose=0).history["loss"]
    assert np.isfinite(losses).all()
    assert losses[-1] < 0.97 * losses[0]
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
    assert 1 < als.loss_scaling_factor.numpy() < 32768


def test_a_gradient_that_has_overflowed_counts_as_the_largest_number_and_one_that_is_nan_stays_so():
    als = optimizers.ALSOptimizer(v2.SGD(0.125), initial_loss_scaling_factor=4096, update_frequency=100)
    variable = tf.Variable(np.ones(4, "float16"))
    als.apply_gradients([(tf.constant([np.inf, -np.inf, np.nan, 4096.0], tf.float16), variable)])
    np.testing.assert_allclose(variable.numpy(), [1 - 2, 1 + 2, np.nan, 1 - 0.125], rtol=1e-3)
    np.testing.assert_array_equal(als.histogram.numpy(), [1, 3])


def test_only_what_was_computed_in_float16_saturates():
    als = optimizers.ALSOptimizer(v2.SGD(1.0))
    single = tf.Variable([0.0, 0.0])
    mixed = tf.keras.layers.Dense(2, dtype="mixed_float16", use_bias=False, kernel_initializer="zeros")
    mixed.build((None, 1))
    overflowed = tf.constant([np.inf, np.nan])
    als.apply_gradients([(overflowed, single), (overflowed[tf.newaxis], mixed.kernel)])
    np.testing.assert_array_equal(single.numpy(), [-np.inf, np.nan])
    np.testing.assert_array_equal(mixed.get_weights()[0], [[-65504.0, np.nan]])


def trained_with_overflow(optimizer, activation):
    """A gradient of 2^16, which overflows, times one of 0, which is NaN on a host; returns the first weight."""
    options = {"use_bias": False, "dtype": "float16", "kernel_initializer": "ones"}
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Dense(1, input_shape=(1,), **options),
            # Zero, but not a constant, which TensorFlow would optimise away.
            tf.keras.layers.Lambda(lambda x: x * tf.cast(x > 2, x.dtype), dtype="float16"),
            tf.keras.layers.Activation(activation, dtype="float16"),
            tf.keras.layers.Lambda(lambda x: x * 256, dtype="float16"),
        ]
    )
    model.compile(optimizer, lambda y, p: tf.cast(p, tf.float16) * 256)
    model.fit(np.ones((2, 1), "float16"), np.ones((2, 1), "float16"), batch_size=1, verbose=0)
    return model.get_weights()[0].item()


@pytest.fixture
def device(emulator_dir):
    """Configures an IPU with or without `nanoo` and returns a strategy on it."""

    def configure(nanoo):
        config = ipu_config.IPUConfig()
        config.floating_point_behaviour.nanoo = nanoo
        config.configure_ipu_system()
        return ipu_strategy.IPUStrategy()

    yield configure
    ipu_config.reset_ipu_configuration()


@pytest.mark.parametrize("kind", ["ALSOptimizer", "ALSOptimizerSGD"])
def test_overflows_of_the_backward_pass_are_limited_or_nan_as_configured_and_other_nan_are_not_hidden(device, kind):
    make = {"ALSOptimizer": lambda: optimizers.ALSOptimizer(v2.SGD(1.0)), "ALSOptimizerSGD": optimizers.ALSOptimizerSGD}
    with device(nanoo=False).scope():
        assert trained_with_overflow(make[kind](), "linear") == 1
        assert np.isnan(trained_with_overflow(make[kind](), lambda x: tf.sqrt(x - 1)))
    with device(nanoo=True).scope():
        assert np.isnan(trained_with_overflow(make[kind](), "linear"))


@pytest.mark.parametrize("rule", ["own sgd", "own adam", "own rmsprop", "own centered"])
def test_float16_variables_are_updated_in_float32_arithmetic(rule):
    gradients = np.random.RandomState(6).uniform(-1, 1, (6, 3)).astype("float16")
    values = {}
    for dtype in ("float16", "float32"):
        als = RULES[rule](initial_loss_scaling_factor=8192, update_frequency=100)
        variable = tf.Variable(np.zeros(3, dtype))
        for gradient in gradients:
            als.apply_gradients([(tf.constant(gradient * np.float16(8192), dtype), variable)])
        values[dtype] = variable.numpy()
    np.testing.assert_allclose(values["float16"], values["float32"], rtol=0.01, atol=1e-4)
    assert np.abs(values["float16"]).min() > 0


def test_what_wraps_a_loss_scaling_optimizer_changes_and_refuses_as_it_does():
    als = optimizers.ALSOptimizer(v2.SGD(0.1))
    wrapper = optimizers.ALSGradientAccumulationOptimizer(als, 2)
    wrapper.update_frequency = 4
    assert als.update_frequency == 4
    with pytest.raises(ValueError, match="histogram cannot be set"):
        wrapper.histogram = 1
    with pytest.raises(ValueError, match="update_frequency=0"):
        wrapper.update_frequency = 0
    with pytest.raises(ValueError, match="loss_scaling_factor cannot be set"):
        wrapper.loss_scaling_factor = 2


@pytest.mark.parametrize("kind", [optimizers.ALSOptimizer, optimizers.GradientAccumulationOptimizer])
def test_a_subclass_may_change_gradients_before_they_are_summed(kind):
    class Doubled(kind):
        def preprocess_gradients(self, x):
            gradient, variable = x
            return 2 * gradient, variable

    arguments = [2] if kind is optimizers.GradientAccumulationOptimizer else []
    optimizer, variable = Doubled(v2.SGD(0.5), *arguments), tf.Variable([1.0])
    for _ in range(2):
        optimizer.apply_gradients([(tf.constant([0.25]), variable)])
    np.testing.assert_allclose(variable.numpy(), [1 - 0.5 * 2 * 2 * 0.25])
