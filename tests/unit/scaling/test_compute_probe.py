"""The parts of the calibration of compute that need no processes."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf_ipu_dp import cli
from tf_ipu_dp.config import train_flags
from tf_ipu_dp.runs.records import InstanceTimes, TrainingRecord
from tf_ipu_dp.scaling import compute_probe
from tf_ipu_dp.scaling.compute_calibration import Shape
from tf_ipu_dp.scaling.records import Cell

SHAPE = Shape(32, 1, 1, 1)


def make_record(update_s, executions=10, **changes):
    seconds = update_s * executions
    times = InstanceTimes(0, seconds, 0.9 * seconds, 0.1 * seconds, 0.0, None, 0.2 * seconds, 0.0)
    times = dataclasses.replace(times, **changes)
    return TrainingRecord(1, 1.0, None, None, 0.1, instances=(times,), executions=executions)


def test_the_parts_of_records_are_those_of_one_update():
    found = compute_probe.time_of_records(SHAPE, [[make_record(0.01)] * 3], 1)
    parts = (found.compute_s, found.input_wait_s, found.optimizer_s, found.overhead_s)
    assert parts == pytest.approx((0.006, 0.001, 0.002, 0.001))
    assert found.total_s == pytest.approx(0.01) and found.deviation_s == pytest.approx(0.0, abs=1e-9)


def test_an_execution_may_make_several_updates():
    assert compute_probe.time_of_records(SHAPE, [[make_record(0.01)] * 3], 5).total_s == pytest.approx(0.002)


def test_a_moment_in_which_another_job_had_the_cores_does_not_count():
    calm = [make_record(0.01, executions=50)] * 4
    found = compute_probe.time_of_records(SHAPE, [[*calm[:2], make_record(0.05, executions=50), *calm[2:]]], 1)
    assert found.total_s == pytest.approx(0.01) and found.high > 1.5


def test_the_time_is_that_of_all_processes():
    found = compute_probe.time_of_records(SHAPE, [[make_record(0.01)] * 3, [make_record(0.05)]], 1)
    assert found.total_s == pytest.approx(0.02) and found.high > 1.5 and found.deviation_s > 0


def test_what_the_device_does_not_report_is_compute():
    record = make_record(0.01, input_wait_s=None, optimizer_s=None)
    found = compute_probe.time_of_records(SHAPE, [[record]], 1)
    assert (found.compute_s, found.input_wait_s, found.optimizer_s) == pytest.approx((0.009, 0.0, 0.0))


def test_records_without_timed_executions_are_refused():
    with pytest.raises(cli.UsageError, match="no record that was timed"):
        compute_probe.time_of_records(SHAPE, [[make_record(0.01, executions=0)]], 1)


@given(st.lists(st.floats(1e-4, 1.0), min_size=1, max_size=12))
def test_the_time_lies_between_the_fastest_and_the_slowest_record(times):
    found = compute_probe.time_of_records(SHAPE, [[make_record(each) for each in times]], 1)
    assert min(times) * 0.999 <= found.total_s <= max(times) * 1.001
    assert found.low <= 1.0 <= found.high


def test_a_process_gets_the_layout_of_its_shape_and_never_ends():
    config = train_flags.parse(
        ["--model=mlp", "--ipus=8", "--instances=4", "--hosts=2", "--global_batch_size=512", "--run_dir=runs/a"]
    )
    words = compute_probe.shape_words(config, Shape(16, 6, 2, 4), 100, 0.01)
    found = train_flags.parse(words)
    assert (found.ipus, found.instances, found.hosts) == (2, 1, None)
    assert (found.micro_batch_size, found.gradient_accumulation, found.global_batch_size) == (16, 3, None)
    assert (found.updates_per_epoch, found.log_every, found.run_dir) == (100, 25, None)
    assert found.model == "mlp" and found.epochs.count * 100 * 0.01 > 3600


def test_other_layouts_share_a_file_and_other_models_do_not(tmp_path):
    def path(*words):
        return compute_probe.cache_path(
            {"XDG_CACHE_HOME": str(tmp_path)}, compute_probe.facts_of(train_flags.parse(words))
        )

    first = path("--model=mlp", "--ipus=1")
    assert first.parent == tmp_path / "tf_ipu_dp" / "scaling"
    assert path("--model=mlp", "--ipus=4", "--instances=4", "--micro_batch_size=64", "--seed=3") == first
    assert path("--model=cnn", "--ipus=1") != first
    assert path("--model=mlp", "--ipus=1", "--precision=16.16") != first


def test_a_damaged_file_is_measured_again(tmp_path):
    path = tmp_path / "compute.json"
    assert compute_probe.load(path) is None
    path.write_text('{"schema": 1}')
    assert compute_probe.load(path) is None


def test_other_engines_are_not_calibrated():
    cell = Cell("ddp-1", "ddp", 1, 1, 1, 1, 32, 1, 32, ("--ipus=1",))
    with pytest.raises(cli.UsageError, match="needs a cell of tf_ipu_dp"):
        compute_probe.probe([], [cell], print)
