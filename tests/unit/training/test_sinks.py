"""Where the records of a run go."""

from __future__ import annotations

import dataclasses
import io

import pytest
import sample_records

from tf_ipu_dp.config import train_flags
from tf_ipu_dp.datasets import info
from tf_ipu_dp.planning import plan
from tf_ipu_dp.runs import heartbeat, run_folder
from tf_ipu_dp.runs.records import InstanceTimes
from tf_ipu_dp.training import sinks
from tf_ipu_dp.training.console import Console

PLAN = plan.plan_run(train_flags.parse(["--ipus=8", "--epochs=5"]), info.DATASETS["fashion_mini"])
TIMES = InstanceTimes(0, 2.0, 1.5)
RECORD = sample_records.make_training(64, TIMES, samples_per_s=1024.0, ipu_utilisation_pct={"0": 90.0, "1": None})


def test_a_validation_that_is_repeated_is_written_once(tmp_path):
    folder = run_folder.RunFolder(tmp_path)
    sink = sinks.MetricsFileSink(folder, [32])
    for record in (RECORD, *map(sample_records.make_validation, (32, 64, 64))):
        sink.write(record)
    assert folder.read_metrics() == [RECORD, sample_records.make_validation(64)]


def test_the_console_gets_a_line_for_each_record():
    stream = io.StringIO()
    sink = sinks.ConsoleSink(Console(stream), PLAN)
    sink.write(RECORD)
    sink.write(dataclasses.replace(RECORD, loss=None, samples_per_s=None))
    sink.write(sample_records.make_validation(64))
    start = f"step  64/160  epoch {RECORD.epoch:.2f}"
    assert stream.getvalue().splitlines() == [
        f"{start}  loss 0.5000  accuracy 75.0 %  learning rate 0.01  1,024 samples/s (128 per replica)  eta 24 s",
        f"{start}  loss -  accuracy 75.0 %  learning rate 0.01  eta 24 s",
        "validation after step 64: loss 0.5000  accuracy 75.00 %  top 5 99.00 %",
    ]


def test_one_slow_record_changes_the_eta_little():
    speed = sinks.SmoothedRate()
    assert speed.samples_per_s is None
    for rate in [1000.0] * 10 + [500.0]:
        speed.add(sample_records.make_training(64, TIMES, samples_per_s=rate))
    assert 880 < speed.samples_per_s < 920
    for rate in [500.0] * 20:
        speed.add(sample_records.make_training(64, TIMES, samples_per_s=rate))
    assert speed.samples_per_s == pytest.approx(500, rel=0.02)


def test_the_heartbeat_gets_step_and_throughput(tmp_path):
    reporter = heartbeat.StatusReporter(tmp_path, environ={"XDG_RUNTIME_DIR": str(tmp_path)})
    sink = sinks.HeartbeatSink(reporter)
    sink.write(sample_records.make_validation(32))
    assert reporter.status().step == 0
    sink.write(RECORD)
    assert (reporter.status().step, reporter.status().samples_per_s, reporter.status().loss) == (64, 1024.0, 0.5)


def test_the_heartbeat_s_eta_is_smoothed_and_known_from_the_second_record_on(tmp_path):
    reporter = heartbeat.StatusReporter(tmp_path, planned_steps=160, environ={"XDG_RUNTIME_DIR": str(tmp_path)})
    sink = sinks.HeartbeatSink(reporter)
    sink.write(sample_records.make_training(8, TIMES, samples_per_s=100.0))
    assert reporter.status().eta_s is None
    smoothed = sinks.SmoothedRate()
    smoothed.add(sample_records.make_training(8, TIMES, samples_per_s=100.0))
    for step, rate in ((16, 1000.0), (24, 1000.0), (32, 1000.0)):
        record = sample_records.make_training(step, TIMES, samples_per_s=rate)
        sink.write(record)
        smoothed.add(record)
    samples_per_step = 1000.0 * TIMES.seconds / 8
    assert reporter.status().eta_s == pytest.approx((160 - 32) * samples_per_step / smoothed.samples_per_s)
    sink.write(sample_records.make_training(160, TIMES, samples_per_s=1000.0))
    assert reporter.status().eta_s == 0.0
