"""The doctor on this very machine, and on one whose TensorFlow is broken."""

from __future__ import annotations

import functools
import json
import sys

import pytest


@pytest.fixture
def doctor(run_command):
    return functools.partial(run_command, "doctor")


@pytest.mark.slow
def test_the_test_environment_is_ready_and_horovod_is_built_with_gloo(doctor):
    done = doctor("--json")
    value = json.loads(done.stdout)
    assert done.returncode == 0 and value["ready"] and value["sdk"] == "emulator"
    findings = {finding["name"]: finding for finding in value["findings"]}
    assert findings["TensorFlow"]["detail"] == ("2.15.1" if sys.version_info >= (3, 9) else "2.6.5") + ", stock"
    assert "0.28.1 with Gloo" in findings["Horovod"]["detail"]
    assert findings["tensorflow-datasets"]["ok"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise ImportError('broken wheel')", "ImportError: broken wheel"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "the interpreter was killed by SIGILL"),
    ],
)
def test_a_tensorflow_that_fails_or_kills_the_interpreter_is_reported(tmp_path, source, reason, doctor):
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow" / "__init__.py").write_text(source, encoding="utf-8")
    done = doctor(PYTHONPATH=str(tmp_path))
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"✗  TensorFlow           {reason}" in done.stdout
    assert done.stdout.endswith("Not ready: train cannot start here.\n")


def test_help_and_mistakes_are_like_those_of_train(doctor):
    assert "--[no]json" in doctor("--help").stdout
    done = doctor("--jsn")
    assert done.returncode == 1 and done.stderr == "doctor: --jsn is not a flag. Did you mean --json?\n"
