"""Devices for which programs are only compiled: Keras and programs get zeros, or are refused."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tf_ipu_dp.emulator.sdk_api.ipu import config as ipu_config
from tf_ipu_dp.emulator.sdk_api.ipu import ipu_compiler, ipu_strategy, scopes
from tf_ipu_dp.emulator.sdk_api.ipu.ops import cross_replica_ops

X = np.ones((8, 2), "float32")


@pytest.fixture
def device(emulator_dir, monkeypatch):
    """Configures so many IPUs of a connection type and returns a strategy on them."""
    monkeypatch.setenv("TF_POPLAR_FLAGS", "--executable_cache_path=cache")

    def configure(ipus, kind):
        config = ipu_config.IPUConfig()
        config.auto_select_ipus = ipus
        config.device_connection.type = kind
        config.device_connection.version = "ipu2"
        config.configure_ipu_system()
        return ipu_strategy.IPUStrategy()

    yield configure
    ipu_config.reset_ipu_configuration()


def make_model(concurrent=False):
    layers = [tf.keras.layers.Dense(3, kernel_initializer="ones", input_shape=(2,))]
    if concurrent:
        layers.append(tf.keras.layers.Lambda(cross_replica_ops.cross_replica_sum))
    model = tf.keras.Sequential(layers)
    model.compile("sgd", "mse", steps_per_execution=2)
    return model


@pytest.mark.parametrize("concurrent", [False, True])
@pytest.mark.parametrize("replicas", [1, 2])
def test_pre_compiled_models_give_zeros_and_do_not_learn(device, replicas, concurrent):
    with device(replicas, ipu_config.DeviceConnectionType.PRE_COMPILE).scope():
        model = make_model(concurrent)
        before = model.get_weights()
        history = model.fit(X, X[:, :1], batch_size=2, verbose=0).history
        outputs = model.predict(X, batch_size=2, verbose=0)
        assert model.evaluate(X, X[:, :1], batch_size=2, verbose=0) == 0
    assert history == {"loss": [0.0]}
    np.testing.assert_array_equal(outputs, np.zeros((8, 3)))
    for one, other in zip(before, model.get_weights()):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("replicas", [1, 2])
def test_pre_compiled_programs_return_zeros_and_change_nothing(device, replicas):
    strategy = device(replicas, ipu_config.DeviceConnectionType.PRE_COMPILE)
    with strategy.scope():
        variable = tf.Variable(1.0)

    @tf.function
    def program(x):
        variable.assign_add(tf.reduce_sum(x))
        return {"sum": tf.reduce_sum(x), "rows": x, "none": None}

    results = strategy.run(program, args=[tf.constant(X)])
    assert results["none"] is None and results["sum"].numpy() == 0 and variable.numpy() == 1
    np.testing.assert_array_equal(results["rows"], np.zeros((8, 2)))


@pytest.mark.parametrize("kind", ["PRE_COMPILE", "NEVER"])
def test_programs_are_compiled_for_more_ipus_than_there_are(device, monkeypatch, kind):
    monkeypatch.setenv("IPU_EMULATOR_IPUS", "2")
    strategy = device(8, ipu_config.DeviceConnectionType[kind])
    assert strategy.ipus() == 8
    if kind == "PRE_COMPILE":
        with strategy.scope():
            model = make_model()
            assert model.fit(np.ones((16, 2)), np.ones((16, 1)), batch_size=1, verbose=0).history == {"loss": [0.0]}
    for ipus, connection in ((6, kind), (8, "ALWAYS")):
        with pytest.raises(tf.errors.FailedPreconditionError, match="Unsupported number of IPUs requested"):
            device(ipus, ipu_config.DeviceConnectionType[connection])


def test_a_device_that_never_connects_refuses_to_execute(device):
    strategy = device(1, ipu_config.DeviceConnectionType.NEVER)
    with strategy.scope(), pytest.raises(tf.errors.InvalidArgumentError, match="compilation only"):
        make_model().predict(X, batch_size=2, verbose=0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="compilation only"):
        strategy.run(tf.function(lambda: tf.constant(1.0)))


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_program_within_a_function_is_compiled_or_refused_like_any_other(device, replicas):
    strategy = device(replicas, ipu_config.DeviceConnectionType.PRE_COMPILE)
    with strategy.scope():
        variable = tf.Variable(1.0)

    def program(x):
        variable.assign_add(tf.reduce_sum(x))
        return x + 1

    x = tf.constant(X)
    np.testing.assert_array_equal(tf.function(lambda: strategy.run(program, args=[x]))(), np.zeros((8, 2)))
    assert variable.numpy() == 1
    device(replicas, ipu_config.DeviceConnectionType.NEVER)
    with pytest.raises(tf.errors.InvalidArgumentError, match="compilation only"):
        tf.function(lambda: strategy.run(program, args=[x]))()
    device(replicas, ipu_config.DeviceConnectionType.ALWAYS)
    np.testing.assert_array_equal(tf.function(lambda: strategy.run(program, args=[x]))(), np.full((8, 2), 2))
    assert variable.numpy() == 17


def test_a_session_compiles_or_refuses_what_is_on_an_ipu(device):
    kinds, v1 = ipu_config.DeviceConnectionType, tf.compat.v1

    def results_of(run):
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            return session.run(run), session.run("counter/Read/ReadVariableOp:0")

    with tf.Graph().as_default():
        device(1, kinds.PRE_COMPILE)
        counter = v1.get_variable("counter", [], initializer=tf.zeros_initializer(), use_resource=True)

        def program(x):
            return x + counter.assign_add(1.0)

        def compiled():
            with scopes.ipu_scope("/device:IPU:0"):
                return ipu_compiler.compile(program, [tf.constant([2.0])])

        pre_compiled = compiled()
        result, count = results_of(pre_compiled)
        assert (result[0].tolist(), count) == ([0.0], 0.0)
        device(1, kinds.NEVER)
        refused = compiled()
        with pytest.raises(tf.errors.InvalidArgumentError, match="compilation only"):
            results_of(refused)
        device(1, kinds.ALWAYS)
        result, count = results_of(compiled())
        assert (result[0].tolist(), count) == ([3.0], 1.0)
        with pytest.raises(tf.errors.UnimplementedError, match="after the graph was made"):
            results_of(pre_compiled)
