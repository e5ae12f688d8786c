"""`tf_ipu_dp.train(...)` and `tf_ipu_dp.plan(...)` from a program: they return, and can be called again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_program(folder, name, *others):
    """Runs a program of tests/programs/own, with other files beside it; it asserts what it is for."""
    for path in (f"tests/programs/own/{name}", *others):
        shutil.copy(ROOT / path, folder)
    done = subprocess.run(
        [sys.executable, name], cwd=folder, env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}, check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_a_program_trains_several_times_and_goes_on(tmp_path):
    run_program(tmp_path, "calls.py", "examples/table/houses.py", "tests/programs/own/watchers.py")


def test_the_graphs_of_past_epochs_are_freed_although_python_sees_too_few_objects_to_collect(tmp_path):
    run_program(tmp_path, "epochs.py")


def test_models_of_every_kind_predict_the_same_from_checkpoint_export_and_python(tmp_path):
    run_program(tmp_path, "predictions.py", "tests/programs/own/kinds.py")


def test_weights_of_samples_count_in_the_update_the_loss_and_weighted_metrics(tmp_path):
    run_program(tmp_path, "weights.py")


def test_importing_the_package_imports_nothing_heavy():
    code = (
        "import sys, tf_ipu_dp; dir(tf_ipu_dp); tf_ipu_dp.Task; tf_ipu_dp.UsageError; tf_ipu_dp.plan(ipus=2);"
        "heavy = {'tensorflow', 'numpy', 'rich'} & set(sys.modules); assert not heavy, heavy"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
