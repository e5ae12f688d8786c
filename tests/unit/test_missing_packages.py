"""A package that is not installed is one sentence with what to do, for every way to start a command."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import pytest

import tf_ipu_dp
from tf_ipu_dp import __main__ as front
from tf_ipu_dp import missing_packages

ROOT = Path(tf_ipu_dp.__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory):
    """An environment with nothing in it."""
    folder = tmp_path_factory.mktemp("bare") / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    return folder / "bin" / "python"


def run(python, *words):
    return subprocess.run(
        [str(python), *words], cwd=str(ROOT), capture_output=True, text=True, check=False, env={"PATH": "/usr/bin:/bin"}
    )


def sentence(python, package, install):
    return (
        f"{package} is needed and {python} has none. Start {ROOT}/launch/tf-ipu-dp, which makes its own environment, "
        f"or run: {python} {install}\n"
    )


@pytest.mark.parametrize("command", sorted({*front.COMMANDS} - {"environment", "emulator", "emulator.poprun"}))
def test_a_command_without_absl_is_one_sentence(bare_python, command):
    done = run(bare_python, "-m", f"tf_ipu_dp.{command}")
    expected = sentence(bare_python, "absl-py", "-m pip install absl-py")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"tf_ipu_dp: {expected}")


def test_the_console_script_without_absl_is_one_sentence(bare_python):
    done = run(bare_python, "-c", "from tf_ipu_dp import __main__; __main__.start(['train', '--ipus=8'])")
    expected = sentence(bare_python, "absl-py", "-m pip install absl-py")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"tf_ipu_dp: {expected}")


@pytest.mark.parametrize("words", [("-m", "tf_ipu_dp"), ("-m", "tf_ipu_dp", "--version"), ("-m", "tf_ipu_dp", "train",
                         "--version"), ("-m", "tf_ipu_dp.environment", "--help")], ids=" ".join)  # fmt: skip
def test_the_list_of_commands_and_the_version_need_no_package(bare_python, words):
    done = run(bare_python, *words)
    assert done.returncode == 0 and done.stdout and not done.stderr


@pytest.mark.parametrize(
    ("line", "start"),
    [
        ("emulator nothing.py", "emulator: there is no program 'nothing.py'. usage: "),
        ("emulator -m", "emulator: -m needs the name of a module. usage: "),
        ("emulator.poprun --num-instnces 2 python3 x.py", "poprun: There is no option --num-instnces. Did you mean "),
        ("emulator.poprun --num-replicas 3 --num-instances 2 python3 x.py", "poprun: --num-replicas 3 cannot be "),
    ],
)
def test_a_mistake_in_starting_a_program_is_told_before_an_environment_is_made(bare_python, line, start):
    program = f"from tf_ipu_dp import __main__; __main__.start_without_environment('x', '/nowhere', {line.split()})"
    done = run(bare_python, "-c", program)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith(start) and "nowhere" not in done.stderr


def test_a_program_on_the_emulator_without_tensorflow_is_one_sentence(bare_python, tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import tensorflow\n", encoding="utf-8")
    done = run(bare_python, "-m", "tf_ipu_dp.emulator", str(program))
    expected = sentence(bare_python, "TensorFlow", f"-m pip install '{ROOT}[host]'")
    assert (done.returncode, done.stderr) == (1, f"tf_ipu_dp: {expected}")


@pytest.mark.parametrize(
    ("name", "install"),
    [
        ("horovod", "-m tf_ipu_dp.environment distributed"),
        ("matplotlib.figure", f"-m pip install '{ROOT}[plots]'"),
        ("tqdm", "-m pip install tqdm"),
    ],
)
def test_the_advice_fits_the_package(monkeypatch, name, install):
    monkeypatch.setattr(missing_packages, "_is_installed", lambda _: False)
    said = missing_packages.explain(ModuleNotFoundError("No module", name=name))
    assert said is not None and said.endswith(f"or run: {sys.executable} {install}")


@pytest.mark.parametrize(
    "error",
    [
        ModuleNotFoundError("No module named 'ours'", name="ours"),
        ModuleNotFoundError("No module named 'absl.nothing'", name="absl.nothing"),
        ImportError("cannot import name 'x' from 'absl'", name="absl"),
    ],
    ids=["not a package that is installed", "a part of an installed package", "a name in an installed package"],
)
def test_other_failures_of_imports_stay_what_they_are(error):
    assert missing_packages.explain(error) is None
