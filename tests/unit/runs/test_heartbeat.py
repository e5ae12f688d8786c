"""Heartbeats: written, read, and never a reason for a run to end."""

from __future__ import annotations

import dataclasses
import json
import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf_ipu_dp.runs import heartbeat
from tf_ipu_dp.runs.heartbeat import INPUT, Status, StatusReporter


def status(instance, at=0.0, *, still_s=0.0, waits_for=None, phase="training"):
    return Status("run", instance, 3, f"host{instance}", 100 + instance, phase, 40, 99, None, waits_for, still_s, at)


@pytest.fixture
def environ(tmp_path):
    return {"XDG_RUNTIME_DIR": str(tmp_path / "runtime")}


def test_a_heartbeat_says_where_an_instance_is_until_it_ends(tmp_path, environ):
    reporter = StatusReporter(
        tmp_path, instance=2, instances=4, planned_steps=99, waits_for=lambda: INPUT, environ=environ
    )
    reporter.start()
    reporter.update("training", 7, 123.5)
    deadline = time.monotonic() + 60
    while (found := heartbeat.find(os.getpid(), environ)) is None or found.step != 7:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert (found.instance, found.phase, found.samples_per_s, found.waits_for) == (2, "training", 123.5, INPUT)
    assert heartbeat.read_run(tmp_path) == [found]
    reporter.stop()
    assert heartbeat.find(os.getpid(), environ) is None
    assert list(tmp_path.rglob("*.json")) == []


def test_a_phase_that_is_over_before_the_next_beat_is_told_with_its_moment(tmp_path, environ):
    reporter = StatusReporter(tmp_path, environ=environ)
    before = time.time()
    for phase in ("compiling", "compiling", "training", "training"):
        reporter.update(phase)
    reporter.start()
    found = heartbeat.find(os.getpid(), environ)
    assert [phase for phase, _ in found.changes] == ["starting", "compiling", "training"]
    assert before <= found.changes[1][1] <= found.changes[2][1] <= time.time()
    for _ in range(50):
        reporter.update("saving")
        reporter.update("training")
    assert len(reporter.status().changes) == 16 and reporter.status().changes[-1][0] == "training"
    reporter.stop()


def test_who_waits_for_nothing_is_not_said_to_wait():
    assert status(0, waits_for=heartbeat.NOTHING).place() == "training after step 40"


def test_a_pipe_a_folder_and_a_tower_of_brackets_are_no_status_and_are_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "tower").write_text("[" * 60_000)
    assert [heartbeat.read(path) for path in (tmp_path / "pipe", tmp_path, tmp_path / "tower")] == [None] * 3


def test_a_folder_that_cannot_be_written_stops_nobody(tmp_path, environ):
    (tmp_path / "file").write_text("")
    reporter = StatusReporter(tmp_path / "file", environ=environ)
    reporter.start()
    reporter.update("training", 1)
    reporter.write()
    assert heartbeat.find(os.getpid(), environ) is None and (tmp_path / "file").read_text() == ""
    assert (reporter.status().phase, reporter.status().step) == ("training", 1)
    reporter.stop()


@given(st.one_of(st.binary(), st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps)))
def test_what_makes_no_sense_is_no_status(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("status") / "instance-000.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert heartbeat.read(path) is None


@given(st.dictionaries(st.sampled_from([f.name for f in dataclasses.fields(Status)]), st.integers() | st.text()))
def test_a_status_with_wrong_types_is_no_status(tmp_path_factory, value):
    path = tmp_path_factory.mktemp("status") / "instance-000.json"
    path.write_text(json.dumps({**dataclasses.asdict(status(1)), **value}))
    found = heartbeat.read(path)
    assert found is None or (isinstance(found.phase, str) and isinstance(found.step, int))


@given(st.recursive(st.none() | st.integers() | st.floats() | st.text(), lambda each: st.lists(each, max_size=3)))
def test_whatever_stands_for_the_changes_those_that_make_sense_are_read(tmp_path_factory, value):
    path = tmp_path_factory.mktemp("status") / "instance-000.json"
    junk = value if isinstance(value, list) else [value, [value, value], ["training", value]]
    changes = [*junk, ["training", 10**400], ["training", 1e300], ["compiling", 5]]
    path.write_text(json.dumps({**dataclasses.asdict(status(1)), "changes": changes}))
    found = heartbeat.read(path).changes
    assert found[-1] == ("compiling", 5.0) and all(abs(began) < 1e10 for _, began in found)
    path.write_text(json.dumps({**dataclasses.asdict(status(1)), "changes": value}))
    assert isinstance(heartbeat.read(path).changes, tuple)
