"""What TensorBoard finds of a run."""

from __future__ import annotations

import dataclasses
import sys

import numpy as np
import pytest
import sample_records
import tensorflow as tf
from tensorboard.backend.event_processing import event_accumulator
from tensorboard.plugins.hparams import plugin_data_pb2

from tf_ipu_dp.config import train_flags
from tf_ipu_dp.runs.records import InstanceTimes
from tf_ipu_dp.training.tensorboard import TensorBoardSink

CONFIG = train_flags.parse(["--ipus=8", "--epochs=3steps", "--prefetch"])
RECORD = sample_records.make_training(
    64, InstanceTimes(0, 2.0, 1.5), samples_per_s=1024.0, ipu_utilisation_pct={"0": 90.0, "1": 60.0, "2": None}
)


def curves(folder):
    """Returns the points of each tag in a folder."""
    found = event_accumulator.EventAccumulator(str(folder)).Reload()
    return {
        tag: [(event.step, float(tf.make_ndarray(event.tensor_proto))) for event in found.Tensors(tag)]
        for tag in found.Tags()["tensors"]
    }


def test_a_folder_with_the_name_of_an_event_file_is_left_alone(tmp_path):
    (tmp_path / "train" / "events.out.tfevents.1.host").mkdir(parents=True)
    TensorBoardSink(tmp_path, CONFIG, []).close()
    assert (tmp_path / "train" / "events.out.tfevents.1.host").is_dir()


def test_training_and_validation_share_their_charts_and_all_ipus_are_one(tmp_path):
    sink = TensorBoardSink(tmp_path, CONFIG, [])
    sink.write(RECORD)
    sink.write(sample_records.make_validation(64))
    sink.close()
    trained, validated = curves(tmp_path / "train"), curves(tmp_path / "validation")
    assert trained["loss"] == validated["loss"] == [(64, 0.5)]
    assert trained["accuracy_pct"] == validated["accuracy_pct"] == [(64, 75.0)]
    assert trained["ipu_utilisation_pct"] == [(64, 75.0)] and validated["top5_pct"] == [(64, pytest.approx(99.0))]
    assert set(trained) == {"loss", "accuracy_pct", "learning_rate", "samples_per_s", "ipu_utilisation_pct"}


def test_a_resumed_run_is_one_curve(tmp_path):
    first = TensorBoardSink(tmp_path, CONFIG, [])
    for step in (16, 32, 48):
        first.write(dataclasses.replace(RECORD, step=step, loss=step / 16))
    first.close()
    # The checkpoint is of step 32; metrics.jsonl was cut there.
    past = [dataclasses.replace(RECORD, step=step, loss=step / 16) for step in (16, 32)]
    second = TensorBoardSink(tmp_path, CONFIG, past)
    second.write(dataclasses.replace(RECORD, step=48, loss=7.0))
    second.close()
    assert curves(tmp_path / "train")["loss"] == [(16, 1.0), (32, 2.0), (48, 7.0)]


def test_the_flags_are_hyperparameters(tmp_path):
    TensorBoardSink(tmp_path, CONFIG, []).close()
    found = event_accumulator.EventAccumulator(str(tmp_path)).Reload()
    content = found.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    flags = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info.hparams
    assert flags["ipus"].number_value == 8 and flags["prefetch"].bool_value is True
    assert flags["model"].string_value == "cnn" and flags["epochs"].string_value == "3steps"
    assert "run_dir" not in flags  # not given


def test_tensorflow_keeps_no_copy_of_the_numbers_that_are_written(tmp_path):
    sink = TensorBoardSink(tmp_path, train_flags.parse([]), [])
    steps = [10**9 + number for number in range(5)]
    before = [sys.getrefcount(step) for step in steps]
    for step in steps:
        sink.write(sample_records.make_training(step))
    sink.close()
    del step  # a reference to the last one
    assert [sys.getrefcount(step) for step in steps] == before


def test_example_images_are_shown_with_their_classes(tmp_path):
    images = np.arange(2 * 4 * 4, dtype=np.uint8).reshape(2, 4, 4, 1)
    TensorBoardSink(tmp_path, CONFIG, [], (images, ["coat", "bag"])).close()
    found = event_accumulator.EventAccumulator(str(tmp_path / "train")).Reload()
    (event,) = found.Tensors("examples")
    width, height, *encoded = tf.make_ndarray(event.tensor_proto)
    assert (width, height) == (b"4", b"4")
    np.testing.assert_array_equal([tf.io.decode_png(each).numpy() for each in encoded], images)
    assert found.SummaryMetadata("examples").summary_description == "0: coat, 1: bag"
