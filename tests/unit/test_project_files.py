"""The files around the package: workflows and hooks that run what is there, and a version with a section of its own."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import tf_ipu_dp

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ["ci.yml", "wheel.yml"])
def test_a_workflow_runs_a_script_of_this_repository(name):
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text(encoding="utf-8"))
    steps = [step for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert steps and all(os.access(ROOT / step["run"].split()[0], os.X_OK) for step in steps)


def test_the_hooks_are_lint_format_and_types_with_the_versions_of_the_environment():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    (local,) = config["repos"]
    assert local["repo"] == "local"
    commands = [hook["entry"].split()[:4] for hook in local["hooks"]]
    python = [".venv/bin/python", "-m"]
    assert commands == [[*python, "ruff", "check"], [*python, "ruff", "format"], [*python, "mypy"]]
    assert {hook["language"] for hook in local["hooks"]} == {"system"}


def test_the_changelog_begins_with_this_version():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\S+)", text, re.MULTILINE)[0] == tf_ipu_dp.__version__


def test_every_file_that_the_recipes_name_is_there():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:launch|tests|benchmarks|\.github|\.ci)/[\w./-]*)`", text))
    named |= {
        f"tf_ipu_dp/{path}"
        for path in re.findall(r"`((?:config|planning|datasets|training|monitoring|emulator)/[\w/]*(?:\.py)?)`", text)
    }
    assert len(named) > 15
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def test_what_every_environment_runs_is_a_file_or_begins_the_name_of_a_test():
    folder = ROOT / "tests" / "integration"
    text = (folder / "conftest.py").read_text(encoding="utf-8")
    (block,) = re.findall(r"^EVERY_ENVIRONMENT = \((.*?)^\)", text, re.MULTILINE | re.DOTALL)
    entries = [entry.partition("::") for entry in re.findall(r'"([^"]+)"', block)]
    assert len(entries) > 10
    without = [
        (file, name)
        for file, _, name in entries
        if not (folder / file).exists()
        or f"\ndef {name.partition('[')[0]}" not in (folder / file).read_text(encoding="utf-8")
    ]
    assert [entry for entry in without if entry[1] or not (folder / entry[0]).exists()] == []


def test_no_unit_test_exchanges_the_environment_of_the_process_that_runs_others():
    # Emptying and refilling it moves it in memory. A thread of tf.data that reads it meanwhile ends the process, and
    # all tests that were to follow. monkeypatch.setenv and delenv change one variable.
    exchanges = re.compile(
        r"patch\.dict\(\s*(?:\"|')?os\.environ|^\s*os\.environ\.clear\(|^\s*os\.environ = ", re.MULTILINE
    )
    assert exchanges.search("with mock.patch.dict(os.environ, launcher):")
    files = [*(ROOT / "tests" / "unit").rglob("*.py"), ROOT / "tests" / "conftest.py"]
    assert [path.name for path in files if path != Path(__file__) and exchanges.search(path.read_text("utf-8"))] == []


def test_a_test_process_that_dies_fails_the_test_that_it_ran(tmp_path):
    (options,) = re.findall(r"-m pytest (-n 2 .*?) \"", (ROOT / "launch" / "test").read_text(encoding="utf-8"))
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    for name in "abcd":
        dies = f"    if '{name}' == 'c': os.kill(os.getpid(), signal.SIGKILL)\n"
        text = f"import os, signal\ndef test_first(): pass\ndef test_last():\n{dies}"
        (tmp_path / f"test_{name}.py").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", *options.split(), "--rootdir=.", "-o", "addopts=", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 1 and "crashed while running 'test_c.py::test_last'" in done.stdout
    assert "1 failed" in done.stdout and "INTERNALERROR" not in done.stdout


def test_extras_that_are_installed_beside_tensorflow_leave_it_the_protobuf_that_it_needs():
    """pip asks only what it installs: without a limit trackers brought a protobuf that TensorFlow 2.15 excludes."""
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    extras = parser["options.extras_require"]
    limit = 'protobuf<5; python_version >= "3.9" and python_version < "3.12"'
    assert all(limit in extras[name].splitlines() for name in ("wandb", "mlflow"))
