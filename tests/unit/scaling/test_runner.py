from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scaling_stand_ins import NO_PARTS, PARTS

from tf_ipu_dp import cli
from tf_ipu_dp.scaling import study_flags, study_folder
from tf_ipu_dp.scaling.__main__ import plan_study
from tf_ipu_dp.scaling.engines.protocol import Answer
from tf_ipu_dp.scaling.modes import Length
from tf_ipu_dp.scaling.records import CellPrediction, Measurement
from tf_ipu_dp.scaling.runner import Runner, Settings, measure_answers


@pytest.fixture
def make_runner(tmp_path):
    """Returns a runner and its study, from flags, parts and the predicted times of updates by cell."""

    def make(*words, parts=PARTS, update_s=None, **settings):
        words = ("--model=mlp", *words)
        options = study_flags.parse(words, parts)
        study = plan_study(options, parts, words)
        predictions = [CellPrediction(key, each, each, each, NO_PARTS) for key, each in (update_s or {}).items()]
        study = dataclasses.replace(study, predictions=tuple(predictions))
        folder = study_folder.open_folder(tmp_path / "study", study, resume=True)
        folder.write_study(study)
        lines = []
        made = Settings(options.config, options.request.dataset, options.updates, **settings)
        return Runner(study, made, folder, parts, lines.append, itertools.count().__next__), study, folder, lines

    return make


def answers(*seconds, samples=100):
    return [Answer(rank, "ddp", each, samples, 2.3, input_wait_s=each / 10) for rank, each in enumerate(seconds)]


@given(seconds=st.lists(st.floats(0.1, 100), min_size=2, max_size=2))
def test_an_engine_is_as_fast_as_its_slowest_process(seconds):
    cell = _CELLS["ddp-2"]
    made = measure_answers(cell, Length(3, 10), answers(*seconds), 200.0, None)
    assert (made.samples, made.updates, made.seconds, made.total_s) == (200, 10, max(seconds), 200.0)
    assert made.input_wait_s == pytest.approx(max(seconds) / 10) and made.memory_bytes is None


def test_a_process_that_does_not_answer_is_a_failure():
    with pytest.raises(cli.UsageError, match=r"1 of 2 processes answered\."):
        measure_answers(_CELLS["ddp-2"], Length(3, 10), answers(1.0), 2.0, None)


_OPTIONS = study_flags.parse(["--model=mlp", "--sizes=1,2", "--engines=ddp"], PARTS)
_CELLS = {cell.key: cell for cell in plan_study(_OPTIONS, PARTS, ()).cells}


def test_a_run_is_as_long_as_the_predicted_updates_take(make_runner):
    runner, study, _, _ = make_runner("--sizes=1,2", "--engines=tf_ipu_dp,ddp", update_s={"tf_ipu_dp-1": 0.01,
                                      "tf_ipu_dp-2": 2.0})  # fmt: skip
    lengths = {cell.key: runner.plan_length(cell) for cell in study.cells}
    assert lengths["tf_ipu_dp-1"] == Length(80, 800) and lengths["tf_ipu_dp-2"] == Length(1, 4)
    # No prediction for another engine: that of our cell with the same global batch.
    assert (lengths["ddp-1"], lengths["ddp-2"]) == (lengths["tf_ipu_dp-1"], lengths["tf_ipu_dp-2"])


def test_executions_of_several_updates_stay_whole(make_runner):
    runner, study, _, _ = make_runner("--sizes=1", "--device_iterations=8", update_s={"tf_ipu_dp-1": 0.1})
    assert runner.plan_length(study.cells[0]) == Length(8, 80)


def test_the_time_left_is_that_of_the_same_cells_and_a_typical_one_for_others(make_runner):
    runner, study, _, _ = make_runner("--sizes=1,2,4")
    first, second, third = study.cells
    measured = [
        Measurement(first.key, 0, Measurement.DONE, total_s=10.0),
        Measurement(second.key, 0, Measurement.DONE, total_s=30.0),
        Measurement(second.key, 1, Measurement.DONE, total_s=50.0),
    ]
    assert runner.time_left_s([(first, 1), (second, 2)], measured) == 50.0
    assert runner.time_left_s([(third, 0)], measured) == 25.0
    assert runner.time_left_s([(third, 0)], []) == 18.0  # 8 s timed, and its start


def test_an_interrupted_run_leaves_no_measurement_and_keeps_the_others(make_runner):
    calls = []

    def run_engine(cell, order, folder, network, on_process):
        calls.append(cell.key)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return [Answer(rank, "ddp", 1.0, 10, 2.3) for rank in range(order.processes)]

    parts = dataclasses.replace(PARTS, run_engine=run_engine)
    runner, study, folder, _ = make_runner("--sizes=1,2", "--engines=ddp", "--repeats=2", parts=parts)
    with pytest.raises(KeyboardInterrupt):
        runner.run()
    assert [each.cell for each in folder.read_measurements()] == calls[:2]
    made = runner.run()
    assert len(made) == 4 and all(each.is_done for each in made)
    # The interrupted run is the first of the others, and nothing is measured twice.
    assert len(calls) == 5 and calls[3] == calls[2]
    assert {(each.cell, each.repeat) for each in made} == {(cell.key, each) for cell in study.cells for each in (0, 1)}


def test_more_repeats_continue_a_study(make_runner):
    runner, _, folder, _ = make_runner("--sizes=1", "--engines=ddp", "--repeats=1")
    assert [each.repeat for each in runner.run()] == [0]
    folder.close()
    runner, _, _, lines = make_runner("--sizes=1", "--engines=ddp", "--repeats=3")
    assert [each.repeat for each in runner.run()] == [0, 1, 2]
    assert lines[0] == "1 of 3 runs are already measured." and len(lines) == 3
