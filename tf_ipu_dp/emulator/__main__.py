"""`python -m tf_ipu_dp.emulator PROGRAM ARGS` runs a program for the Poplar SDK as `python PROGRAM ARGS` would."""

from __future__ import annotations

import builtins
import importlib.util
import runpy
import shutil
import sys
import textwrap
import types
from pathlib import Path
from typing import List

from tf_ipu_dp import __version__, emulator

USAGE = "usage: python -m tf_ipu_dp.emulator PROGRAM [ARGS]   or   python -m tf_ipu_dp.emulator -m MODULE [ARGS]"
ABOUT = "Runs a program written for the Poplar SDK on this host's CPU, as python PROGRAM ARGS would run it on IPUs."
EXAMPLES = """Examples
  python -m tf_ipu_dp.emulator program.py --its-own=flags
  python -m tf_ipu_dp.emulator -m my_package.train"""


def main(words: List[str]) -> int:
    """Installs the emulator and runs the program in this process."""
    if not words:
        print(USAGE, file=sys.stderr)
        return 1
    if words[0] in ("-h", "--help"):
        print(render_help(shutil.get_terminal_size().columns))
        return 0
    if words[0] == "--version":
        print(f"tf_ipu_dp {__version__}")
        return 0
    return _run(words)


def render_help(width: int) -> str:
    """Returns the usage, what it does, and examples."""
    usage = textwrap.fill(USAGE, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return f"{usage}\n\n{textwrap.fill(ABOUT, width)}\n\n{EXAMPLES}"


def find_mistake(words: List[str]) -> str:
    """Returns what is wrong with the words that name the program, as a sentence; empty if nothing is."""
    if words[0] == "-m":
        return "" if len(words) > 1 else f"emulator: -m needs the name of a module. {USAGE}"
    program = Path(words[0])
    if program.is_dir() and not (program / "__main__.py").is_file():
        return f"emulator: {words[0]!r} is a folder without a __main__.py, and no program. {USAGE}"
    return "" if program.exists() else f"emulator: there is no program {words[0]!r}. {USAGE}"


def _run(words: List[str]) -> int:
    mistake = find_mistake(words)
    if mistake:
        print(mistake, file=sys.stderr)
        return 1
    emulator.install()
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path[0] = str(Path.cwd())
        missing = _find_missing_module(words[1])
        if missing:
            print(f"emulator: there is no module {missing!r} to run. {USAGE}", file=sys.stderr)
            return 1
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return 0
    program = Path(words[0])
    sys.argv = words
    if program.is_dir():
        runpy.run_path(words[0], run_name="__main__")
        return 0
    sys.path[0] = str(program.resolve().parent)
    # The program's module stays in place after its last line, for its threads and exit handlers.
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=words[0], __builtins__=builtins)
    sys.modules["__main__"] = module
    exec(compile(program.read_bytes(), words[0], "exec"), module.__dict__)
    return 0


def _find_missing_module(name: str) -> str:
    """Returns the module that -m would not find: the named one, its parent, or __main__ of a package."""
    try:
        spec = importlib.util.find_spec(name)
        if spec and spec.submodule_search_locations is not None:
            name += ".__main__"
            spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:  # a parent; what a parent itself imports is the program's own error
        if not error.name or not f"{name}.".startswith(f"{error.name}."):
            raise
        return error.name
    except ValueError:  # an empty name
        return name
    return "" if spec else name


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
