"""The wheel that is built from this clone has every module, the shipped data and the console script, and trains."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_wheel_has_every_module_the_data_and_the_console_script(tmp_path):
    source = tmp_path / "source"  # setuptools writes beside what it builds
    source.mkdir()
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "tf_ipu_dp", source / "tf_ipu_dp", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir"]
    subprocess.run([*command, str(tmp_path), str(source)], check=True, capture_output=True)
    (path,) = tmp_path.glob("tf_ipu_dp-*.whl")
    with zipfile.ZipFile(path) as wheel:
        names = set(wheel.namelist())
        (entry_points,) = (wheel.read(name).decode() for name in names if name.endswith("/entry_points.txt"))
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "tf_ipu_dp").rglob("*.py")}
    others = {"tf_ipu_dp/py.typed", "tf_ipu_dp/datasets/fashion_mini.npz", "tf_ipu_dp/datasets/fashion_mini.txt"}
    profiles = {str(path.relative_to(ROOT)) for path in (ROOT / "tf_ipu_dp").rglob("*.ini")}
    assert profiles and modules | others | profiles <= names
    assert not [name for name in names if not name.startswith("tf_ipu_dp")]
    assert entry_points == "[console_scripts]\ntf-ipu-dp = tf_ipu_dp.__main__:start\n"


@pytest.mark.slow
def test_the_wheel_of_the_sdist_is_installed_where_nothing_else_is_and_trains(tmp_path):
    # The console script, the shipped data and the fabrics are checked by the command itself.
    environ = {**os.environ, "TF_IPU_DP_PYTHON": os.path.realpath(sys.executable)}
    command = [str(ROOT / "launch" / "check-wheel"), str(tmp_path / "dist")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "replica 7  IPU 7" in done.stdout and re.search(r"Updates +2 +of 2\b", done.stdout)
    assert sorted(path.suffix for path in (tmp_path / "dist").iterdir()) == [".gz", ".whl"]
