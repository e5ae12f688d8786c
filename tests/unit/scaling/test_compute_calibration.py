"""Shapes of cells, and times of those that were not measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf_ipu_dp.scaling import compute_calibration
from tf_ipu_dp.scaling.compute_calibration import ComputeCalibration, Shape, ShapeTime
from tf_ipu_dp.scaling.records import Cell

SHAPES = st.builds(Shape, st.integers(1, 512), st.integers(1, 32), st.integers(1, 4), st.sampled_from([1, 2, 4]))


def make_calibration(*times, **changes):
    return ComputeCalibration("2026-11-18", "mlp", 2, True, (971_048,), tuple(times), **changes)


def make_time(compute_s, micro=32, count=1, processes=1):
    return ShapeTime(Shape(micro, count, 1, processes), compute_s, 0.001, 0.002, 0.003)


def test_a_cell_has_the_shape_of_one_of_its_processes():
    cell = Cell("a", "tf_ipu_dp", 4, 8, 4, 2, 32, 3, 768, ())
    assert compute_calibration.shape_of(cell, on_one_machine=False) == Shape(32, 6, 2, 2)
    assert compute_calibration.shape_of(cell, on_one_machine=True) == Shape(32, 6, 2, 4)


@given(st.lists(SHAPES, max_size=30), st.integers(2, 6))
def test_the_outermost_sizes_are_measured_and_not_too_many(shapes, most):
    found = compute_calibration.shapes_to_measure(shapes, most)
    assert set(found) <= set(shapes) and len(found) == len(set(found))
    for processes in {each.processes for each in shapes}:
        group = [each.samples for each in shapes if each.processes == processes]
        chosen = [each.samples for each in found if each.processes == processes]
        assert len(chosen) <= most and (min(chosen), max(chosen)) == (min(group), max(group))


@given(st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.lists(st.integers(1, 1000), min_size=2, max_size=6, unique=True))
def test_points_of_a_line_give_the_line(fixed, slope, places):
    found = compute_calibration.fit_line(places, [fixed + slope * place for place in places])
    assert found == pytest.approx((fixed, slope), abs=1e-6)


@given(st.lists(st.tuples(st.integers(1, 100), st.floats(0.0, 1.0)), min_size=1, max_size=6))
def test_a_line_never_gives_a_negative_time(points):
    fixed, slope = compute_calibration.fit_line(*zip(*points))
    assert fixed >= 0 and slope >= 0


def test_a_shape_that_was_measured_is_not_interpolated():
    found = make_calibration(make_time(0.01), make_time(0.05, count=2), make_time(0.03, count=4))
    assert found.time_of(Shape(32, 2, 1, 1)).compute_s == 0.05


@pytest.mark.parametrize(("count", "compute_s"), [(3, 0.025), (8, 0.05), (1, 0.015)])
def test_other_numbers_of_micro_batches_lie_on_a_line(count, compute_s):
    found = make_calibration(make_time(0.02, count=2), make_time(0.03, count=4))
    assert found.time_of(Shape(32, count, 1, 1)).compute_s == pytest.approx(compute_s)


def test_other_micro_batch_sizes_lie_on_a_line_of_samples():
    found = make_calibration(make_time(0.01, micro=16), make_time(0.02, micro=48))
    assert found.time_of(Shape(32, 1, 1, 1)).compute_s == pytest.approx(0.015)


def test_the_time_beside_other_processes_does_not_follow_from_that_alone():
    assert make_calibration(make_time(0.01)).time_of(Shape(32, 1, 1, 2)) is None


def test_an_update_alone_has_a_fixed_part_and_one_per_micro_batch():
    found = make_calibration(make_time(0.02, count=2), make_time(0.03, count=4), make_time(0.9, processes=2))
    assert found.line_of(32) == pytest.approx((0.01, 0.005))


def test_it_is_read_back_as_it_was_written():
    found = make_calibration(make_time(0.02), facts={"python": "3.8"})
    assert ComputeCalibration.from_json(found.to_json()) == found


def test_of_many_processes_on_few_cores_the_fewer_stand_for_the_more():
    shapes = [Shape(32, 1, 1, processes) for processes in (1, 2, 4, 8)]
    assert [each.processes for each in compute_calibration.shapes_to_measure(shapes, cores=2)] == [1, 2, 4]
    assert [each.processes for each in compute_calibration.shapes_to_measure(shapes)] == [1, 2, 4, 8]
    other = Shape(64, 1, 1, 8)
    assert compute_calibration.shapes_to_measure([*shapes, other], cores=2)[-1] == other  # no others do the same work


@pytest.mark.parametrize(("emulated", "expected"), [(True, 0.06), (False, None)])
def test_twice_the_processes_on_the_same_cores_take_twice_as_long(emulated, expected):
    time = ShapeTime(Shape(32, 1, 1, 4), 0.02, 0.0, 0.004, 0.006)
    found = ComputeCalibration("2026-11-18", "mlp", 2, emulated, (8,), (time,)).time_of(Shape(32, 1, 1, 8))
    assert (found and found.total_s) == (expected and pytest.approx(expected))


@pytest.mark.parametrize(
    ("processes", "cores", "jobs"),
    [
        ([1], 2, []),
        ([1, 2, 4], 8, [2]),
        ([1, 2, 3], 2, [2]),
        ([1, 2, 4], 2, [2, 4]),
        ([1, 8, 4, 16], 2, [2, 4]),
        ([2, 3], 1, [2]),
    ],
)
def test_jobs_of_two_and_of_the_fewest_that_take_turns_on_the_cores_are_measured(processes, cores, jobs):
    assert compute_calibration.jobs_to_measure(processes, cores) == jobs
