"""The addons' optimizers against numbers by hand and stock Keras, in graphs and eagerly, saved and restored."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tf_ipu_dp.emulator.sdk_api.addons.keras import layers, optimizers

RNG = np.random.RandomState(0)
X = RNG.randn(32, 4).astype("float32")
Y = RNG.randn(32, 2).astype("float32")
START = RNG.randn(3, 2).astype("float32")
GRADIENTS = RNG.randn(5, 3, 2).astype("float32")
STOCK = getattr(tf.keras.optimizers, "legacy", tf.keras.optimizers)
CLASSES = {name: getattr(optimizers, name) for name in ("AdamIpuOptimizer", "SGDIpuOptimizer", "LAMBIpuOptimizer")}


def stepped(optimizer, start=START, gradients=GRADIENTS, name="w"):
    """Applies the gradients one after the other, alternately eagerly and in a graph."""
    variable = tf.Variable(start, name=name)

    @tf.function
    def in_graph(gradient):
        optimizer.apply_gradients([(gradient, variable)])

    for index, gradient in enumerate(gradients):
        if index % 2:
            in_graph(tf.constant(gradient))
        else:
            optimizer.apply_gradients([(tf.constant(gradient), variable)])
    return variable.numpy()


def adam_directions(beta_1=0.9, beta_2=0.999, epsilon=1e-7, debiasing=True, amsgrad=False, gradients=GRADIENTS):
    """Yields Adam's step for each gradient, before the learning rate."""
    m = v = largest = 0
    for t, gradient in enumerate(gradients.astype("float64"), 1):
        m = beta_1 * m + (1 - beta_1) * gradient
        v = beta_2 * v + (1 - beta_2) * gradient**2
        m_hat, v_hat = (m / (1 - beta_1**t), v / (1 - beta_2**t)) if debiasing else (m, v)
        largest = np.maximum(largest, v_hat)
        yield m_hat / (np.sqrt(largest if amsgrad else v_hat) + epsilon)


def make_model():
    return tf.keras.Sequential([tf.keras.layers.Dense(3, "tanh", input_shape=(4,)), tf.keras.layers.Dense(2)])


def first_weights():
    return [RNG.uniform(-1, 1, weight.shape).astype("float32") for weight in make_model().weights]


def trained(optimizer, weights, **compiled):
    model = make_model()
    model.set_weights(weights)
    model.compile(optimizer, "mse", **compiled)
    model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return model


def assert_same(left, right, tolerance=1e-6):
    for one, other in zip(left, right):
        np.testing.assert_allclose(one, other, atol=tolerance)


@pytest.mark.parametrize("debiasing", [True, False])
@pytest.mark.parametrize("amsgrad", [True, False])
def test_adam_adds_epsilon_after_the_correction(debiasing, amsgrad):
    arguments = {"epsilon": 0.1, "debiasing": debiasing, "amsgrad": amsgrad}
    expected = START - 0.05 * sum(adam_directions(**arguments))
    result = stepped(optimizers.AdamIpuOptimizer(0.05, **arguments))
    np.testing.assert_allclose(result, expected, atol=1e-5)
    if debiasing and not amsgrad:
        assert np.abs(stepped(STOCK.Adam(0.05, epsilon=0.1)) - expected).max() > 1e-3


def test_adam_with_a_small_epsilon_trains_a_model_like_keras():
    weights = first_weights()
    reference = trained(STOCK.Adam(0.01, epsilon=1e-12), weights).get_weights()
    model = trained(optimizers.AdamIpuOptimizer(0.01, epsilon=1e-12), weights)
    assert_same(model.get_weights(), reference, tolerance=2e-5)


@pytest.mark.parametrize("arguments", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"decay": 0.1}])
def test_sgd_trains_a_model_like_keras(arguments):
    weights = first_weights()
    reference = trained(STOCK.SGD(0.1, **arguments), weights).get_weights()
    for eagerly in (False, True):
        model = trained(optimizers.SGDIpuOptimizer(0.1, **arguments), weights, run_eagerly=eagerly)
        assert_same(model.get_weights(), reference)


def lamb_by_hand(decay, adapted, clip=None, start=START):
    weights = start.astype("float64")
    for direction in adam_directions(epsilon=1e-6):
        step = direction + decay * weights
        of_weights, of_step = np.linalg.norm(weights), np.linalg.norm(step)
        of_weights = of_weights if clip is None else min(of_weights, clip)
        ratio = of_weights / of_step if adapted and of_weights and of_step else 1
        weights = weights - 0.05 * ratio * step
    return weights


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, lamb_by_hand(0, adapted=True)),
        ({"weight_decay_rate": 0.2}, lamb_by_hand(0.2, adapted=True)),
        ({"weight_decay_rate": 0.2, "weight_norm_clip": 0.5}, lamb_by_hand(0.2, adapted=True, clip=0.5)),
        ({"weight_decay_rate": 0.2, "exclude_from_layer_adaptation": ["ker"]}, lamb_by_hand(0.2, adapted=False)),
        (
            {
                "weight_decay_rate": 0.2,
                "exclude_from_weight_decay": ["bias", "k.rnel$"],
                "exclude_from_layer_adaptation": ["bias"],
            },
            lamb_by_hand(0, adapted=True),
        ),
    ],
)
def test_lamb_scales_the_step_by_the_norms(arguments, expected):
    result = stepped(optimizers.LAMBIpuOptimizer(0.05, **arguments), name="dense/kernel")
    np.testing.assert_allclose(result, expected, atol=2e-6)


def test_lamb_does_not_scale_the_first_step_of_zero_weights():
    result = stepped(optimizers.LAMBIpuOptimizer(0.05), np.zeros_like(START), GRADIENTS[:1])
    np.testing.assert_allclose(result, -0.05 * np.sign(GRADIENTS[0]), atol=1e-5)


def test_lamb_needs_two_precisions():
    with pytest.raises(ValueError, match="2"):
        optimizers.LAMBIpuOptimizer(optimizer_compute_precisions=(tf.float32,))


@pytest.mark.parametrize(
    ("make", "slots"),
    [
        (lambda: optimizers.AdamIpuOptimizer(1e-4, m_dtype=tf.float32, v_dtype="float32"), ["m", "v"]),
        (
            lambda: optimizers.AdamIpuOptimizer(
                1e-4, amsgrad=True, m_dtype=tf.float32, v_dtype=tf.float32, vhat_dtype=tf.float32
            ),
            ["m", "v", "vhat"],
        ),
        (lambda: optimizers.LAMBIpuOptimizer(1e-4, m_dtype=tf.float32, v_dtype=tf.float32), ["m", "v"]),
        (lambda: optimizers.SGDIpuOptimizer(1.0, 0.9, momentum_accum_dtype=tf.float32), ["momentum"]),
    ],
)
def test_float16_variables_may_have_float32_slots_that_checkpoints_restore(tmp_path, make, slots):
    small = GRADIENTS.astype("float16") / 1000  # whose squares vanish in float16

    def apply(optimizer, variable, gradients):
        for gradient in gradients:
            optimizer.apply_gradients([(tf.constant(gradient), variable)])

    optimizer, variable = make(), tf.Variable(START.astype("float16"))
    apply(optimizer, variable, small[:3])
    for slot in slots:
        value = optimizer.get_slot(variable, slot)
        assert value.dtype == tf.float32
        assert value.numpy().all()
    path = tf.train.Checkpoint(variable=variable, optimizer=optimizer).save(str(tmp_path / "checkpoint"))
    again, restored = make(), tf.Variable(np.zeros_like(START, "float16"))
    status = tf.train.Checkpoint(variable=restored, optimizer=again).restore(path)
    apply(optimizer, variable, small[3:])
    apply(again, restored, small[3:])
    status.assert_consumed()
    assert again.get_slot(restored, slots[0]).dtype == tf.float32
    np.testing.assert_array_equal(variable.numpy(), restored.numpy())
    assert (variable.numpy() != START.astype("float16")).any()


def test_slots_have_the_type_of_the_variable_if_not_told_else():
    optimizer, variable = optimizers.AdamIpuOptimizer(), tf.Variable(START.astype("float16"))
    optimizer.apply_gradients([(tf.constant(GRADIENTS[0].astype("float16")), variable)])
    assert optimizer.get_slot(variable, "m").dtype == tf.float16


def test_an_optimizer_of_one_s_own_chooses_the_type_of_its_slots(tmp_path):
    class Velocity(optimizers.IpuOptimizerBase):
        def _create_slots(self, var_list):
            for var in var_list:
                self.add_slot(var, "velocity", dtype=tf.float32)

        def _resource_apply_dense(self, grad, var, apply_state=None):
            velocity = self.get_slot(var, "velocity")
            return tf.group(velocity.assign_add(tf.cast(grad, velocity.dtype)))

    optimizer, variable = Velocity("own"), tf.Variable(START.astype("float16"))
    optimizer.apply_gradients([(tf.constant(GRADIENTS[0].astype("float16")), variable)])
    velocity = optimizer.get_slot(variable, "velocity")
    assert velocity.dtype == tf.float32
    np.testing.assert_array_equal(velocity.numpy(), GRADIENTS[0].astype("float16"))
    assert optimizer.add_slot(variable, "velocity") is velocity


def double(pairs):
    return [(2 * gradient, var) for gradient, var in pairs]


@pytest.mark.parametrize("make", list(CLASSES.values()))
@pytest.mark.parametrize(
    ("arguments", "transform"),
    [
        ({"clipnorm": 1.0}, lambda gradient: tf.clip_by_norm(gradient, 1.0)),
        ({"gradient_transformers": [double]}, lambda gradient: 2 * gradient),
    ],
)
def test_schedules_transformers_and_clipping_are_those_of_keras(make, arguments, transform):
    schedule = tf.keras.optimizers.schedules.PiecewiseConstantDecay([1], [0.1, 0.05])
    by_hand, by_keras = tf.Variable(START), tf.Variable(START)
    plain, scheduled = make(0.1), make(schedule, **arguments)
    for index, gradient in enumerate(GRADIENTS):
        plain.learning_rate = 0.1 if index < 2 else 0.05
        plain.apply_gradients([(transform(gradient), by_hand)])
        scheduled.apply_gradients([(tf.constant(gradient), by_keras)])
    np.testing.assert_allclose(by_keras.numpy(), by_hand.numpy(), atol=1e-5)


def test_minimize_and_an_own_tape_lead_to_the_same_weights():
    one, other = tf.Variable(START), tf.Variable(START)
    optimizer, second = optimizers.AdamIpuOptimizer(), optimizers.AdamIpuOptimizer()
    optimizer.minimize(lambda: tf.reduce_sum(one**2), [one])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(other**2)
    second.apply_gradients(zip(tape.gradient(loss, [other]), [other]))
    np.testing.assert_array_equal(one.numpy(), other.numpy())


@pytest.mark.parametrize("make", list(CLASSES.values()))
def test_sparse_gradients_are_refused_and_the_ipus_embedding_has_none(make):
    ids = tf.constant([[1, 2], [2, 3]])
    for embedding in (tf.keras.layers.Embedding(8, 2), layers.Embedding(8, 2)):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(embedding(ids))
        pairs = list(zip(tape.gradient(loss, embedding.weights), embedding.weights))
        if isinstance(embedding, layers.Embedding):
            make().apply_gradients(pairs)
        else:
            with pytest.raises(NotImplementedError, match="sparse"):
                make().apply_gradients(pairs)


@pytest.mark.parametrize(
    ("make", "arguments", "dtypes"),
    [
        (
            optimizers.AdamIpuOptimizer,
            {"learning_rate": 0.02, "beta_1": 0.8, "amsgrad": True, "clipnorm": 1.0},
            {"m_dtype": tf.float16},
        ),
        (
            optimizers.SGDIpuOptimizer,
            {"learning_rate": 0.02, "momentum": 0.5, "nesterov": True, "decay": 0.1},
            {"momentum_accum_dtype": tf.float16},
        ),
        (
            optimizers.LAMBIpuOptimizer,
            {"learning_rate": 0.02, "weight_decay_rate": 0.1, "exclude_from_weight_decay": ["bias"]},
            {"v_dtype": tf.float16},
        ),
    ],
)
def test_a_model_in_a_file_goes_on_training_where_it_was_saved(tmp_path, make, arguments, dtypes):
    optimizer = make(**arguments, **dtypes)
    model = trained(optimizer, first_weights())
    path = str(tmp_path / "model.h5")
    model.save(path)
    again = tf.keras.models.load_model(path, custom_objects=CLASSES)
    assert type(again.optimizer) is type(optimizer)
    assert again.optimizer.get_config() == optimizer.get_config()
    for some in (model, again):
        some.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    assert_same(again.get_weights(), model.get_weights())
    assert [slot.dtype for slot in again.optimizer.weights] == [slot.dtype for slot in optimizer.weights]


@pytest.mark.parametrize("make", list(CLASSES.values()))
def test_a_saved_model_comes_back_with_its_optimizer_but_as_in_keras_without_slots(tmp_path, make):
    model = trained(make(0.02, clipnorm=1.0), first_weights())
    model.save(str(tmp_path / "model"))
    again = tf.keras.models.load_model(str(tmp_path / "model"), custom_objects=CLASSES)
    assert_same(again.get_weights(), model.get_weights(), tolerance=0)
    assert type(again.optimizer) is make
    assert again.optimizer.get_config() == model.optimizer.get_config()


def test_replicas_and_accumulation_add_the_gradients_up(scope):
    weights = first_weights()
    summed = make_model()
    summed.set_weights(weights)
    # The loss of a micro batch is its mean, so four of them, added up, are four times the mean of all.
    summed.compile(STOCK.SGD(0.4, momentum=0.9), "mse")
    summed.fit(X, Y, batch_size=32, epochs=3, shuffle=False, verbose=0)
    with scope(2).scope():
        model = make_model()
        model.set_weights(weights)
        model.compile(optimizers.SGDIpuOptimizer(0.1, 0.9), "mse", steps_per_execution=2)
        model.set_gradient_accumulation_options(2)
        model.fit(X, Y, batch_size=8, epochs=3, shuffle=False, verbose=0)
    assert_same(model.get_weights(), summed.get_weights(), tolerance=1e-5)


def test_an_own_optimizer_on_the_base_class_gets_dense_gradients():
    class SignDescent(optimizers.IpuOptimizerBase):
        def __init__(self, learning_rate=0.1, name="SignDescent", **kwargs):
            super().__init__(name, **kwargs)
            self._set_hyper("learning_rate", learning_rate)

        def _resource_apply_dense(self, grad, var, apply_state=None):
            return var.assign_sub(self._decayed_lr(var.dtype) * tf.sign(grad))

    result = stepped(SignDescent(0.5, outline_apply_gradients=True), gradients=GRADIENTS[:1])
    np.testing.assert_allclose(result, START - 0.5 * np.sign(GRADIENTS[0]))


def test_a_momentum_outside_zero_and_one_is_refused():
    with pytest.raises(ValueError, match="momentum"):
        optimizers.SGDIpuOptimizer(momentum=1.5)
