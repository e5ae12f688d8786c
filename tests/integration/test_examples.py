"""The examples run as their READMEs say, as one instance and as two."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
# What a run must reach: the classes are easy, so less means that something is wrong and not that it had bad luck.
LEAST = {"image_folder": 0.8, "text": 0.9, "fine_tuning": 0.8}


def commands(name):
    """Returns the commands in an example's README."""
    text = (EXAMPLES / name / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```\n(.*?)```", text, re.DOTALL)
    return [shlex.split(line) for line in blocks[0].splitlines() if line]


def run(words, folder):
    assert words[0] == "python"
    done = subprocess.run([sys.executable, *words[1:]], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize("name", ["image_folder", "text", "table", "fine_tuning", "pipeline"])
def test_an_example_runs_as_its_readme_says_and_as_two_instances(name, tmp_path):
    folder = tmp_path / name
    shutil.copytree(EXAMPLES / name, folder)
    for words in commands(name):
        run(words, folder)
    last = [words for words in commands(name) if "--dry_run" not in words][-1]
    (path,) = (folder / word.partition("=")[2] for word in last if word.startswith("--run_dir="))
    one = json.loads((path / "result.json").read_text(encoding="utf-8"))
    assert (one["validation"]["top1"] or 1.0) >= LEAST.get(name, 0.0)
    if name == "table":
        assert one["validation"]["samples"] == 501 and one["validation"]["metrics"]["mae"] < 0.5
    changed = [re.sub("^--run_dir=.*", "--run_dir=runs/two", word) for word in last]
    run([*changed, "--instances=2"], folder)
    two = json.loads((folder / "runs/two/result.json").read_text(encoding="utf-8"))
    assert two["validation"]["loss"] == pytest.approx(one["validation"]["loss"], rel=0.02, abs=0.005)
    assert two["validation"]["samples"] == one["validation"]["samples"]


def test_the_cells_of_the_notebook_run_in_order(tmp_path):
    """Runs the code of the cells in one process, without Jupyter, which the test environments do not have."""
    for name in ("notebook", "text"):
        shutil.copytree(EXAMPLES / name, tmp_path / name)
    notebook = json.loads((tmp_path / "notebook" / "reviews.ipynb").read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    program = "\n".join([*cells, "assert accuracy == result.scores.top1 > 0.9, (accuracy, result.scores)"])
    (tmp_path / "notebook" / "cells.py").write_text(program, encoding="utf-8")
    run(["python", "cells.py"], tmp_path / "notebook")
