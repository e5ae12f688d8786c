"""What a study's measurements say: baselines, efficiency, failed and missing cells, errors of predictions."""

from __future__ import annotations

import dataclasses
import random

import pytest
import sample_study
from hypothesis import given
from hypothesis import strategies as st

from tf_ipu_dp.scaling import analysis, records
from tf_ipu_dp.scaling.records import Measurement


@pytest.fixture(params=records.MODES)
def mode(request):
    return request.param


def analyse(study):
    return analysis.analyse(study, sample_study.make_measurements(study))


def rows_by_key(found):
    return {row.cell.key: row for row in found.rows}


def test_every_cell_is_a_row_in_the_order_of_the_study_whatever_was_measured(mode):
    study = sample_study.make_study(mode)
    measurements = sample_study.make_measurements(study)
    random.Random(3).shuffle(measurements)
    found = analysis.analyse(study, measurements)
    assert [row.cell for row in found.rows] == list(study.cells)
    assert found == analyse(study), "the order of the measurements does not matter"
    empty = analysis.analyse(study, [])
    assert {row.reason for row in empty.rows} == {"not measured yet"} and empty.baseline == ""
    assert empty.knee is None and not any(row.is_done for row in empty.rows)


def test_a_cell_that_failed_or_is_missing_keeps_its_reason_and_its_prediction(mode):
    found = analyse(sample_study.make_study(mode))
    lost = [row for row in found.rows if not row.is_done]
    assert {row.reason for row in lost} == {sample_study.FAILED_REASON, sample_study.MISSING_REASON}
    assert all(row.efficiency is row.speedup is row.error is None and row.repeats == 0 for row in lost)


def test_a_repeat_that_failed_does_not_lose_the_others():
    study = sample_study.make_study(engines=("tf_ipu_dp",))
    measurements = sample_study.make_measurements(study)
    measurements[0] = sample_study.make_failure(study.cells[0])
    row = analysis.analyse(study, measurements).rows[0]
    assert (row.repeats, row.reason, row.failures) == (2, "", (sample_study.FAILED_REASON,))
    again = [*measurements, sample_study.make_measurement(study.cells[0])]
    assert analysis.analyse(study, again).rows[0].repeats == 3, "a repeat that is measured again replaces the first"


def test_efficiency_is_against_the_smallest_size_of_the_same_engine():
    found = analyse(sample_study.make_study(records.WEAK))
    rows = rows_by_key(found)
    assert found.baseline == "each engine at 1 instance"
    for engine in ("tf_ipu_dp", "horovod"):
        base, second = rows[f"{engine}-1"], rows[f"{engine}-2"]
        assert (base.speedup, base.efficiency, base.efficiency_interval) == (1, 1, None)
        assert second.speedup == pytest.approx(second.samples_per_s.median / base.samples_per_s.median)
        assert second.efficiency == pytest.approx(second.speedup / 2)
        assert second.efficiency_interval.low < second.efficiency < second.efficiency_interval.high


def test_the_baseline_is_named_after_what_was_measured():
    study = sample_study.make_study(records.WEAK, engines=("tf_ipu_dp", "horovod"))
    assert analyse(dataclasses.replace(study, cells=study.cells[:3])).baseline == "tf_ipu_dp at 1 instance"
    without = [each for each in sample_study.make_measurements(study) if each.cell != "horovod-1"]
    assert analysis.analyse(study, without).baseline == "tf_ipu_dp at 1 instance, horovod at 2 instances"
    compared = analyse(sample_study.make_study(records.COMPARE, engines=("tf_ipu_dp",)))
    assert compared.baseline == "tf_ipu_dp at 1 replica in 1 instance"
    swept = analyse(sample_study.make_study(records.BATCH, engines=("tf_ipu_dp",)))
    assert swept.baseline == "the best rate of tf_ipu_dp at batch 256"


def test_replicas_are_what_efficiency_counts_where_instances_differ():
    compared = rows_by_key(analyse(sample_study.make_study(records.COMPARE)))
    row = compared["tf_ipu_dp-4x2"]
    assert row.efficiency == pytest.approx(row.speedup / 4)
    instances = rows_by_key(analyse(sample_study.make_study(records.INSTANCES)))
    row = instances["tf_ipu_dp-4"]
    assert row.efficiency == row.speedup < 1


def test_a_batch_sweep_has_a_knee_for_each_engine_and_efficiency_of_the_best_rate():
    found = analyse(sample_study.make_study(records.BATCH))
    assert (found.knee.engine, found.knee.size, found.knee.best_size) == ("tf_ipu_dp", 64, 256)
    assert [knee.engine for knee in found.knees] == ["tf_ipu_dp", "horovod"]
    assert max(row.efficiency for row in found.rows if row.is_done) == 1
    assert analyse(sample_study.make_study(records.WEAK)).knee is None


def test_parts_and_input_wait_are_those_of_the_repeat_with_the_median_rate():
    study = sample_study.make_study(engines=("tf_ipu_dp",))
    measurements = sample_study.make_measurements(study)
    row = analysis.analyse(study, measurements).rows[0]
    typical = sorted((each for each in measurements if each.cell == row.cell.key), key=lambda each: each.seconds)[1]
    assert row.parts == typical.parts and row.samples_per_s.median == typical.samples_per_s
    assert row.input_wait_share == pytest.approx(typical.input_wait_s / typical.seconds)
    assert abs(row.parts_error) < 1e-9
    other = rows_by_key(analyse(sample_study.make_study()))["horovod-1"]
    assert other.parts is None and other.input_wait_share is None and other.parts_error is None


def test_parts_are_held_against_the_time_of_their_own_repeat():
    study = sample_study.make_study(engines=("tf_ipu_dp",), repeats=2)
    first, second = (sample_study.make_measurement(study.cells[0], repeat) for repeat in range(2))
    second = dataclasses.replace(
        second, seconds=3 * second.seconds, parts=dataclasses.replace(second.parts, compute_s=second.update_s * 3)
    )
    row = analysis.analyse(study, [first, second]).rows[0]
    assert row.update_s == pytest.approx((first.update_s + second.update_s) / 2), "the median of two repeats is neither"
    assert row.parts == first.parts and row.parts_update_s == first.update_s and abs(row.parts_error) < 1e-9


def test_memory_is_the_most_of_any_repeat():
    study = sample_study.make_study(engines=("tf_ipu_dp",), repeats=2)
    cell = study.cells[0]
    measured = [sample_study.make_measurement(cell, repeat, memory_bytes=7 + repeat) for repeat in range(2)]
    assert analysis.analyse(study, measured).rows[0].memory_bytes == 8
    unknown = [dataclasses.replace(each, memory_bytes=None) for each in measured]
    assert analysis.analyse(study, unknown).rows[0].memory_bytes is None


@given(st.floats(-0.5, 2))
def test_the_error_of_a_prediction_is_the_share_by_which_it_is_longer(error):
    study = sample_study.make_study(engines=("tf_ipu_dp",), repeats=1)
    cell = study.cells[0]
    study = dataclasses.replace(study, predictions=(sample_study.make_prediction(cell, error),))
    found = analysis.analyse(study, [sample_study.make_measurement(cell)])
    assert found.rows[0].error == pytest.approx(error, abs=1e-9)


def test_cells_that_share_the_cores_of_this_machine_are_marked():
    study = sample_study.make_study(engines=("tf_ipu_dp",))
    marked = {row.cell.size: row.core_limited for row in analyse(study).rows}
    assert marked == {1: False, 2: True, 4: True}, "one replica has both cores for itself"


def test_the_same_cells_of_all_engines_are_marked_however_busy_they_kept_the_cores():
    study = sample_study.make_study(engines=("tf_ipu_dp", "ddp"), predictions=())
    idle = [sample_study.make_measurement(cell, busy=0.3) for cell in study.cells]
    marked = [(row.cell.engine, row.core_limited) for row in analysis.analyse(study, idle).rows if row.cell.size == 2]
    assert marked == [("tf_ipu_dp", True), ("ddp", True)]
    on_ipus = dataclasses.replace(study, facts={"sdk": "poplar"})
    marked = [(row.cell.engine, row.core_limited) for row in analysis.analyse(on_ipus, idle).rows if row.cell.size == 2]
    assert marked == [("tf_ipu_dp", False), ("ddp", True)], "IPUs are not the cores of this machine"


def test_one_replica_on_each_of_several_machines_does_not_share_cores():
    cell = dataclasses.replace(sample_study.make_cell("tf_ipu_dp", 2), hosts=2)
    study = dataclasses.replace(sample_study.make_study(), cells=(cell,), predictions=())
    busy = [sample_study.make_measurement(cell, busy=1.0)]
    assert not analysis.analyse(study, busy).rows[0].core_limited
    emulated = dataclasses.replace(study, fabric="r4")
    assert analysis.analyse(emulated, busy).rows[0].core_limited, "emulated hosts are on this machine"


def test_the_time_to_an_accuracy_is_explained_by_three_factors():
    found = analysis.analyse(*sample_study.make_accuracy_study(sizes=(1, 2, 4)))
    first, second, third = found.time_to_accuracy
    assert (first.efficiency, first.hardware, first.statistical, first.overhead) == pytest.approx((1, 1, 1, 1))
    assert first.epochs == 4 and second.epochs == 5
    assert second.statistical == pytest.approx(4 / 5)
    assert second.hardware == pytest.approx(found.rows[1].efficiency)
    assert second.efficiency == pytest.approx(first.seconds / second.seconds / 2)
    assert second.hardware * second.statistical * second.overhead == pytest.approx(second.efficiency)
    assert third.seconds is third.efficiency is third.samples is None, "the accuracy was not reached"


def test_a_repeat_that_does_not_reach_the_accuracy_counts_as_the_slowest():
    study, (measured, *_) = sample_study.make_accuracy_study(sizes=(1, 2))
    lost = dataclasses.replace(measured, validations=())

    def seconds(*repeats):
        repeats = [dataclasses.replace(each, repeat=number) for number, each in enumerate(repeats)]
        return analysis.analyse(study, repeats).time_to_accuracy[0].seconds

    assert seconds(measured) == seconds(measured, lost, measured) == measured.validations[-1].elapsed_s
    assert seconds(measured, lost) is seconds(lost, lost, measured) is None


def test_a_study_without_a_target_has_no_time_to_accuracy(mode):
    assert analyse(sample_study.make_study(mode)).time_to_accuracy == ()


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 2), st.sampled_from(["done", "failed"]), st.floats(0, 100)),
        max_size=20,
    )
)
def test_any_measurements_can_be_analysed(drawn):
    study = sample_study.make_study(records.WEAK, engines=("tf_ipu_dp", "horovod"), target_accuracy=0.5)
    measurements = [
        Measurement(study.cells[place].key, repeat, state, samples=64, updates=1, seconds=seconds)
        for place, repeat, state, seconds in drawn
    ]
    for row in analysis.analyse(study, measurements).rows:
        assert row.is_done == (row.reason == "") == (row.speedup is not None) == (row.efficiency is not None)
