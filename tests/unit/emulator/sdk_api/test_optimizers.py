"""The SDK's optimizer wrappers, TF1's and Keras', against the wrapped optimizer and by hand."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import tensorflow as tf

from tf_ipu_dp.emulator.sdk_api.ipu import cross_replica_optimizer, loops, optimizers
from tf_ipu_dp.emulator.sdk_api.ipu.gradient_accumulation import GradientAccumulationReductionMethod
from tf_ipu_dp.emulator.sdk_api.keras_ipu import layers as ipu_layers
from tf_ipu_dp.emulator.sdk_api.keras_ipu import optimizers as keras_optimizers

v1 = tf.compat.v1.train
v2 = getattr(tf.keras.optimizers, "legacy", tf.keras.optimizers)
METHODS = list(GradientAccumulationReductionMethod)
GRADIENTS = np.random.RandomState(0).randn(8, 3).astype("float32")


def reduced(method, window):
    """What one window's gradients come to."""
    return window.sum(axis=0) if method is GradientAccumulationReductionMethod.SUM else window.mean(axis=0)


def steps(optimizer, gradients=GRADIENTS, dtype=tf.float32):
    """Returns a variable's value after each of the gradients, from one traced function."""
    variable = tf.Variable([1.0, 2.0, 3.0], dtype=dtype)

    @tf.function
    def apply(gradient):
        optimizer.apply_gradients([(gradient, variable)])

    values = []
    for gradient in gradients:
        apply(tf.constant(gradient, dtype))
        values.append(variable.numpy())
    return np.stack(values)


# TF1


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("make", [lambda: v1.MomentumOptimizer(0.1, 0.9), lambda: v1.AdamOptimizer(0.1)])
def test_every_fourth_call_updates_with_the_reduced_gradients(method, make):
    wrapper = optimizers.GradientAccumulationOptimizerV2(make(), 4, reduction_method=method)
    ours = steps(wrapper)
    stock = steps(make(), [reduced(method, GRADIENTS[:4]), reduced(method, GRADIENTS[4:])])
    np.testing.assert_array_equal(ours[:3], np.tile([1.0, 2.0, 3.0], (3, 1)))
    np.testing.assert_allclose(ours[[3, 7]], stock, rtol=1e-5)


@pytest.mark.parametrize("times", [6, 1, np.int64(7)])
def test_a_loop_that_ends_within_a_window_is_refused(times):
    variable = tf.Variable([1.0, 2.0, 3.0])
    optimizer = optimizers.GradientAccumulationOptimizerV2(v1.GradientDescentOptimizer(0.1), 4)

    def train(times):
        @tf.function
        def program():
            loops.repeat(times, lambda: optimizer.apply_gradients([(tf.ones(3), variable)]))

        program()

    with pytest.raises(tf.errors.FailedPreconditionError, match=f"4 micro batches .* loop's {times}"):
        train(times)
    train(8)
    np.testing.assert_allclose(variable, [0.2, 1.2, 2.2], rtol=1e-6)


def test_an_optimizer_of_tf1_accumulates_in_a_loop_under_a_strategy(scope):
    strategy = scope(1)
    with strategy.scope():
        variable = tf.Variable([1.0, 2.0, 3.0])
        inner = v1.GradientDescentOptimizer(0.1)
        optimizer = optimizers.CrossReplicaGradientAccumulationOptimizerV2(inner, 4)

    @tf.function
    def loop(gradients):
        for i in tf.range(8):
            loss = tf.reduce_sum(gradients[i] * variable)
            optimizer.minimize(loss, var_list=[variable])

    strategy.run(loop, args=[tf.constant(GRADIENTS)])
    np.testing.assert_allclose(variable.numpy(), [1.0, 2.0, 3.0] - 0.1 * GRADIENTS.sum(axis=0), rtol=1e-5)
    strategy.run(loop, args=[tf.constant(GRADIENTS)])
    np.testing.assert_allclose(variable.numpy(), [1.0, 2.0, 3.0] - 0.2 * GRADIENTS.sum(axis=0), rtol=1e-5)


def test_replicas_update_with_the_mean_of_their_gradients(scope):
    strategy = scope(2)
    with strategy.scope():
        variables = [tf.Variable([1.0, 2.0, 3.0]) for _ in range(2)]
        at_once = optimizers.CrossReplicaOptimizer(v1.GradientDescentOptimizer(0.1))
        later = optimizers.CrossReplicaGradientAccumulationOptimizerV2(v1.GradientDescentOptimizer(0.1), 4)
        elements = iter(tf.data.Dataset.from_tensor_slices(GRADIENTS))

    @tf.function
    def loop(elements):
        for _ in tf.range(4):
            gradient = next(elements)
            at_once.minimize(tf.reduce_sum(gradient * variables[0]), var_list=variables[:1])
            later.minimize(tf.reduce_sum(gradient * variables[1]), var_list=variables[1:])

    strategy.run(loop, args=[elements])
    for variable in variables:
        np.testing.assert_allclose(variable.numpy(), [1.0, 2.0, 3.0] - 0.1 * GRADIENTS.sum(axis=0) / 2, rtol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_accumulation_works_in_a_graph_and_a_session(method):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variable = tf.compat.v1.get_variable("w", initializer=[1.0, 2.0, 3.0], use_resource=True)
        fed = tf.compat.v1.placeholder(tf.float32, [3])
        step = v1.get_or_create_global_step()
        optimizer = optimizers.GradientAccumulationOptimizerV2(
            v1.GradientDescentOptimizer(0.1), 4, reduction_method=method
        )
        train = optimizer.minimize(tf.reduce_sum(fed * variable), global_step=step)
        session.run(tf.compat.v1.global_variables_initializer())
        for gradient in GRADIENTS:
            session.run(train, {fed: gradient})
        value, updates = session.run([variable, step])
    total = reduced(method, GRADIENTS[:4]) + reduced(method, GRADIENTS[4:])
    np.testing.assert_allclose(value, [1.0, 2.0, 3.0] - 0.1 * total, rtol=1e-5)
    assert updates == 2


def test_the_running_mean_does_not_overflow_where_the_sum_does():
    large = np.full((4, 3), 40000.0, "float16")
    for method, finite in (("sum", False), ("running_mean", True)):
        opt = optimizers.GradientAccumulationOptimizerV2(v1.GradientDescentOptimizer(0.001), 4, reduction_method=method)
        assert np.isfinite(steps(opt, large, tf.float16)[-1]).all() == finite


@pytest.mark.parametrize("dtype", [tf.float32, lambda variable: tf.float32])
def test_the_wrapped_optimizer_gets_gradients_of_the_accumulators_type(dtype):
    class Recorder(v1.GradientDescentOptimizer):
        def apply_gradients(self, grads_and_vars, global_step=None, name=None):
            seen.append(grads_and_vars[0][0].dtype)
            return super().apply_gradients([(tf.cast(g, v.dtype), v) for g, v in grads_and_vars], global_step, name)

    seen = []
    steps(optimizers.GradientAccumulationOptimizerV2(Recorder(0.1), 4, dtype=dtype), GRADIENTS[:4], tf.float16)
    assert set(seen) == {tf.float32}


def test_gradients_are_mapped_with_the_variables_value_and_slots_are_the_wrapped_optimizers():
    variable = tf.Variable([1.0, 2.0])
    momentum = v1.MomentumOptimizer(1.0, 0.5)
    optimizer = optimizers.MapGradientOptimizer(
        optimizers.ShardedOptimizer(optimizers.IpuOptimizer(momentum)), lambda gradient, value: gradient + 10 * value
    )
    optimizer.minimize(lambda: tf.reduce_sum(variable), var_list=[variable])
    np.testing.assert_array_equal(variable.numpy(), [-10.0, -19.0])
    assert optimizer.get_slot_names() == ["momentum"]
    np.testing.assert_array_equal(optimizer.get_slot(variable, "momentum").numpy(), [11.0, 21.0])
    assert len(optimizer.variables()) == 1
    assert cross_replica_optimizer.CrossReplicaOptimizer is optimizers.CrossReplicaOptimizer


@pytest.mark.parametrize(
    "make",
    [
        lambda: optimizers.GradientAccumulationOptimizerV2(v1.AdamOptimizer(), 0),
        lambda: optimizers.GradientAccumulationOptimizerV2(v1.AdamOptimizer(), 2, reduction_method="median"),
        lambda: optimizers.GradientAccumulationOptimizer(v1.AdamOptimizer(), 2),
        lambda: optimizers.CrossReplicaOptimizer(v2.SGD()),
        lambda: keras_optimizers.GradientAccumulationOptimizer(v2.SGD(), 0),
        lambda: keras_optimizers.GradientAccumulationOptimizer(v2.SGD(), 2, reduction_method="median"),
        lambda: keras_optimizers.GradientAccumulationOptimizer(v1.AdamOptimizer(), 2),
        lambda: keras_optimizers.ALSGradientAccumulationOptimizer(v2.SGD(), 1),
    ],
    ids=["count", "method", "old form", "keras", "keras count", "keras method", "tf1", "not als"],
)
def test_what_cannot_be_wrapped_so_is_a_value_error(make):
    with pytest.raises(ValueError):
        make()


def test_the_old_form_adds_up():
    for make in (optimizers.GradientAccumulationOptimizer, optimizers.CrossReplicaGradientAccumulationOptimizer):
        ours = steps(make(v1.MomentumOptimizer(0.1, 0.9), 4))
        stock = steps(v1.MomentumOptimizer(0.1, 0.9), [GRADIENTS[:4].sum(axis=0), GRADIENTS[4:].sum(axis=0)])
        np.testing.assert_allclose(ours[[3, 7]], stock, rtol=1e-5)


# Keras: accumulation


def make_model(dtype="float32", wrap=lambda layer: layer):
    model = tf.keras.Sequential(
        [
            tf.keras.Input((4,), dtype=dtype),
            wrap(tf.keras.layers.Dense(8, activation="tanh", dtype=dtype)),
            tf.keras.layers.Dense(3, dtype=dtype),
        ]
    )
    rng = np.random.RandomState(3)
    model.set_weights([rng.uniform(-0.5, 0.5, weight.shape) for weight in model.get_weights()])
    return model


def fit(model, optimizer, batch=4, dtype="float32", epochs=1, **compile_arguments):
    rng = np.random.RandomState(5)
    x, y = rng.randn(32, 4).astype(dtype), rng.randn(32, 3).astype(dtype)
    model.compile(optimizer, "mse", **compile_arguments)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch, drop_remainder=True)
    model.fit(data, epochs=epochs, verbose=0)
    return model.get_weights()


def assert_same(left, right, tolerance=1e-5):
    for one, other in zip(left, right):
        np.testing.assert_allclose(one, other, atol=tolerance)


@pytest.mark.parametrize(
    "make",
    [lambda: v2.SGD(0.1, momentum=0.9), lambda: v2.Adam(0.01), lambda: tf.keras.optimizers.Adam(0.01)],
    ids=["sgd", "adam", "the release's own adam"],
)
def test_fit_with_accumulated_means_equals_fit_with_the_larger_batch(make):
    wrapper = keras_optimizers.GradientAccumulationOptimizer(make(), 4, reduction_method="mean")
    ours = fit(make_model(), wrapper, epochs=3)
    assert_same(ours, fit(make_model(), make(), batch=16, epochs=3))
    assert wrapper.iterations.numpy() == 6


def test_fit_under_a_strategy_accumulates_too(scope):
    with scope(2).scope():
        wrapper = keras_optimizers.GradientAccumulationOptimizer(v2.SGD(0.1), 2, reduction_method="running_mean")
        ours = fit(make_model(), wrapper, steps_per_execution=2)
    # The sum over 2 replicas of means is twice the mean of the joined batch.
    assert_same(ours, fit(make_model(), v2.SGD(0.2), batch=16))


def test_replicas_of_a_custom_loop_accumulate_the_sum_of_their_gradients(scope):
    strategy = scope(2)
    with strategy.scope():
        variable = tf.Variable([1.0, 2.0, 3.0])
        als = keras_optimizers.ALSOptimizer(v2.SGD(0.1), initial_loss_scaling_factor=8, update_frequency=1)
        optimizer = keras_optimizers.ALSGradientAccumulationOptimizer(als, 2, reduction_method="mean")
        elements = iter(tf.data.Dataset.from_tensor_slices(GRADIENTS))

    @tf.function
    def loop(elements):
        for _ in tf.range(4):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(next(elements) * variable)
            optimizer.minimize(loss, [variable], tape=tape)

    strategy.run(loop, args=[elements])
    np.testing.assert_allclose(variable.numpy(), [1.0, 2.0, 3.0] - 0.1 * GRADIENTS.sum(axis=0) / 2, rtol=1e-5)
    assert optimizer.loss_scaling_factor.numpy() == 32


def test_an_accumulation_of_one_is_the_optimizer_itself():
    inner, als = v2.SGD(), keras_optimizers.ALSOptimizer(v2.SGD())
    assert keras_optimizers.GradientAccumulationOptimizer(inner, 1) is inner
    assert keras_optimizers.ALSGradientAccumulationOptimizer(als, 1) is als
    twice = keras_optimizers.GradientAccumulationOptimizer(inner, 4)
    assert keras_optimizers.GradientAccumulationOptimizer(twice, 1) is twice
    np.testing.assert_allclose(steps(twice)[3], [1.0, 2.0, 3.0] - 0.01 * GRADIENTS[:4].sum(axis=0), rtol=1e-5)


def test_hyperparameters_transformers_and_callbacks_reach_the_wrapped_optimizer():
    inner = v2.SGD(0.5, gradient_transformers=[lambda pairs: [(g / 4, v) for g, v in pairs]])
    wrapper = keras_optimizers.GradientAccumulationOptimizer(inner, 4)
    np.testing.assert_allclose(steps(wrapper)[3], [1.0, 2.0, 3.0] - 0.5 * GRADIENTS[:4].mean(axis=0), rtol=1e-5)
    wrapper.learning_rate = 0.25
    assert float(inner.learning_rate) == 0.25
    model = make_model()
    model.compile(wrapper, "mse")
    schedule = tf.keras.callbacks.LearningRateScheduler(lambda epoch: 0.125)
    model.fit(np.zeros((4, 4), "float32"), np.zeros((4, 3), "float32"), verbose=0, callbacks=[schedule])
    assert float(inner.lr) == 0.125


def test_wrappers_survive_their_configuration_and_a_checkpoint(tmp_path):
    als = keras_optimizers.ALSOptimizer(v2.Adam(0.01), initial_loss_scaling_factor=4, update_frequency=1)
    wrapper = keras_optimizers.ALSGradientAccumulationOptimizer(als, 2, dtype=tf.float32, reduction_method="mean")
    twin = type(wrapper).from_config(wrapper.get_config())
    assert twin.get_config() == wrapper.get_config()
    sgd = keras_optimizers.ALSOptimizerSGD(0.5, momentum=0.25, increase_factor=4)
    assert type(sgd).from_config(sgd.get_config()).get_config() == sgd.get_config()

    model = make_model()
    fit(model, wrapper)
    path = tf.train.Checkpoint(optimizer=wrapper, model=model).save(str(tmp_path / "checkpoint"))
    other = make_model()
    other.compile(twin, "mse")
    tf.train.Checkpoint(optimizer=twin, model=other).restore(path)
    assert_same(fit(model, wrapper), fit(other, twin), 0.0)
    assert twin.loss_scaling_factor.numpy() == wrapper.loss_scaling_factor.numpy() == 4 * 2**8


# Keras: automatic loss scaling


@pytest.mark.parametrize("kind", [v2.SGD, tf.keras.optimizers.SGD])
def test_loss_scaling_leaves_the_result_of_float32_training_as_it_is(kind):
    make = lambda: kind(0.1, momentum=0.9)  # noqa: E731
    als = keras_optimizers.ALSOptimizer(make(), update_frequency=1)
    assert_same(fit(make_model(), als), fit(make_model(), make()))
    # Nothing is counted, 0/0 is not above the threshold: the factor doubles with every one of the 8 updates.
    assert als.loss_scaling_factor.numpy() == 256
    assert als.previous_loss_scaling_factor.numpy() == 128


FUSED = {
    "sgd": (lambda **als: keras_optimizers.ALSOptimizerSGD(0.1, 0.9, **als), lambda: v2.SGD(0.1, 0.9)),
    "adam": (lambda **als: keras_optimizers.ALSOptimizerAdam(0.01, **als), lambda: v2.Adam(0.01)),
    "rmsprop": (lambda **als: keras_optimizers.ALSOptimizerRMSProp(0.01, **als), lambda: v2.RMSprop(0.01)),
    "centered": (
        lambda **als: keras_optimizers.ALSOptimizerRMSProp(0.01, momentum=0.5, centered=True, **als),
        lambda: v2.RMSprop(0.01, momentum=0.5, centered=True),
    ),
}


@pytest.mark.parametrize("rule", FUSED)
def test_rules_that_carry_the_factor_themselves_give_the_same_updates_while_it_moves(rule):
    make, stock = FUSED[rule]
    als = make(initial_loss_scaling_factor=4, update_frequency=2)
    assert_same(fit(make_model(), als, epochs=2), fit(make_model(), stock(), epochs=2), 2e-5)
    assert als.loss_scaling_factor.numpy() == 4 * 2**5


def test_the_factor_moves_once_in_the_frequency_plus_one_calls_and_stays_in_bounds():
    als = keras_optimizers.ALSOptimizer(v2.SGD(0.0), update_frequency=3, max_loss_scaling_factor=8)
    variable = tf.Variable(np.ones(3, "float16"))
    factors, counters = [], []
    for _ in range(20):
        als.apply_gradients([(tf.ones(3, tf.float16), variable)])
        factors.append(int(als.loss_scaling_factor.numpy()))
        counters.append(int(als.update_counter.numpy()))
    assert factors == [1] * 3 + [2] * 4 + [4] * 13
    assert counters == [1, 2, 3, 0] * 5
    for _ in range(12):
        als.apply_gradients([(tf.constant([1.0, 9000.0, np.nan], tf.float16), variable)])
    assert als.loss_scaling_factor.numpy() == 1
    als.apply_gradients([(tf.constant([1.0, 8184.0, 8192.0], tf.float16), variable)])
    np.testing.assert_array_equal(als.histogram.numpy(), [2, 1])
    np.testing.assert_allclose(als.normalized_histogram.numpy(), [2 / 3, 1 / 3])
    als.reset()
    np.testing.assert_array_equal(als.histogram.numpy(), [0, 0])


def test_scaled_gradients_are_unscaled_whoever_computed_them():
    variable = tf.Variable([2.0])
    als = keras_optimizers.ALSOptimizer(v2.SGD(0.1), initial_loss_scaling_factor=16)
    with tf.GradientTape() as tape:
        loss = als.get_scaled_loss(tf.reduce_sum(3.0 * variable))
    gradient = tape.gradient(loss, variable)
    assert gradient.numpy() == 48
    als.apply_gradients([(gradient, variable)])
    np.testing.assert_allclose(variable.numpy(), [1.7], rtol=1e-6)
    als.minimize(lambda: 3.0 * variable, [variable])
    np.testing.assert_allclose(variable.numpy(), [1.4], rtol=1e-6)


def test_statistics_of_accumulated_float16_gradients_are_taken_before_they_are_widened():
    class Narrow(v2.SGD):
        def _resource_apply_dense(self, grad, var, apply_state=None):
            assert grad.dtype == tf.float32
            return super()._resource_apply_dense(tf.cast(grad, var.dtype), var, apply_state)

    als = keras_optimizers.ALSOptimizer(Narrow(0.0), update_frequency=100)
    wrapper = keras_optimizers.ALSGradientAccumulationOptimizer(als, 2, dtype=tf.float32)
    variable = tf.Variable(np.ones(3, "float16"))
    for _ in range(4):
        wrapper.apply_gradients([(tf.constant([1.0, 2.0, 9000.0], tf.float16), variable)])
    np.testing.assert_array_equal(wrapper.histogram.numpy(), [8, 4])
    assert wrapper.update_counter.numpy() == 2


@pytest.mark.parametrize("layer", [ipu_layers.CaptureUpstreamGradients, ipu_layers.CaptureActivationGradients])
def test_captured_gradients_alone_can_be_counted(layer):
    stock = make_model("float16")
    model = make_model("float16", wrap=layer)
    x = np.ones((4, 4), "float16")
    np.testing.assert_array_equal(model(x).numpy(), stock(x).numpy())
    als = keras_optimizers.ALSOptimizer(v2.SGD(0.1), captured_grads_only=True, update_frequency=100)
    assert_same(fit(model, als, dtype="float16"), fit(stock, v2.SGD(0.1), dtype="float16"), 2e-3)
    assert als.histogram.numpy().sum() == 32 * 8
    twin = layer.from_config(model.layers[0].get_config())
    assert twin.layer.units == 8


def test_a_layer_without_activation_has_none_to_capture():
    with pytest.raises(ValueError, match="no activation"):
        ipu_layers.CaptureActivationGradients(tf.keras.layers.Flatten())


@pytest.mark.parametrize(
    ("error", "arguments"),
    [
        (TypeError, {"initial_loss_scaling_factor": 1.0}),
        (TypeError, {"increase_factor": 2.0}),
        (TypeError, {"max_loss_scaling_factor": 32768.0}),
        (ValueError, {"initial_loss_scaling_factor": 3}),
        (ValueError, {"increase_factor": 0}),
        (ValueError, {"initial_loss_scaling_factor": 16, "max_loss_scaling_factor": 32}),
        (ValueError, {"update_frequency": 0}),
        (ValueError, {"ratio_threshold": 1.0}),
        (ValueError, {"ratio_threshold": 0.0}),
    ],
    ids=str,
)
def test_impossible_loss_scaling_is_refused_when_made_and_when_changed(error, arguments):
    with pytest.raises(error):
        keras_optimizers.ALSOptimizer(v2.SGD(), **arguments)
    als = keras_optimizers.ALSOptimizer(v2.SGD())
    with pytest.raises(error):  # noqa: PT012 the first change may be fine by itself
        for name, value in arguments.items():
            setattr(als, name, value)


@pytest.mark.parametrize(
    "name",
    ["loss_scaling_factor", "previous_loss_scaling_factor", "histogram", "normalized_histogram", "update_counter",
     "decrease_factor"],
)  # fmt: skip
def test_what_loss_scaling_has_found_cannot_be_set(name):
    als = keras_optimizers.ALSOptimizer(v2.SGD())
    getattr(als, name)
    with pytest.raises(ValueError):
        setattr(als, name, 1)


def test_arguments_stand_in_the_sdks_order():
    order = lambda made: list(inspect.signature(made).parameters)  # noqa: E731
    accumulation = ["num_mini_batches", "offload_weight_update_variables", "replicated_optimizer_state_sharding",
                    "dtype", "reduction_method", "name"]  # fmt: skip
    assert order(optimizers.GradientAccumulationOptimizerV2.__init__) == ["self", "opt", *accumulation]
    assert order(optimizers.CrossReplicaGradientAccumulationOptimizerV2.__init__) == ["self", "opt", *accumulation]
    assert order(keras_optimizers.GradientAccumulationOptimizer.__init__) == ["self", "opt", *accumulation]
    als = ["initial_loss_scaling_factor", "update_frequency", "increase_factor", "max_loss_scaling_factor",
           "accumulate_statistics_over_update_period", "ratio_threshold", "captured_grads_only", "lpf_alpha",
           "histogram_bin_edge", "name"]  # fmt: skip
    assert order(keras_optimizers.ALSOptimizer.__init__) == ["self", "opt", *als]
    assert order(keras_optimizers.ALSOptimizerSGD.__init__) == ["self", "learning_rate", "momentum", *als]


def accumulated_in(strategy, loop):
    """Runs a program in which an optimizer accumulates 4 micro batches."""
    with strategy.scope():
        variable = tf.Variable(1.0)
    optimizer = optimizers.GradientAccumulationOptimizerV2(v1.GradientDescentOptimizer(0.1), 4)

    def step():
        optimizer.apply_gradients([(tf.constant(1.0), variable)])

    def program():
        loop(step)

    strategy.run(tf.function(program))
    return variable.numpy()


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_program_accumulates_only_in_a_loop_of_a_known_length_that_the_window_divides(scope, replicas):
    def over_a_range(step):
        for _ in tf.range(4):
            step()

    strategy = scope(replicas)
    assert accumulated_in(strategy, over_a_range) == pytest.approx(1 - 0.1 * 4 * replicas)
    assert accumulated_in(strategy, lambda step: loops.repeat(8, step)) == pytest.approx(1 - 0.1 * 8 * replicas)
    unknown = tf.Variable(8)
    for loop, reason in (
        (lambda step: step(), "no loop around"),
        (lambda step: [step() for _ in range(4)], "no loop around"),
        (lambda step: loops.repeat(6, step), "does not divide the loop's 6"),
        (lambda step: loops.repeat(unknown, step), "is not known"),
    ):
        with pytest.raises(tf.errors.FailedPreconditionError, match=f"4 micro batches are accumulated, .*{reason}"):
            accumulated_in(strategy, loop)


@pytest.mark.parametrize(("steps", "fits"), [(1, False), (2, True), (3, False)])
def test_an_execution_of_fit_is_a_loop_for_an_accumulating_optimizer(scope, steps, fits):
    with scope(1).scope():
        model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(1,))])
        model.compile(keras_optimizers.GradientAccumulationOptimizer(v2.SGD(0.1), 2), "mse", steps_per_execution=steps)
        data = np.ones((6, 1), "float32")
        if fits:
            assert np.isfinite(model.fit(data, data, batch_size=1, verbose=0).history["loss"]).all()
            return
        with pytest.raises(tf.errors.FailedPreconditionError, match=f"does not divide the loop's {steps}"):
            model.fit(data, data, batch_size=1, verbose=0)
