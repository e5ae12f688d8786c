"""The parts of a run's time, on a fake clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf_ipu_dp.training.clock import RunClock

SECONDS = st.floats(0, 100)


class FakeTime:
    def __init__(self, now):
        self.now = now

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


EPOCH = st.lists(st.tuples(SECONDS, SECONDS, SECONDS), max_size=4)  # idle, executing, bookkeeping of each execution


@given(
    start=SECONDS, compiling=SECONDS, epochs=st.lists(st.tuples(EPOCH, SECONDS), min_size=1, max_size=4), end=SECONDS
)
def test_the_parts_sum_to_the_total(start, compiling, epochs, end):
    now = FakeTime(50.0)
    clock = RunClock(50.0, now)
    now.sleep(start)
    clock.finish_startup()
    executing = bookkeeping = idle = evaluation = 0.0
    for number, (executions, validating) in enumerate(epochs):
        clock.start_epoch()
        if number == 0:
            now.sleep(compiling)
            clock.finish_compiling()
        for pause, run, keep in executions:
            now.sleep(pause)
            now.sleep(run)
            clock.add_execution(run)
            with clock.bookkeeping():
                now.sleep(keep)
            idle, executing, bookkeeping = idle + pause, executing + run, bookkeeping + keep
        clock.end_epoch()
        with clock.evaluating() as seconds:
            now.sleep(validating)
            assert seconds() == pytest.approx(validating, abs=1e-6)
        evaluation += validating
    now.sleep(end)
    times = clock.slowest_times([clock.parts(None, 1.0)])
    parts = (times.compile_s, times.executing_s, times.between_s, times.bookkeeping_s, times.evaluation_s)
    assert parts == pytest.approx((compiling, executing, idle, bookkeeping, evaluation), abs=1e-6)
    assert times.total_s == pytest.approx(sum(parts) + start + end, abs=1e-6)
    assert times.overhead_s == pytest.approx(start + end, abs=1e-6)
    assert (times.startup_s, times.other_s) == pytest.approx((start, end), abs=1e-6)
    assert times.input_wait_s is None and times.collective_s is None  # of one instance


def test_the_slowest_instance_gives_the_times():
    clock = RunClock(0.0, lambda: 100.0)
    fast = (10.0, 4.0, 1.0, 8.0, 1.0, 1.0, 2.0, 0.5, 0.75)
    slow = (12.0, 5.0, 3.0, 9.0, 2.0, 1.0, 2.5, 0.25, 0.125)
    times = clock.slowest_times([fast, slow])
    assert (times.startup_s, times.compile_s, times.executing_s, times.total_s) == (5.0, 3.0, 9.0, 100.0)
    assert (times.training_s, times.input_wait_s, times.collective_s) == (12.0, 0.25, 0.125)


def test_bookkeeping_before_the_first_execution_is_part_of_compiling():
    now = FakeTime(0.0)
    clock = RunClock(0.0, now)
    clock.start_epoch()
    with clock.bookkeeping():
        now.sleep(2.0)
    clock.finish_compiling()
    clock.end_epoch()
    times = clock.slowest_times([clock.parts(1.0, None)])
    assert (times.compile_s, times.bookkeeping_s, times.input_wait_s) == (2.0, 0.0, 1.0)


def test_an_export_has_a_part_of_its_own():
    now = FakeTime(0.0)
    clock = RunClock(0.0, now)
    now.sleep(3.0)
    clock.finish_startup()
    with clock.exporting():
        now.sleep(7.0)
    now.sleep(0.5)
    times = clock.slowest_times([clock.parts(None, None)])
    assert (times.startup_s, times.export_s, times.other_s, times.total_s) == (3.0, 7.0, 0.5, 10.5)
