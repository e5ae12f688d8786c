"""The calibration of compute with real processes, and the parts of real runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tf_ipu_dp import cli
from tf_ipu_dp.runs.records import TrainingRecord
from tf_ipu_dp.runs.run_folder import RunFolder
from tf_ipu_dp.scaling import compute_probe, decomposition, our_runs, prediction
from tf_ipu_dp.scaling.records import Cell

WORDS = ["--model=mlp", "--dataset=synthetic", "--image_size=28", "--sdk=emulator"]


def make_cell(instances, *words):
    layout = (f"--ipus={instances}", f"--instances={instances}", "--micro_batch_size=32", *words)
    return Cell(
        f"tf_ipu_dp-{instances}", "tf_ipu_dp", instances, instances, instances, 1, 32, 1, 32 * instances, layout
    )


@pytest.fixture
def cache(tmp_path, monkeypatch, emulator_dir):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tf_ipu_dp" / "scaling"


def test_shapes_are_measured_once_and_kept(cache, monkeypatch):
    monkeypatch.setattr(compute_probe, "_cores", lambda: 2)  # on which four instances take turns
    said = []
    cells = [make_cell(1), make_cell(2), make_cell(4)]
    found = compute_probe.probe(WORDS, cells, said.append)
    assert [each.shape.processes for each in found.times] == [1, 2, 4]
    assert all(each.compute_s > 0 and each.optimizer_s > 0 and each.overhead_s > 0 for each in found.times)
    assert found.emulated and found.bucket_bytes == (2_576_680,)
    assert [job.shape.processes for job in found.shared_exchanges] == [2, 4]
    assert all(0 < job.seconds < job.update_s for job in found.shared_exchanges)
    assert [each.split(" that ")[0] for each in said[1:]] == [
        f"calibrating the exchange of {instances} instances" for instances in (2, 4)
    ]
    assert said[0].startswith("calibrating the compute of 3 layouts") and len(said) == 3
    assert len(list(cache.iterdir())) == 1
    assert compute_probe.probe(WORDS, cells, said.append) == found and len(said) == 3
    (predicted,) = prediction.predict(cells, found, None)
    assert predicted.cell == "tf_ipu_dp-1" and predicted.low_s <= predicted.update_s <= predicted.high_s


def test_a_probe_that_cannot_train_says_why_and_leaves_no_process(cache, monkeypatch):
    monkeypatch.setenv("TF_POPLAR_FLAGS", "--no_such_flag=1")
    with pytest.raises(cli.UsageError, match=r"The calibration of compute ended with 1: .*no_such_flag"):
        compute_probe.probe(WORDS, [make_cell(2)], lambda text: None)
    assert not any("scaling.probe_program" in command for command in commands_of_children())


def commands_of_children():
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [Path(f"/proc/{child}/cmdline").read_bytes().decode(errors="replace") for child in children]


@pytest.mark.parametrize("instances", [1, 2])
def test_the_parts_of_an_update_add_up_to_its_time_by_other_clocks(instances, run_command, tmp_path, emulator_dir):
    words = [*WORDS, *make_cell(instances).words, "--epochs=60steps", "--log_every=20", f"--run_dir={tmp_path / 'run'}"]
    command = "launch" if instances > 1 else "train"
    made = run_command(command, *(["--"] if instances > 1 else []), *words, **our_runs.TIMED_OPTIMIZER)
    assert made.returncode == 0, made.stderr
    folder = RunFolder(tmp_path / "run")
    records = [each for each in folder.read_metrics() if isinstance(each, TrainingRecord) and each.step > 20]
    every = [each for each in folder.read_metrics() if isinstance(each, TrainingRecord)]
    measured = our_runs.measure(make_cell(instances), every, 20, on_the_wall=True)
    clocks = our_runs.read_clocks(measured, every, records, folder.read_result().times.between_s)
    parts = decomposition.decompose(records, folder.read_exchange_times(), measured.updates, clocks)
    # A study says how well they close; on a busy machine the clocks of so few updates differ by more than 3 %.
    assert parts.total_s == pytest.approx(measured.update_s, rel=0.1)
    assert parts.compute_s > 0 and parts.optimizer_s > 0 and parts.overhead_s > 0
    assert (parts.collective_s > 0) == (instances > 1)
