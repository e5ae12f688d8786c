"""Instances that begin with TensorFlow already there: imported once, then forked, in place of one import for each.

Importing takes seconds of a core, which instances on one host would all spend at the same time. A fork looks to the
program like a fresh Python that was started with its words and variables: its own session, streams, arguments, path and
signals, the right words in the list of processes, its exit handlers run at the end. Where that is not possible (another
Python, options, a start-up hook of the user's, a program without TensorFlow, or one that sets what TensorFlow reads as
it is imported) the program is started as usual. Linux only.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import fcntl
import gc
import importlib
import importlib.machinery
import io
import os
import re
import runpy
import shutil
import signal
import sys
import sysconfig
import threading
import traceback
import types
from pathlib import Path
from typing import IO, Any, Callable, FrozenSet, List, Mapping, NoReturn, Optional, Sequence, Tuple

from tf_ipu_dp.emulator.launcher import exit_notices, orphans

ASKED = "IPU_EMULATOR_PRELOAD"
_PRELOADED = (
    "tensorflow", "tensorflow.keras", "horovod.tensorflow", "tf_ipu_dp.emulator.sdk_api.popdist.tensorflow",
    "tf_ipu_dp.emulator.sdk_api.ipu", "tf_ipu_dp.emulator.keras.models", "tf_ipu_dp.emulator.runtime.execution",
    "tf_ipu_dp.emulator.sdk_api.ipu.distributed.popdist_strategy",
)  # fmt: skip
_OUR_TRAINING = ("tf_ipu_dp.training.loop",)
# What the libraries read as they are imported. It is the same for all instances of a host.
_READ_EARLY = ("OMP_", "KMP_", "MKL_", "OPENBLAS_", "TF_", "HOROVOD_", "PYTHON", "LD_", "CUDA_")
# What Python and the C library read before all else: no fork can begin with other values than its parent.
_READ_FIRST = ("PYTHON", "LD_", "MALLOC_", "GLIBC_", "LC_", "LANG", "TZ")
_READ_BY_A_FORK = ("PYTHONPATH", "PYTHONUNBUFFERED")
_OUR_PACKAGE = __name__.split(".", 1)[0]
_OUR_FRAMES = (__file__, runpy.__file__, "<frozen runpy>")
_SHOWN_FIRST = ("IPU_EMULATOR_", "POPDIST_")
_OF_AN_INSTANCE = ("HOROVOD_RANK", "HOROVOD_LOCAL_RANK")


class Fork:
    """A child that runs a program; what of `subprocess.Popen` a group of processes needs."""

    def __init__(self, pid: int, stdout: IO[bytes], stderr: IO[bytes]) -> None:
        self.pid, self.stdout, self.stderr = pid, stdout, stderr
        self.returncode: Optional[int] = None

    def wait(self) -> int:
        """Returns how the child ended: its exit status, or the negative number of a signal."""
        _, status = os.waitpid(self.pid, 0)
        self.returncode = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        return self.returncode


def are_possible(words: Sequence[str], environs: Sequence[Mapping[str, str]]) -> bool:
    """Whether these instances of a program can be forks: they gain from it, and would not see a difference."""
    if len(environs) < 2 or sys.platform != "linux" or os.environ.get(ASKED) == "0" or environs[0].get(ASKED) == "0":
        return False
    early = [{name: environ.get(name) for name in environ if _is_read_early(name)} for environ in environs]
    path = environs[0].get("PYTHONPATH", "")
    text = _program_text(words[1:], path)
    return (
        all(each == early[0] for each in early)
        and all(_read_first(environ) == _read_first(os.environ) for environ in environs)
        and _is_this_python(words[0], environs[0].get("PATH", ""))
        and "tensorflow" in text.lower()
        and (_is_ours(words[1:]) or not _sets_what_is_read_early(text))
        and not _has_a_hook(path)
        and _can_be_marked(environs)
    )


def preload(words: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Imports what the instances will need, as the first of them would; returns whether that could be done."""
    for name in list(os.environ):
        if _is_read_early(name):
            del os.environ[name]
    os.environ.update({name: value for name, value in environ.items() if _is_read_early(name)})
    own = os.dup(2)
    gc.disable()  # what is imported stays: to look through it time and again takes a tenth of the whole
    try:
        # TensorFlow greets, and would do so here for all.
        with open(os.devnull, "wb") as nowhere:  # noqa: PTH123
            os.dup2(nowhere.fileno(), 2)

        from tf_ipu_dp import emulator

        emulator.install()
        for name in (*_PRELOADED, *(_OUR_TRAINING if _is_ours(words[1:]) else ())):
            importlib.import_module(name)
    except Exception:  # the program will fail with it in its own words
        return False
    finally:
        gc.enable()
        os.dup2(own, 2)
        os.close(own)
    # Its eager context brings threads, which no fork keeps: who has one was not only imported.
    context = sys.modules["tensorflow.python.eager.context"]
    return context.context()._context_handle is None


def fork(
    words: Sequence[str], environ: Mapping[str, str], directory: Optional[str], make_ready: Callable[[], None]
) -> Fork:
    """Starts the program in a child. `make_ready` is called there first."""
    pipes = [os.pipe(), os.pipe()]
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        try:
            make_ready()
            _become(words, environ, directory, pipes[0][1], pipes[1][1])
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    for _, writing in pipes:
        os.close(writing)
    return Fork(pid, *(os.fdopen(reading, "rb", buffering=0) for reading, _ in pipes))


def _is_read_early(name: str) -> bool:
    return name.startswith(_READ_EARLY) and name not in _OF_AN_INSTANCE


def _read_first(environ: Mapping[str, str]) -> Mapping[str, str]:
    return {
        name: value for name, value in environ.items() if name.startswith(_READ_FIRST) and name not in _READ_BY_A_FORK
    }


def _sets_what_is_read_early(text: str) -> bool:
    """Whether a program may set variables for the import of TensorFlow, which a fork has behind it."""
    names = "|".join(_READ_EARLY)
    return bool(re.search(r"environ|putenv", text) and re.search(rf"\b(?!TF_POPLAR_)(?:{names})[A-Z]", text))


def _is_ours(words: Sequence[str]) -> bool:
    """Whether it is a command of this package: these set nothing early but how much the libraries log."""
    return len(words) > 1 and words[0] == "-m" and words[1].split(".")[0] == _OUR_PACKAGE


def _can_be_marked(environs: Sequence[Mapping[str, str]]) -> bool:
    """Whether there is room to show the job's mark, by which whatever is left of the job is found."""
    start, end = _places_shown()[1]
    marks = [f"{orphans.NAME}={environ.get(orphans.NAME, '')}" for environ in environs]
    return all(len(os.fsencode(mark)) < end - start for mark in marks)


def _is_this_python(word: str, path: str) -> bool:
    found = shutil.which(word, path=path)
    # Within one environment python, python3 and python3.11 are the same; between environments the links differ.
    return (
        found is not None
        and Path(found).parent.resolve() == Path(sys.executable).parent.resolve()
        and (Path(found).resolve() == Path(sys.executable).resolve())
    )


def _program_text(words: Sequence[str], path: str) -> str:
    """Returns the program's source, or nothing where it is not one that can be run here."""
    try:
        if words[0] == "-c":
            return words[1]
        if words[0] == "-m":
            origin = _find_module(words[1], [str(Path.cwd()), *filter(None, path.split(os.pathsep)), *sys.path])
        else:
            origin = words[0] if words[0].endswith(".py") else ""
        return Path(origin).read_text(encoding="utf-8", errors="replace") if origin else ""
    except Exception:  # whatever is wrong with it, the program will say so itself
        return ""


def _find_module(name: str, places: Optional[Sequence[str]]) -> str:
    """Returns the file that `python -m` would run. Unlike importlib's own search it imports no package on the way."""
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


def _has_a_hook(path: str) -> bool:
    """Whether the user's own Python would do something at its start that a fork does not."""
    own = str(Path(__file__).resolve().parents[1] / "start")
    places = [place for place in [*path.split(os.pathsep), *sys.path] if place and place != own]
    return any(importlib.machinery.PathFinder.find_spec(name, places) for name in ("sitecustomize", "usercustomize"))


def _become(words: Sequence[str], environ: Mapping[str, str], directory: Optional[str], out: int, err: int) -> NoReturn:
    """Turns this child into the program."""
    gc.freeze()  # what is the parent's stays untouched, and shared
    loaded = frozenset(sys.modules)
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    for number, handle in enumerate((null, out, err)):
        os.dup2(handle, number)
    _close_what_exec_would()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if directory is not None:
        os.chdir(directory)
    os.environ.clear()
    os.environ.update(environ)
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)  # type: ignore[misc]  # noqa: SIM115
    sys.stdout = sys.__stdout__ = _writer(1)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _writer(2)  # type: ignore[misc]
    for place in reversed(environ.get("PYTHONPATH", "").split(os.pathsep)):
        if place and place not in sys.path:
            sys.path.insert(1, place)
    _show_process(words, environ)
    if "numpy" in sys.modules:  # Python's own generator sees to it itself
        sys.modules["numpy"].random.seed()
    code = _run_to_its_end(words)
    if code:  # also of a program that has Horovod from elsewhere than us
        exit_notices.say(environ, int(environ.get("HOROVOD_RANK", "0")))
        horovod = sys.modules.get("horovod.tensorflow.mpi_ops")
        if horovod is not None:  # who fails does not say goodbye: the others would fail of it at once
            atexit.unregister(horovod.shutdown)
    # As the interpreter does it when it ends.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    _let_go(loaded)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = code or 120
    os._exit(code)


def _run_to_its_end(words: Sequence[str]) -> int:
    try:
        _run(words)
    except SystemExit as error:
        return _exit_code(error)
    except KeyboardInterrupt:
        traceback.print_exc()
        return 128 + signal.SIGINT
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in _OUR_FRAMES:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return 1
    return 0


def _let_go(loaded: FrozenSet[str]) -> None:
    """Drops what the program's modules hold, so that files are closed and objects say goodbye; the rest is flushed."""
    threading.excepthook = lambda _: None  # threads that nobody waits for would be stopped by now
    for name, module in list(sys.modules.items()):
        if name == "__main__" or (name not in loaded and _is_of_the_user(name, module)):
            content = vars(module)
            for each in sorted(content, key=lambda key: not key.startswith("_")):
                if each != "__builtins__":
                    content[each] = None
    gc.collect()
    for held in gc.get_objects():
        if isinstance(held, (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)):
            with contextlib.suppress(Exception):
                held.flush()


def _is_of_the_user(name: str, module: Any) -> bool:
    file = getattr(module, "__file__", None)
    installed = tuple(sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "platstdlib", "purelib", "platlib"))
    return isinstance(file, str) and not file.startswith(installed) and name.split(".", maxsplit=1)[0] != _OUR_PACKAGE


def _run(given: Sequence[str]) -> None:
    words = list(given[1:])
    if hasattr(sys, "orig_argv"):
        sys.orig_argv = list(given)
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    content = module.__dict__
    content.update(__builtins__=builtins, __annotations__={}, __loader__=importlib.machinery.BuiltinImporter)
    if words[0] == "-m":
        sys.argv = ["-m", *words[2:]]
        sys.path[0] = str(Path.cwd())
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path[0] = ""
        exec(compile(words[1], "<string>", "exec"), content)
    else:
        sys.argv = words
        sys.path[0] = str(Path(words[0]).resolve().parent)
        loader = importlib.machinery.SourceFileLoader("__main__", words[0])
        content.update(__file__=words[0], __cached__=None, __loader__=loader)
        exec(compile(Path(words[0]).read_bytes(), words[0], "exec"), content)


def _exit_code(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def _writer(number: int) -> Any:
    """Returns a stream that keeps nothing back, as with PYTHONUNBUFFERED."""
    raw = open(number, "wb", buffering=0, closefd=False)  # noqa: SIM115
    errors = "strict" if number == 1 else "backslashreplace"
    return io.TextIOWrapper(raw, encoding="utf-8", errors=errors, write_through=True)


def _close_what_exec_would() -> None:
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        handle = int(name)
        if handle > 2:
            try:
                if fcntl.fcntl(handle, fcntl.F_GETFD) & fcntl.FD_CLOEXEC:
                    os.close(handle)
            except OSError:  # the one that listed them
                pass


def _show_process(words: Sequence[str], environ: Mapping[str, str]) -> None:
    """Shows the program's words and variables in /proc as if it had been started with them, as far as there is room.

    The memory is where the parent's own were when it was started; nothing refers to it any more.
    """
    for (start, end), texts in zip(_places_shown(), (words, _shown_variables(environ))):
        room = end - start
        if room > 0:
            content = b"\0".join(os.fsencode(text) for text in texts)[: room - 1]
            ctypes.memmove(start, content.ljust(room, b"\0"), room)


def _shown_variables(environ: Mapping[str, str]) -> List[str]:
    """Returns the variables, the job's mark first."""
    variables = [f"{name}={value}" for name, value in environ.items()]
    mark = f"{orphans.NAME}="
    return sorted(variables, key=lambda each: (not each.startswith(mark), not each.startswith(_SHOWN_FIRST)))


def _places_shown() -> Tuple[Tuple[int, int], Tuple[int, int]]:
    """Returns where in memory the words and the variables are that /proc shows, from and to."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
        words, words_end, variables, variables_end = (int(field) for field in fields[45:49])
    except (OSError, IndexError, ValueError):
        return (0, 0), (0, 0)
    return (words, words_end), (variables, variables_end)
