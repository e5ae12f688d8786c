"""Recordings written and read back."""

from __future__ import annotations

import dataclasses
import json
import os

import pytest

from tf_ipu_dp import cli
from tf_ipu_dp.monitoring import devices, recorder, snapshots
from tf_ipu_dp.runs.records import Verdict


def test_a_recording_is_json_lines_that_can_be_read_back(record, snapshot):
    path = record(snapshot(0, "compiling"), snapshot(1), snapshot(2))
    head, *lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    assert (head["schema"], head["sdk"], len(head["ipus"]), len(lines)) == (1, "poplar", 2, 3)
    assert lines[0]["ipus"][1]["utilisation_pct"] == 81.0 and "power_w" not in lines[0]["ipus"][1]
    found = recorder.read(path)
    assert [each.time for each in found.samples] == [1e9, 1e9 + 1, 1e9 + 2]


def test_an_hour_of_64_idle_ipus_is_some_megabytes(record):
    idle = snapshots.Snapshot(0.0, "poplar", tuple(devices.Ipu(id=n, utilisation_pct=0.0) for n in range(64)), ())
    assert 3600 * len(record(idle).read_bytes().splitlines()[1]) < 20e6


def test_a_line_that_was_cut_off_by_a_crash_is_skipped(record, snapshot):
    path = record(snapshot(0), snapshot(1), snapshot(2))
    path.write_bytes(path.read_bytes()[:-30])
    assert len(recorder.read(path).samples) == 2


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("", "is not a recording of this monitor. Make one with --record=OTHER.jsonl alone"),
        ("[]\n5\n", "is not a recording of this monitor"),
        (
            '{"kind": "tf_ipu_dp recording", "schema": 99, "ipus": []}',
            "has schema 99; this version reads schema 1. .* record again with --record=OTHER.jsonl",
        ),
        (
            '{"kind": "tf_ipu_dp recording", "schema": 1, "ipus": []}',
            "has 0 samples; a report needs two or more. Record for longer, with --record=OTHER.jsonl",
        ),
    ],
)
def test_a_file_that_is_no_recording_is_refused(tmp_path, text, refusal):
    (tmp_path / "x").write_text(text, encoding="utf-8")
    with pytest.raises(cli.UsageError, match=refusal):
        recorder.read(tmp_path / "x")


def test_an_existing_file_is_not_overwritten_and_a_missing_folder_is_named(record, snapshot, tmp_path):
    path = record(snapshot(0))
    with pytest.raises(cli.UsageError, match="already exists and is not overwritten"):
        recorder.Recorder(path, 1.0)
    with pytest.raises(cli.UsageError, match=r"cannot be written \(No such file or directory\)"):
        recorder.Recorder(tmp_path / "no" / "a.jsonl", 1.0)


def test_a_saved_checkpoint_is_recorded_once(tmp_path):
    run = tmp_path / "run"
    (run / "checkpoints" / "step-00000001").mkdir(parents=True)
    process = snapshots.Process(7, "ann", "x", 1.0, (0,), "running", run_dir=str(run), run="run", instance=0)
    writer = recorder.Recorder(tmp_path / "a.jsonl", 1.0)
    now = (run / "checkpoints" / "step-00000001").stat().st_mtime
    for seconds in (now + 10, now + 11):
        writer.write(snapshots.Snapshot(seconds, "poplar", (devices.Ipu(id=0, pid=7),), (process,)))
    (run / "checkpoints" / "step-00000002").mkdir()
    later = run / "checkpoints" / "step-00000002"
    os.utime(later, (now + 12, now + 12))
    for seconds in (now + 12, now + 13):
        writer.write(snapshots.Snapshot(seconds, "poplar", (devices.Ipu(id=0, pid=7),), (process,)))
    writer.close()
    assert [len(each.saves) for each in recorder.read(writer.path).samples] == [0, 0, 1, 0]


def test_throughput_loss_and_verdicts_are_read_back_and_a_verdict_is_written_once(record, snapshot, tmp_path):
    def with_run(seconds, sentence):
        found = snapshot(seconds)
        run = dataclasses.replace(found.processes[0], run_dir="/runs/a", host="h", samples_per_s=9.0, loss=0.5)
        return dataclasses.replace(found, processes=(run,), verdicts={"/runs/a": Verdict("input", sentence)})

    path = record(with_run(0, "One."), with_run(1, "One."), with_run(2, "Two."))
    found = recorder.read(path)
    assert [[each.sentence for each in sample.verdicts] for sample in found.samples] == [["One."], [], ["Two."]]
    process = found.samples[0].processes[0]
    assert (process.host, process.samples_per_s, process.loss, process.key) == ("h", 9.0, 0.5, ("h", 7))


def test_a_recording_that_cannot_be_read_is_refused_with_what_works(tmp_path):
    with pytest.raises(
        cli.UsageError,
        match=r"cannot be read \(it is a folder and not a file\). Give a file that --record=FILE has made",
    ):
        recorder.read(tmp_path)
