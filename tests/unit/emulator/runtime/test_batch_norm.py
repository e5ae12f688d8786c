"""Batch statistics that groups of replicas share, against stock TensorFlow on the batches of the groups."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tf_ipu_dp.emulator.sdk_api.ipu import config as ipu_config
from tf_ipu_dp.emulator.sdk_api.ipu import ipu_outfeed_queue, ipu_strategy
from tf_ipu_dp.emulator.sdk_api.ipu.ops import pipelining_ops

RNG = np.random.RandomState(0)
REPLICAS, MICRO = 4, 2
IMAGES = (RNG.randn(16, 3, 3, 2) * [1, 5] + np.arange(16).reshape(16, 1, 1, 1)).astype("float32")
TARGETS = RNG.randn(16, 3, 3, 2).astype("float32")


@pytest.fixture
def device(emulator_dir):
    """Configures so many IPUs with this group size and returns a strategy on them."""

    def configure(group, ipus=REPLICAS):
        config = ipu_config.IPUConfig()
        config.auto_select_ipus = ipus
        config.norms.experimental.distributed_batch_norm_replica_group_size = group
        config.configure_ipu_system()
        return ipu_strategy.IPUStrategy()

    yield configure
    ipu_config.reset_ipu_configuration()


def make_model():
    layers = [
        tf.keras.layers.Conv2D(2, 1, kernel_initializer="ones", input_shape=(3, 3, 2)),
        tf.keras.layers.BatchNormalization(momentum=0.5),
        tf.keras.layers.Conv2D(2, 1, kernel_initializer="ones"),
    ]
    return tf.keras.Sequential(layers)


def trained_by_hand(group, learning_rate):
    """Plain SGD. What shares statistics goes through stock TensorFlow as one batch; replicas' gradients are summed."""
    model = make_model()
    variables = model.trainable_variables
    means, groups = [], REPLICAS // group
    for first in range(0, 16, REPLICAS * MICRO):
        total = [tf.zeros_like(variable) for variable in variables]
        start = model.layers[1].moving_mean.numpy()
        means = []
        for number in range(groups):
            rows = slice(first + number * group * MICRO, first + (number + 1) * group * MICRO)
            model.layers[1].moving_mean.assign(start)
            with tf.GradientTape() as tape:
                outputs = model(IMAGES[rows], training=True)
                loss = group * tf.reduce_mean(tf.math.squared_difference(outputs, TARGETS[rows]))
            total = [one + other for one, other in zip(total, tape.gradient(loss, variables))]
            means.append(model.layers[1].moving_mean.numpy())
        model.layers[1].moving_mean.assign(np.mean(means, axis=0))
        for variable, gradient in zip(variables, total):
            variable.assign_sub(learning_rate * gradient)
    return [*(variable.numpy() for variable in variables), model.layers[1].moving_mean.numpy()]


@pytest.mark.parametrize("group", [1, 2, 4])
def test_keras_trains_with_the_statistics_of_the_group(device, group):
    with device(group).scope():
        model = make_model()
        model.compile(tf.keras.optimizers.SGD(0.01), "mse", steps_per_execution=2)
        model.fit(IMAGES, TARGETS, batch_size=MICRO, shuffle=False, verbose=0)
    found = [*(variable.numpy() for variable in model.trainable_variables), model.layers[1].moving_mean.numpy()]
    for one, other in zip(found, trained_by_hand(group, 0.01)):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_validation_uses_the_moving_statistics_alone(device):
    stock = make_model()
    with device(4).scope():
        model = make_model()
        np.testing.assert_allclose(model.predict(IMAGES, batch_size=MICRO, verbose=0), stock(IMAGES), rtol=1e-5)


def normalised_in_program(strategy, inputs, **options):
    queue = ipu_outfeed_queue.IPUOutfeedQueue()

    @tf.function
    def program(iterator):
        for _ in tf.range(2):
            queue.enqueue(tf.compat.v1.nn.fused_batch_norm(next(iterator), [1.0, 2.0], [0.0, 1.0], **options))

    with strategy.scope():
        strategy.run(program, args=[iter(tf.data.Dataset.from_tensor_slices(inputs).batch(MICRO, drop_remainder=True))])
    return [tensor.numpy() for tensor in queue.dequeue()]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("group", [1, 2, 4])
def test_programs_normalise_with_the_statistics_of_the_group(device, group, dtype):
    inputs = IMAGES.astype(dtype)
    y, mean, variance = normalised_in_program(device(group), inputs, epsilon=0.1)
    assert y.shape == (2, REPLICAS, MICRO, 3, 3, 2) and y.dtype == dtype
    groups = inputs.reshape(-1, group * MICRO, 3, 3, 2)
    expected = [tf.compat.v1.nn.fused_batch_norm(each, [1.0, 2.0], [0.0, 1.0], epsilon=0.1) for each in groups]
    np.testing.assert_allclose(y.reshape(-1, group * MICRO, 3, 3, 2), [each[0] for each in expected], atol=5e-3)
    for replica in range(group):
        own = mean.reshape(-1, group, 2)[:, replica]
        np.testing.assert_allclose(own, [each[1] for each in expected], rtol=1e-4)
    of_group = np.var(np.float64(groups), axis=(1, 2, 3))
    count = MICRO * 9  # of one replica: the correction for the sample's size is not that of the group
    np.testing.assert_allclose(variance.reshape(-1, group, 2)[:, 0], of_group * count / (count - 1), rtol=1e-3)


def test_running_averages_are_continued_with_the_group_s_statistics(device):
    options = {"mean": [10.0, 20.0], "variance": [1.0, 2.0], "exponential_avg_factor": 0.25}
    _, mean, _ = normalised_in_program(device(4), IMAGES, **options)
    of_steps = IMAGES.reshape(2, -1, 2).mean(axis=1)
    np.testing.assert_allclose(mean[:, 0], 0.75 * np.array([10.0, 20.0]) + 0.25 * of_steps, rtol=1e-4)


def test_the_gradient_is_that_of_the_group_s_losses(device):
    strategy, queue = device(2, ipus=2), ipu_outfeed_queue.IPUOutfeedQueue()

    def weighted(x, targets, norm):
        return tf.reduce_sum(norm(x, [1.0, 2.0], [0.0, 1.0])[0] * targets)

    @tf.function
    def program(iterator):
        x, targets = next(iterator)
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = weighted(x, targets, tf.compat.v1.nn.fused_batch_norm)
        queue.enqueue(tape.gradient(loss, x))

    with strategy.scope():
        strategy.run(program, args=[iter(tf.data.Dataset.from_tensor_slices((IMAGES, TARGETS)).batch(8, True))])
    x = tf.constant(IMAGES)
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = weighted(x, TARGETS, tf.compat.v1.nn.fused_batch_norm)
    np.testing.assert_allclose(queue.dequeue().numpy().reshape(IMAGES.shape), tape.gradient(loss, x), atol=1e-5)


def test_normalisation_that_is_not_fused_keeps_the_statistics_of_its_replica(device):
    rows = IMAGES[:, 0, 0]
    results = []
    for group in (1, 4):
        with device(group).scope():
            model = tf.keras.Sequential([tf.keras.layers.BatchNormalization(momentum=0.5, input_shape=(2,))])
            model.compile(tf.keras.optimizers.SGD(0.01), "mse")
            model.fit(rows, rows, batch_size=MICRO, shuffle=False, verbose=0)
            results.append(model.get_weights())
    for one, other in zip(*results):
        np.testing.assert_array_equal(one, other)


def test_a_group_that_does_not_divide_the_replicas_is_refused(device):
    with pytest.raises(tf.errors.InvalidArgumentError, match="group_size=3 does not divide the 4 replicas"):
        normalised_in_program(device(3), IMAGES)


def test_pipelines_cannot_share_statistics(device):
    with device(2).scope():
        model = make_model()
        model.set_pipeline_stage_assignment([0, 0, 1])
        model.set_pipelining_options(gradient_accumulation_steps_per_replica=4)
        model.compile("sgd", "mse", steps_per_execution=4)
        with pytest.raises(tf.errors.InvalidArgumentError, match="cannot be used with pipelining"):
            model.fit(IMAGES, TARGETS, batch_size=1, verbose=0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="cannot be used with pipelining"):
        pipelining_ops.pipeline([lambda x: x, lambda x: x], 4, inputs=[tf.zeros([1])])
