"""The processes of a job on this machine: starts them, reads their output, and ends them with all their children."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import select
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import IO, Any, Callable, Dict, List, Mapping, Optional, Protocol, Sequence, Set

from tf_ipu_dp.emulator.launcher import forked_program, orphans, preload, stop_signals
from tf_ipu_dp.emulator.launcher.preloading import Preloading

FAILURE_GRACE_S = 3.0  # between SIGTERM and SIGKILL, when another process has failed
_CHUNK_BYTES = 1 << 16
_POLL_S = 0.02
_STATE_POLL_S = 1.0
_OTHERS_REPORT_WITHIN_S = 10.0  # instances of a run watch each other, and say what one was doing; so they come first
_READ_POLL_MS = 200
_PR_SET_PDEATHSIG = 1
_LIBC: Any = ctypes.CDLL(None) if sys.platform == "linux" else None


@dataclasses.dataclass(frozen=True)
class Command:
    """One process to start."""

    words: Sequence[str]
    environ: Mapping[str, str]
    directory: Optional[str] = None
    cpus: Optional[Sequence[int]] = None  # that it may use; None for all


@dataclasses.dataclass(frozen=True)
class Exit:
    """How a process ended."""

    index: int
    status: int  # 128 plus the number for a signal
    by_signal: int = 0

    @classmethod
    def from_code(cls, index: int, code: int) -> Exit:
        """Converts what `Popen.wait` returns."""
        return cls(index, code, 0) if code >= 0 else cls(index, 128 - code, -code)


class Output(Protocol):
    """Where the processes' output goes, from any thread."""

    def write(self, index: int, name: str, data: bytes) -> None:
        """Receives what a process has written to stdout or stderr."""

    def finish(self, index: int, name: str) -> None:
        """Marks the end of a process's stream."""


class ProcessObserver(Protocol):
    """Receives what happens to processes, from any thread."""

    def exited(self, ended: Exit) -> None:
        """Receives the end of one process."""

    def stopped(self, index: int, pid: int, seconds: float) -> None:
        """Receives, once, that a process has been stopped for longer than the limit."""


class HostProcesses(Protocol):
    """The processes of a job on one host."""

    host: str
    indices: List[int]

    def prepare(self) -> None:
        """Begins with what takes time before processes can be started."""

    def is_prepared(self) -> bool:
        """Whether `start` can be called."""

    def start(self) -> None:
        """Starts them all."""

    def send_signal(self, number: int) -> None:
        """Sends a signal to them."""

    def close(self, grace_s: float, terminate: bool) -> None:
        """Ends the remaining processes: with SIGTERM if `terminate` is set, and with SIGKILL after the grace period."""

    def is_drained(self) -> bool:
        """Whether all output has been forwarded, after `close`."""


class LocalProcesses:
    """The processes on this machine. Each leads its own session, so that a terminal's signals do not reach it."""

    def __init__(
        self,
        host: str,
        commands: Mapping[int, Command],
        output: Output,
        observer: ProcessObserver,
        stall_timeout_s: float = 0.0,
    ) -> None:
        """With a stall timeout, a process that is stopped for longer (by SIGSTOP or a debugger) is reported."""
        self.host = host
        self._stall_timeout_s = stall_timeout_s
        self.indices = list(commands)
        self._commands = commands
        self._output = output
        self._observer = observer
        self._processes: Dict[int, Any] = {}
        self._readers: List[threading.Thread] = []
        self._mark = uuid.uuid4().hex
        self._preloading: Optional[Preloading] = None
        self._reaper: Any = None
        self._is_closing = threading.Event()

    def prepare(self) -> None:
        """Begins to import what they share, if they can be forks of this process."""
        environs = [self._with_mark(command) for command in self._commands.values()]
        words = [list(command.words) for command in self._commands.values()]
        if all(each == words[0] for each in words) and preload.can_fork(words[0], environs):
            self._preloading = Preloading(words[0], environs[0])

    def is_prepared(self) -> bool:
        """Whether the import is done, or not needed."""
        return self._preloading is None or self._preloading.is_done()

    def start(self) -> None:
        """Starts them all. The thread that calls it must outlive them: they are killed when it ends."""
        use_fork = self._preloading is not None and self._preloading.can_fork()
        self._reaper = subprocess.Popen(
            [sys.executable, "-I", "-S", orphans.__file__, self._mark],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for index, command in self._commands.items():
            process = self._start(command, use_fork)
            self._processes[index] = process
            for name, stream in (("stdout", process.stdout), ("stderr", process.stderr)):
                assert stream is not None
                reader = threading.Thread(target=self._read, args=(index, name, stream), daemon=True)
                reader.start()
                self._readers.append(reader)
            threading.Thread(target=self._wait, args=(index, process), daemon=True).start()
        if self._stall_timeout_s:
            threading.Thread(target=self._watch_stopped, daemon=True).start()

    def send_signal(self, number: int) -> None:
        """Sends a signal to every running process and its process group; those that are stopped continue to handle it.

        Children that have left the group get only SIGTERM and SIGKILL.
        """
        for process in self._processes.values():
            if process.returncode is None:
                try:
                    os.killpg(process.pid, number)
                    os.killpg(process.pid, signal.SIGCONT)
                except ProcessLookupError:  # a fork that does not lead its group yet
                    _send_signal(process.pid, number)
                except PermissionError:
                    continue
        if number in (signal.SIGTERM, signal.SIGKILL):
            for pid in self._find_escaped():
                _send_signal(pid, number)

    def close(self, grace_s: float, terminate: bool) -> None:
        """Ends the remaining processes: with SIGTERM if `terminate` is set, and with SIGKILL after the grace period.

        Children that have left the process groups always get SIGTERM, and at most FAILURE_GRACE_S to end.
        """
        if not self.is_prepared():
            assert self._preloading is not None
            self._preloading.abandon()
        began, signalled = time.monotonic(), set()
        left = orphans.find(self._mark) if self._processes else []
        while left:
            escaped = self._find_escaped()
            for pid in (left if terminate else escaped) if grace_s else ():
                if pid not in signalled:
                    signalled.add(pid)
                    _send_signal(pid, signal.SIGTERM)
            limit_s = min(grace_s, FAILURE_GRACE_S) if set(left) <= set(escaped) else grace_s
            if time.monotonic() - began >= limit_s:
                break
            time.sleep(_POLL_S)
            left = orphans.find(self._mark)
        if self._processes:
            self.send_signal(signal.SIGKILL)
            orphans.kill(self._mark)
        self._is_closing.set()
        if self._reaper is not None:
            self._reaper.communicate(orphans.DONE)
            self._reaper = None

    def is_drained(self) -> bool:
        """Whether all output of the processes has been forwarded, after `close`."""
        return not any(reader.is_alive() for reader in self._readers)

    def _with_mark(self, command: Command) -> Dict[str, str]:
        return {**command.environ, orphans.JOB_VARIABLE: orphans.add_mark(os.environ, self._mark)}

    def _start(self, command: Command, use_fork: bool) -> Any:
        environ = self._with_mark(command)
        with stop_signals.blocked() as mask:
            # It makes few system calls and takes no lock, so it is safe although other threads are running.
            prepare_child = _make_prepare_child(command.cpus, os.getpid(), mask)
            if use_fork:
                assert self._preloading is not None
                environ[preload.SECONDS] = f"{self._preloading.seconds:.3f}"
                return forked_program.fork(command.words, environ, command.directory, prepare_child)
            return subprocess.Popen(
                list(command.words),
                env=environ,
                cwd=command.directory,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                preexec_fn=prepare_child,  # noqa: PLW1509
            )

    def _find_escaped(self) -> List[int]:
        """Returns the processes of the job that have left the process groups of its instances."""
        groups = {process.pid for process in self._processes.values()}
        return [pid for pid in orphans.find(self._mark) if _process_group(pid) not in groups]

    def _wait(self, index: int, process: Any) -> None:
        self._observer.exited(Exit.from_code(index, process.wait()))

    def _watch_stopped(self) -> None:
        """Reports a process that is stopped, also if all are: then none of them can report it."""
        limit_s = self._stall_timeout_s + _OTHERS_REPORT_WITHIN_S
        since: Dict[int, float] = {}
        checked_at = time.monotonic()
        while not self._is_closing.wait(_STATE_POLL_S):
            now = time.monotonic()
            if now - checked_at > 5 * _STATE_POLL_S:  # this process was stopped itself
                since.clear()
            checked_at = now
            for index, process in self._processes.items():
                if process.returncode is None and _is_stopped(process.pid):
                    since.setdefault(index, now)
                else:
                    since.pop(index, None)
            overdue = [index for index, at in since.items() if now - at > limit_s]
            if overdue:
                index = min(overdue)
                self._observer.stopped(index, self._processes[index].pid, now - since[index])
                return

    def _read(self, index: int, name: str, stream: IO[bytes]) -> None:
        readable = select.poll()
        readable.register(stream, select.POLLIN)
        while True:
            # A process without the job's mark is not ended, and may keep the pipe open forever.
            if readable.poll(_READ_POLL_MS):
                data = os.read(stream.fileno(), _CHUNK_BYTES)
                if not data:
                    break
                self._output.write(index, name, data)
            elif self._is_closing.is_set():
                break
        self._output.finish(index, name)
        stream.close()


def _send_signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _is_stopped(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:  # it has ended, or this is not Linux
        return False
    return stat.rpartition(")")[2].split()[0] in ("T", "t")


def _process_group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


def _make_prepare_child(cpus: Optional[Sequence[int]], parent: int, mask: Set[int]) -> Callable[[], None]:
    """Returns what a child does before it runs the program: it is killed when its parent ends, and pinned to cores."""

    def prepare_child() -> None:
        stop_signals.restore_in_child(mask)
        if _LIBC is not None:
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)
            if cpus is not None:
                os.sched_setaffinity(0, cpus)

    return prepare_child
