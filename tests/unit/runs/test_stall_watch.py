"""Watching heartbeats: what it costs, and who reports a stall."""

from __future__ import annotations

import os
import threading

import pytest

from tf_ipu_dp.runs import heartbeat, stall_watch
from tf_ipu_dp.runs.heartbeat import INPUT, NOTHING, OTHERS, StatusReporter
from tf_ipu_dp.runs.stall_watch import StallWatch


@pytest.fixture
def clock(monkeypatch):
    """Replaces the monotonic clock of heartbeats and watches by one that a test moves on."""

    class Clock:
        now = 1000.0

        def monotonic(self):
            return self.now

        def time(self):
            return self.now

    fake = Clock()
    for module in (heartbeat, stall_watch):
        monkeypatch.setattr(module, "time", fake)
    return fake


class Job:
    """Instances of one run in this process, without threads: `beat` is a second of all of them."""

    def __init__(self, folder, instances, clock, limit_s=10.0):
        self.clock, self.waits_for = clock, dict.fromkeys(range(instances), NOTHING)
        self.silent = set()
        environ = {"XDG_RUNTIME_DIR": str(folder)}
        self.reporters = [
            StatusReporter(
                folder, instance=n, instances=instances, waits_for=lambda n=n: self.waits_for[n], environ=environ
            )
            for n in range(instances)
        ]  # fmt: skip
        self.watches = [
            StallWatch(folder, reporter, limit_s=limit_s, on_stall=lambda stall: None) for reporter in self.reporters
        ]

    def progress(self):
        for number, reporter in enumerate(self.reporters):
            if number not in self.silent:
                reporter.update("training", int(self.clock.now))

    def beat(self):
        """Returns the stalls that the instances which are not silent find after one more second, by instance."""
        self.clock.now += 1.0
        awake = [number for number in range(len(self.reporters)) if number not in self.silent]
        for number in awake:
            self.reporters[number].write()
        found = {}
        for number in awake:
            self.watches[number].read_others()
            stall = self.watches[number].check()
            if stall:
                found[number] = stall
        return found

    def beat_until_stalled(self, most=60):
        for second in range(1, most + 1):
            found = self.beat()
            if found:
                return second, found
        return None


def test_256_instances_cost_two_reads_each_and_not_256(tmp_path, clock, monkeypatch):
    job = Job(tmp_path, 256, clock)
    reads = []
    read = heartbeat.read
    monkeypatch.setattr(heartbeat, "read", lambda path: reads.append(path) or read(path))
    job.progress()
    assert job.beat() == {}
    assert len(reads) == 2 * 255
    reads.clear()
    job.progress()
    assert job.beat() == {} and len(reads) == 510


def test_the_leader_names_the_instance_that_was_stopped(tmp_path, clock):
    job = Job(tmp_path, 8, clock)
    job.progress()
    job.beat()
    job.silent.add(5)
    job.waits_for.update(dict.fromkeys(range(8), OTHERS))
    _, found = job.beat_until_stalled()
    assert list(found) == [0] and found[0].culprit.instance == 5 and "No heartbeat for" in found[0].sentence


def test_the_others_notice_that_the_leader_was_stopped(tmp_path, clock):
    job = Job(tmp_path, 4, clock)
    job.progress()
    job.beat()
    job.silent.add(0)
    job.waits_for.update(dict.fromkeys(range(4), OTHERS))
    seconds, found = job.beat_until_stalled()
    assert set(found) == {1, 2, 3} and {stall.culprit.instance for stall in found.values()} == {0}
    assert seconds <= 12


def test_the_leader_names_the_instance_whose_input_does_not_come_and_that_one_does_too(tmp_path, clock):
    job = Job(tmp_path, 3, clock)
    job.progress()
    job.beat()
    job.waits_for.update({0: OTHERS, 1: OTHERS, 2: INPUT})
    _, found = job.beat_until_stalled()
    assert {stall.culprit.instance for stall in found.values()} == {2} and 0 in found
    assert "waiting for input" in found[0].sentence


def test_an_instance_that_started_before_its_leader_reports_no_stall_of_its_own(tmp_path, clock):
    job = Job(tmp_path, 2, clock)
    job.silent.add(0)
    job.progress()
    assert job.beat() == {}
    job.silent.clear()
    for _ in range(30):
        job.progress()
        assert job.beat() == {}


def test_an_instance_whose_leader_has_ended_judges_for_itself(tmp_path, clock):
    job = Job(tmp_path, 2, clock)
    job.progress()
    job.beat()
    job.reporters[0].stop()
    job.silent.add(0)
    _, found = job.beat_until_stalled()
    assert "No progress for" in found[1].sentence


def test_phases_of_unknown_length_and_long_steps_are_no_stall(tmp_path, clock):
    job = Job(tmp_path, 2, clock)
    for reporter in job.reporters:
        reporter.update("compiling", 0, watched=False)
    assert job.beat_until_stalled() is None
    job.progress()
    for watch in job.watches:
        watch.expect_step_time(30.0)
    assert job.beat_until_stalled() is None
    assert job.beat_until_stalled() is not None


def test_a_pause_of_this_process_is_no_stall(tmp_path, clock):
    job = Job(tmp_path, 2, clock)
    job.progress()
    job.beat()
    clock.now += 500.0
    assert job.beat() == {} and job.beat() == {}


def test_a_stall_is_reported_once_by_a_thread(tmp_path):
    said, reported = [], threading.Event()

    def on_stall(stall):
        said.append(stall)
        reported.set()

    reporter = StatusReporter(tmp_path, waits_for=lambda: INPUT, environ={"XDG_RUNTIME_DIR": str(tmp_path)})
    reporter.update("compiling", 3, watched=False)
    reporter.start()
    watch = StallWatch(tmp_path, reporter, limit_s=0.5, on_stall=on_stall)
    watch.start()
    assert reported.wait(60)
    watch.stop()
    reporter.stop()
    assert len(said) == 1 and said[0].culprit.pid == os.getpid()
    assert "compiling after step 3, waiting for input" in said[0].sentence
