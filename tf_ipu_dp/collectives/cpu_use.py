"""How busy cores, threads and single processes were between two moments, from /proc. Shares from 0 to 1."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Dict, Optional, Tuple

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")


_LOOK_S = 0.2
_POLLING = 0.25  # share of a core that a thread takes from which on it polls, while there is nothing to do
_LOWEST_PRIORITY = 19


class CpuUse:
    """What has been used since this was made, by all but one thread of this process, if one is given."""

    def __init__(self, process: Optional[int] = None, without_thread: Optional[int] = None) -> None:
        self._began = time.monotonic()
        self._cores = _read_cores()
        self._threads = _read_threads()
        self._without = without_thread
        self._process = process
        self._process_s = _read_process(process)

    def cores(self) -> float:
        """Returns the used share of all cores of this machine, by any process."""
        idle, total = (now - before for now, before in zip(_read_cores(), self._cores))
        left_out = self._used().get(self._without or 0, 0.0) * _TICKS_PER_S
        return max(0.0, 1 - (idle + left_out) / total) if total > 0 else 0.0

    def busiest_thread(self) -> float:
        """Returns the largest share of a core that a thread of this process has used."""
        used = (seconds for thread, seconds in self._used().items() if thread != self._without)
        return max(used, default=0.0) / self._elapsed_s()

    def _used(self) -> Dict[int, float]:
        return {thread: seconds - self._threads.get(thread, 0.0) for thread, seconds in _read_threads().items()}

    def process(self) -> Optional[float]:
        """Returns the share of a core that the other process has used; None if there is none."""
        now = _read_process(self._process)
        return None if now is None or self._process_s is None else (now - self._process_s) / self._elapsed_s()

    def _elapsed_s(self) -> float:
        return max(time.monotonic() - self._began, 1e-9)


def calm_polling_thread() -> Optional[int]:
    """Gives the thread of this process that polls, while all others wait, the lowest priority; returns it, or None."""
    before = _read_threads()
    time.sleep(_LOOK_S)
    used = {thread: seconds - before.get(thread, 0.0) for thread, seconds in _read_threads().items()}
    thread = max(used, key=lambda each: used[each], default=0)
    if used.get(thread, 0.0) < _POLLING * _LOOK_S:
        return None
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, thread, _LOWEST_PRIORITY)
    return thread


def prefer_thread(thread: int) -> None:
    """Gives a thread of this process the highest priority that the user may give."""
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(thread, os.SCHED_RR, os.sched_param(1))
        return
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, 0)


def _read_cores() -> Tuple[int, int]:
    """Returns idle and all ticks of all cores."""
    try:
        fields = (_PROC / "stat").read_text(encoding="ascii").splitlines()[0].split()[1:9]
    except OSError:
        return 0, 0
    numbers = [int(field) for field in fields]
    return numbers[3] + numbers[4], sum(numbers)


def _read_threads() -> Dict[int, float]:
    """Returns the seconds on a core of each thread of this process."""
    found = {}
    with contextlib.suppress(OSError):
        for folder in (_PROC / "self" / "task").iterdir():
            with contextlib.suppress(OSError):  # it has just ended
                found[int(folder.name)] = _cpu_seconds((folder / "stat").read_text(encoding="utf-8", errors="replace"))
    return found


def _read_process(process: Optional[int]) -> Optional[float]:
    if process is None:
        return None
    try:
        return _cpu_seconds((_PROC / str(process) / "stat").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None


def _cpu_seconds(stat: str) -> float:
    """Returns the seconds on a core that a text of /proc/PID/stat has. The name, in brackets, may have spaces."""
    fields = stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
