"""What the processes of a cell use while they run: the most memory at once, and how busy this machine's cores are.

Read from /proc. Memory costs most: its next reading waits a hundred times as long as the last one computed. What others
used of the cores is what neither this process nor those that it has waited for did.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path
from typing import Dict, List, Optional, Tuple

_PERIOD_S = 0.5
_COST_FACTOR = 100  # readings take less than 1 % of the time
_PROC = Path("/proc")


class ProcessUse:
    """Samples a process and all that it has started, while the context is open. Elsewhere than on Linux: nothing."""

    def __init__(self, pid: int, period_s: float = _PERIOD_S) -> None:
        self._pid, self._period_s = pid, period_s
        self._began = time.monotonic()
        self._cores: List[Tuple[float, float, float]] = []  # seconds since the beginning, busy and all ticks
        self._at_start: Optional[Tuple[float, float, float]] = None  # busy and all ticks, own seconds
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.memory_bytes: Optional[int] = None  # the most that all processes had at once; None: not known

    def __enter__(self) -> ProcessUse:
        with contextlib.suppress(OSError, ValueError, IndexError):
            self._at_start = (*read_core_ticks(), _own_seconds())
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends sampling. It may be called again."""
        self._done.set()
        self._thread.join()

    def busy(self, first_s: float, last_s: float) -> Optional[float]:
        """Returns the share of this machine's cores that was used between two times since the beginning."""
        inside = [each for each in self._cores if first_s - self._period_s <= each[0] <= last_s + self._period_s]
        if len(inside) < 2 or inside[-1][2] <= inside[0][2]:
            return None
        return min(max((inside[-1][1] - inside[0][1]) / (inside[-1][2] - inside[0][2]), 0.0), 1.0)

    def others(self) -> Optional[float]:
        """Returns the share of this machine's cores that other processes, or other machines of its host, have used.

        It counts from the beginning until this call, which comes after the processes were waited for.
        """
        if self._at_start is None:
            return None
        began_busy, began_all, began_own_s = self._at_start
        busy, every = read_core_ticks()
        own_ticks = (_own_seconds() - began_own_s) * os.sysconf("SC_CLK_TCK")
        return min(max((busy - began_busy - own_ticks) / (every - began_all), 0.0), 1.0) if every > began_all else None

    def _sample(self) -> None:
        memory_due = 0.0
        while True:
            is_last = self._done.is_set()
            now = time.monotonic()
            with contextlib.suppress(OSError, ValueError, IndexError):
                self._cores.append((now - self._began, *read_core_ticks()))
            if now >= memory_due and not is_last:
                cost_s = self._sample_memory()
                memory_due = time.monotonic() + _COST_FACTOR * cost_s
            if is_last:
                break
            self._done.wait(self._period_s)

    def _sample_memory(self) -> float:
        """Reads the memory of all processes, and returns the time that this computed."""
        began = time.thread_time()
        found = sum(map(_memory_of, find_tree(self._pid)))
        if found:
            self.memory_bytes = max(self.memory_bytes or 0, found)
        return time.thread_time() - began


def find_tree(pid: int) -> List[int]:
    """Returns a process and all that it has started, directly or not, as far as they are running."""
    children: Dict[int, List[int]] = {}
    for entry in _PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parent = int((entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    found = [pid] if (_PROC / str(pid)).exists() else []
    for each in found:
        found += children.get(each, [])
    return found


def read_core_ticks() -> Tuple[float, float]:
    """Returns the ticks that all cores of this machine were busy since it was started, and all ticks."""
    numbers = [float(word) for word in (_PROC / "stat").read_text().split("\n", 1)[0].split()[1:9]]
    return sum(numbers) - numbers[3] - numbers[4], sum(numbers)


def _own_seconds() -> float:
    """Returns what this process and those that it, or one of them, has waited for have computed."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _memory_of(pid: int) -> int:
    """Returns the bytes of a process; pages that it shares count in part (PSS) where the kernel says it."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (_PROC / str(pid) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (_PROC / str(pid) / "status").read_text(errors="replace").splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    return 0
