"""The parts of training that need no run; whole runs are in tests/integration/test_training.py."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_ipu_dp import callbacks, training


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 40), st.integers(2, 12), st.integers(0, 2**31))
def test_scores_are_those_of_keras(samples, classes, seed):
    rng = np.random.RandomState(seed)
    logits = rng.normal(size=(samples, classes)) * 5
    labels = rng.randint(0, classes, samples)
    scores = training.score(logits, labels)
    expected = tf.keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
    assert scores.samples == samples
    assert scores.loss == pytest.approx(float(np.mean(expected)), rel=1e-5, abs=1e-6)
    assert scores.top1 == pytest.approx(np.mean(logits.argmax(1) == labels))
    top5 = np.argsort(-logits, axis=1)[:, :5]
    assert scores.top5 == pytest.approx(np.mean([label in row for label, row in zip(labels, top5)]))


def test_equal_logits_do_not_make_a_model_that_says_nothing_right():
    scores = training.score(np.zeros((10, 10)), np.arange(10))
    assert (scores.top1, scores.top5) == (0.1, 0.5)
    assert training.score(np.full((4, 10), np.nan), np.zeros(4, int)).top5 == 0


def test_means_of_a_window_come_out_of_means_since_the_beginning():
    window = training._Window()
    losses = [4.0, 2.0, 3.0, 1.0]
    taken = []
    for number in range(1, 5):
        mean = sum(losses[:number]) / number
        window.add(number, (mean, mean / 10), 8, callbacks.Execution(0.0, 1.0, 0.5, {}))
        if number % 2 == 0:
            taken.append(window.take())
    assert [each.loss for each in taken] == pytest.approx([3.0, 2.0])
    assert [each.accuracy for each in taken] == pytest.approx([0.3, 0.2])
    assert [(each.samples, each.seconds, each.executing_s) for each in taken] == [(16, 3.0, 2.0)] * 2


def test_a_callback_tells_executions_apart_from_what_lies_between_them():
    ticks = iter([0.0, 1.0, 3.0, 7.0, 8.0, 10.0])
    seen = []
    callback = callbacks.AfterExecution(lambda done: not seen.append(done) and len(seen) < 2, lambda: next(ticks))
    callback.set_model(tf.keras.Sequential())
    callback.on_train_begin()
    callback.on_train_batch_begin(0)
    callback.on_train_batch_end(0, {"loss": np.float32(2)})
    assert not callback.model.stop_training
    callback.on_train_batch_begin(1)
    callback.on_train_batch_end(1, {"loss": np.float32(1)})
    assert [(each.idle_s, each.seconds, each.logs) for each in seen] == [
        (2.0, 4.0, {"loss": 2.0}),
        (1.0, 2.0, {"loss": 1.0}),
    ]
    assert callback.model.stop_training
