"""Phases, names and summaries of recorded processes."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from tf_ipu_dp.monitoring import recorder, recording_report, timeline


def test_the_summary_weighs_by_time_and_names_the_phases(record, snapshot):
    found = recorder.read(record(snapshot(0, "compiling"), snapshot(2), snapshot(3), snapshot(4)))
    (row,) = timeline.summarise(found)
    assert (row.pid, row.ipus, row.utilisation_pct) == (7, {0, 1}, 80.5)
    assert row.phases == {"compiling": 2.0, "training": 2.0}


def test_a_pause_of_the_recording_counts_for_a_few_periods_only(record, snapshot):
    found = recorder.read(record(snapshot(0), snapshot(500), snapshot(501)))
    assert timeline.summarise(found)[0].seconds == 4.0


@pytest.fixture
def changing(snapshot):
    def make(seconds, phase, *changes):
        found = snapshot(seconds, phase)
        began = tuple((each, 1e9 + start) for each, start in changes)
        return dataclasses.replace(found, processes=(dataclasses.replace(found.processes[0], changes=began),))

    return make


def test_a_compile_between_two_samples_is_in_the_recording_once_and_in_the_report(record, changing):
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
    found = recorder.read(path)
    (band,) = timeline.make_bands(found).values()
    assert [(round(start - 1e9, 3), round(end - 1e9, 3), phase) for start, end, phase in band] == [
        (0, 0.25, "starting"), (0.25, 0.75, "compiling"), (0.75, 2.5, "training"), (2.5, 2.625, "saving"),
        (2.625, 5, "training"),
    ]  # fmt: skip
    assert timeline.summarise(found)[0].phases["compiling"] == 0.5
    assert "compiling 0.5 s" in recording_report.render_page(found)
    path.write_text(
        re.sub(r', "changes": \[.*\]}', ', "saved": 5}', path.read_text(encoding="utf-8")), encoding="utf-8"
    )
    older = recorder.read(path)
    assert timeline.summarise(older)[0].phases == {"starting": 1.0, "training": 4.0}


def test_frequent_saves_do_not_hide_where_a_run_compiled(record, changing):
    saves = [(phase, 2.0 + n + part) for n in range(50) for phase, part in (("saving", 0.3), ("training", 0.6))]
    changes = [("starting", -1.0), ("compiling", 0.2), ("training", 0.9), *saves]
    found = recorder.read(record(*(changing(n, "training", *changes) for n in range(60))))
    marks = timeline.find_phase_changes(timeline.make_bands(found))
    assert [(round(moment - 1e9, 3), phase) for _, moment, phase in marks] == [(0.2, "compiling"), (0.9, "training")]


def test_runs_whose_folders_have_the_same_name_have_a_band_each(record, runs_in):
    found = recorder.read(record(*runs_in("/x/runs/a", "/y/runs/a", "/y/b", "a")))
    assert list(timeline.make_bands(found)) == ["x/runs/a 0", "y/runs/a 0", "b 0", "a 0"]
    assert [row.run for row in timeline.summarise(found)] == ["x/runs/a", "y/runs/a", "b", "a"]
