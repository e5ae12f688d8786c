"""Where instances are, and who keeps the others waiting."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf_ipu_dp.runs import heartbeat
from tf_ipu_dp.runs.heartbeat import INPUT, OTHERS, StallDetector, Status, StatusReporter


def status(instance, at=0.0, *, still_s=0.0, waits_for=None, phase="training"):
    return Status("run", instance, 3, f"host{instance}", 100 + instance, phase, 40, 99, None, waits_for, still_s, at)


def detector_of(*statuses, now=0.0):
    detector = StallDetector(3)
    for each in statuses:
        detector.observe(each, now)
    return detector


def test_who_moves_is_not_blamed():
    own = status(0, still_s=9.0, waits_for=OTHERS)
    detector = detector_of(own, status(1, still_s=9.0), status(2))
    assert detector.find_stalled(own, 0.0, 10.0, watched=True) is None


def test_who_says_nothing_is_stopped_or_gone_in_whatever_phase():
    own = status(0, phase="compiling")
    detector = detector_of(own, status(1, waits_for=INPUT), status(2))
    detector.observe(status(0, at=1.0, phase="compiling"), 11.0)
    detector.observe(status(2, at=1.0), 11.0)
    said, culprit = detector.find_stalled(own, 11.0, 10.0, watched=False)
    assert culprit.instance == 1 and said == (
        "instance 1 on host1 (pid 101) has not been heard of for 11 s: it is stopped, or its host or the network to it "
        "is gone. It was training after step 40, waiting for input."
    )


def test_who_waits_for_its_input_keeps_those_waiting_that_wait_for_others():
    own = status(0, still_s=12.0, waits_for=OTHERS)
    detector = detector_of(own, status(1, still_s=12.5, waits_for=INPUT), status(2, still_s=12.0, waits_for=OTHERS))
    assert detector.find_stalled(own, 0.0, 10.0, watched=True)[0] == (
        "instance 1 on host1 (pid 101) has not moved for 12 s: it is training after step 40, waiting for input."
    )


def test_who_waits_for_nothing_known_is_blamed_before_those_that_wait_for_others():
    own = status(0, still_s=12.0, waits_for=OTHERS)
    detector = detector_of(own, status(1, still_s=12.0, waits_for=OTHERS), status(2, still_s=12.0, phase="saving"))
    assert "instance 2 on host2" in detector.find_stalled(own, 0.0, 10.0, watched=True)[0]


def test_when_all_wait_for_each_other_the_network_is_named():
    own = status(0, still_s=12.0, waits_for=OTHERS)
    detector = detector_of(own, *(status(i, still_s=12.0, waits_for=OTHERS) for i in (1, 2)))
    assert (
        "all 3 instances are training after step 40, waiting for other instances"
        in detector.find_stalled(own, 0, 10, True)[0]
    )


def test_compiling_takes_as_long_as_it_takes():
    own = status(0, still_s=9999.0, phase="compiling")
    assert detector_of(own).judge(own, 0.0, 10.0, watched=False) is None


def test_clocks_of_other_hosts_do_not_matter_but_news_do():
    own = status(0)
    detector = detector_of(own, status(1, at=5e9))
    for second in range(1, 30):
        detector.observe(dataclasses.replace(own, time=float(second)), second)
        detector.observe(status(1, at=5e9 + second), second)
        assert detector.find_stalled(own, second, 10.0, watched=True) is None


def test_an_instance_that_has_ended_is_not_missed_and_a_sleep_of_this_one_is_no_silence_of_others():
    own = status(0)
    detector = detector_of(own, status(1), status(2))
    detector.remove(1)
    detector.discount_pause(100.0)
    assert detector.find_stalled(own, 105.0, 10.0, watched=True) is None
    assert "instance" in detector.find_stalled(own, 120.0, 10.0, watched=True)[0]


@pytest.fixture
def environ(tmp_path):
    return {"XDG_RUNTIME_DIR": str(tmp_path / "runtime")}


def test_a_heart_tells_where_it_is_until_it_stops(tmp_path, environ):
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


def test_a_heart_that_stands_still_says_so_once(tmp_path, environ):
    said, told = [], threading.Event()

    def on_stall(sentence, culprit):
        said.append(sentence)
        assert culprit.pid == os.getpid()
        told.set()

    reporter = StatusReporter(tmp_path, waits_for=lambda: INPUT, limit_s=0.5, on_stall=on_stall, environ=environ)
    reporter.update("training", 3)
    reporter.start()
    assert told.wait(10)
    reporter.stop()
    assert len(said) == 1 and "training after step 3, waiting for input" in said[0]


def test_input_that_never_comes_is_found_while_compiling_too(tmp_path, environ):
    told = threading.Event()
    reporter = StatusReporter(
        tmp_path, waits_for=lambda: INPUT, limit_s=0.5, on_stall=lambda *_: told.set(), environ=environ
    )  # fmt: skip
    reporter.update("compiling", 0, watched=False)
    reporter.start()
    assert told.wait(10)
    reporter.stop()


def test_who_waits_for_nothing_is_not_said_to_wait():
    assert status(0, waits_for=heartbeat.NOTHING).place() == "training after step 40"


def test_a_pipe_a_folder_and_a_tower_of_brackets_are_no_status_and_are_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "tower").write_text("[" * 60_000)
    assert [heartbeat.read(path) for path in (tmp_path / "pipe", tmp_path, tmp_path / "tower")] == [None] * 3


def test_a_folder_that_cannot_be_written_stops_nobody(tmp_path, environ, wait_until):
    (tmp_path / "file").write_text("")
    reporter = StatusReporter(tmp_path / "file", environ=environ)
    reporter.start()
    reporter.update("training", 1)
    found = wait_until(lambda: heartbeat.find(os.getpid(), environ))
    assert found.phase == "training" and (tmp_path / "file").read_text() == ""
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
