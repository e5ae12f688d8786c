"""Scores of predictions; sessions on devices are in tests/integration/test_training.py and test_instances.py."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_ipu_dp.config import train_flags
from tf_ipu_dp.datasets import lookup
from tf_ipu_dp.distributed.world import World
from tf_ipu_dp.emulator.sdk_api import gcipuinfo, ipu, popdist
from tf_ipu_dp.planning import plan
from tf_ipu_dp.sdk import Sdk
from tf_ipu_dp.training import session


@settings(max_examples=50)
@given(st.integers(1, 40), st.integers(2, 12), st.integers(0, 2**31))
def test_scores_are_those_of_keras(samples, classes, seed):
    rng = np.random.RandomState(seed)
    logits = rng.normal(size=(samples, classes)) * 5
    labels = rng.randint(0, classes, samples)
    scores = session.score(logits, labels)
    expected = tf.keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
    assert scores.samples == samples
    assert scores.loss == pytest.approx(float(np.mean(expected)), rel=1e-5, abs=1e-6)
    assert scores.top1 == pytest.approx(np.mean(logits.argmax(1) == labels))
    top5 = np.argsort(-logits, axis=1)[:, :5]
    assert scores.top5 == pytest.approx(np.mean([label in row for label, row in zip(labels, top5)]))


def test_equal_logits_do_not_make_a_model_that_says_nothing_right():
    scores = session.score(np.zeros((10, 10)), np.arange(10))
    assert (scores.top1, scores.top5) == (0.1, 0.5)
    assert session.score(np.full((4, 10), np.nan), np.zeros(4, int)).top5 == 0


def planned(*words):
    cfg = train_flags.parse(["--model=mlp", "--dataset=synthetic", "--image_size=28", *words])
    return cfg, plan.plan_run(cfg, lookup.find(cfg.dataset, cfg.data_dir, cfg.image_size))


EMULATOR = Sdk("emulator", ipu, popdist, gcipuinfo)


@pytest.mark.parametrize(
    ("words", "overflow_is_nan", "rounds"),
    [
        (["--precision=32.32"], False, False),
        (["--precision=16.32"], True, False),
        (["--precision=16.16"], True, True),
        (["--precision=16.16", "--deterministic"], True, False),
    ],
)
def test_sixteen_bit_runs_see_overflows_and_replicas_that_round_by_chance_round_alike(words, overflow_is_nan, rounds):
    config = session.make_ipu_config(*planned(*words), EMULATOR)
    assert config.floating_point_behaviour.nanoo is overflow_is_nan
    assert config.floating_point_behaviour.esr.name == ("ON" if rounds else "OFF")
    assert config.experimental.enable_prng_stability is rounds


@pytest.mark.parametrize(
    ("words", "portable"),
    [([], False), (["--deterministic"], True), (["--ipus=2"], False), (["--ipus=2", "--instances=2"], True)],
)
def test_the_seed_means_the_same_on_all_instances(words, portable):
    config = session.make_ipu_config(*planned(*words), EMULATOR)
    expected = {"target.deterministicWorkers": "portable"} if portable else {}
    assert config.compilation_poplar_options == expected


@pytest.mark.parametrize("pipeline", [(), ("--pipeline_stages=2",)])
def test_the_validated_model_returns_the_outputs_of_every_replica(pipeline, emulator_dir):
    """The trained model reduces its metrics over replicas; the same setting would reduce predictions too."""
    cfg, run = planned("--ipus=4", "--micro_batch_size=16", *pipeline)
    config = session.make_ipu_config(cfg, run, EMULATOR)
    session.select_ipus(config, run, EMULATOR, distributed=False)
    session.configure(config, run, EMULATOR)
    try:
        device = session.Device(ipu.ipu_strategy.IPUStrategy(), distributed=False, world=World())
        made = session.make_session(cfg, run, EMULATOR, device, session.open_source(cfg, run))
        images = np.random.RandomState(0).rand(512, 28, 28, 3).astype("float32")
        steps = 512 // 16
        made.evaluator.compile(steps_per_execution=steps // run.topology.local_replicas)
        outputs = made.evaluator.predict(images, batch_size=16, verbose=0)
        np.testing.assert_allclose(outputs, made.model(images), atol=1e-4)
    finally:
        ipu.config.reset_ipu_configuration()
