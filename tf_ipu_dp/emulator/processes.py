"""A group of processes that live and die together: their output tagged, the first failure kept, nobody left behind."""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from typing import IO, Any, Callable, Deque, Dict, List, Mapping, Optional, Sequence

_GRACE_S = 3.0
_LAST_LINES = 20
_PR_SET_PDEATHSIG = 1


@dataclasses.dataclass(frozen=True)
class Command:
    """One process to start."""

    words: Sequence[str]
    environ: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Failure:
    """The first process that did not end well."""

    index: int
    status: int  # of its exit; 128 and the number for a signal
    last_lines: Sequence[str]


class Group:
    """Starts the processes and waits for them; the first failure, or a signal, ends them all."""

    def __init__(self, commands: Sequence[Command], say: Callable[[int, str, str], None]) -> None:
        self._commands = commands
        self._say = say  # called with index, stdout or stderr, and a line
        self._processes: List[Any] = []
        self._last: Dict[int, Deque[str]] = collections.defaultdict(lambda: collections.deque(maxlen=_LAST_LINES))
        self._signal = 0

    def run(self) -> Optional[Failure]:
        """Returns the first failure, or None when all ended well."""
        before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            readers = self._start()
            failure = self._wait()
            self._end()
            for reader in readers:
                reader.join(_GRACE_S)
            return failure
        finally:
            self._end()
            for number, handler in before.items():
                signal.signal(number, handler)

    def last_lines(self, index: int) -> Sequence[str]:
        """Returns the last lines of a process."""
        return tuple(self._last[index])

    def _note(self, number: int, _: Any) -> None:
        self._signal = number

    def _start(self) -> List[threading.Thread]:
        readers = []
        for index, command in enumerate(self._commands):
            process = subprocess.Popen(
                list(command.words),
                env=dict(command.environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                # Only prctl is called in the child, which is safe beside the reading threads.
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509
            )
            self._processes.append(process)
            for name, stream in (("stdout", process.stdout), ("stderr", process.stderr)):
                assert stream is not None
                reader = threading.Thread(target=self._read, args=(index, name, stream), daemon=True)
                reader.start()
                readers.append(reader)
        return readers

    def _read(self, index: int, name: str, stream: IO[bytes]) -> None:
        for raw in stream:
            line = raw.decode("utf-8", "replace").rstrip("\n")
            self._last[index].append(line)
            self._say(index, name, line)

    def _wait(self) -> Optional[Failure]:
        while True:
            if self._signal:
                return Failure(-1, 128 + self._signal, ())
            codes = [process.poll() for process in self._processes]
            failed = [index for index, code in enumerate(codes) if code]
            if failed:
                code = codes[failed[0]] or 0
                time.sleep(0.05)  # for its last lines
                return Failure(failed[0], code if code > 0 else 128 - code, self.last_lines(failed[0]))
            if all(code == 0 for code in codes):
                return None
            time.sleep(0.02)

    def _end(self) -> None:
        """Asks whoever is left to go, and then does not ask."""
        for number, patience in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, _GRACE_S)):
            left = [process for process in self._processes if _send(process, number)]
            deadline = time.monotonic() + patience
            while any(process.poll() is None for process in left) and time.monotonic() < deadline:
                time.sleep(0.02)


def _send(process: Any, number: int) -> bool:
    """Sends a signal to a process and to all that it has started; returns whether anyone was there."""
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
