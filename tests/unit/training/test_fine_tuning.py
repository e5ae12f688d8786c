"""First weights from every kind of source: loaded to the bit, and listed by layer."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tensorflow as tf

from tf_ipu_dp import cli
from tf_ipu_dp.training import fine_tuning

layers = tf.keras.layers
WRITES_ARCHIVES = hasattr(tf.keras.Model, "get_build_config")  # .keras is an .h5 file in earlier releases of Keras


def make(classes=3, first="words", *, wide=4):
    """Returns a model with a layer of each kind that is saved differently: in a model, with a cell, with parts."""
    tf.keras.backend.reset_uids()
    inner_input = tf.keras.Input((6, 4))
    inner = layers.Conv1D(4, 3, padding="same", name="inner_conv")(inner_input)
    inner = layers.BatchNormalization(name="inner_norm")(inner)
    backbone = tf.keras.Model(inner_input, inner, name="backbone")
    tokens = tf.keras.Input((6,), dtype="int32", name="tokens")
    x = layers.Embedding(7, 4, name=first)(tokens)
    x = backbone(x)
    x = layers.MultiHeadAttention(2, 2, name="attention")(x, x)
    x = layers.Bidirectional(layers.SimpleRNN(wide), name="both_ways")(x)
    x = layers.Dense(5)(x)
    x = layers.Dense(5)(x)
    return tf.keras.Model(tokens, layers.Dense(classes, name="head")(x))


class Subclassed(tf.keras.Model):
    def __init__(self):
        super().__init__(name="whole")
        self.hidden = layers.Dense(4, name="hidden")
        self.head = layers.Dense(2, name="head")

    def call(self, inputs):
        return self.head(self.hidden(inputs))


def fill(model, seed=1):
    random = np.random.RandomState(seed)
    model.set_weights([random.normal(size=each.shape).astype(np.float32) for each in model.get_weights()])
    return model


WRITERS = {
    "model.h5": lambda model, path: model.save(path, save_format="h5"),
    "weights.h5": lambda model, path: model.save_weights(path),
    "model.weights.h5": lambda model, path: model.save_weights(path),
    "model.keras": lambda model, path: model.save(path),
    "saved_model": lambda model, path: model.save(path, save_format="tf"),
    "checkpoint_of_weights": lambda model, path: model.save_weights(path),
    "checkpoint": lambda model, path: tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(path),
}
ALL = ("words", "inner_conv", "inner_norm", "attention", "both_ways", "dense", "dense_1", "head")


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_source_is_loaded_to_the_bit_and_listed_by_layer(name, tmp_path):
    saved = fill(make())
    saved.compile(optimizer=tf.keras.optimizers.Adam(), loss="mse")
    pairs = [(tf.zeros_like(each), each) for each in saved.trainable_variables]
    saved.optimizer.apply_gradients(pairs)  # so that it has a state, which is saved too
    path = str(tmp_path / name)
    WRITERS[name](saved, path)

    same = make()
    loaded = fine_tuning.load(same, path)
    assert loaded.loaded == ALL and not (loaded.missing or loaded.unfit or loaded.unused)
    for variable, expected in zip(same.weights, saved.get_weights()):
        np.testing.assert_array_equal(variable.numpy(), expected, err_msg=variable.name)
    assert loaded.render() == (
        f"Weights from {path}: 8 layers loaded (words, inner_conv, inner_norm, attention, both_ways, dense, dense_1, "
        "head)"
    )

    other = make(classes=9, first="letters")
    before = other.get_layer("letters").get_weights()[0]
    loaded = fine_tuning.load(other, path)
    assert loaded.unfit == ("head (5 x 3 there, 5 x 9 here)",)
    if name == "model.weights.h5" and WRITES_ARCHIVES:  # layers have no names there, only their kind and order
        assert loaded.loaded == ("letters", *ALL[1:-1])
        return
    assert (loaded.loaded, loaded.missing, loaded.unused) == (ALL[1:-1], ("letters",), ("words",))
    np.testing.assert_array_equal(other.get_layer("letters").get_weights()[0], before)
    assert loaded.render().splitlines()[1:] == [
        "  not in the source, drawn from the seed: letters",
        "  other shapes, drawn from the seed: head (5 x 3 there, 5 x 9 here)",
        "  left out, not in the model: words",
    ]


@pytest.mark.parametrize("name", ["weights.h5", "saved_model", "checkpoint_of_weights"])
def test_a_subclassed_model_is_known_by_its_layers_whatever_calls_it(name, tmp_path):
    saved = Subclassed()
    saved(np.zeros([2, 3], np.float32))
    fill(saved)
    if name == "saved_model":
        saved.predict(np.zeros([2, 3], np.float32), verbose=0)  # so that Keras knows the shape to save it with
    WRITERS[name](saved, str(tmp_path / name))
    inputs = tf.keras.Input([3])
    wrapped = tf.keras.Model(inputs, Subclassed()(inputs))
    assert fine_tuning.load(wrapped, str(tmp_path / name)).loaded == ("hidden", "head")
    for variable, expected in zip(wrapped.weights, saved.get_weights()):
        np.testing.assert_array_equal(variable.numpy(), expected, err_msg=variable.name)


def test_sources_that_cannot_be_used_are_one_sentence(tmp_path):
    model = make()
    (tmp_path / "damaged.h5").write_bytes(b"\x89HDF\r\n\x1a\n and nothing else")
    (tmp_path / "damaged.keras").write_bytes(b"PK\x03\x04 and nothing else")
    (tmp_path / "text.h5").write_text("no weights")
    other = tf.keras.Sequential([tf.keras.Input([3]), layers.Dense(2, name="elsewhere")])
    other.save_weights(str(tmp_path / "other.h5"))
    for name, message in (
        ("damaged.h5", r"damaged.h5 cannot be read \(.+\)\.$"),
        ("damaged.keras", r"damaged.keras cannot be read \(File is not a zip file\)\.$"),
        ("text.h5", "text.h5 is not a run with a checkpoint, a checkpoint, an .h5 or .keras file, or a SavedModel."),
        ("nowhere", "nowhere is not a run with a checkpoint"),
        ("other.h5", "other.h5 has no layer that fits the model: it has elsewhere."),
    ):
        with pytest.raises(cli.UsageError, match=re.escape(f"--init_from={tmp_path}/") + message) as caught:
            fine_tuning.load(model, str(tmp_path / name))
        assert "\n" not in str(caught.value)
