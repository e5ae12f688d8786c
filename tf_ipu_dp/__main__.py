"""`python -m tf_ipu_dp` and `tf-ipu-dp`: lists the commands, or runs one of them. Imports nothing until it has to.

`tf-ipu-dp train --ipus=8` is the same as `python -m tf_ipu_dp.train --ipus=8`.
"""

from __future__ import annotations

import difflib
import importlib
import os
import runpy
import shutil
import sys
from typing import Callable, List, NoReturn, Optional

from tf_ipu_dp import __version__, missing_packages, terminal_text

# The modules that are commands, with what each does. A test checks that every command has a row here.
COMMANDS = {
    "train": "Trains a Keras model data-parallel on IPUs, real or emulated.",
    "launch": "Starts a training run as several instances, and restarts it after failures.",
    "monitor": "Shows what the IPUs and the runs do, live, as JSON, recorded, or for Prometheus.",
    "doctor": "Reports what this machine can do, and what is missing.",
    "runs": "Shows a table of runs; shows, compares and deletes them.",
    "predict": "Predicts with a trained run: images or arrays in, CSV, JSON or arrays out.",
    "compare": "Compares the trained weights of two runs, layer by layer.",
    "collectives": "Shows what a gradient all-reduce costs, measured and simulated.",
    "scaling": "Runs a scaling study: trains at several sizes, predicts, and explains.",
    "list": "Lists models, data sets and flag files.",
    "completion": "Prints what completes commands and flags in bash, zsh or fish.",
    "environment": "Makes the Python environment that launch/train and launch/test use.",
    "emulator": "Runs a program written for the Poplar SDK on this host's CPU.",
    "emulator.poprun": "Replaces the SDK's poprun: starts a program as several instances.",
}
_EXAMPLES = (
    "tf-ipu-dp train --ipus=8 --run_dir=runs/first",
    "tf-ipu-dp monitor --watch=1",
    "tf-ipu-dp train --run_dir=runs/first --evaluate",
)
_HELP = ("-h", "--help", "help")
# They run the user's program, which expects TensorFlow.
_PROGRAM_RUNNERS = ("emulator", "emulator.poprun")
# Of the standard library alone.
_WITHOUT_PACKAGES = ("environment", *_PROGRAM_RUNNERS)


def main(words: List[str], prepare: Callable[[], None] = lambda: None) -> int:
    """Lists the commands, or runs the one that the first word names, after `prepare`. Returns the exit code."""
    if not words or words[0] in _HELP:
        launch = os.environ.get("TF_IPU_DP_LAUNCH")
        sys.stdout.write(render_commands(shutil.get_terminal_size().columns, f"{launch}/" if launch else ""))
        return 0
    if words[0] == "--version" or (words[1:] == ["--version"] and words[0] in {*COMMANDS} - {*_PROGRAM_RUNNERS}):
        sys.stdout.write(f"tf_ipu_dp {__version__}\n")
        return 0
    if words[0] not in COMMANDS:
        sys.stderr.write(f"tf-ipu-dp: {_explain_unknown_command(words[0])}\n")
        return 1
    if words[0] not in _WITHOUT_PACKAGES:
        prepare()
    sys.argv = [words[0], *words[1:]]
    # Like python -m: the command itself ends the process with its exit code.
    runpy.run_module(f"{__package__}.{words[0]}", run_name="__main__", alter_sys=True)
    return 0


def render_commands(width: int, folder: str = "") -> str:
    """Returns the usage, what each command does, and examples. `folder` is that of launch/, if started from there."""
    # The NUL keeps a long path of the command in the first line.
    usage = f"usage:\0{folder}tf-ipu-dp COMMAND [ARGS]   or   python -m tf_ipu_dp.COMMAND [ARGS]"
    last = f"{folder}tf-ipu-dp COMMAND --help lists a command's flags, with examples."
    blocks = [
        terminal_text.wrap(usage, width).replace("\0", " "),
        terminal_text.render_names(COMMANDS, width),
        terminal_text.wrap(last, width, indent=""),
        "\n".join(["Examples", *(f"  {folder}{line}" for line in _EXAMPLES)]),
    ]
    return "\n\n".join(blocks) + "\n"


def _explain_unknown_command(word: str) -> str:
    nearest = difflib.get_close_matches(word, COMMANDS, n=1)
    advice = f"Did you mean {nearest[0]}?" if nearest else "Commands: " + ", ".join(COMMANDS) + "."
    if word.startswith("-"):
        return f"the flag {word} needs a command before it. {advice}"
    return f"{word} is not a command. {advice}"


def start_without_environment(program: str, wrapper: str, words: List[str]) -> NoReturn:
    """Runs the command line in a clone that has no environment yet: with the packages that help and plans need.

    A command that needs more starts again, through the wrapper in launch/, in the environment that it makes.
    """

    def prepare() -> None:
        from tf_ipu_dp.environment import plan_packages
        from tf_ipu_dp.environment.status import SetupError, Status

        status = Status(program, sys.stderr)
        try:
            sys.path.insert(1, str(plan_packages.get(status)))
        except SetupError as error:
            status.info(str(error))
            sys.exit(1)

    missing_packages.explain_at_exit()
    missing_packages.allow_restart(program, wrapper, words)
    if words[:1] and words[0] in _PROGRAM_RUNNERS and words[1:] and words[1] not in (*_HELP, "--version"):
        _refuse_mistake_in_program(words)
        missing_packages.restart()
    sys.exit(main(words, prepare))


def _refuse_mistake_in_program(words: List[str]) -> None:
    name = "emulator.__main__" if words[0] == "emulator" else words[0]
    mistake = importlib.import_module(f"{__package__}.{name}").find_mistake(words[1:])
    if mistake:
        sys.stderr.write(f"{mistake}\n")
        sys.exit(1)


def start(words: Optional[List[str]] = None) -> NoReturn:
    """Runs the command line; the entry point of the console script."""
    missing_packages.explain_at_exit()
    sys.exit(main(sys.argv[1:] if words is None else words))


if __name__ == "__main__":
    start()
