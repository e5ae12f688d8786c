"""Imports TensorFlow once for all instances of a host, which are then forked from this process.

The import takes seconds of a core, which the instances would all spend at the same time. A fork looks to the program
like a fresh Python (`forked_program`). Where it would notice a difference, every instance starts its own Python: with
another Python or Python options, a start-up hook of the user, a program without TensorFlow, or one that sets variables
that TensorFlow reads as it is imported. Linux only, and up to Python 3.11: later ones call a fork of a process with
threads deprecated, and poprun has threads by then. IPU_EMULATOR_PRELOAD=0 turns it off.

A program can name additional modules in a comment line of its source:

    # poprun preloads: my_package.model, my_package.data

With that line a program is preloaded even if it sets such variables. It then starts with the values of poprun's own
environment.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.machinery
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Iterator, Mapping, Optional, Sequence, Tuple

from tf_ipu_dp.emulator.launcher import orphans, process_display

SWITCH = "IPU_EMULATOR_PRELOAD"
SECONDS = "IPU_EMULATOR_PRELOAD_SECONDS"  # by which forks know how long the import took that they did not have to do
MODULES = (
    "tensorflow", "tensorflow.keras", "horovod.tensorflow", "tf_ipu_dp.emulator.sdk_api.popdist.tensorflow",
    "tf_ipu_dp.emulator.sdk_api.ipu", "tf_ipu_dp.emulator.keras.models", "tf_ipu_dp.emulator.runtime.execution",
    "tf_ipu_dp.emulator.sdk_api.ipu.distributed.popdist_strategy",
)  # fmt: skip
CAN_FORK_WITH_THREADS = sys.platform == "linux" and sys.version_info < (3, 12)
_DECLARATION = re.compile(r"^# poprun preloads: *([\w.]+(?:, *[\w.]+)*) *$", re.MULTILINE)
# Read by the libraries as they are imported, so it must be the same for all instances of a host.
_READ_AT_IMPORT = ("OMP_", "KMP_", "MKL_", "OPENBLAS_", "TF_", "HOROVOD_", "PYTHON", "LD_", "CUDA_")
_DIFFERS_BETWEEN_INSTANCES = ("HOROVOD_RANK", "HOROVOD_LOCAL_RANK")
# Read by Python and the C library as they start, so a fork has the values of its parent.
_READ_AT_START = ("PYTHON", "LD_", "MALLOC_", "GLIBC_", "LC_", "LANG", "TZ")
_APPLIED_AFTER_FORK = ("PYTHONPATH", "PYTHONUNBUFFERED")


def can_fork(words: Sequence[str], environs: Sequence[Mapping[str, str]]) -> bool:
    """Whether instances of a program can be forks: they start faster, and would not notice a difference."""
    switches = (os.environ.get(SWITCH), *(environ.get(SWITCH) for environ in environs[:1]))
    if len(environs) < 2 or not CAN_FORK_WITH_THREADS or "0" in switches:
        return False
    at_import = [{name: environ.get(name) for name in environ if _is_read_at_import(name)} for environ in environs]
    path = environs[0].get("PYTHONPATH", "")
    text = _read_program(words[1:], path)
    return (
        all(each == at_import[0] for each in at_import)
        and all(_read_at_start(environ) == _read_at_start(os.environ) for environ in environs)
        and _is_this_python(words[0], environs[0].get("PATH", ""))
        and (bool(declared_modules(text)) or ("tensorflow" in text.lower() and not _sets_variables_of_imports(text)))
        and not _has_startup_hook(path)
        and _has_room_for_mark(environs)
    )


def preload(words: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Imports what the instances need, with the variables of the first; returns whether they can be forked now."""
    declared = declared_modules(_read_program(words[1:], environ.get("PYTHONPATH", "")))
    for name in list(os.environ):
        if _is_read_at_import(name):
            del os.environ[name]
    os.environ.update({name: value for name, value in environ.items() if _is_read_at_import(name)})
    stderr = os.dup(2)
    gc.disable()  # imported modules are never freed, and scanning them takes a tenth of the time
    try:
        # TensorFlow logs its start. That would appear once, as output of poprun itself.
        with open(os.devnull, "wb") as null:  # noqa: PTH123
            os.dup2(null.fileno(), 2)

        from tf_ipu_dp import emulator

        emulator.install()
        for name in MODULES:
            importlib.import_module(name)
        with _search_path_of(words[1:], environ):
            for name in declared:
                importlib.import_module(name)
    except (Exception, SystemExit):  # the program itself will fail in the same way, and print the error
        return False
    finally:
        gc.enable()
        os.dup2(stderr, 2)
        os.close(stderr)
    # TensorFlow's eager context has threads, which a fork loses, so no imported module may have started it.
    context = sys.modules["tensorflow.python.eager.context"]
    return context.context()._context_handle is None


def declared_modules(text: str) -> Tuple[str, ...]:
    """Returns the modules that a program's source asks to preload."""
    return tuple(name.strip() for found in _DECLARATION.findall(text) for name in found.split(","))


@contextlib.contextmanager
def _search_path_of(words: Sequence[str], environ: Mapping[str, str]) -> Iterator[None]:
    """Inside, imports use the program's search path."""
    program_folder = Path.cwd() if words[0] in ("-c", "-m") else Path(words[0]).resolve().parent
    before = list(sys.path)
    sys.path[:0] = [str(program_folder), *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))]
    try:
        yield
    finally:
        sys.path[:] = before


def _is_read_at_import(name: str) -> bool:
    return name.startswith(_READ_AT_IMPORT) and name not in _DIFFERS_BETWEEN_INSTANCES


def _read_at_start(environ: Mapping[str, str]) -> Mapping[str, str]:
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(_READ_AT_START) and name not in _APPLIED_AFTER_FORK
    }


def _sets_variables_of_imports(text: str) -> bool:
    """Whether a program seems to set variables for the import of TensorFlow, which a fork has already done."""
    names = "|".join(_READ_AT_IMPORT)
    return bool(re.search(r"environ|putenv", text) and re.search(rf"\b(?!TF_POPLAR_)(?:{names})[A-Z]", text))


def _has_room_for_mark(environs: Sequence[Mapping[str, str]]) -> bool:
    """Whether /proc can show the job's mark, by which orphans are found."""
    room = process_display.room_for_environment()
    marks = [f"{orphans.JOB_VARIABLE}={environ.get(orphans.JOB_VARIABLE, '')}" for environ in environs]
    return all(len(os.fsencode(mark)) < room for mark in marks)


def _is_this_python(word: str, path: str) -> bool:
    found = shutil.which(word, path=path)
    # Within one environment python, python3 and python3.11 are the same; between environments the links differ.
    return (
        found is not None
        and Path(found).parent.resolve() == Path(sys.executable).parent.resolve()
        and (Path(found).resolve() == Path(sys.executable).resolve())
    )


def _read_program(words: Sequence[str], path: str) -> str:
    """Returns the program's source, or an empty string where it is not a plain Python program."""
    try:
        if words[0] == "-c":
            return words[1]
        if words[0] == "-m":
            origin = _find_module(words[1], [str(Path.cwd()), *filter(None, path.split(os.pathsep)), *sys.path])
        else:
            origin = words[0] if words[0].endswith(".py") else ""
        return Path(origin).read_text(encoding="utf-8", errors="replace") if origin else ""
    except Exception:  # whatever the cause, running the program will report it
        return ""


def _find_module(name: str, places: Optional[Sequence[str]]) -> str:
    """Returns the file that `python -m` would run. Unlike importlib's own search it imports no parent package."""
    spec = None
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        spec = importlib.machinery.PathFinder.find_spec(".".join(parts[:count]), places)
        if spec is None:
            return ""
        places = spec.submodule_search_locations
    if places is not None:
        spec = importlib.machinery.PathFinder.find_spec(f"{name}.__main__", places)
    return (spec.origin or "") if spec else ""


def _has_startup_hook(path: str) -> bool:
    """Whether the user's Python has a sitecustomize or usercustomize module, which a fork does not run."""
    our_hook = str(Path(__file__).resolve().parents[1] / "start")
    places = [place for place in [*path.split(os.pathsep), *sys.path] if place and place != our_hook]
    return any(importlib.machinery.PathFinder.find_spec(name, places) for name in ("sitecustomize", "usercustomize"))
