"""What is refused before TensorFlow is imported."""

from __future__ import annotations

import pytest

from tf_ipu_dp import cli
from tf_ipu_dp.config import train_flags
from tf_ipu_dp.datasets import info
from tf_ipu_dp.planning import plan
from tf_ipu_dp.training import preflight


def check(*words):
    cfg = train_flags.parse(words)
    preflight.check(cfg, plan.plan_run(cfg, info.DATASETS["fashion_mini"]))


def test_weights_that_are_nowhere_are_refused_unless_the_run_resumes(tmp_path, monkeypatch, emulator_dir):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(cli.UsageError) as caught:
        check("--init_from=base")
    assert str(caught.value) == (
        "--init_from=base does not exist. Give the folder of a run, like runs/first, a checkpoint, an .h5 or .keras "
        "file, or a SavedModel."
    )
    (tmp_path / "weights.index").touch()
    check("--init_from=weights")
    (tmp_path / "run" / "checkpoints" / "step-00000001").mkdir(parents=True)
    (tmp_path / "run" / "run.flags").touch()
    check("--init_from=base", "--run_dir=run")


def test_a_missing_file_of_callbacks_is_refused_with_its_flag(tmp_path, monkeypatch, emulator_dir):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(cli.UsageError, match=r"^--callbacks=mine.py:watch: there is no file mine.py on this host"):
        check("--callbacks=mine.py:watch")
    (tmp_path / "mine.py").touch()  # what is in it is known when it is loaded
    check("--callbacks=mine.py:watch")
