from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import xml.etree.ElementTree as ET

import pytest

from tf_ipu_dp import cli
from tf_ipu_dp.monitoring import devices, recording, snapshots


def snapshot(seconds, phase="training", ipus=2, **changes):
    found = [
        devices.Ipu(id=n, board_serial=f"b{n // 4}", utilisation_pct=80.0 + n, pid=7, board_power_w=100.0, **changes)
        for n in range(ipus)
    ]
    process = snapshots.Process(
        7, "<b>ann</b>", "train\x1b[31m", 1.0, tuple(range(ipus)), "running", run="r$1_$", instance=0, phase=phase
    )
    return snapshots.Snapshot(1e9 + seconds, "poplar", tuple(found), (process,))


@pytest.fixture
def record(tmp_path):
    def write(*snapshots, name="a.jsonl"):
        recorder = recording.Recorder(tmp_path / name, 1.0)
        for each in snapshots:
            recorder.write(each)
        recorder.close()
        return recorder.path

    return write


def test_a_recording_is_json_lines_that_can_be_read_back(record):
    path = record(snapshot(0, "compiling"), snapshot(1), snapshot(2))
    head, *lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    assert (head["schema"], head["sdk"], len(head["ipus"]), len(lines)) == (1, "poplar", 2, 3)
    assert lines[0]["ipus"][1]["utilisation_pct"] == 81.0 and "power_w" not in lines[0]["ipus"][1]
    found = recording.read(path)
    assert [each["seconds"] for each in found.samples] == [1e9, 1e9 + 1, 1e9 + 2]


def test_an_hour_of_64_idle_ipus_is_some_megabytes(record):
    idle = snapshots.Snapshot(0.0, "poplar", tuple(devices.Ipu(id=n, utilisation_pct=0.0) for n in range(64)), ())
    assert 3600 * len(record(idle).read_bytes().splitlines()[1]) < 20e6


def test_what_was_cut_off_by_a_crash_is_left_out(record):
    path = record(snapshot(0), snapshot(1), snapshot(2))
    path.write_bytes(path.read_bytes()[:-30])
    assert len(recording.read(path).samples) == 2


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("", "is not a recording of this monitor"),
        ("[]\n5\n", "is not a recording of this monitor"),
        ('{"kind": "tf_ipu_dp recording", "schema": 99, "ipus": []}', "is of schema 99; this version reads 1"),
        ('{"kind": "tf_ipu_dp recording", "schema": 1, "ipus": []}', "has 0 samples; a report needs two or more"),
    ],
)
def test_what_is_no_recording_is_refused(tmp_path, text, refusal):
    (tmp_path / "x").write_text(text, encoding="utf-8")
    with pytest.raises(cli.UsageError, match=refusal):
        recording.read(tmp_path / "x")


def test_a_file_that_is_there_is_not_written_over_and_a_place_that_is_not_is_named(record, tmp_path):
    path = record(snapshot(0))
    with pytest.raises(cli.UsageError, match="is there already, and is not written over"):
        recording.Recorder(path, 1.0)
    with pytest.raises(cli.UsageError, match=r"cannot be written \(No such file or directory\)"):
        recording.Recorder(tmp_path / "no" / "a.jsonl", 1.0)


def test_a_report_that_finds_no_room_leaves_the_one_before(record, tmp_path, monkeypatch):
    found = recording.read(record(snapshot(0), snapshot(1)))
    recording.draw(found, tmp_path / "a.svg")
    before = (tmp_path / "a.svg").read_bytes()

    def fail(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(cli.UsageError, match=r"cannot be written \(No space left on device\)"):
        recording.draw(recording.read(record(snapshot(0), snapshot(5), name="b.jsonl")), tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "a.svg", "b.jsonl"]


def test_a_report_of_another_kind_or_place_is_refused_before_anything_is_drawn(tmp_path):
    with pytest.raises(cli.UsageError, match=r"has no known ending. Use one of .png, .svg, .html"):
        recording.check_report_name(tmp_path / "a.pdf")
    with pytest.raises(cli.UsageError, match="there is no folder"):
        recording.check_report_name(tmp_path / "no" / "a.png")


def test_the_summary_weighs_by_time_and_names_the_phases(record):
    found = recording.read(record(snapshot(0, "compiling"), snapshot(2), snapshot(3), snapshot(4)))
    (row,) = recording.summarise(found)
    assert (row["pid"], row["ipus"], row["utilisation_pct"]) == (7, {0, 1}, 80.5)
    assert row["phases"] == {"compiling": 2.0, "training": 2.0}


def test_a_pause_of_the_recording_counts_for_a_few_periods_only(record):
    found = recording.read(record(snapshot(0), snapshot(500), snapshot(501)))
    assert recording.summarise(found)[0]["seconds"] == 4.0


def test_a_drawing_has_labelled_axes_and_a_heat_map_for_many_ipus(record):
    few = recording.make_figure(recording.read(record(snapshot(0, "compiling"), snapshot(1), snapshot(2))))
    labels = [axis.get_ylabel() for axis in few.axes]
    assert labels[:2] == ["utilisation (%)", "power (W)"]
    assert few.axes[2].get_xlabel() == "seconds since 2001-09-09 01:46:40 UTC"
    legend = [text.get_text() for text in few.axes[2].get_legend().get_texts()]
    assert legend == ["compiling", "training", "next phase"]
    assert [text.get_text() for text in few.axes[2].get_yticklabels()] == ["r$1_$ 0"]
    many = recording.make_figure(recording.read(record(*(snapshot(n, ipus=64) for n in range(3)), name="b.jsonl")))
    assert many.axes[0].get_ylabel() == "IPU" and many.axes[-1].get_ylabel().startswith("utilisation (%)")
    assert 16 <= len(many.axes[0].get_yticks()) <= 32


def test_power_that_was_not_reported_has_no_curve(record):
    idle = snapshots.Snapshot(0.0, "emulator", (devices.Ipu(id=0),), ())
    figure = recording.make_figure(recording.read(record(idle, idle)))
    assert len(figure.axes) == 1 and figure._suptitle.get_text().endswith("; power was not reported")


def test_every_format_is_written_and_names_are_escaped(record, tmp_path):
    found = recording.read(record(snapshot(0), snapshot(1), snapshot(2)))
    for name in ("a.png", "a.SVG"):
        recording.draw(found, tmp_path / name)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    drawing = (tmp_path / "a.SVG").read_text(encoding="utf-8")
    assert ET.fromstring(drawing).tag.endswith("svg")
    texts = [each.text for each in ET.fromstring(drawing).iter("{http://www.w3.org/2000/svg}text")]
    assert {"r$1_$ 0", "power (W)", "training"} <= set(texts), "text is text"
    page = recording.render_page(found, drawing)
    assert "&lt;b&gt;ann&lt;/b&gt;" in page and "train\\x1b[31m" in page
    assert not re.search(r"(src|href)=\"http", page), "it loads nothing"


def test_a_save_of_a_run_is_noted_once(tmp_path):
    run = tmp_path / "run"
    (run / "checkpoints" / "step-00000001").mkdir(parents=True)
    process = snapshots.Process(7, "ann", "x", 1.0, (0,), "running", run_dir=str(run), run="run", instance=0)
    recorder = recording.Recorder(tmp_path / "a.jsonl", 1.0)
    now = (run / "checkpoints" / "step-00000001").stat().st_mtime
    for seconds in (now + 10, now + 11):
        recorder.write(snapshots.Snapshot(seconds, "poplar", (devices.Ipu(id=0, pid=7),), (process,)))
    (run / "checkpoints" / "step-00000002").mkdir()
    later = run / "checkpoints" / "step-00000002"
    os.utime(later, (now + 12, now + 12))
    for seconds in (now + 12, now + 13):
        recorder.write(snapshots.Snapshot(seconds, "poplar", (devices.Ipu(id=0, pid=7),), (process,)))
    recorder.close()
    assert [len(each["saved"]) for each in recording.read(recorder.path).samples] == [0, 0, 1, 0]


def changing(seconds, phase, *changes):
    found = snapshot(seconds, phase)
    told = tuple((each, 1e9 + began) for each, began in changes)
    return dataclasses.replace(found, processes=(dataclasses.replace(found.processes[0], changes=told),))


def test_a_compile_between_two_samples_is_in_the_recording_once_and_in_the_report(record):
    changes = [("starting", -5.0), ("compiling", 0.25), ("training", 0.75), ("saving", 2.5), ("training", 2.625)]
    path = record(
        changing(0, "starting", *changes[:1]), changing(1, "training", *changes[:3]),
        changing(2, "training", *changes[:3]), changing(3, "training", *changes), changing(4, "training", *changes),
        changing(5, None),
    )  # fmt: skip
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[1:]]
    assert [[each["phase"] for each in line["changes"]] for line in lines] == [
        ["starting"], ["compiling", "training"], [], ["saving", "training"], [], [],
    ]  # fmt: skip
    assert "changes" not in lines[0]["processes"][0]
    found = recording.read(path)
    (band,) = recording._bands(found).values()
    assert [(round(start - 1e9, 3), round(end - 1e9, 3), phase) for start, end, phase in band] == [
        (0, 0.25, "starting"), (0.25, 0.75, "compiling"), (0.75, 2.5, "training"), (2.5, 2.625, "saving"),
        (2.625, 5, "training"),
    ]  # fmt: skip
    assert recording.summarise(found)[0]["phases"]["compiling"] == 0.5
    assert "compiling 0.5 s" in recording.render_page(found, "<svg/>")
    path.write_text(
        re.sub(r', "changes": \[.*\]}', ', "saved": 5}', path.read_text(encoding="utf-8")), encoding="utf-8"
    )
    older = recording.read(path)
    assert recording.summarise(older)[0]["phases"] == {"starting": 1.0, "training": 4.0}


def test_frequent_saves_do_not_hide_where_a_run_compiled(record):
    saves = [(phase, 2.0 + n + part) for n in range(50) for phase, part in (("saving", 0.3), ("training", 0.6))]
    changes = [("starting", -1.0), ("compiling", 0.2), ("training", 0.9), *saves]
    found = recording.read(record(*(changing(n, "training", *changes) for n in range(60))))
    marks = recording._changes(recording._bands(found))
    assert [(round(moment - 1e9, 3), phase) for moment, phase in marks] == [(0.2, "compiling"), (0.9, "training")]


def runs_in(*folders):
    processes = [
        snapshots.Process(
            n, "ann", "x", 1.0, (n,), "running", run_dir=folder, run=folder.rpartition("/")[2], instance=0
        )
        for n, folder in enumerate(folders)
    ]
    ipus = tuple(devices.Ipu(id=n, utilisation_pct=50.0, pid=n) for n in range(len(folders)))
    return [snapshots.Snapshot(1e9 + seconds, "poplar", ipus, tuple(processes)) for seconds in range(3)]


def test_runs_whose_folders_have_the_same_name_have_a_band_each(record):
    found = recording.read(record(*runs_in("/x/runs/a", "/y/runs/a", "/y/b", "a")))
    assert list(recording._bands(found)) == ["x/runs/a 0", "y/runs/a 0", "b 0", "a 0"]
    assert [row["run"] for row in recording.summarise(found)] == ["x/runs/a", "y/runs/a", "b", "a"]


def test_processes_that_are_not_drawn_are_counted(record):
    figure = recording.make_figure(recording.read(record(*runs_in(*(f"/runs/{n}" for n in range(21))))))
    bands = next(axis for axis in figure.axes if axis.get_legend())
    labels = [label.get_text() for label in bands.get_yticklabels()]
    assert labels[-2:] == ["15 0", "and 5 more"] and len(labels) == 17
