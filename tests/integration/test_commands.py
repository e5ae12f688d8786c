"""The front door: `python -m tf_ipu_dp` and the console script list the commands and run each as `python -m` does."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import tf_ipu_dp
from tf_ipu_dp import __main__ as front

PACKAGE = Path(tf_ipu_dp.__file__).parent


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def tf_ipu_dp_command():
    """Runs `python -m tf_ipu_dp WORDS...` and returns the completed process."""

    def run(*words):
        command = [sys.executable, "-m", "tf_ipu_dp", *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)

    return run


def test_every_command_is_listed_with_a_line_of_its_own(tf_ipu_dp_command):
    done = tf_ipu_dp_command()
    assert (done.returncode, done.stderr) == (0, "")
    names, examples = done.stdout.split("\nExamples\n")
    assert re.findall(r"^  (\S+)", names, re.MULTILINE) == list(front.COMMANDS)
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert {line.split()[1] for line in examples.splitlines()} <= set(front.COMMANDS)
    assert tf_ipu_dp_command("--help").stdout == done.stdout


def test_the_list_has_every_module_that_can_be_started():
    modules = [*PACKAGE.glob("*.py"), *(PACKAGE / "emulator").glob("*.py")]
    modules += [PACKAGE / room / "__main__.py" for room in ("collectives", "environment", "runs", "scaling")]
    names = [path.relative_to(PACKAGE).with_suffix("").parts for path in modules if '\nif __name__ == "__main__"' in
             path.read_text(encoding="utf-8")]  # fmt: skip
    commands = {".".join(part for part in parts if part != "__main__") for parts in names} - {"", "emulator.coverage"}
    assert commands == set(front.COMMANDS)


def test_the_version_is_printed(tf_ipu_dp_command):
    done = tf_ipu_dp_command("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"tf_ipu_dp {tf_ipu_dp.__version__}\n", "")


@pytest.mark.parametrize("command", sorted({*front.COMMANDS} - {"emulator.poprun", "environment"}))
def test_every_command_prints_the_version(run_command, command):
    words = ["size"] if command == "collectives" else []
    done = run_command(command, *words, "--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"tf_ipu_dp {tf_ipu_dp.__version__}\n", "")


@pytest.mark.parametrize("command", front.COMMANDS)
def test_every_help_ends_with_examples(run_command, command):
    text = run_command(command, "--help", COLUMNS="80").stdout
    examples = text.replace("Examples:", "Examples").partition("\nExamples\n")[2].splitlines()
    assert examples and all(line.startswith("  ") for line in examples)


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("trian", "trian is not a command. Did you mean train?"),
        ("fly", f"fly is not a command. Commands: {', '.join(front.COMMANDS)}."),
        ("--ipus=8", f"the flag --ipus=8 needs a command before it. Commands: {', '.join(front.COMMANDS)}."),
    ],
)
def test_an_unknown_command_is_one_sentence_with_the_nearest(tf_ipu_dp_command, word, sentence):
    done = tf_ipu_dp_command(word)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"tf-ipu-dp: {sentence}\n")


@pytest.mark.parametrize(
    "words",
    [
        ["train", "--ipus=8", "--dry_run"],
        ["train", "--ipus=6"],
        ["launch", "--help"],
        ["monitor", "--free"],
        ["doctor", "--jsn"],
        ["compare", "nowhere", "neither"],
        ["emulator", "nowhere.py"],
        ["emulator.poprun", "--version"],
    ],
    ids=" ".join,
)
def test_a_command_does_the_same_as_with_python_m(tf_ipu_dp_command, run_command, emulator_dir, words):
    here, there = tf_ipu_dp_command(*words), run_command(*words)
    assert (here.returncode, here.stdout, here.stderr) == (there.returncode, there.stdout, there.stderr)
    assert here.stdout or here.stderr


def test_a_program_on_the_emulator_is_the_main_module_and_keeps_its_exit_code(tf_ipu_dp_command, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, popdist\nprint(__name__, sys.modules['__main__'].sys is sys, sys.argv[1:])\nsys.exit(7)\n"
    )
    done = tf_ipu_dp_command("emulator", program, "a")
    assert (done.returncode, done.stdout) == (7, "__main__ True ['a']\n"), done.stderr
