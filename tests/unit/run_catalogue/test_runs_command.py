from __future__ import annotations

import json

import pytest

from tf_ipu_dp import cli
from tf_ipu_dp.runs import __main__ as command
from tf_ipu_dp.runs.records import StopReason


@pytest.fixture
def runs(make_run, tmp_path, monkeypatch, capsys):
    """Returns a function that runs the command where the folder runs is, and returns exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        code = cli.run("runs", lambda: command.main(words), None)
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def test_the_table_is_sorted_filtered_and_limited(make_run, runs):
    make_run("low", accuracy=0.2)
    make_run("high", accuracy=0.9)
    make_run("broken", result=False)
    code, out, err = runs("--sort=accuracy")
    assert code == 0 and [line.split()[0] for line in out.splitlines()] == ["Run", "high", "broken", "low"]
    assert err == "runs: 3 runs: 2 finished, 1 failed\n"
    assert runs("list", "runs", "--state=failed")[1].splitlines()[1].startswith("broken")
    assert runs("--limit=1", "--json", "--sort", "accuracy")[1].count('"name"') == 1
    assert runs("--state=failed")[2] == "runs: 1 run: 1 failed; 2 not shown\n"


def test_a_run_is_shown_with_what_can_be_done_with_it(make_run, runs):
    make_run("a", "--ipus=4", "--export")
    code, out, _ = runs("show", "runs/a")
    assert code == 0 and "--ipus=4" in out and "--export\n" in out
    assert "python -m tf_ipu_dp.monitor --explain=runs/a" in out
    assert json.loads(runs("show", "--json", "runs/a")[1])["flags"]["ipus"] == "4"


def test_the_command_that_resumes_a_run_is_for_where_the_user_stands(make_run, runs, monkeypatch, tmp_path):
    stopped = StopReason(StopReason.SIGNAL, True, "SIGTERM after step 64, saved.", "launch/train --run_dir=a")
    path = make_run("a", "--callbacks=own.py:report", stopped=stopped)
    (path / "checkpoints" / "step-00000064").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "runs")
    code, out, _ = runs("show", "../runs/a")
    assert code == 0 and "Stopped: SIGTERM after step 64, saved.\n" in out
    assert "  python -m tf_ipu_dp.train --run_dir=../runs/a --callbacks=own.py:report\n" in out
    assert "on fashion_mini, in ../runs/a\n" in out and "launch/train --run_dir=a" not in out


def test_commands_for_a_run_of_own_code_name_the_code_again(make_run, runs):
    path = make_run("own")
    flags = json.loads((path / "config.json").read_text(encoding="utf-8"))
    flags.update(model="my file.py:build", dataset="mine:load")
    (path / "config.json").write_text(json.dumps(flags), encoding="utf-8")
    (path / "checkpoints" / "step-00000004").mkdir(parents=True)
    out = runs("show", "runs/own")[1]
    named = "'--model=my file.py:build' --dataset=mine:load"
    assert f"python -m tf_ipu_dp.train --run_dir=runs/own {named} --evaluate\n" in out
    assert "python -m tf_ipu_dp.predict runs/own INPUT ... '--model=my file.py:build'\n" in out


def test_clean_says_what_it_would_delete_and_deletes_only_with_yes(make_run, runs):
    path = make_run("a", result=False)
    make_run("b")
    code, out, err = runs("clean", "--state=failed")
    assert code == 0 and "Would delete 1 run and free" in out and out.endswith("Add --yes to delete.\n") and err == ""
    assert path.exists()
    code, out, _ = runs("clean", "--state=failed", "--yes")
    assert code == 0 and "Deleted 1 run and freed" in out and not path.exists()
    assert runs("clean", "--older_than=30d", "--yes")[1] == "Deleted 0 runs and freed 0 bytes.\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["clean"], "clean needs to know which runs are meant. Give --older_than=30d, --state=failed, --model, "
                    "--dataset or --match='old-*'."),
        (["clean", "--older_than=soon"], "--older_than=soon is not possible: it is not a time. It takes a time like "
                                         "90s, 30m, 2h or 3d."),
        (["--state=done"], "--state=done is not a state of a run. Use running, finished, interrupted, failed or "
                           "damaged."),
        (["delete", "runs/a"], "delete is neither a subcommand nor a folder. Did you mean clean?"),
        (["shwo"], "shwo is neither a subcommand nor a folder. Did you mean show?"),
        (["show", "runs"], "runs is not the folder of a run: it has no run.flags. Runs below it: runs/a."),
        (["show"], "show needs the folder of one run, like runs/first, but got 0."),
        (["compare", "runs/a"], "compare needs two runs or more, like runs/first runs/second, but got 1."),
        (["compare", "runs/a", "runs/a", "--metric=acuracy"], "--metric=acuracy is not a metric that can be drawn. Did "
                                                             "you mean accuracy?"),
        (["compare", "runs/a", "runs/a", "--out=a.doc"], "--out=a.doc has an unknown file type. Use one of .png, .svg, "
                                                        ".html."),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence(make_run, runs, words, sentence):
    make_run("a")
    assert runs(*words) == (1, "", f"runs: {sentence}\n")


def test_a_folder_without_runs_is_no_error(runs, tmp_path):
    assert runs()[2] == "runs: There is no folder runs here. Give the folder that has the runs in it.\n"
    (tmp_path / "runs").mkdir()
    assert runs()[:2] == (0, "")
