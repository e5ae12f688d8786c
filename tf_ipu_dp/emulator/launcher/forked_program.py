"""Runs a program in a fork of this process, as a fresh Python would.

The fork has its own session, streams, arguments, path, signal handlers and exit handlers, and /proc shows the program's
command line and environment.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import fcntl
import gc
import importlib.machinery
import io
import os
import runpy
import signal
import sys
import sysconfig
import threading
import traceback
import types
from pathlib import Path
from typing import IO, Any, Callable, FrozenSet, List, Mapping, NoReturn, Optional, Sequence

from tf_ipu_dp.emulator.launcher import orphans, process_display

_EMULATOR = __name__.rsplit(".", 2)[0]
_FRAMES_TO_HIDE = (__file__, runpy.__file__, "<frozen runpy>")
_FLUSH_FAILED = 120  # the exit status of a Python that could not flush its output
_PARENT_STREAMS: List[Any] = []


class ForkedProgram:
    """A fork that runs a program; has the part of `subprocess.Popen` that `processes` uses."""

    def __init__(self, pid: int, stdout: IO[bytes], stderr: IO[bytes]) -> None:
        self.pid, self.stdout, self.stderr = pid, stdout, stderr
        self.returncode: Optional[int] = None

    def wait(self) -> int:
        """Returns how it ended: its exit status, or the negative number of a signal."""
        _, status = os.waitpid(self.pid, 0)
        self.returncode = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        return self.returncode


def fork(
    words: Sequence[str], environ: Mapping[str, str], directory: Optional[str], prepare_child: Callable[[], None]
) -> ForkedProgram:
    """Starts the program in a fork, where `prepare_child` is called first. It sets how signals end the fork."""
    pipes = [os.pipe(), os.pipe()]
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        try:
            prepare_child()
            _exec_program(words, environ, directory, pipes[0][1], pipes[1][1])
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    for _, writing in pipes:
        os.close(writing)
    return ForkedProgram(pid, *(os.fdopen(reading, "rb", buffering=0) for reading, _ in pipes))


def _exec_program(
    words: Sequence[str], environ: Mapping[str, str], directory: Optional[str], out: int, err: int
) -> NoReturn:
    """Runs the program in this fork, and exits with its status."""
    gc.freeze()  # the collector would touch, and so copy, the memory shared with the parent
    loaded = frozenset(sys.modules)
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    for number, handle in enumerate((null, out, err)):
        os.dup2(handle, number)
    _close_inherited_files()
    if directory is not None:
        os.chdir(directory)
    os.environ.clear()
    os.environ.update(environ)
    # A thread of the parent may hold the lock of a stream for ever, so the streams must not be closed here.
    _PARENT_STREAMS.extend([sys.stdin, sys.stdout, sys.stderr])
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)  # type: ignore[misc]  # noqa: SIM115
    sys.stdout = sys.__stdout__ = _writer(1)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _writer(2)  # type: ignore[misc]
    for place in reversed(environ.get("PYTHONPATH", "").split(os.pathsep)):
        if place and place not in sys.path:
            sys.path.insert(1, place)
    process_display.show(words, environ, first=orphans.JOB_VARIABLE)
    if "numpy" in sys.modules:  # Python seeds its own generator after a fork
        sys.modules["numpy"].random.seed()
    code = _run_to_exit_code(words)
    if code:
        horovod = sys.modules.get("horovod.tensorflow.mpi_ops")
        if horovod is not None:  # failed instances skip Horovod's shutdown: their peers would fail at once
            atexit.unregister(horovod.shutdown)
    # What the interpreter does when it ends.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    _clear_modules(loaded)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = code or _FLUSH_FAILED
    os._exit(code)


def _run_to_exit_code(words: Sequence[str]) -> int:
    try:
        # Until here SIGINT ends the process silently: it has run nothing of the program.
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        _run(words)
    except SystemExit as error:
        return _exit_code(error)
    except KeyboardInterrupt as error:
        if _is_in_program(error.__traceback__):
            traceback.print_exc()
        return 128 + signal.SIGINT
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in _FRAMES_TO_HIDE:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return 1
    return 0


def _is_in_program(trace: Optional[types.TracebackType]) -> bool:
    """Whether an exception was raised in the program, and not before its first line."""
    own = vars(sys.modules["__main__"])
    return any(frame.f_globals is own for frame, _ in traceback.walk_tb(trace))


def _clear_modules(loaded: FrozenSet[str]) -> None:
    """Clears the program's modules, so that files are closed and finalizers run; flushes files that are still open."""
    threading.excepthook = lambda _: None  # daemon threads would be stopped by now
    for name, module in list(sys.modules.items()):
        if name == "__main__" or (name not in loaded and _is_user_module(name, module)):
            content = vars(module)
            for each in sorted(content, key=lambda key: not key.startswith("_")):
                if each != "__builtins__":
                    content[each] = None
    gc.collect()
    for left in gc.get_objects():
        if isinstance(left, (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)):
            with contextlib.suppress(Exception):
                left.flush()


def _is_user_module(name: str, module: Any) -> bool:
    file = getattr(module, "__file__", None)
    installed = tuple(sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "platstdlib", "purelib", "platlib"))
    is_emulator = name == _EMULATOR or name.startswith(f"{_EMULATOR}.")
    return isinstance(file, str) and not file.startswith(installed) and not is_emulator


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
    """Returns an unbuffered stream, as with PYTHONUNBUFFERED."""
    raw = open(number, "wb", buffering=0, closefd=False)  # noqa: SIM115
    errors = "strict" if number == 1 else "backslashreplace"
    return io.TextIOWrapper(raw, encoding="utf-8", errors=errors, write_through=True)


def _close_inherited_files() -> None:
    """Closes the files that exec would close."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        handle = int(name)
        if handle > 2:
            try:
                if fcntl.fcntl(handle, fcntl.F_GETFD) & fcntl.FD_CLOEXEC:
                    os.close(handle)
            except OSError:  # the handle of the listing itself, which is closed by now
                pass
