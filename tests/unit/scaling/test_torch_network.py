"""The models in PyTorch compute what the Keras ones compute, from the same weights."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tf_ipu_dp.planning import architectures
from tf_ipu_dp.scaling.engines import keras_training, torch_network
from tf_ipu_dp.training import models

torch = pytest.importorskip("torch", reason="PyTorch is not installed: python -m tf_ipu_dp.environment ddp")


@pytest.fixture(autouse=True)
def _free_memory():
    yield
    tf.keras.backend.clear_session()


def make_pair(name, norm, size, channels):
    """Returns a Keras model with weights off their initial values, and the PyTorch one with the same."""
    architecture = architectures.describe(name, height=size, width=size, channels=channels, classes=10, norm=norm)
    tf.random.set_seed(1)
    model = models.make_model(architecture, eight_bit_input=False, mean=(0.5,) * channels, deviation=(0.25,) * channels)
    source = np.random.RandomState(2)
    model.set_weights(
        [weight + source.uniform(0.1, 0.3, weight.shape) * (weight.ndim == 1) for weight in model.get_weights()]
    )
    network = torch_network.make_network(architecture)
    torch_network.load_weights(network, {keras_training.variable_name(each): each.numpy() for each in model.weights})
    return model, network.to(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("name", "norm", "size", "channels"),
    [
        ("mlp", "batch", 28, 1),
        ("cnn", "batch", 28, 1),
        ("cnn", "group", 33, 3),
        ("resnet20", "batch", 32, 3),
        ("resnet20", "batch", 33, 3),
        ("resnet8", "group", 28, 1),
        ("resnet18", "batch", 32, 3),
        ("resnet50", "batch", 32, 3),
        ("resnet50", "batch", 45, 1),
    ],
)
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
def test_both_have_the_same_logits(name, norm, size, channels, training):
    model, network = make_pair(name, norm, size, channels)
    images = np.random.RandomState(0).randn(8, size, size, channels).astype(np.float32)
    expected = model(images, training=training).numpy()
    network.train(training)
    with torch.no_grad():
        found = network(torch.from_numpy(images).permute(0, 3, 1, 2)).numpy()
    assert np.abs(found - expected).max() <= 2e-3 * np.abs(expected).max()


@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet20", "resnet18", "resnet50", "resnet101"])
def test_both_have_the_same_number_of_parameters(name):
    architecture = architectures.describe(name, height=32, width=32, channels=3, classes=10, norm="batch")
    state = torch_network.make_network(architecture).state_dict()
    assert sum(each.numel() for name, each in state.items() if "num_batches" not in name) == architecture.parameters


def test_initial_weights_are_spread_like_those_of_keras():
    architecture = architectures.describe("cnn", height=28, width=28, channels=1, classes=10, norm="batch")
    model = models.make_model(architecture, eight_bit_input=False, mean=(0.5,), deviation=(0.25,))
    torch.manual_seed(1)
    network = torch_network.make_network(architecture)
    torch_network.initialise(network)
    state = network.state_dict()
    for variable in model.trainable_weights:
        layer, _, kind = keras_training.variable_name(variable).partition("/")
        name = {"kernel": "weight", "gamma": "weight", "bias": "bias", "beta": "bias"}[kind]
        assert float(state[f"layers.{layer}.{name}"].std()) == pytest.approx(variable.numpy().std(), rel=0.2, abs=1e-7)
