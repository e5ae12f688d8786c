"""The launch command: its words, its dry run, its refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tf_ipu_dp import launch


@pytest.mark.parametrize(
    ("words", "own", "train"),
    [
        (["--instances=4", "--max_restarts=3", "--", "--ipus=8"], ["--max_restarts=3"], ["--instances=4", "--ipus=8"]),
        (["--max_restarts", "3", "--model", "mlp", "--verify"], ["--max_restarts", "3", "--verify"],
         ["--model", "mlp"]),
        (["--nodry_run", "-launcher=emulator", "--noresume"], ["--nodry_run", "-launcher=emulator"], ["--noresume"]),
        (["--", "--model=mlp", "--dry_run", "--"], ["--dry_run"], ["--model=mlp", "--"]),
        ([], [], []),
    ],
)  # fmt: skip
def test_the_launchers_words_are_separated_from_those_of_train_with_and_without_two_dashes(words, own, train):
    assert launch.split_words(words) == (own, train)


def run(*words, **environ):
    given_environ = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    done = subprocess.run(
        [sys.executable, "-m", "tf_ipu_dp.launch", *words], env={**given_environ, **environ}, capture_output=True,
        text=True, check=False, timeout=240,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_a_dry_run_shows_the_plan_and_the_command_and_starts_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = run("--instances=2", "--dry_run", "--sdk=emulator", "--", "--ipus=4", "--model=mlp")
    assert (code, err) == (0, "")
    assert "replica 3  IPU 3" in out
    assert out.splitlines()[-1].endswith("--instances=2 --sdk=emulator --ipus=4 --model=mlp")
    code, out, _ = run("--dry_run", "--json", "--sdk=emulator", "--ipus=4")
    value = json.loads(out)
    assert value["plan"]["topology"]["instances"] == 2 and value["command"][2] == "tf_ipu_dp.emulator.poprun"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "environ", "sentence"),
    [
        (["--instances=2", "--max_restart=3"], {}, "--max_restart is not a flag. Did you mean --max_restarts?"),
        (["--instances=2", "--ipus=6"], {}, "--ipus=6 is not possible: IPUs come in powers of two. Use --ipus=4 or 8."),
        (["--hosts=2", "--sdk=emulator"], {}, "--hosts=2 is enough to plan the job, but not to start it. Give names"),
        (["--dry_run", "--evaluate", "--run_dir=x"], {}, "--run_dir=x is not the folder of a run"),
        (["--verify", "--instances=1", "--sdk=emulator"], {}, "--verify compares one instance with several"),
        (["--launcher_args=it's"], {}, "--launcher_args=it's cannot be split into words (No closing quotation). "),
        ([], {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
         "launch starts the instances itself, but mpirun started it as instance 1 of 2."),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence_and_leaves_nothing_behind(tmp_path, monkeypatch, words, environ, sentence):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(*words, **environ)
    assert (code, out) == (1, "")
    assert err.startswith(f"launch: {sentence}") and err.count("\n") == 1
    assert not list(tmp_path.iterdir())
