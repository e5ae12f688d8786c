"""Scores of predictions; sessions on devices are in tests/integration/test_training.py and test_instances.py."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

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
