"""A run's folder as training writes it, read and judged."""

from __future__ import annotations

import pytest
import sample_records

from tf_ipu_dp import cli
from tf_ipu_dp.config import train_flags
from tf_ipu_dp.datasets import info
from tf_ipu_dp.monitoring import diagnosis
from tf_ipu_dp.planning import plan
from tf_ipu_dp.runs import heartbeat, records, run_folder
from tf_ipu_dp.runs.exchange_times import ExchangeTimes

FLAGS = ("--ipus=4", "--epochs=2", "--sdk=emulator")


@pytest.fixture
def run(tmp_path):
    """Writes the folder of a run of these flags; `times` are (seconds, executing, input wait) of each record."""

    def write(*times, flags=FLAGS, result=None):
        folder = run_folder.RunFolder(tmp_path)
        folder.write_start(train_flags.parse(flags), sample_records.make_plan(*flags))
        for number, (spent, executing, waiting) in enumerate(times):
            instance = records.InstanceTimes(0, spent, executing, waiting, 0.0)
            folder.append_metrics(sample_records.make_training(10 * number, instance, executions=64))
            folder.append_metrics(sample_records.make_validation(10 * number))
        with folder.metrics.open("a", encoding="utf-8") as file:
            file.write('{"kind": "train", "st')
        if result:
            folder.write_result(result)
        return tmp_path

    return write


# As release 0.1 left it: the verdict is a sentence.
TIMES = records.RunTimes(100.0, 5.0, 18.0, 1.0, 1.0, 0.0, 11.0)
OLD_RESULT = sample_records.make_result(times=TIMES, updates=128, verdict=records.Verdict("unknown", "Held back."))


def test_a_finished_run_is_judged_by_its_records(run):
    found = diagnosis.explain(run((10.0, 9.0, 6.0), (10.0, 9.0, 5.0), result=OLD_RESULT))
    assert (found.finished, found.updates, found.verdict.kind) == (True, 128, "input")
    assert "55 % of training was waiting for samples" in found.verdict.sentence


def test_executions_that_are_too_short_get_a_number_that_the_planner_takes(run):
    found = diagnosis.explain(run((10.0, 5.0, 0.0), (10.0, 5.0, 0.0), result=OLD_RESULT))
    assert found.verdict.kind == "small executions" and "of 78 ms: 45 % of training" in found.verdict.sentence
    iterations = int(found.verdict.sentence.rpartition("=")[2].rstrip("."))
    planned = plan.plan_run(
        train_flags.parse([*FLAGS, f"--device_iterations={iterations}"]), info.DATASETS["fashion_mini"]
    )
    assert planned.epochs.device_iterations == iterations == 32


def test_a_run_without_records_of_its_instances_is_judged_by_its_result(run):
    found = diagnosis.explain(run(result=OLD_RESULT))
    assert found.verdict.kind == "input" and "55 %" in found.verdict.sentence


def test_the_verdict_of_the_trainer_is_the_one_that_is_explained(run):
    result = sample_records.make_result()
    assert diagnosis.explain(run((10.0, 9.0, 6.0), result=result)).verdict == result.verdict


def test_a_run_that_goes_on_is_judged_by_what_there_is(run):
    folder = run((10.0, 9.9, 0.1), (10.0, 9.9, 0.1))
    found = diagnosis.explain(folder)
    assert (found.finished, found.updates, found.verdict.kind) == (False, 10, "none")
    assert diagnosis.explain_recent(folder) == found.verdict


def test_logging_and_checkpoints_are_judged_alike_while_a_run_goes_on_and_afterwards(run):
    path = run()
    folder = run_folder.RunFolder(path)
    folder.metrics.unlink()  # it ends with half a line
    instances = (records.InstanceTimes(0, 10.0, 6.0, 0.1, 0.0, bookkeeping_s=3.9),)
    recorded = sample_records.make_training(10, *instances, executions=64)
    folder.append_metrics(recorded)
    live = diagnosis.explain_recent(path)
    assert live.kind == "logging and checkpoints" and "39 % of training" in live.sentence
    times = records.RunTimes(20.0, 1.0, 6.0, 0.1, 3.9, 0.0, 0.1)
    assert diagnosis.judge(folder.read_plan(), None, [recorded], times) == live


@pytest.mark.parametrize(("kind", "finished"), [("signal", False), ("time limit", False), ("early stopping", True)])
def test_a_run_that_was_interrupted_is_not_finished(run, kind, finished):
    stopped = records.StopReason(kind, transient=False, message="Stopped.")
    result = sample_records.make_result(stopped=stopped)
    assert diagnosis.explain(run((10.0, 9.9, 0.1), result=result)).finished is finished


def test_the_exchanges_of_a_run_that_goes_on_are_those_of_its_last_checkpoint(run):
    path = run((10.0, 9.9, 0.1))
    assert diagnosis.explain(path).exchanges is None
    times = ExchangeTimes.of([[0.3, 0.2], [0.1, 0.4]])
    run_folder.RunFolder(path).write_exchange_times(times)
    assert diagnosis.explain(path).exchanges == times.summary()


def test_the_exchanges_of_a_run_that_has_ended_are_those_of_its_result(run):
    result = sample_records.make_result(exchanges=ExchangeTimes.of([[0.3, 0.2], [0.1, 0.4]]).summary())
    assert diagnosis.explain(run((10.0, 9.9, 0.1), result=result)).exchanges == result.exchanges


def test_a_run_that_compiles_says_so(run):
    folder = run()
    reporter = heartbeat.StatusReporter(folder, environ={"XDG_RUNTIME_DIR": str(folder)})
    reporter.update("compiling")
    reporter.start()
    try:
        found = diagnosis.explain(folder)
    finally:
        reporter.stop()
    assert found.verdict.kind == "compiling" and "--executable_cache" in found.verdict.sentence
    assert diagnosis.explain_recent(folder) is None


@pytest.mark.parametrize("name", ["metrics.jsonl", "result.json", "run.flags"])
def test_files_that_make_no_sense_are_passed_over(run, name):
    folder = run((10.0, 9.0, 6.0), result=OLD_RESULT)
    (folder / name).write_bytes(b"\xff\x00[1, 2]\n{}\n")
    assert diagnosis.explain(folder).verdict.kind == "input"


def test_a_folder_that_is_no_runs_is_refused(tmp_path):
    with pytest.raises(cli.UsageError, match=r"is not the folder of a run: it has no plan\.json"):
        diagnosis.explain(tmp_path)
