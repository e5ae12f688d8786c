"""The parts of training that need no run; whole runs are in tests/integration/test_training.py."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tf_ipu_dp import cli
from tf_ipu_dp.training import executions, meters


def test_means_of_a_window_come_out_of_means_since_the_beginning():
    window = meters.Window()
    losses = [4.0, 2.0, 3.0, 1.0]
    taken = []
    for number in range(1, 5):
        mean = sum(losses[:number]) / number
        window.add(number, mean, mean / 10, 8, executions.Execution(0.0, 1.0, 0.5, {}))
        if number % 2 == 0:
            taken.append(window.take())
    assert [each.loss for each in taken] == pytest.approx([3.0, 2.0])
    assert [each.accuracy for each in taken] == pytest.approx([0.3, 0.2])
    assert [(each.samples, each.executions, each.seconds, each.executing_s) for each in taken] == [
        (16, 2, 3.0, 2.0)
    ] * 2


def test_a_metric_that_is_no_mean_is_the_one_since_the_beginning():
    window = meters.Window([True, False])
    taken = []
    for number, area in enumerate([0.9, 0.5, 0.3], 1):  # as means, the last would be -0.1
        window.add(number, 1.0, float("nan"), 8, executions.Execution(0.0, 1.0, 0.5, {}), [area, area])
        taken.append(window.take().others)
    assert taken[2] == pytest.approx((0.3, -0.1))


def test_a_callback_tells_executions_apart_from_what_lies_between_them():
    ticks = iter([0.0, 1.0, 3.0, 7.0, 8.0, 10.0])
    seen = []
    callback = executions.TrainingCallback(
        lambda done: not seen.append(done) and len(seen) < 2, clock=lambda: next(ticks)
    )
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


@pytest.mark.parametrize("name", ["LearningRateScheduler", "ReduceLROnPlateau"])
def test_a_callback_that_sets_the_learning_rate_is_refused_before_training(name):
    given = getattr(tf.keras.callbacks, name)
    made = given(lambda epoch: 0.1) if name == "LearningRateScheduler" else given()
    with pytest.raises(cli.UsageError) as caught:
        executions.require_callbacks([tf.keras.callbacks.TerminateOnNaN(), made], "callbacks has", "takes")
    assert str(caught.value) == (
        f"callbacks has {name}, which sets the learning rate. That is the part of --learning_rate and --lr_schedule: "
        "leave it out."
    )
