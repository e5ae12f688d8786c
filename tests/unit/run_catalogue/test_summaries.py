from __future__ import annotations

import json
import os
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf_ipu_dp import cli
from tf_ipu_dp.monitoring.text_layout import DisplayOptions
from tf_ipu_dp.run_catalogue import summaries, table
from tf_ipu_dp.runs import heartbeat
from tf_ipu_dp.runs.run_folder import RunFolder


def test_a_summary_has_what_the_run_was_and_how_it_ended(make_run):
    path = make_run("a", "--ipus=8", "--instances=2", "--model=mlp", accuracy=0.75)
    found = summaries.read_summary(path)
    assert (found.state, found.model, found.dataset, found.layout) == ("finished", "mlp", "fashion_mini", "2 x 4")
    assert (found.step, found.planned_steps, found.best_accuracy, found.best_loss) == (160, 160, 0.75, 1 / 64)
    assert found.samples_per_s == 1000.0 and found.problem is None and found.verdict.startswith("No bottleneck")
    assert found.started == pytest.approx(time.time(), abs=600)


def test_a_run_without_a_result_has_failed_with_its_error(make_run, interrupted):
    path = make_run("a", result=False)
    assert summaries.read_summary(path).problem == "it ended without a result"
    RunFolder(path).write_error(0, "Traceback ...\nValueError: the disk is on fire")
    found = summaries.read_summary(path)
    assert (found.state, found.problem, found.step) == ("failed", "ValueError: the disk is on fire", 64)
    stopped = summaries.read_summary(make_run("b", stopped=interrupted))
    assert (stopped.state, stopped.problem) == ("interrupted", "SIGTERM after step 64.")


def test_a_run_with_a_heartbeat_of_a_live_process_is_running(make_run):
    path = make_run("a", result=False)
    reporter = heartbeat.StatusReporter(path, environ={"XDG_RUNTIME_DIR": str(path.parent)})
    reporter.write()
    assert summaries.read_summary(path).state == "running"
    reporter.stop()
    assert summaries.read_summary(path).state == "failed"


def test_an_instance_on_another_host_is_alive_for_ten_minutes_after_its_heartbeat(make_run):
    path = make_run("a", result=False)
    status = heartbeat.Status(str(path), 0, 1, "another-host", 1, time=1000.0)
    heartbeat.path_of(path, 0).parent.mkdir()
    heartbeat.path_of(path, 0).write_text(json.dumps(status.to_json()), encoding="utf-8")
    assert summaries.is_running(path, 1599.0) and not summaries.is_running(path, 1601.0)


def test_runs_are_found_below_a_folder_but_not_through_links_or_in_hidden_folders(make_run, tmp_path):
    a, b = make_run("a"), make_run("study/deep/b")
    make_run(".hidden/c")
    (tmp_path / "runs" / "link").symlink_to(a)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "run.flags").symlink_to(a / "run.flags")
    assert summaries.find_runs(tmp_path) == [a, b]
    assert [each.name for each in summaries.read_summaries(tmp_path / "runs", 0.0)] == ["a", "study/deep/b"]
    assert summaries.find_runs(a) == [a]
    with pytest.raises(cli.UsageError, match="is not a folder"):
        summaries.find_runs(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["plan.json", "result.json", "config.json", "metrics.jsonl", "status", "errors"])
@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\xfe\x00", b"[]", b"{" * 100_000, b'{"schema": 99}', b'{"updates": 1e999}', b"null\n" * 1000],
    ids=["empty", "no text", "a list", "nested", "later schema", "infinite", "null"],
)
def test_a_damaged_file_is_a_row_that_says_so_and_breaks_nothing(make_run, name, content):
    path = make_run("a")
    file = path / name
    if name in ("status", "errors"):
        file.mkdir()
        file = file / ("instance-000.json" if name == "status" else "instance-000.txt")
    file.write_bytes(content)
    found = summaries.read_summary(path)
    if name in ("plan.json", "result.json"):
        assert found.state == "damaged" and name in found.problem
    else:
        assert found.state == "finished"
    assert table.render([found], DisplayOptions(80)).count("\n") == 2


def test_pipes_and_missing_files_do_not_block(make_run):
    path = make_run("a", result=False)
    for name in ("plan.json", "metrics.jsonl", "config.json", "result.json"):
        (path / name).unlink(missing_ok=True)
        os.mkfifo(path / name)
    os.mkfifo(path / "best")
    found = summaries.read_summary(path)
    assert found.state == "damaged" and "plan.json" in found.problem and "result.json" in found.problem


def test_escapes_and_huge_values_cannot_disturb_the_table(make_run):
    path = make_run("a\x1b[2Jb\n\u202ec")
    result = json.loads((path / "result.json").read_text())
    result["updates"], result["samples_per_s"], result["model"] = 10**18, 1e300, "m\x1b]0;x\x07" * 100
    result["verdict"]["sentence"] = "red\x1b[31m" * 1000
    result["validation"]["top1"] = 1e300
    (path / "result.json").write_text(json.dumps(result))
    (path / "run.flags").touch()
    os.utime(path / "run.flags", (2**62, 2**62) if sys.platform != "linux" else (2**33, 2**33))
    text = table.render([summaries.read_summary(path)], DisplayOptions(None))
    assert text.count("\n") == 2 and text.replace("\n", "").isprintable()
    assert "a\\x1b[2Jb\\n\\u202ec" in text and "more than 1e+12" in text and max(map(len, text.splitlines())) < 1200


@given(st.lists(st.tuples(st.one_of(st.none(), st.floats(0, 1)), st.one_of(st.none(), st.integers(0, 9))), max_size=8))
def test_a_sorted_table_has_every_run_once_and_what_is_not_known_last(pairs):
    runs = [
        summaries.RunSummary(str(number), str(number), "finished", best_accuracy=accuracy, step=step)
        for number, (accuracy, step) in enumerate(pairs)
    ]
    for key in table.SORTS:
        for reverse in (False, True):
            ordered = table.sort(runs, key, reverse=reverse)
            assert sorted(each.name for each in ordered) == sorted(each.name for each in runs)
    best = [each.best_accuracy for each in table.sort(runs, "accuracy")]
    known = [each for each in best if each is not None]
    assert known == sorted(known, reverse=True) and best[: len(known)] == known


def test_a_selection_restricts_by_name_model_data_and_state(make_run, tmp_path):
    make_run("old-1", "--model=mlp")
    make_run("old-2", result=False)
    make_run("new", "--dataset=synthetic")
    runs = summaries.read_summaries(tmp_path / "runs", time.time())

    def chosen(**fields):
        return [each.name for each in table.Selection(**fields).choose(runs)]

    assert chosen() == ["new", "old-1", "old-2"]
    assert chosen(match="old-*") == ["old-1", "old-2"] and chosen(model="mlp") == ["old-1"]
    assert chosen(dataset="synthetic") == ["new"] and chosen(states=("failed",)) == ["old-2"]
    assert table.summary_line(runs) == "3 runs: 2 finished, 1 failed"


def test_the_table_is_as_wide_as_the_terminal(make_run, tmp_path):
    for number in range(3):
        make_run(f"a-run-with-a-rather-long-name-{number}", "--ipus=8", "--instances=2")
    runs = summaries.read_summaries(tmp_path / "runs", time.time())
    for width in (40, 60, 80, 120, 200):
        lines = table.render(runs, DisplayOptions(width)).splitlines()
        assert len(lines) == 4 and max(map(len, lines)) <= width
        assert "State" in lines[0] and ("Accuracy %" in lines[0]) == (width > 40)
        # A state is never cut, and of a name only the middle.
        for number, line in enumerate(lines[1:]):
            name, rest = line.split(maxsplit=1)
            assert name.startswith("a-run-with-a") and name.endswith(f"long-name-{number}") and "finished" in rest
            assert ("~" in name) == (width == 40)
    assert json.loads(table.render_json(runs))["runs"][0]["best_accuracy"] == 0.5
