"""The engines of a study, and what is said where one is not installed."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import absl
import pytest

import tf_ipu_dp
from tf_ipu_dp.environment import versions
from tf_ipu_dp.scaling.engines import registry

ASK = "import sys; from tf_ipu_dp.scaling.engines import registry; print(registry.missing(sys.argv[1]))"


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """Returns a Python without any engine."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False)
    return folder / "bin" / "python"


def test_two_engines_are_ours_and_the_others_have_a_program():
    assert [name for name in registry.ENGINES if registry.is_ours(name)] == ["tf_ipu_dp", "tf_ipu_dp_mpi"]


@pytest.mark.parametrize("name", ["tf_ipu_dp", "horovod", "keras"])
def test_an_installed_engine_lacks_nothing(name):
    assert registry.missing(name) is None


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("keras", "plain Keras needs tensorflow, and {0} has none. Install tf_ipu_dp[host]."),
        (
            "ddp",
            "PyTorch DDP on Gloo needs torch, and {0} has none. Install it with: python -m tf_ipu_dp.environment ddp",
        ),
        (
            "horovod",
            "Horovod's recipe for Keras needs tensorflow and horovod, and {0} has none. "
            "Install it with: python -m tf_ipu_dp.environment distributed",
        ),
    ],
)
def test_a_missing_engine_is_a_sentence_that_says_how_to_install_it(bare, name, sentence):
    path = [str(Path(tf_ipu_dp.__file__).parents[1]), str(Path(absl.__file__).parents[1])]
    code = f"import sys; sys.path.append({path[0]!r}); {ASK}"
    done = subprocess.run([str(bare), "-c", code, name], capture_output=True, text=True, check=False, cwd="/")
    assert (done.stdout, done.stderr) == (f"{sentence.format(bare)}\n", "")


def test_mpi_needs_mpirun(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "needs mpirun, which is not on the PATH" in registry.missing("tf_ipu_dp_mpi")


def test_mpi_needs_a_horovod_that_is_built_with_it(monkeypatch, tmp_path):
    mpirun = tmp_path / "mpirun"
    mpirun.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    import horovod.tensorflow as hvd

    expected = (
        f"tf_ipu_dp on Horovod/MPI needs a Horovod that is built with MPI, and that of {sys.executable} is not. With "
        "Open MPI's headers installed, build it again with: python -m tf_ipu_dp.environment distributed"
    )
    assert registry.missing("tf_ipu_dp_mpi") == (None if hvd.mpi_built() else expected)


def test_every_command_that_installs_an_engine_exists():
    commands = {engine.installed_by for engine in registry.ENGINES.values()} - {""}
    assert {command.rpartition(" ")[2] for command in commands} <= {*versions.TARGETS, *versions.ADDED}


def test_asking_for_engines_imports_none():
    code = f"{ASK}; print(*{{'tensorflow', 'torch', 'horovod'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code, "keras"], capture_output=True, text=True, check=True)
    assert done.stdout == "None\n\n"
