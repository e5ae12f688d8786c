"""Processes that live and die together, on one machine or several: the first failure is kept, nobody is left behind."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
import uuid
from typing import IO, Any, Callable, Dict, List, Mapping, Optional, Protocol, Sequence, Tuple

from tf_ipu_dp.emulator.launcher import orphans, preload

FAILURE_GRACE_S = 3.0  # for the others, when one has failed
SIGNAL_GRACE_S = 120.0  # when asked to end: a training run saves a checkpoint
_SETTLE_S = 0.3  # within which deaths count as one event, whose cause is looked for
_CHUNK = 1 << 16
_POLL_S = 0.02
_READ_POLL_MS = 200
_PR_SET_PDEATHSIG = 1
_LIBC: Any = ctypes.CDLL(None) if sys.platform == "linux" else None


@dataclasses.dataclass(frozen=True)
class Command:
    """One process to start."""

    words: Sequence[str]
    environ: Mapping[str, str]
    directory: Optional[str] = None
    cpus: Optional[Sequence[int]] = None  # which it may use; None for all


@dataclasses.dataclass(frozen=True)
class Exit:
    """How a process ended."""

    index: int
    status: int  # 128 and the number for a signal
    by_signal: int = 0

    @classmethod
    def from_code(cls, index: int, code: int) -> Exit:
        """Takes what `Popen.wait` returns."""
        return cls(index, code, 0) if code >= 0 else cls(index, 128 - code, -code)


@dataclasses.dataclass(frozen=True)
class Failure:
    """What ended the job: the first process that did not end well, or a signal, or the loss of a host."""

    status: int
    exit: Optional[Exit] = None
    host: str = ""
    reason: str = ""  # a sentence, where the exit does not say it all


class Events:
    """What happens to the processes, told from any thread and by signal handlers."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Tuple[str, Any]] = queue.SimpleQueue()

    def leaving(self, index: int) -> None:
        """A process is about to end, well or not."""
        self._queue.put(("leaving", index))

    def exited(self, ended: Exit) -> None:
        """A process has ended."""
        self._queue.put(("exited", ended))

    def lost(self, host: str, reason: str) -> None:
        """A host is out of reach, with all its processes."""
        self._queue.put(("lost", (host, reason)))

    def signalled(self, number: int, _: Any = None) -> None:
        """Somebody asks the job to end. A signal handler."""
        self._queue.put(("signalled", number))

    def unread(self) -> None:
        """Nobody reads the output any more."""
        self._queue.put(("unread", None))

    def next(self, patience_s: Optional[float]) -> Tuple[str, Any]:
        """Returns what happened next, or ("", None) when nothing does for so long."""
        try:
            return self._queue.get(timeout=patience_s)
        except queue.Empty:
            return "", None


class Output(Protocol):
    """Where the processes' output goes, from any thread."""

    def write(self, index: int, name: str, data: bytes) -> None:
        """Takes what a process has written to stdout or stderr."""

    def finish(self, index: int, name: str) -> None:
        """Says that no more will come."""


class Observer(Protocol):
    """Who wants to know how the processes end, from any thread."""

    def exited(self, ended: Exit) -> None:
        """A process has ended."""


class Processes(Protocol):
    """Processes of one host."""

    host: str
    indices: List[int]

    def start(self) -> None:
        """Starts them all."""

    def send(self, number: int) -> None:
        """Sends a signal to them."""

    def close(self, patience_s: float, ask: bool) -> None:
        """Ends whatever is left, after a while and perhaps a request."""

    def is_told(self) -> bool:
        """Whether all output has been passed on. For closed ones."""


class Group:
    """Processes on this machine. Each leads a session of its own, so that a terminal's signals pass it by."""

    def __init__(self, host: str, commands: Mapping[int, Command], output: Output, observer: Observer) -> None:
        self.host = host
        self.indices = list(commands)
        self._commands = commands
        self._output = output
        self._observer = observer
        self._processes: Dict[int, Any] = {}
        self._readers: List[threading.Thread] = []
        self._mark = uuid.uuid4().hex
        self._watcher: Any = None
        self._ending = threading.Event()

    def start(self) -> None:
        """Starts them all. The thread that calls it must outlive them: they are killed when it ends."""
        environs = [self._marked(command) for command in self._commands.values()]
        words = [list(command.words) for command in self._commands.values()]
        forked = all(each == words[0] for each in words) and preload.are_possible(words[0], environs)
        forked = forked and preload.preload(words[0], environs[0])
        self._watcher = subprocess.Popen(
            [sys.executable, "-I", "-S", orphans.__file__, self._mark],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for index, command in self._commands.items():
            process = self._start(command, forked)
            self._processes[index] = process
            for name, stream in (("stdout", process.stdout), ("stderr", process.stderr)):
                assert stream is not None
                reader = threading.Thread(target=self._read, args=(index, name, stream), daemon=True)
                reader.start()
                self._readers.append(reader)
            threading.Thread(target=self._wait, args=(index, process), daemon=True).start()

    def _marked(self, command: Command) -> Dict[str, str]:
        return {**command.environ, orphans.NAME: orphans.marked(os.environ, self._mark)}

    def _start(self, command: Command, forked: bool) -> Any:
        environ = self._marked(command)
        # It makes two system calls and takes no lock, which is safe beside the reading threads.
        make_ready = _make_ready(command.cpus, os.getpid())
        if forked:
            return preload.fork(command.words, environ, command.directory, make_ready)
        return subprocess.Popen(
            list(command.words),
            env=environ,
            cwd=command.directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=make_ready,  # noqa: PLW1509
        )

    def send(self, number: int) -> None:
        """Sends a signal to every process that runs, and to those that it has started.

        Who has left for a session of his own is spared, as by a terminal, but for the signals that end the job.
        """
        for process in self._processes.values():
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, number)
        if number in (signal.SIGTERM, signal.SIGKILL):
            for pid in self._runaways():
                _send(pid, number)

    def close(self, patience_s: float, ask: bool) -> None:
        """Ends whatever is left, after a while and perhaps a request. Returns when nobody is."""
        began, asked = time.monotonic(), set()
        left = orphans.find(self._mark) if self._processes else []
        while left:
            runaways = self._runaways()
            for pid in (left if ask else runaways) if patience_s else ():
                if pid not in asked:
                    asked.add(pid)
                    _send(pid, signal.SIGTERM)
            patience = min(patience_s, FAILURE_GRACE_S) if set(left) <= set(runaways) else patience_s
            if time.monotonic() - began >= patience:
                break
            time.sleep(_POLL_S)
            left = orphans.find(self._mark)
        if self._processes:
            self.send(signal.SIGKILL)
            orphans.end(self._mark)
        self._ending.set()
        if self._watcher is not None:
            self._watcher.communicate(orphans.DONE)
            self._watcher = None

    def is_told(self) -> bool:
        """Whether all that the processes have written has been passed on. For a closed group."""
        return not any(reader.is_alive() for reader in self._readers)

    def _runaways(self) -> List[int]:
        own = {process.pid for process in self._processes.values()}
        return [pid for pid in orphans.find(self._mark) if _group_of(pid) not in own]

    def _wait(self, index: int, process: Any) -> None:
        self._observer.exited(Exit.from_code(index, process.wait()))

    def _read(self, index: int, name: str, stream: IO[bytes]) -> None:
        waiting = select.poll()
        waiting.register(stream, select.POLLIN)
        while True:
            # Somebody who has shed the job's mark may keep the pipe open for ever.
            if waiting.poll(_READ_POLL_MS):
                data = os.read(stream.fileno(), _CHUNK)
                if not data:
                    break
                self._output.write(index, name, data)
            elif self._ending.is_set():
                break
        self._output.finish(index, name)
        stream.close()


def supervise(groups: Sequence[Processes], events: Events) -> Optional[Failure]:
    """Starts the groups and returns what ended them, or None when all processes ended well. Nobody is left then.

    A signal that asks to end is passed on once, so that a program can end well; a second one ends all at once.
    """
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # else nohup wants it to go on
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, events.signalled) for number in numbers}
    watch = _Watch(groups, events)
    try:
        # This machine's last: others can begin while it imports what its instances share.
        for group in sorted(groups, key=lambda each: isinstance(each, Group)):
            group.start()
        return watch.run()
    finally:
        watch.close()
        for number, handler in before.items():
            signal.signal(number, handler)


class _Watch:
    """One job from its start to its end."""

    def __init__(self, groups: Sequence[Processes], events: Events) -> None:
        self._groups, self._events = groups, events
        self._hosts = {index: group.host for group in groups for index in group.indices}
        self._left = set(self._hosts)
        self._leavers: List[int] = []  # in the order in which they went, or said that they go
        self._failed: List[Exit] = []
        self._failure: Optional[Failure] = None  # that is no exit of a process
        self._ask_at: Optional[float] = None
        self._kill_at: Optional[float] = None
        self._asked = False
        self._patience_s = FAILURE_GRACE_S

    def run(self) -> Optional[Failure]:
        while self._left:
            times = [at for at in (self._when_to_ask(), self._kill_at) if at is not None]
            what, value = self._events.next(max(min(times) - time.monotonic(), 0) if times else None)
            if what:
                getattr(self, f"_{what}")(value)
            now = time.monotonic()
            ask_at = self._when_to_ask()
            if ask_at is not None and now >= ask_at:
                self._ask(signal.SIGTERM, FAILURE_GRACE_S)
            if self._kill_at is not None and now >= self._kill_at:
                self._send(signal.SIGKILL)
                self._kill_at, self._patience_s = None, 0.0
        if self._failure is not None or not self._failed:
            return self._failure
        # Where one was ended by a signal and others failed beside it, these felt the loss; Gloo aborts of it.
        killed = [each for each in self._failed if each.by_signal not in (0, signal.SIGABRT)]
        first = min(killed or self._failed, key=lambda each: self._leavers.index(each.index))
        return Failure(first.status, first, self._hosts[first.index])

    def close(self) -> None:
        """Waits until nothing is left and all output is shown."""
        if self._kill_at is not None:
            self._patience_s = max(self._kill_at - time.monotonic(), 0.0)
        closing = [
            threading.Thread(target=group.close, args=(self._patience_s, not self._asked), daemon=True)
            for group in self._groups
        ]
        for thread in closing:
            thread.start()
        while any(thread.is_alive() for thread in closing) or not all(group.is_told() for group in self._groups):
            what, _ = self._events.next(_POLL_S)
            if what == "signalled":
                if not any(thread.is_alive() for thread in closing):
                    return  # there is only output left, which nobody takes
                self._send(signal.SIGKILL)

    def _when_to_ask(self) -> Optional[float]:
        """Returns when those that are left are asked to end, which may move."""
        if self._ask_at is None:
            return None
        failed = {ended.index for ended in self._failed}
        earlier = itertools.takewhile(lambda index: index not in failed, self._leavers)
        # Who began to go before all that have failed is still to show how he ends.
        is_open = any(index in self._left for index in earlier)
        return self._ask_at + (FAILURE_GRACE_S if is_open else 0.0)

    def _leaving(self, index: int) -> None:
        if index not in self._leavers:
            self._leavers.append(index)

    def _exited(self, ended: Exit) -> None:
        self._leaving(ended.index)
        self._left.discard(ended.index)
        if ended.status and not self._asked:
            self._failed.append(ended)
            self._ask_at = self._ask_at or time.monotonic() + _SETTLE_S

    def _lost(self, loss: Tuple[str, str]) -> None:
        host, reason = loss
        self._left -= {index for index, name in self._hosts.items() if name == host}
        if not self._asked:
            index = min(index for index, name in self._hosts.items() if name == host)
            self._failure = self._failure or Failure(1, Exit(index, 1), host, reason)
            self._ask_at = self._ask_at or time.monotonic()

    def _signalled(self, number: int) -> None:
        if self._asked or self._failed:
            self._kill_at = time.monotonic()
        else:
            self._failure = self._failure or Failure(128 + number)
            self._ask(number, SIGNAL_GRACE_S)

    def _unread(self, _: None) -> None:
        if not self._asked:
            self._failure = self._failure or Failure(128 + signal.SIGPIPE)
            self._ask(signal.SIGTERM, FAILURE_GRACE_S)

    def _ask(self, number: int, patience_s: float) -> None:
        self._asked, self._ask_at = True, None
        self._kill_at = time.monotonic() + patience_s
        self._send(number)

    def _send(self, number: int) -> None:
        for group in self._groups:
            group.send(number)


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _group_of(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


def _make_ready(cpus: Optional[Sequence[int]], parent: int) -> Callable[[], None]:
    """Returns what a child does before it becomes the program: it dies with its parent, and keeps to its cores."""

    def make_ready() -> None:
        if _LIBC is not None:
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)
            if cpus is not None:
                os.sched_setaffinity(0, cpus)

    return make_ready
