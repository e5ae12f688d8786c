"""The gradients of a plan against those of the Keras model."""

from __future__ import annotations

import pytest

from tf_ipu_dp.planning import architectures, gradients


@pytest.mark.parametrize("norm", architectures.NORMS)
@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet8", "resnet18", "resnet50"])
def test_every_trainable_variable_of_the_keras_model_has_its_gradient(name, norm):
    import tensorflow as tf

    from tf_ipu_dp.training import models

    architecture = architectures.describe(name, height=32, width=32, channels=3, classes=10, norm=norm)
    model = models.make_model(architecture, eight_bit_input=False, mean=(0.5,) * 3, deviation=(0.25,) * 3)
    expected = {v.name.split(":")[0]: int(tf.size(v)) for v in model.trainable_variables}
    found = {each.variable: each.elements for each in gradients.gradients(architecture)}
    tf.keras.backend.clear_session()
    assert found == expected


@pytest.mark.parametrize(
    ("precision", "deterministic", "size"),
    [("32.32", False, 4), ("16.32", False, 4), ("16.16", False, 2), ("32.32", True, 8), ("16.16", True, 2)],
)
def test_gradients_have_the_type_of_the_weights_and_deterministic_sums_more_bits(precision, deterministic, size):
    assert gradients.bytes_per_element(precision, deterministic) == size
