"""Keras models against their description, in every precision, on pipeline stages and exported."""

from __future__ import annotations

import random
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tf_ipu_dp.planning import architectures
from tf_ipu_dp.planning.layers import INPUT
from tf_ipu_dp.training import models

MEAN, DEVIATION = (0.49, 0.48, 0.45, 0.5), (0.25, 0.24, 0.26, 0.25)
OWN_AND_QUICK = ("mlp", "cnn", "resnet8", "resnet20", "resnet18")


@pytest.fixture(autouse=True)
def _as_before():
    """Gives back the memory of a test's models, and the policy."""
    yield
    tf.keras.mixed_precision.set_global_policy("float32")
    tf.keras.backend.clear_session()


@pytest.fixture
def strategy(scope):
    """A strategy on four emulated IPUs."""
    return scope(4)


def describe(name, norm="batch", height=28, width=28, channels=1, classes=10):
    return architectures.describe(name, height=height, width=width, channels=channels, classes=classes, norm=norm)


def make(architecture, eight_bit_input=False, seed=1):
    random.seed(seed)
    tf.random.set_seed(seed)
    if hasattr(tf.keras.utils, "set_random_seed"):
        tf.keras.utils.set_random_seed(seed)
    count = architecture.channels
    return models.make_model(
        architecture, eight_bit_input=eight_bit_input, mean=MEAN[:count], deviation=DEVIATION[:count]
    )


def export(model, architecture):
    return models.make_export_model(
        model, architecture, MEAN[: architecture.channels], DEVIATION[: architecture.channels]
    )


def images_for(architecture, count=4):
    shape = (count, architecture.height, architecture.width, architecture.channels)
    return np.random.RandomState(0).randint(0, 256, shape).astype(np.uint8)


def normalised(images):
    channels = images.shape[-1]
    return ((images / 255 - MEAN[:channels]) / DEVIATION[:channels]).astype(np.float32)


def stir(model):
    """Moves all weights off their initial values, where many differences do not show."""
    source = np.random.RandomState(2)
    model.set_weights(
        [(weight + source.uniform(0.1, 0.3, weight.shape) * (weight.ndim == 1)) for weight in model.get_weights()]
    )


def assert_as_described(architecture, model):
    made = {layer.name: layer for layer in model.layers if not isinstance(layer, tf.keras.layers.InputLayer)}
    assert sorted(made) == sorted(name for block in architecture.blocks for name in block.layers)
    assert model.count_params() == architecture.parameters
    entry = INPUT
    for block in architecture.blocks:
        layers = [made[name] for name in block.layers]
        assert sum(layer.count_params() for layer in layers) == block.parameters
        assert sum(map(macs_of, layers)) == block.macs
        sources = {source for layer in layers for source in sources_of(layer)}
        assert sources - set(block.layers) == {entry}
        entry = block.layers[-1]
    assert model.output_shape == (None, architecture.classes)


def macs_of(layer):
    if isinstance(layer, tf.keras.layers.Conv2D):
        positions = int(np.prod(layer.output_shape[1:3]))
        return positions * int(np.prod(layer.kernel.shape))
    return int(np.prod(layer.kernel.shape)) if isinstance(layer, tf.keras.layers.Dense) else 0


def sources_of(layer):
    return [tensor._keras_history.layer.name for tensor in tf.nest.flatten(layer.input)]


@pytest.mark.parametrize(
    ("norm", "height", "width", "channels", "classes"), [("batch", 28, 28, 1, 10), ("group", 33, 46, 4, 7)]
)
@pytest.mark.parametrize("name", OWN_AND_QUICK)
def test_a_model_is_as_described(name, norm, height, width, channels, classes):
    architecture = describe(name, norm, height, width, channels, classes)
    assert_as_described(architecture, make(architecture))


def norms_of(model, kind):
    """Returns the normalisations of a model of keras.applications, which are all of one kind."""
    norms = [layer for layer in model.layers if layer.name.endswith("_bn")]
    assert all(type(layer) is type(norms[0]) and isinstance(layer, kind) for layer in norms)
    return norms


def test_a_model_of_keras_applications_is_as_described():
    architecture = describe("resnet50", "batch", 28, 29, 1)
    model = make(architecture)
    assert_as_described(architecture, model)
    norms = norms_of(model, tf.keras.layers.BatchNormalization)
    assert len(norms) == 53 and {layer.momentum for layer in norms} == {0.9}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(architectures.MODELS) - set(OWN_AND_QUICK) - {"resnet50"}))
def test_the_larger_models_are_as_described(name):
    # Each kind of block was looked at with both norms above; batch norm is quicker to make.
    architecture = describe(name, "batch", 32, 36, 3, 100)
    assert_as_described(architecture, make(architecture))


@pytest.mark.slow
def test_a_model_of_keras_applications_has_the_work_described_at_full_size():
    architecture = describe("resnet50", "batch", 224, 224, 3, 1000)
    assert_as_described(architecture, make(architecture))


@pytest.mark.parametrize("policy", ["float32", "mixed_float16", "float16"])
@pytest.mark.parametrize("norm", architectures.NORMS)
def test_logits_are_float32_in_every_precision(norm, policy):
    architecture = describe("cnn", norm, channels=3)
    expected = make(architecture)(normalised(images_for(architecture))).numpy()
    tf.keras.mixed_precision.set_global_policy(policy)
    model = make(architecture, eight_bit_input=True)
    logits = model(images_for(architecture))
    assert logits.dtype == tf.float32
    assert model.get_layer("conv2_conv").compute_dtype == ("float32" if policy == "float32" else "float16")
    tolerance = 1e-5 if policy == "float32" else 0.02
    np.testing.assert_allclose(logits, expected, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize(("policy", "dtype"), [("float32", "float32"), ("mixed_float16", "float16")])
def test_images_come_as_bytes_or_in_the_precision_of_the_computation(policy, dtype):
    tf.keras.mixed_precision.set_global_policy(policy)
    assert make(describe("mlp"), eight_bit_input=True).input.dtype == tf.uint8
    assert make(describe("mlp"), eight_bit_input=False).input.dtype == dtype


def test_bytes_are_normalised_per_channel_before_the_first_layer():
    architecture = describe("resnet8", channels=4)
    images = images_for(architecture)
    by_bytes, by_floats = make(architecture, eight_bit_input=True), make(architecture)
    np.testing.assert_allclose(by_bytes(images), by_floats(normalised(images)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "norm"), [("cnn", "batch"), ("resnet8", "group"), ("mlp", "batch")])
def test_the_seed_decides_the_weights_in_a_strategy_or_not(name, norm, strategy):
    architecture = describe(name, norm)
    first, second, other = make(architecture), make(architecture), make(architecture, seed=2)
    with strategy.scope():
        in_scope = make(architecture, eight_bit_input=True)
    for same in (second, in_scope):
        for left, right in zip(first.get_weights(), same.get_weights()):
            np.testing.assert_array_equal(left, right)
    assert any((left != right).any() for left, right in zip(first.get_weights(), other.get_weights()))


def test_convolutions_begin_with_the_variance_that_relu_needs():
    kernel = make(describe("resnet20")).get_layer("conv4_block2_1_conv").get_weights()[0]
    assert kernel.std() == pytest.approx(np.sqrt(2 / (3 * 3 * 64)), rel=0.02)


@pytest.mark.parametrize(("name", "norm"), [("cnn", "group"), ("resnet8", "batch"), ("resnet8", "group")])
def test_every_weight_gets_a_gradient(name, norm):
    architecture = describe(name, norm)
    model = make(architecture)
    stir(model)
    with tf.GradientTape() as tape:
        logits = model(normalised(images_for(architecture)), training=True)
        loss = tf.reduce_sum(tf.square(logits - 1))
    gradients = tape.gradient(loss, model.trainable_variables)
    assert all(tf.reduce_max(tf.abs(gradient)) > 0 for gradient in gradients)


@pytest.mark.parametrize(
    ("name", "stages", "eight_bit_input"),
    [("cnn", 2, False), ("cnn", 3, True), ("cnn", 4, False), ("resnet8", 2, True), ("resnet8", 4, False)],
)
def test_each_layer_is_on_the_stage_of_its_block(name, stages, eight_bit_input, strategy):
    assert_staged(describe(name, "group"), stages, eight_bit_input, strategy)


def test_a_model_of_keras_applications_with_group_norm_is_as_described_and_on_the_stages_of_its_blocks(strategy):
    architecture = describe("resnet50", "group", 37, 29, 3)
    model = assert_staged(architecture, 4, False, strategy)
    assert_as_described(architecture, model)
    assert len(norms_of(model, models.GroupNormalization)) == 53


def assert_staged(architecture, stages, eight_bit_input, strategy):
    cut = architectures.cut(architecture, architectures.balance(architecture, stages))
    with strategy.scope():
        model = make(architecture, eight_bit_input)
        models.assign_stages(model, cut)
    assigned = {one.layer.name: one.pipeline_stage for one in model.get_pipeline_stage_assignment()}
    expected = {name: stage for stage, blocks in enumerate(cut) for block in blocks for name in block.layers}
    assert set(expected.values()) == set(range(stages))
    assert assigned == {**expected, **({models.NORMALISE: 0} if eight_bit_input else {})}
    return model


def test_a_single_stage_is_no_pipeline(strategy):
    architecture = describe("cnn")
    with strategy.scope():
        model = make(architecture)
        models.assign_stages(model, architectures.cut(architecture, []))
    assert {one.pipeline_stage for one in model.get_pipeline_stage_assignment()} == {None}


@given(channels=st.integers(1, 2048))
def test_channels_are_shared_evenly_by_at_most_32_groups_of_at_least_4(channels):
    groups = architectures.groups_of(channels)
    assert channels % groups == 0
    assert groups == 1 or (groups <= 32 and channels // groups >= 4)
    assert groups == max(n for n in range(1, 33) if channels % n == 0 and (n == 1 or channels // n >= 4))


def by_numpy(values, groups, gamma, beta, epsilon):
    batch, height, width, channels = values.shape
    grouped = values.astype(np.float64).reshape(batch, height, width, groups, channels // groups)
    mean = grouped.mean(axis=(1, 2, 4), keepdims=True)
    variance = grouped.var(axis=(1, 2, 4), keepdims=True)
    return ((grouped - mean) / np.sqrt(variance + epsilon)).reshape(values.shape) * gamma + beta


@pytest.mark.parametrize("groups", [1, 3, 12])
def test_group_norm_is_what_its_formula_says(groups):
    source = np.random.RandomState(0)
    # Far from 0, where a variance from the mean of squares would be lost in rounding.
    values = source.normal(300, 0.5, (3, 5, 7, 12)).astype(np.float32)
    gamma, beta = source.normal(size=(2, 12)).astype(np.float32)
    layer = models.GroupNormalization(groups, epsilon=1e-3)
    layer.build(values.shape)
    assert [weight.tolist() for weight in layer.get_weights()] == [[1] * 12, [0] * 12]
    layer.set_weights([gamma, beta])
    np.testing.assert_allclose(layer(values), by_numpy(values, groups, gamma, beta, 1e-3), atol=1e-3)


@pytest.mark.parametrize("policy", ["float16", "mixed_float16"])
def test_group_norm_computes_in_float32_whatever_the_policy(policy):
    # Squares of these are beyond float16.
    values = np.random.RandomState(0).normal(0, 5000, (2, 4, 4, 8)).astype(np.float16)
    layer = models.GroupNormalization(2, dtype=policy)
    normal = layer(values)
    assert normal.dtype == tf.float16
    assert {weight.dtype for weight in layer.weights} == {tf.float32}
    np.testing.assert_allclose(normal, by_numpy(values, 2, 1, 0, layer.epsilon), atol=0.005)


@pytest.mark.parametrize(
    "layer", [models.GroupNormalization(4, epsilon=0.5, name="one"), models.Normalise((0.25, 0.5), (2, 4), name="two")]
)
def test_own_layers_are_made_again_from_their_config(layer):
    values = np.random.RandomState(0).normal(size=(2, 3, 3, 8 if layer.name == "one" else 2)).astype(np.float32)
    again = type(layer).from_config(layer.get_config())
    assert again.name == layer.name
    np.testing.assert_array_equal(layer(values), again(values))


@pytest.mark.parametrize(("policy", "norm"), [("float32", "batch"), ("mixed_float16", "group"), ("float16", "batch")])
def test_an_exported_model_gives_the_trained_models_probabilities_in_float32(policy, norm, strategy):
    architecture = describe("resnet8", norm, channels=3)
    images = images_for(architecture)
    tf.keras.mixed_precision.set_global_policy(policy)
    with strategy.scope():
        model = make(architecture, eight_bit_input=policy == "float16")
        stir(model)
    exported = export(model, architecture)
    assert tf.keras.mixed_precision.global_policy().name == policy
    assert {weight.dtype for weight in exported.weights} == {tf.float32}
    probabilities = exported(images)
    expected = tf.nn.softmax(model(images if policy == "float16" else normalised(images)))
    assert probabilities.dtype == tf.float32
    np.testing.assert_allclose(probabilities, expected, atol=1e-5 if policy == "float32" else 0.02)


LOADS = """
import sys
import numpy as np
import tensorflow as tf

images = np.load("images.npy")
for folder in sys.argv[1:]:
    assert tf.keras.models.load_model(folder, compile=False).input_shape == (None, 28, 28, 1)
    loaded = tf.saved_model.load(folder)
    answer = loaded.signatures["serving_default"](image=tf.constant(images))
    np.save(folder, answer["probabilities"].numpy())
assert "tf_ipu_dp" not in sys.modules
"""


@pytest.mark.slow
def test_exported_models_are_loaded_by_tensorflow_alone(tmp_path):
    images = images_for(describe("cnn"), 5)
    np.save(str(tmp_path / "images.npy"), images)
    expected = {}
    for norm in architectures.NORMS:
        architecture = describe("cnn", norm)
        model = make(architecture)
        stir(model)
        exported = export(model, architecture)
        exported.save(str(tmp_path / norm), save_format="tf")
        expected[norm] = exported(images).numpy()
    subprocess.run([sys.executable, "-c", LOADS, *architectures.NORMS], cwd=str(tmp_path), check=True)
    for norm, probabilities in expected.items():
        answer = np.load(str(tmp_path / f"{norm}.npy"))
        np.testing.assert_allclose(answer, probabilities, atol=1e-6)
        np.testing.assert_allclose(answer.sum(axis=1), np.ones(5), atol=1e-5)
