"""Synthetic data, as TF_POPLAR_FLAGS asks for it: what a program reads and reports, and what the host keeps."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tf_ipu_dp import sdk
from tf_ipu_dp.emulator.runtime import poplar_flags
from tf_ipu_dp.emulator.sdk_api.ipu import ipu_outfeed_queue, utils

ALL = {"infeed", "outfeed", "seed", "hostembedding", "parameters"}
IMAGES = np.full((8, 3), 7, "float32")
LABELS = np.full(8, 2, "int32")


@pytest.fixture
def flagged_scope(scope, monkeypatch):
    """Configures so many IPUs with TF_POPLAR_FLAGS and returns a strategy on them."""

    def configure(ipus, *flags):
        monkeypatch.setenv("TF_POPLAR_FLAGS", " ".join(flags))
        return scope(ipus)

    return configure


@pytest.mark.parametrize(
    ("flags", "categories"),
    [
        ("", set()),
        ("--synthetic_data_categories=infeed,seed", {"infeed", "seed"}),
        ("--use_synthetic_data", ALL),
        ("--use_synthetic_data --synthetic_data_categories=infeed", ALL),
        ("--use_synthetic_data=false --synthetic_data_categories=Infeed", {"infeed"}),
    ],
)
def test_the_two_flags_together_mean_everything(flags, categories, monkeypatch):
    monkeypatch.setenv("TF_POPLAR_FLAGS", flags)
    assert poplar_flags.synthetic_categories(poplar_flags.read({"TF_POPLAR_FLAGS": flags})) == categories
    assert {each.name.lower() for each in utils.SyntheticDataCategory if utils.use_synthetic_data_for(each)} == (
        categories
    )


def compiled_model(**options):
    layers = [tf.keras.layers.Dense(4, kernel_initializer="ones", input_shape=(3,))]
    model = tf.keras.Sequential(layers)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tf.keras.optimizers.SGD(0.1), loss, metrics=["accuracy"], **options)
    return model


@pytest.mark.parametrize("replicas", [1, 2])
def test_synthetic_input_alone_is_ones_and_trains(flagged_scope, replicas):
    with flagged_scope(replicas, *sdk.SYNTHETIC_INPUT).scope():
        model = compiled_model(steps_per_execution=2)
        np.testing.assert_array_equal(model.predict(IMAGES, batch_size=2, verbose=0), np.full((8, 4), 3))
        history = model.fit(IMAGES, LABELS, batch_size=2, epochs=3, verbose=0).history
    assert history["loss"][0] > history["loss"][2] > 0 and history["accuracy"][2] == 1
    assert model.get_weights()[1].argmax() == 1  # the label that the device has made


@pytest.mark.parametrize("replicas", [1, 2])
def test_all_data_synthetic_reports_zeros_and_leaves_the_weights(flagged_scope, replicas):
    with flagged_scope(replicas, "--use_synthetic_data", "--synthetic_data_categories=infeed").scope():
        model = compiled_model(steps_per_execution=2)
        before = model.get_weights()
        history = model.fit(IMAGES, LABELS, batch_size=2, verbose=0).history
        outputs = model.predict(IMAGES, batch_size=2, verbose=0)
    assert history == {"loss": [0.0], "accuracy": [0.0]}
    np.testing.assert_array_equal(outputs, np.zeros((8, 4)))
    for one, other in zip(before, model.get_weights()):
        np.testing.assert_array_equal(one, other)


def test_parameters_alone_are_made_by_the_initializer(flagged_scope):
    flags = ("--synthetic_data_categories=parameters", "--synthetic_data_initializer=2")
    with flagged_scope(1, *flags).scope():
        outputs = compiled_model().predict(IMAGES, batch_size=2, verbose=0)
    np.testing.assert_array_equal(outputs, np.full((8, 4), 3 * 7 * 2 + 2))


@pytest.mark.parametrize("replicas", [1, 2])
def test_outfeed_queues_of_synthetic_data_stay_empty(flagged_scope, replicas):
    strategy = flagged_scope(replicas, "--use_synthetic_data")
    everything = ipu_outfeed_queue.IPUOutfeedQueue()
    last = ipu_outfeed_queue.IPUOutfeedQueue(ipu_outfeed_queue.IPUOutfeedMode.LAST)

    @tf.function
    def loop(iterator):
        for _ in tf.range(2):
            everything.enqueue(tf.reduce_sum(next(iterator)))
        last.enqueue(tf.constant(1.0))

    with strategy.scope():
        strategy.run(loop, args=[iter(tf.data.Dataset.from_tensor_slices(IMAGES))])
    assert everything.dequeue().shape[0] == 0
    with pytest.raises(tf.errors.FailedPreconditionError):
        last.dequeue()


@pytest.mark.parametrize("initializer", ["random", "uniform", "normal"])
def test_random_input_is_finite_but_no_labels(flagged_scope, initializer):
    flags = ("--synthetic_data_categories=infeed", f"--synthetic_data_initializer={initializer}")
    strategy = flagged_scope(1, *flags)
    data = tf.data.Dataset.from_tensors((np.zeros([100], "float32"), np.zeros([100], "int32")))

    @tf.function
    def draw(iterator):
        return next(iterator)

    with strategy.scope():
        images, labels = strategy.run(draw, args=[iter(data)])
    assert np.isfinite(images).all() and np.std(images) > 0.1
    assert np.min(labels) < 0


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_program_within_a_function_reads_synthetic_input(flagged_scope, replicas):
    strategy = flagged_scope(replicas, *sdk.SYNTHETIC_INPUT)
    with strategy.scope():
        iterator = iter(tf.data.Dataset.from_tensor_slices(IMAGES).batch(2, drop_remainder=True))

    @tf.function
    def outer():
        return strategy.run(lambda: next(iterator))

    np.testing.assert_array_equal(outer(), np.ones((2, 3)))
