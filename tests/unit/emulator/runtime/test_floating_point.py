"""Floating point exceptions and NaN on overflow, on one replica and on several, in programs and in Keras."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import tensorflow as tf

from tf_ipu_dp.emulator.runtime import floating_point
from tf_ipu_dp.emulator.sdk_api.ipu import config as ipu_config
from tf_ipu_dp.emulator.sdk_api.ipu import ipu_compiler, ipu_strategy, loops, scopes

HALF_MAX = 65504.0


@pytest.fixture
def device(emulator_dir):
    """Configures so many IPUs with these settings of floating_point_behaviour and returns a strategy on them."""

    def configure(ipus, *names, **settings):
        config = ipu_config.IPUConfig()
        config.auto_select_ipus = ipus
        for name in names:
            setattr(config.floating_point_behaviour, name, True)
        for name, value in settings.items():
            setattr(config.floating_point_behaviour, name, value)
        config.configure_ipu_system()
        return ipu_strategy.IPUStrategy()

    yield configure
    ipu_config.reset_ipu_configuration()


def run(strategy, function, *values):
    return strategy.run(tf.function(function), args=values).numpy()


HALF = tf.constant([1.0, HALF_MAX], tf.float16)
SINGLE = tf.constant([1.0, 3e38])


@pytest.mark.parametrize("replicas", [1, 2])
def test_an_overflow_of_16_bit_numbers_becomes_nan_with_nanoo(device, replicas):
    np.testing.assert_array_equal(run(device(replicas), lambda x: x * 2, HALF), [2, np.inf])
    np.testing.assert_array_equal(run(device(replicas, "nanoo"), lambda x: x * 2, HALF), [2, np.nan])


@pytest.mark.parametrize(
    ("function", "value", "expected"),
    [
        (lambda x: tf.cast(x, tf.float16), tf.constant([7e4]), np.nan),
        (lambda x: tf.cast(x, tf.float16), tf.constant([70_000]), np.nan),
        (lambda x: tf.matmul(x, x), tf.fill([1, 1], tf.constant(300, tf.float16)), np.nan),
        (lambda x: x * 2, tf.constant([3e38]), np.inf),  # 32 bits
        (lambda x: 1 / x, tf.zeros([1], tf.float16), np.inf),  # not an overflow
        (lambda x: x + 1, tf.constant([np.inf], tf.float16), np.inf),  # it has been infinite before
    ],
)
def test_nanoo_is_about_overflows_of_16_bit_numbers_alone(device, function, value, expected):
    np.testing.assert_array_equal(np.ravel(run(device(1, "nanoo"), function, value)), [expected])


EVENTS = {
    "oflo": [
        (lambda x: x * 2, HALF),
        (lambda x: x * 2, SINGLE),
        (tf.exp, tf.constant([100.0])),
        (lambda x: tf.cast(x, tf.float16), tf.constant([1e5])),
    ],
    "div0": [
        (lambda x: 1 / x, tf.constant([2.0, 0.0])),
        (lambda x: x / tf.zeros([1], tf.float16), HALF),
        (tf.math.log, tf.constant([0.0])),
        (tf.math.rsqrt, tf.constant([0.0])),
    ],
    "inv": [
        (lambda x: x / x, tf.constant([0.0])),
        (tf.sqrt, tf.constant([-1.0])),
        (tf.math.log, tf.constant([-1.0], tf.float16)),
    ],
}


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("event", EVENTS)
def test_an_event_raises_as_the_poplar_runtime_does_if_it_is_asked_for(device, event, replicas):
    others = [name for name in EVENTS if name != event]
    for function, value in EVENTS[event]:
        run(device(replicas, *others), function, value)
        with pytest.raises(tf.errors.InternalError, match=rf"^\[Poplar\]\[Execute engine\].*behaviour\.{event}\)"):
            run(device(replicas, event), function, value)


def test_set_all_asks_for_everything(device):
    for event in EVENTS:
        function, value = EVENTS[event][0]
        with pytest.raises(tf.errors.InternalError, match=event):
            run(device(1, "set_all"), function, value)


def test_events_are_found_in_loops_branches_and_gradients(device):
    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(tf.sqrt(x))
        return tape.gradient(y, x)

    def loop(x):
        for _ in tf.range(200):
            x = x * 2
        return x

    def branch(x):
        return tf.exp(x) if tf.reduce_sum(x) > 50 else x

    with pytest.raises(tf.errors.InternalError, match="div0"):
        run(device(1, "set_all"), gradient, tf.zeros([1]))
    for function in (loop, branch):
        with pytest.raises(tf.errors.InternalError, match="oflo"):
            run(device(1, "set_all"), function, tf.constant([100.0]))
    np.testing.assert_allclose(run(device(1, "set_all"), gradient, tf.ones([1])), [0.5])


@pytest.mark.parametrize("replicas", [1, 2])
def test_keras_training_raises_on_overflow_and_otherwise_is_the_same(device, replicas):
    x, y = np.ones((8, 2), "float32"), np.ones((8, 1), "float32")

    def weights_after(strategy, scale):
        with strategy.scope():
            model = tf.keras.Sequential([tf.keras.layers.Dense(1, kernel_initializer="ones", input_shape=(2,))])
            model.compile(tf.keras.optimizers.SGD(0.1), "mse")
            model.fit(x * scale, y, batch_size=2, verbose=0)
            return model.get_weights()

    for one, other in zip(weights_after(device(replicas), 1), weights_after(device(replicas, "set_all"), 1)):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(tf.errors.InternalError, match="oflo"):
        weights_after(device(replicas, "oflo"), 1e30)


def test_models_and_functions_are_traced_anew_for_another_configuration(device):
    strategy = device(1)

    @tf.function
    def double(x):
        return x * 2

    @tf.function
    def program(x):
        return double(x)

    with strategy.scope():
        model = tf.keras.Sequential([tf.keras.layers.Lambda(lambda x: x * 2, input_shape=(1,))])
    assert np.isinf(strategy.run(program, args=[SINGLE])[1]) and np.isinf(
        model.predict([[3e38]], batch_size=1, verbose=0)
    )
    device(1, "oflo")
    with pytest.raises(tf.errors.InternalError, match="oflo"):
        strategy.run(program, args=[SINGLE])
    with pytest.raises(tf.errors.InternalError, match="oflo"):
        model.predict([[3e38]], batch_size=1, verbose=0)


@pytest.mark.parametrize("replicas", [1, 2])
def test_programs_within_a_function_have_the_behaviour_too(device, replicas):
    def within_a_function(strategy, function, value):
        return tf.function(lambda: strategy.run(function, args=[value]))().numpy()

    np.testing.assert_array_equal(within_a_function(device(replicas, "nanoo"), lambda x: x * 2, HALF), [2, np.nan])
    np.testing.assert_array_equal(within_a_function(device(replicas), lambda x: x * 2, HALF), [2, np.inf])
    with pytest.raises(tf.errors.InvalidArgumentError, match="floating point exception oflo"):
        within_a_function(device(replicas, "oflo"), lambda x: x * 2, SINGLE)


def test_sessions_have_the_behaviour_in_loops_too(device):
    def result_of(function, value):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            with scopes.ipu_scope("/device:IPU:0"):
                made = ipu_compiler.compile(function, [tf.constant(value)])
            return session.run(made)[0]

    def doubled(x):
        return loops.repeat(3, lambda y: y * 2, [x])

    half = np.float16([1, 20000])
    device(1, "nanoo")
    np.testing.assert_array_equal(result_of(doubled, half), [8, np.nan])
    device(1, "oflo")
    np.testing.assert_array_equal(result_of(doubled, half[:1]), [8])
    with pytest.raises(tf.errors.InvalidArgumentError, match="floating point exception oflo"):
        result_of(doubled, half)


def test_other_errors_of_a_program_stay_what_they_are(device):
    def refuse(x):
        tf.debugging.Assert(x[0] < 1, ["too large"])
        return x

    with pytest.raises(tf.errors.InvalidArgumentError, match="too large"):
        run(device(1, "oflo"), refuse, SINGLE)


def test_that_stochastic_rounding_is_not_emulated_is_told_once(device, caplog, monkeypatch):
    monkeypatch.setattr(floating_point, "_has_warned", False)

    def told():
        return [record.getMessage() for record in caplog.records if record.name == floating_point.__name__]

    with caplog.at_level(logging.WARNING, floating_point.__name__):
        device(1)
        assert told() == []
        for ipus in (1, 2):
            device(ipus, esr=ipu_config.StochasticRoundingBehaviour.ON)
    assert told() == ["emulator: stochastic rounding is not emulated; 16-bit numbers are rounded to the nearest."]
