"""When poprun decides that instances do not connect: all have arrived, and one has not connected in time."""

from __future__ import annotations

import threading

import pytest

from tf_ipu_dp.emulator.launcher import connection_watch
from tf_ipu_dp.emulator.launcher.connection_watch import ConnectionWatch

SOON_S, NEVER_S, LIMIT_S = 0.01, 3600.0, 60.0


class Timeouts:
    """Collects the timeouts of a watch."""

    def __init__(self, timeout_s):
        self.happened = threading.Event()
        self.were_connected = []
        self.missing = []
        self.watch = ConnectionWatch(2, timeout_s, self.add, self.add_missing)

    def add_missing(self, missing):
        self.missing.append(missing)
        self.happened.set()

    def add(self, was_connected):
        self.were_connected.append(was_connected)
        self.happened.set()


def arrive(watch, *instances):
    for instance in instances:
        watch.written("global", f"rank_{instance}")
        watch.written("global", str(instance))


def connect(watch, instances=2):
    for instance in range(instances):
        watch.deleted("global_process_set_hash_1")
        watch.deleted(f"cross_{instance}_process_set_hash_1")


def test_instances_that_have_all_arrived_and_do_not_connect_time_out_once():
    timeouts = Timeouts(SOON_S)
    arrive(timeouts.watch, 0, 1)
    assert timeouts.happened.wait(LIMIT_S)
    timeouts.watch.close()
    assert timeouts.were_connected == [False]


def test_an_instance_that_has_not_arrived_is_waited_for():
    timeouts = Timeouts(SOON_S)
    arrive(timeouts.watch, 1, 1)
    assert not timeouts.happened.wait(20 * SOON_S)


def test_instances_that_have_not_arrived_in_their_time_are_named():
    timeouts = Timeouts(NEVER_S)
    arrive(timeouts.watch, 0)
    timeouts.watch.expect_all(SOON_S)
    assert timeouts.happened.wait(LIMIT_S)
    assert (timeouts.missing, timeouts.were_connected) == ([[1]], [])


@pytest.mark.parametrize("connected", [False, True])
def test_instances_that_arrive_in_time_are_not_missing(connected):
    timeouts = Timeouts(NEVER_S)
    timeouts.watch.expect_all(NEVER_S)
    arrive(timeouts.watch, 0, 1)
    if connected:
        connect(timeouts.watch)
    assert timeouts.watch._arrival_timer.finished.is_set() and timeouts.watch.was_connected == connected
    timeouts.watch._find_missing()  # in time, but too late to be cancelled
    assert not timeouts.missing
    timeouts.watch.close()


@pytest.mark.parametrize("connected", [1, 2])
def test_the_time_is_over_only_when_the_last_instance_has_connected(connected):
    timeouts = Timeouts(NEVER_S)
    arrive(timeouts.watch, 0, 1)
    connect(timeouts.watch, connected)
    assert (timeouts.watch._timer is None) == (connected == 2)
    timeouts.watch.close()
    assert timeouts.watch._timer is None


def test_a_second_start_of_horovod_is_watched_too_and_told_apart():
    timeouts = Timeouts(NEVER_S)
    arrive(timeouts.watch, 0, 1)
    connect(timeouts.watch)
    timeouts.watch._timeout_s = SOON_S
    connect(timeouts.watch)  # of a subset of instances, later
    arrive(timeouts.watch, 0, 1)
    assert timeouts.happened.wait(LIMIT_S)
    assert timeouts.were_connected == [True]


def test_the_timeout_is_the_users_or_a_minute():
    assert connection_watch.read_timeout_s({}) == 60.0
    assert connection_watch.read_timeout_s({"IPU_EMULATOR_CONNECT_TIMEOUT": " 2.5 "}) == 2.5
    for text in ("0", "-1", "soon", "nan", "inf"):
        with pytest.raises(ValueError, match=f"IPU_EMULATOR_CONNECT_TIMEOUT={text} is not a number of seconds above 0"):
            connection_watch.read_timeout_s({"IPU_EMULATOR_CONNECT_TIMEOUT": text})


def test_the_stall_timeout_has_no_default_and_bounds_the_other():
    assert connection_watch.read_stall_timeout_s({}) == 0.0
    assert connection_watch.read_stall_timeout_s({"IPU_EMULATOR_STALL_TIMEOUT": "600"}) == 600.0
    assert connection_watch.read_timeout_s({"IPU_EMULATOR_STALL_TIMEOUT": "600"}) == 60.0
    assert connection_watch.read_timeout_s({"IPU_EMULATOR_STALL_TIMEOUT": "6"}) == 6.0
    with pytest.raises(ValueError, match="IPU_EMULATOR_STALL_TIMEOUT=soon is not a number of seconds above 0"):
        connection_watch.read_stall_timeout_s({"IPU_EMULATOR_STALL_TIMEOUT": "soon"})
