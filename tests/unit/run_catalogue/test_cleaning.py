from __future__ import annotations

import fcntl
import time

import pytest

from tf_ipu_dp.run_catalogue import cleaning, summaries
from tf_ipu_dp.runs import heartbeat

DAY_S = 86400.0


def plan(folder, older_than_s=None, keep_best=False):
    now = time.time()
    runs = summaries.read_summaries(folder, now)
    found = cleaning.plan(runs, runs, older_than_s=older_than_s, keep_best=keep_best, now=now)
    return {each.run.name: each for each in found}


def test_only_old_runs_are_chosen_and_the_best_of_each_model_and_data_set_is_kept(make_run, tmp_path):
    make_run("best", accuracy=0.9, age_s=40 * DAY_S)
    make_run("worse", accuracy=0.8, age_s=40 * DAY_S)
    make_run("other-best", "--model=mlp", accuracy=0.3, age_s=40 * DAY_S)
    make_run("young", accuracy=0.1, age_s=20 * DAY_S)
    found = plan(tmp_path, 30 * DAY_S, keep_best=True)
    assert {name: each.kept for name, each in found.items()} == {
        "runs/best": "it has the best accuracy of cnn on fashion_mini",
        "runs/other-best": "it has the best accuracy of mlp on fashion_mini",
        "runs/worse": "",
    }
    assert found["runs/worse"].bytes > 0
    assert set(plan(tmp_path, 30 * DAY_S)) == {"runs/best", "runs/worse", "runs/other-best"}


def test_a_deleted_run_is_gone_and_what_its_links_lead_to_is_not(make_run, tmp_path):
    path = make_run("a")
    target = tmp_path / "precious"
    target.mkdir()
    (target / "file").write_text("x")
    (path / "checkpoints").mkdir()
    (path / "checkpoints" / "link").symlink_to(target)
    (path / "export").symlink_to(target)
    (path / "job.log").write_text("log")
    (candidate,) = plan(tmp_path).values()
    assert cleaning.delete(candidate, time.time()) == ""
    assert not path.exists() and (target / "file").read_text() == "x"


def test_a_run_that_is_alive_is_never_deleted(make_run, tmp_path):
    path = make_run("a", result=False)
    (candidate,) = plan(tmp_path).values()
    assert candidate.kept == ""
    with (path / ".lock").open() as handle:  # it was started since
        fcntl.flock(handle, fcntl.LOCK_EX)
        assert cleaning.delete(candidate, time.time()) == "it is running"
    reporter = heartbeat.StatusReporter(path, environ={"XDG_RUNTIME_DIR": str(tmp_path)})
    reporter.write()
    assert cleaning.delete(candidate, time.time()) == "it is running"
    assert plan(tmp_path)["runs/a"].kept == "it is running"
    assert (path / "run.flags").exists() and (path / "metrics.jsonl").exists()


@pytest.mark.parametrize("name", ["notes.txt", "src", "thesis.tex"])
def test_a_folder_with_other_files_is_kept(make_run, tmp_path, name):
    path = make_run("a")
    (path / name).write_text("mine")
    candidate = plan(tmp_path)["runs/a"]
    assert candidate.kept == f"{name} in it is not a run's file"
    assert cleaning.delete(candidate, time.time()) == candidate.kept and (path / name).exists()


def test_a_folder_that_was_replaced_by_a_link_is_kept(make_run, tmp_path):
    path, other = make_run("a"), make_run("b")
    candidate = plan(tmp_path)["runs/a"]
    path.rename(tmp_path / "moved")
    path.symlink_to(other)
    assert cleaning.delete(candidate, time.time()) == "it is not the folder of a run any more"
    assert (other / "run.flags").exists()


def test_an_interrupted_deletion_leaves_a_folder_that_is_still_a_run(make_run, tmp_path, monkeypatch):
    path = make_run("a")
    (candidate,) = plan(tmp_path).values()

    def fail(entry):
        raise PermissionError(13, f"not allowed: {entry.name}")

    monkeypatch.setattr(cleaning, "_remove", fail)
    assert cleaning.delete(candidate, time.time()).startswith("it cannot be deleted (not allowed: config.json")
    assert summaries.is_run(path)
