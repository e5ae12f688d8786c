"""A run's folder as training writes it, read and judged."""

from __future__ import annotations

import json

import pytest

from tf_ipu_dp import cli
from tf_ipu_dp.config import train_flags
from tf_ipu_dp.datasets import info
from tf_ipu_dp.monitoring import diagnosis
from tf_ipu_dp.planning import plan, report
from tf_ipu_dp.runs import heartbeat

FLAGS = ("--ipus=4", "--epochs=2", "--sdk=emulator")


@pytest.fixture
def run(tmp_path):
    """Writes the folder of a run of these flags; `times` are (seconds, executing, input wait) of each record."""

    def write(*times, flags=FLAGS, seconds=None):
        cfg = train_flags.parse(flags)
        (tmp_path / "run.flags").write_text("\n".join(flags) + "\n", encoding="utf-8")
        planned = plan.plan_run(cfg, info.DATASETS[cfg.dataset])
        (tmp_path / "plan.json").write_text(report.render_json(planned), encoding="utf-8")
        lines = []
        for number, (spent, executing, waiting) in enumerate(times):
            share = {"instance": 0, "seconds": spent, "executing_s": executing, "input_wait_s": waiting}
            lines.append({"kind": "train", "step": 10 * number, "instances": [{**share, "collective_s": 0.0}]})
            lines.append({"kind": "validation", "step": 10 * number})
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / "metrics.jsonl").write_text(text + '{"kind": "train", "st', encoding="utf-8")
        if seconds:
            (tmp_path / "result.json").write_text(json.dumps({"updates": 128, "seconds": seconds}), encoding="utf-8")
        return tmp_path

    return write


SECONDS = {"total": 100.0, "compile": 5.0, "executing": 60.0, "between_executions": 1.0, "logging_and_checkpoints": 1.0,
           "input_wait": 30.0}  # fmt: skip


def test_a_finished_run_is_judged_by_its_records(run):
    found = diagnosis.explain(run((10.0, 9.0, 6.0), (10.0, 9.0, 5.0), seconds=SECONDS))
    assert (found.finished, found.updates, found.verdict.kind) == (True, 128, "input")
    assert "55 % of the training was waiting for samples" in found.verdict.sentence


def test_executions_that_are_too_short_get_a_number_that_the_planner_takes(run):
    found = diagnosis.explain(run((10.0, 5.0, 0.0), (10.0, 5.0, 0.0), seconds=SECONDS))
    assert found.verdict.kind == "executions" and "of 78 ms: 45 % of the training" in found.verdict.sentence
    iterations = int(found.verdict.sentence.rpartition("=")[2].rstrip("."))
    planned = plan.plan_run(
        train_flags.parse([*FLAGS, f"--device_iterations={iterations}"]), info.DATASETS["fashion_mini"]
    )
    assert planned.epochs.device_iterations == iterations == 8


def test_a_run_without_records_of_its_instances_is_judged_by_its_result(run):
    found = diagnosis.explain(run(seconds=SECONDS))
    assert found.verdict.kind == "input" and "48 %" in found.verdict.sentence


def test_a_run_that_goes_on_is_judged_by_what_there_is(run):
    folder = run((10.0, 9.9, 0.1), (10.0, 9.9, 0.1))
    found = diagnosis.explain(folder)
    assert (found.finished, found.updates, found.verdict.kind) == (False, 10, "well fed")
    assert diagnosis.explain_lately(folder) == found.verdict


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
    assert diagnosis.explain_lately(folder) is None


@pytest.mark.parametrize("name", ["metrics.jsonl", "result.json", "run.flags"])
def test_files_that_make_no_sense_are_passed_over(run, name):
    folder = run((10.0, 9.0, 6.0), seconds=SECONDS)
    (folder / name).write_bytes(b"\xff\x00[1, 2]\n{}\n")
    assert diagnosis.explain(folder).verdict.kind == "input"


def test_a_folder_that_is_no_runs_is_refused(tmp_path):
    with pytest.raises(cli.UsageError, match=r"is not the folder of a run: it has no plan\.json"):
        diagnosis.explain(tmp_path)
