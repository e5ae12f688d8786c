"""Own models and their tasks: what cannot be trained is one sentence, before anything is trained."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tf_ipu_dp
from tf_ipu_dp import cli, user_code
from tf_ipu_dp.config import train_flags
from tf_ipu_dp.planning.plan import plan_run
from tf_ipu_dp.training import own_models

FLOATS = np.random.RandomState(0).normal(size=(20, 3)).astype(np.float32)
DATA = tf_ipu_dp.Data((FLOATS, FLOATS))
ONE = tf_ipu_dp.Data((FLOATS, np.float32(FLOATS[:, :1] > 0)))


def refusal(build, data=DATA):
    references = [user_code.register(build, "model"), user_code.register(lambda: data, "data")]
    with pytest.raises(cli.UsageError) as caught:
        own_models.learn(train_flags.parse([f"--model={references[0]}", f"--dataset={references[1]}"]))
    assert len(caught.value.sentences) == 1
    return str(caught.value)


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ({"loss": "mean_square_error"}, "has the loss 'mean_square_error', which Keras does not know. Did you mean '"),
        ({"loss": "zzz"}, "has the loss 'zzz', which Keras does not know. Give one of Keras' names, or a function."),
        ({"loss": "mse", "metrics": ["mean_absolut_error"]}, "has the metric 'mean_absolut_error', which Keras does n"),
        ({"loss": "mse", "weighted_metrics": "zzz"}, "has the metric 'zzz', which Keras does not know. Give one of"),
    ],
)
def test_names_that_keras_does_not_know_are_one_sentence(task, words):
    said = refusal(lambda: tf_ipu_dp.Task(tf.keras.Sequential([tf.keras.layers.Dense(3)]), **task))
    assert said.startswith("--model=__main__:model ") and words in said


@pytest.mark.parametrize("name", ["mae", "accuracy", "acc", "AUC", "MeanSquaredError"])
def test_names_that_keras_knows_are_taken(name):
    def build():
        return tf_ipu_dp.Task(tf.keras.Sequential([tf.keras.layers.Dense(1)]), loss="mse", metrics=[name])

    model, data = user_code.register(build, "model"), user_code.register(lambda: ONE, "data")
    found = own_models.learn(train_flags.parse([f"--model={model}", f"--dataset={data}"]))
    assert found.own_model is not None and found.own_model.own.has_own_loss


def test_a_model_that_needs_classes_says_why_there_are_none():
    stream = tf.data.Dataset.from_tensor_slices((FLOATS, np.arange(20) % 2))
    said = refusal(
        lambda classes: tf.keras.Sequential([tf.keras.layers.Dense(classes)]), tf_ipu_dp.Data(stream, stream)
    )
    assert said.endswith(
        "; classes is None, because the targets of __main__:data are one int32, not class numbers. Of a stream say how "
        "many there are: tf_ipu_dp.Data(..., classes=N)."
    )


def test_outputs_in_a_dictionary_may_have_the_names_of_their_layers():
    def build(input_shape):
        layers, inputs = tf.keras.layers, tf.keras.Input(input_shape)
        outputs = {"price": layers.Dense(1, name="price")(inputs), "kind": layers.Dense(2, name="head")(inputs)}
        return tf_ipu_dp.Task(tf.keras.Model(inputs, outputs), loss={"price": "mse", "kind": "mae"})

    data = tf_ipu_dp.Data((FLOATS, {"price": FLOATS[:, 0], "kind": FLOATS[:, :2]}))
    model, reference = user_code.register(build, "model"), user_code.register(lambda: data, "data")
    found = own_models.learn(train_flags.parse([f"--model={model}", f"--dataset={reference}"]))
    assert sorted(name for name, _ in found.own_model.own.layers) == ["head", "kind", "price"]


def test_a_compiled_model_is_compiled_again_and_the_plan_says_so():
    def build():
        model = tf.keras.Sequential([tf.keras.layers.Dense(3)])
        model.compile("adam", "mse")
        return tf_ipu_dp.Task(model, loss="mae")

    model, reference = user_code.register(build, "model"), user_code.register(lambda: DATA, "data")
    cfg = train_flags.parse([f"--model={model}", f"--dataset={reference}", "--optimizer=sgd", "--micro_batch_size=4"])
    (note,) = plan_run(cfg, own_models.learn(cfg)).notes
    assert note == (
        f"{model} returns a model that is compiled, which has no effect: the optimizer is --optimizer=sgd, loss and "
        "metrics are those of tf_ipu_dp.Task(model, loss=...)."
    )
