"""The parts of another engine's calibration that need no processes, and when a program has been timed long enough."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf_ipu_dp import cli
from tf_ipu_dp.scaling import engine_probe
from tf_ipu_dp.scaling.compute_calibration import Shape
from tf_ipu_dp.scaling.engines.protocol import Order
from tf_ipu_dp.scaling.engines.update_times import UpdateTimes

SHAPE = Shape(32, 1, 1, 2)


def make_order(**changes):
    settings = {
        "model": "mlp", "norm": "batch", "dataset": "synthetic", "data_dir": None, "image_size": None,
        "batch_size": 16, "processes": 1, "warmup_updates": 1, "updates": 3, "learning_rate": 0.05, "momentum": 0.9,
        "weight_decay": 0.0, "seed": 1, "threads": 1,
    }  # fmt: skip
    return Order(**{**settings, **changes})


@given(st.lists(st.lists(st.floats(1e-4, 2.0), min_size=1, max_size=40), min_size=1, max_size=4))
def test_the_time_of_an_update_lies_between_the_fastest_and_the_slowest(programs):
    found = engine_probe.time_of_updates(SHAPE, programs)
    every = [each for times in programs for each in times]
    assert min(every) * 0.999 <= found.total_s <= max(every) * 1.001
    assert found.compute_s == found.total_s and found.low <= 1.0 <= found.high and found.deviation_s >= 0


@given(st.lists(st.floats(1e-3, 2.0), min_size=1, max_size=200), st.floats(0.01, 3.0))
def test_windows_have_their_length_and_are_at_least_one(times, window_s):
    found = engine_probe.split(times, window_s)
    assert 1 <= len(found) <= max(sum(times) / window_s, 1) * 1.001


def test_a_moment_in_which_another_job_had_the_cores_does_not_count():
    calm = [0.01] * 100
    assert engine_probe.time_of_updates(SHAPE, [[*calm, *[0.05] * 20, *calm]]).total_s == pytest.approx(0.01)


def test_programs_without_a_timed_update_are_refused():
    with pytest.raises(cli.UsageError, match="no update that was timed"):
        engine_probe.time_of_updates(SHAPE, [[]])


def test_the_job_of_two_is_that_of_a_cell_or_the_smallest_batch():
    one, two, four = Shape(512, 1, 1, 1), Shape(256, 1, 1, 2), Shape(128, 1, 1, 4)
    assert engine_probe.shape_of_two([one, two, four]) == two
    assert engine_probe.shape_of_two([one, four]) == Shape(128, 1, 1, 2)


@pytest.mark.parametrize(("update_s", "most_s", "made"), [(0.125, 1.0, 8), (5.0, 1.0, 3), (0.125, None, 50)])
def test_a_program_ends_after_its_time_but_not_before_three_updates(update_s, most_s, made):
    times = UpdateTimes(make_order(most_s=most_s))
    times.begin(100.0)
    for number in range(50):
        if times.end_update(100.0 + (number + 1) * update_s):
            break
    assert times.seconds == [update_s] * made
