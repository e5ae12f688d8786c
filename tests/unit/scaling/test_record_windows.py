"""Windows of a calibration: what is measured beside another job does not count, as long as most is not."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf_ipu_dp.runs.records import InstanceTimes, TrainingRecord
from tf_ipu_dp.scaling import record_windows


def make_record(execution_s, seconds=0.6):
    executions = max(round(seconds / execution_s), 1)
    times = InstanceTimes(0, executions * execution_s, executions * execution_s)
    return TrainingRecord(1, 1.0, None, None, 0.1, instances=(times,), executions=executions)


def test_short_records_are_put_together():
    records = [make_record(0.01, 0.2) for _ in range(7)]
    assert [len(window) for window in record_windows.split(records)] == [3, 3]
    assert [len(window) for window in record_windows.split(records[:2])] == [2]


def test_a_window_beside_another_job_does_not_count():
    calm, slow = make_record(0.01), make_record(0.04)
    assert record_windows.median_execution_s([[calm, slow, calm, calm]]) == pytest.approx(0.01)


def test_a_window_is_that_of_all_processes():
    assert record_windows.window_times([[make_record(0.01)] * 2, [make_record(0.03)] * 2]) == pytest.approx(
        [1.2 / 80] * 2
    )


def test_a_calibration_ends_when_one_more_window_does_not_move_the_median():
    calm, slow = make_record(0.01), make_record(0.015)
    assert not record_windows.is_enough([[calm] * 2])
    assert record_windows.is_enough([[calm] * 3])
    assert not record_windows.is_enough([[slow, calm, calm, slow]])
    assert record_windows.is_enough([[slow, calm, calm, slow, calm, calm]])
    assert not record_windows.is_enough([[calm] * 3, [calm] * 2])


def test_a_calibration_ends_although_nothing_agrees():
    records = [make_record(0.01 * 1.2**place) for place in range(40)]
    counts = [count for count in range(1, 40) if record_windows.is_enough([records[:count]])]
    assert sum(record.instances[0].seconds for record in records[: counts[0]]) < record_windows.MOST_S + 1


def test_records_that_were_not_timed_are_left_out():
    untimed = TrainingRecord(1, 1.0, None, None, 0.1, executions=0)
    assert record_windows.split([untimed]) == []
    assert not record_windows.is_enough([[untimed] * 5])


def test_time_between_epochs_is_that_of_the_record_after_it():
    records = [dataclasses.replace(make_record(0.01), elapsed_s=elapsed_s) for elapsed_s in (1.0, 1.6, 2.4)]
    found = [each.instances[0].seconds for each in record_windows.on_the_wall(records)]
    assert found == pytest.approx([0.6, 0.6, 0.8])


@given(st.lists(st.floats(0.001, 0.2), min_size=1, max_size=12))
def test_the_median_lies_between_the_fastest_and_the_slowest_window(times):
    found = record_windows.median_execution_s([[make_record(each) for each in times]])
    assert min(times) * 0.999 <= found <= max(times) * 1.001
