"""`tf_ipu_dp.train(...)` and `tf_ipu_dp.plan(...)` from a program: they return, and can be called again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_program_trains_several_times_and_goes_on(tmp_path):
    shutil.copy(ROOT / "tests/programs/own/calls.py", tmp_path)
    shutil.copy(ROOT / "examples/table/houses.py", tmp_path)
    done = subprocess.run(
        [sys.executable, "calls.py"], cwd=tmp_path, env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}, check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_models_of_every_kind_predict_the_same_from_checkpoint_export_and_python(tmp_path):
    for name in ("predictions.py", "kinds.py"):
        shutil.copy(ROOT / "tests/programs/own" / name, tmp_path)
    done = subprocess.run(
        [sys.executable, "predictions.py"], cwd=tmp_path, env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}, check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_importing_the_package_imports_nothing_heavy():
    code = (
        "import sys, tf_ipu_dp; dir(tf_ipu_dp); tf_ipu_dp.Task; tf_ipu_dp.UsageError; tf_ipu_dp.plan(ipus=2);"
        "heavy = {'tensorflow', 'numpy', 'rich'} & set(sys.modules); assert not heavy, heavy"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
