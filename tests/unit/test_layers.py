"""Imports point downwards, and nothing that a user waits for imports TensorFlow."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import tf_ipu_dp

# From the bottom up; a module may import from lower rows only. A new module gets its row here.
LAYERS = [
    ["__init__"],
    ["architectures", "cli", "environment", "heartbeat", "telemetry", "verdict"],
    ["activity", "config"],
    ["catalogue", "fixes", "run_folder", "screens"],
    ["plan"],
    ["checkpoints", "explanation", "exporter", "failures", "launchers", "recording", "report", "world", "sdk"],
    ["data", "models", "optimizers", "callbacks", "progress"],
    ["agreement", "learners"],
    ["training"],
    ["compare", "doctor", "launch", "monitor", "train"],
]
RANKS = {name: rank for rank, names in enumerate(LAYERS) for name in names}
PURE = ["architectures", "cli", "config", "failures", "fixes", "launchers", "plan", "report", "screens", "verdict"]
WITH_TENSORFLOW = ["agreement", "callbacks", "data", "learners", "models", "optimizers", "training"]
HEAVY = ("tensorflow", "keras", "horovod", "popdist", "gcipuinfo", "numpy")
PACKAGE = Path(tf_ipu_dp.__file__).parent


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not used here"
            yield node.module
            if node.module == "tf_ipu_dp":
                yield from (f"tf_ipu_dp.{alias.name}" for alias in node.names if alias.name in RANKS)


def test_the_emulator_imports_nothing_else_of_this_package_and_nothing_heavy_when_it_is_imported():
    for path in (PACKAGE / "emulator").rglob("*.py"):
        ours = {name for name in imports_of(path) if name.startswith("tf_ipu_dp") and name != "tf_ipu_dp"}
        assert all(name.startswith("tf_ipu_dp.emulator") for name in ours), path
    code = (
        "import sys; from tf_ipu_dp import emulator; emulator.install(); "
        "import popdist, popdist.tensorflow, gcipuinfo; "
        "print(*{'tensorflow', 'keras', 'horovod', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_every_module_has_a_layer():
    assert sorted(path.stem for path in PACKAGE.glob("*.py")) == sorted(RANKS)


def test_the_readme_says_what_every_module_owns():
    tables = (PACKAGE.parent / "README.md").read_text(encoding="utf-8").split("## How it works")[1]
    for path in (*PACKAGE.glob("*.py"), *(PACKAGE / "emulator").glob("*.py")):
        assert path.stem == "__init__" or f"`{path.name}`" in tables, path


@pytest.mark.parametrize("name", sorted(RANKS))
def test_imports_point_downwards(name):
    for imported in imports_of(PACKAGE / f"{name}.py"):
        if imported.split(".")[:2] == ["tf_ipu_dp", "emulator"]:
            assert name in ("sdk", "telemetry"), f"{name} imports the emulator"
        elif imported.startswith("tf_ipu_dp."):
            assert RANKS[imported.split(".")[1]] < RANKS[name], f"{name} imports {imported}"


@pytest.mark.parametrize("name", PURE)
def test_pure_modules_do_not_reach_for_the_outside(name):
    allowed = {"cli": {"os"}}  # os.dup2, where a reader of our output has gone
    outside = {"os", "time", "datetime", "socket", "subprocess", "random", "tempfile", "importlib"}
    assert set(imports_of(PACKAGE / f"{name}.py")) & outside <= allowed.get(name, set())


@pytest.mark.parametrize("name", [name for name in RANKS if name not in ("__init__", *WITH_TENSORFLOW)])
def test_importing_a_module_imports_nothing_heavy(name):
    code = f"import sys, tf_ipu_dp.{name}; print(*set(sys.modules) & set({HEAVY}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
