"""Scores of own tasks, compared with what Keras computes for all samples at once."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tf_ipu_dp
from tf_ipu_dp.datasets.info import TensorInfo
from tf_ipu_dp.distributed.world import World
from tf_ipu_dp.training import own_models
from tf_ipu_dp.training.task_scores import TaskScorer

RANDOM = np.random.RandomState(0)
TOKENS = RANDOM.randint(1, 11, (300, 6)).astype(np.int32)  # more than are scored at once
for row, length in enumerate(RANDOM.randint(1, 7, 300)):
    TOKENS[row, length:] = 0
NEXT = np.roll(TOKENS, -1, axis=1)


def make_task():
    layers = tf.keras.layers
    model = tf.keras.Sequential(
        [
            tf.keras.Input([6], dtype="int32"),
            layers.Embedding(11, 4, mask_zero=True),
            layers.LSTM(5, return_sequences=True),
            layers.Dense(11),
        ]
    )
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return tf_ipu_dp.Task(model, loss=loss, metrics=["sparse_categorical_accuracy"])


def test_places_that_a_mask_leaves_out_count_in_no_score():
    task = make_task()
    outputs = task.model(TOKENS)
    (mask,) = own_models.masks_of(outputs)
    scores = TaskScorer(task.model, task, "mine.py:build").score(
        np.asarray(outputs), NEXT, World(), masks=[np.asarray(mask)]
    )
    logits: np.ndarray = np.asarray(outputs, np.float64)
    losses = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, NEXT[..., None], -1)[..., 0]
    kept = TOKENS > 0
    assert scores.samples == 300 and scores.loss == pytest.approx(losses[kept].mean(), rel=1e-5)
    right = (logits.argmax(-1) == NEXT)[kept].mean()
    assert scores.metrics["sparse_categorical_accuracy"] == pytest.approx(right, rel=1e-5)
    without = TaskScorer(task.model, task, "mine.py:build").score(np.asarray(outputs), NEXT, World())
    assert without.loss == pytest.approx(losses.mean(), rel=1e-5) and without.loss != scores.loss


def test_metrics_that_are_no_means_over_samples_are_known():
    class Worst(tf.keras.metrics.Metric):
        def __init__(self, name="worst", **settings):
            super().__init__(name, **settings)
            self.most = self.add_weight(name="most", initializer="zeros")

        def update_state(self, targets, outputs, sample_weight=None):
            self.most.assign(tf.maximum(self.most, tf.reduce_max(tf.abs(targets - outputs))))

        def result(self):
            return self.most

    model = tf.keras.Sequential([tf.keras.Input([2]), tf.keras.layers.Dense(1, activation="sigmoid")])
    metrics = ["mae", "accuracy", tf.keras.metrics.RootMeanSquaredError(name="rmse"), tf.keras.metrics.AUC(), Worst()]
    scorer = TaskScorer(model, tf_ipu_dp.Task(model, loss="mse", metrics=metrics), "mine.py:build")
    assert scorer.try_out(TensorInfo((), "float32")) == ("mae", "accuracy", "rmse", "auc", "worst")
    assert scorer.running_metrics == {"rmse", "auc", "worst"}
