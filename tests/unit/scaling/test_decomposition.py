"""The parts of an update, from the records of a run."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf_ipu_dp.runs.exchange_times import ExchangeTimes
from tf_ipu_dp.runs.records import InstanceTimes, TrainingRecord
from tf_ipu_dp.scaling.decomposition import Clocks, decompose

SECONDS = st.floats(0.0, 10.0)


def make_record(*instances):
    return TrainingRecord(1, 1.0, None, None, 0.1, instances=tuple(instances))


def make_times(instance, *, compute, waited, collective, optimizer, overhead):
    executing = compute + waited + collective + optimizer
    return InstanceTimes(
        instance, executing + overhead, executing, waited, collective + 0.5 * overhead, None, optimizer, collective
    )


@st.composite
def runs(draw):
    count = draw(st.integers(1, 4))
    records = draw(st.integers(1, 3))
    names = ("compute", "waited", "collective", "optimizer", "overhead")
    return [
        make_record(*(make_times(number, **{name: draw(SECONDS) for name in names}) for number in range(count)))
        for _ in range(records)
    ]


def slowest_s(records):
    rows = zip(*(record.instances for record in records))
    return max(sum(each.seconds for each in row) for row in rows)


@given(runs(), st.integers(1, 100), st.lists(st.floats(0.0, 1.0), max_size=5))
def test_the_parts_sum_to_the_time_of_the_slowest_instance(records, updates, exchanges):
    times = ExchangeTimes.of([exchanges] * len(records[0].instances)) if exchanges else None
    parts = decompose(records, times, updates)
    if (
        slowest_s(records) == 0
        or min(sum(r.instances[i].seconds for r in records) for i in range(len(records[0].instances))) == 0
    ):
        assert parts is None
        return
    assert parts.total_s == pytest.approx(slowest_s(records) / updates)
    assert all(value >= -1e-9 for value in dataclasses.astuple(parts))


def test_each_part_is_what_was_measured_of_it():
    times = make_times(0, compute=6.0, waited=1.0, collective=0.0, optimizer=0.5, overhead=2.5)
    parts = decompose([make_record(times)], None, 10)
    assert dataclasses.astuple(parts) == pytest.approx((0.6, 0.1, 0.0, 0.0, 0.05, 0.25))


def test_a_slow_instance_shows_as_waiting_on_the_others():
    slow = make_times(0, compute=8.0, waited=0.0, collective=1.0, optimizer=0.0, overhead=1.0)
    fast = make_times(1, compute=4.0, waited=0.0, collective=5.0, optimizer=0.0, overhead=1.0)
    exchanges = ExchangeTimes.of([[0.1] * 10, [0.5] * 10])
    parts = decompose([make_record(slow, fast)], exchanges, 10)
    assert parts.compute_s == pytest.approx(0.6)
    assert parts.collective_s == pytest.approx(0.1)
    assert parts.waiting_s == pytest.approx(0.2)


def test_collectives_between_executions_are_overhead():
    times = InstanceTimes(0, 10.0, 6.0, 0.0, 5.0, None, 0.0, 2.0)
    parts = decompose([make_record(times)], None, 1)
    assert (parts.compute_s, parts.collective_s, parts.overhead_s) == (4.0, 2.0, 4.0)


def test_parts_of_clocks_that_disagree_do_not_add_up():
    times = make_times(0, compute=6.0, waited=1.0, collective=0.0, optimizer=0.5, overhead=0.5)
    agreed = decompose([make_record(times)], None, 10, Clocks(wall_s=9.0, between_s=0.05))
    assert agreed.overhead_s == pytest.approx(0.15) and agreed.total_s == pytest.approx(0.9)
    written = decompose([make_record(times)], None, 10, Clocks(wall_s=9.0, between_s=0.03))
    assert written.total_s == pytest.approx(0.9), "writing between executions is overhead as well"
    disagreed = decompose([make_record(times)], None, 10, Clocks(wall_s=9.0, between_s=0.15))
    assert disagreed.total_s == pytest.approx(1.0)


def test_measured_parts_that_exceed_the_executions_are_not_hidden():
    times = InstanceTimes(0, 10.0, 6.0, 4.0, 4.0, None, 1.0, 4.0)
    assert decompose([make_record(times)], None, 1).total_s == pytest.approx(13.0)


@pytest.mark.parametrize("name", ["input_wait_s", "optimizer_s", "program_collective_s"])
def test_there_are_no_parts_where_the_device_does_not_report_them(name):
    times = make_times(0, compute=1.0, waited=0.0, collective=0.0, optimizer=0.0, overhead=0.0)
    assert decompose([make_record(dataclasses.replace(times, **{name: None}))], None, 1) is None


def test_there_are_no_parts_of_no_updates_or_records():
    times = make_times(0, compute=1.0, waited=0.0, collective=0.0, optimizer=0.0, overhead=0.0)
    assert decompose([make_record(times)], None, 0) is None
    assert decompose([], None, 5) is None
