"""The SDK's host embeddings, images, dropout and normalisation, by hand."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import tensorflow as tf

from tf_ipu_dp.emulator.sdk_api.ipu.ops import embedding_ops, image_ops, normalization_ops, rand_ops

RNG = np.random.RandomState(0)


def host_embedding(spec):
    table = np.arange(8, dtype="float32").reshape(4, 2)
    return table, embedding_ops.create_host_embedding("table", [4, 2], tf.float32, "TOKEN", spec, table)


def test_a_host_embedding_learns_by_itself_in_a_session():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        before, embedding = host_embedding(embedding_ops.HostEmbeddingOptimizerSpec(0.5))
        rows = embedding.lookup(tf.constant([[1, 1, 9]]))
        step = tf.compat.v1.train.GradientDescentOptimizer(100.0).minimize(tf.reduce_sum(rows))
        session.run(tf.compat.v1.global_variables_initializer())
        with embedding.register(session):
            np.testing.assert_array_equal(session.run(rows), before[np.array([[1, 1, 3]])])
            session.run(step)
        after = session.run(tf.compat.v1.trainable_variables())[0]
    np.testing.assert_array_equal(before - after, [[0, 0], [1, 1], [0, 0], [0.5, 0.5]])


@pytest.mark.parametrize("traced", [False, True])
def test_a_host_embedding_can_add_up_micro_batches(traced):
    before, embedding = host_embedding(embedding_ops.HostEmbeddingSGDGAOptimizerSpec(0.5, accumulation_factor=2))

    def step():
        with tf.GradientTape() as tape:
            rows = embedding.lookup(tf.constant([1, 2]))
        tape.gradient(rows, tape.watched_variables())
        return rows

    run = tf.function(step) if traced else step
    seen = [run().numpy() for _ in range(5)]
    for number, rows in enumerate(seen):
        np.testing.assert_array_equal(rows, before[[1, 2]] - number // 2)


def test_a_host_embedding_without_an_optimizer_does_not_learn_and_bad_ones_are_refused():
    _, embedding = host_embedding(None)
    with tf.GradientTape() as tape:
        rows = embedding.lookup(tf.constant([1]))
    assert tape.gradient(rows, tape.watched_variables()) == (None,)
    with pytest.raises(ValueError, match="partition_strategy"):
        embedding_ops.create_host_embedding("other", [2, 2], tf.float32, partition_strategy="ROWS")
    spec = embedding_ops.HostEmbeddingOptimizerSpec(0.1, "Adam")
    with pytest.raises(ValueError, match="SGD"):
        embedding_ops.create_host_embedding("another", [2, 2], tf.float32, optimizer_spec=spec)


@pytest.mark.parametrize(
    ("given_type", "result"), [("uint8", "float16"), ("float16", "float16"), ("float32", "float32")]
)
def test_an_image_is_normalised_and_gets_a_fourth_channel_of_zeros(given_type, result):
    image = RNG.randint(0, 255, [2, 4, 4, 3]).astype(given_type)
    offsets, scales = [1.0, 2.0, 3.0], [0.5, 0.25, 0.125]
    found = tf.function(image_ops.normalise_image)(image, offsets, scales, 1 / 255).numpy()
    expected = (image.astype("float32") / 255 - offsets) * scales
    assert found.dtype == result
    np.testing.assert_allclose(found[..., :3], expected, rtol=2e-3)
    assert found.shape == (2, 4, 4, 4)
    assert not found[..., 3].any()


def test_an_image_of_another_type_or_with_other_channels_is_refused():
    with pytest.raises(TypeError):
        image_ops.normalise_image(tf.zeros([4, 4, 3], tf.int32), [0.0] * 3, [1.0] * 3)
    for channels, offsets in ((4, 3), (3, 4)):
        with pytest.raises(tf.errors.InvalidArgumentError):
            image_ops.normalise_image(tf.zeros([4, 4, channels]), [0.0] * offsets, [1.0] * 3)


@pytest.mark.parametrize("dtype", [tf.float16, tf.float32])
def test_dropout_drops_its_share_scales_the_rest_and_lets_gradients_through_the_same_mask(dtype):
    @tf.function
    def program(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = rand_ops.dropout(x, 0.25)
        return value, tape.gradient(value, x)

    value, gradient = program(tf.ones([100, 100], dtype))
    kept = value.numpy() != 0
    assert 0.72 < kept.mean() < 0.78
    np.testing.assert_allclose(value.numpy()[kept], 4 / 3, rtol=1e-3)
    np.testing.assert_array_equal(gradient.numpy(), value.numpy())


def test_dropout_repeats_its_mask_only_for_the_same_seed_and_along_dimensions_of_size_one():
    x = tf.ones([8, 64])
    masks = [rand_ops.dropout(x, 0.5, seed=seed).numpy() for seed in ([1, 2], [1, 2], [1, 3], None, None)]
    assert np.array_equal(masks[0], masks[1])
    assert not np.array_equal(masks[0], masks[2])
    assert not np.array_equal(masks[3], masks[4])
    rows = rand_ops.dropout(x, 0.5, noise_shape=[1, 64], ref=x).numpy()
    assert np.array_equal(rows, np.tile(rows[:1], [8, 1]))
    assert np.array_equal(rand_ops.dropout(x, 0.5, noise_shape=[], seed=[1, 2]).numpy(), masks[0])
    assert np.array_equal(rand_ops.dropout(x, 0.0).numpy(), x.numpy())


@pytest.mark.parametrize(
    "arguments",
    [{"rate": 1.0}, {"rate": -0.1}, {"noise_shape": [4]}, {"noise_shape": [2, 4]}, {"seed": 3}, {"seed": [1, 2, 3]}],
)
def test_dropout_refuses_bad_rates_noise_and_seeds(arguments):
    with pytest.raises(ValueError):
        rand_ops.dropout(tf.ones([4, 4]), **arguments)


def normalised_by_hand(x, group_of_channel, epsilon=1.53e-5):
    result = np.empty_like(x)
    for group in set(group_of_channel):
        members = [channel for channel, own in enumerate(group_of_channel) if own == group]
        part = x[..., members]
        axes = tuple(range(1, x.ndim))
        mean, variance = part.mean(axes, keepdims=True), part.var(axes, keepdims=True)
        result[..., members] = (part - mean) / np.sqrt(variance + epsilon)
    return result


@pytest.mark.parametrize("channels_axis", [-1, 1])
@pytest.mark.parametrize(
    ("normalise", "group_of_channel"),
    [
        (lambda x, **more: normalization_ops.group_norm(x, groups=2, **more), [0, 1, 0, 1, 0, 1]),
        (
            lambda x, **more: normalization_ops.group_norm(x, groups=2, strided_channel_grouping=False, **more),
            [0, 0, 0, 1, 1, 1],
        ),
        (normalization_ops.layer_norm, [0] * 6),
        (normalization_ops.instance_norm, range(6)),
    ],
    ids=["strided groups", "neighbouring groups", "layer", "instance"],
)
def test_normalisation_is_over_the_groups_of_channels(normalise, group_of_channel, channels_axis):
    x = RNG.randn(2, 3, 4, 6).astype("float32")
    scale = np.arange(6, dtype="float32")
    initializers = {"gamma": tf.constant_initializer(scale), "beta": tf.constant_initializer(-scale)}
    given_x = x if channels_axis == -1 else np.moveaxis(x, -1, 1)
    found = normalise(given_x, channels_axis=channels_axis, param_initializers=initializers).numpy()
    found = found if channels_axis == -1 else np.moveaxis(found, 1, -1)
    np.testing.assert_allclose(found, normalised_by_hand(x, group_of_channel) * scale - scale, atol=2e-5)


def test_normalisation_has_tf1_variables_that_can_be_reused():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        x = tf.constant(RNG.randn(2, 4, 6), tf.float16)
        with tf.compat.v1.variable_scope("outer"):
            first = normalization_ops.group_norm(x, scope="norm", variables_collections=["mine"])
            second = normalization_ops.group_norm(x, scope="norm", reuse=True, training=False)
            normalization_ops.group_norm(x, center=False)
        names = [variable.op.name for variable in tf.compat.v1.trainable_variables()]
        assert names == ["outer/norm/beta", "outer/norm/gamma", "outer/GroupNorm/gamma"]
        assert len(tf.compat.v1.get_collection("mine")) == 2
        session.run(tf.compat.v1.global_variables_initializer())
        one, other = session.run([first, second])
    assert one.dtype == "float16"
    assert np.array_equal(one, other)


def test_normalisation_refuses_what_it_cannot_divide_and_warns_of_a_small_epsilon(caplog):
    x = tf.ones([2, 3, 4, 6])
    for arguments in ({"groups": 4}, {"groups": 12}, {"channels_axis": 2}, {"channels_axis": 0}, {"channels_axis": 9}):
        with pytest.raises(ValueError):
            normalization_ops.group_norm(x, **arguments)
    with caplog.at_level(logging.WARNING, logger="tensorflow"):
        normalization_ops.group_norm(x, epsilon=1e-7)
    assert "epsilon=1e-07" in caplog.text
