"""What Linux reports about a process: whether it is alive, when it started, its command line, CPU time and memory."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import List, Mapping, NamedTuple, Optional

# Tolerance for start times, because clocks and file times are coarse.
START_TOLERANCE_S = 5.0
_MAX_COMMAND_BYTES = 4096
# Set by launch/ where it made the environment, which then runs the command in the same process: when that was done, in
# seconds since the machine was started.
INSTALLED_VARIABLE = "TF_IPU_DP_INSTALLED"
# Set by the emulator's poprun for instances that are forks: how long it imported what they need.
PRELOAD_VARIABLE = "IPU_EMULATOR_PRELOAD_SECONDS"


class HostUse(NamedTuple):
    """What a process has used of its host until now."""

    cpu_s: float  # by all of its threads, in user and kernel mode
    memory_gib: float  # resident


def is_alive(pid: int) -> bool:
    """Whether a process of this machine is running; a zombie is not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    with contextlib.suppress(OSError, IndexError):
        return _read_stat(pid)[0] not in ("Z", "X")
    return True


def started_before(pid: int, seconds: float) -> bool:
    """Whether a process started before a time since the epoch: a later one only reuses the process id.

    OSError, ValueError or IndexError where /proc does not show the process.
    """
    return time.time() - _read_age_s(pid) <= seconds + START_TOLERANCE_S


def began(environ: Mapping[str, str]) -> float:
    """Returns when this command began, on the clock of time.perf_counter; now where /proc does not show its process.

    An installation before it is not part of it; the import that another process did for it is.
    """
    age_s = 0.0
    with contextlib.suppress(OSError, ValueError, IndexError):
        age_s = _read_age_s(os.getpid())
    with contextlib.suppress(KeyError, ValueError):
        since_s = time.clock_gettime(time.CLOCK_BOOTTIME) - float(environ[INSTALLED_VARIABLE])
        age_s = min(age_s, max(since_s, 0.0))
    with contextlib.suppress(KeyError, ValueError):
        age_s += max(float(environ[PRELOAD_VARIABLE]), 0.0)
    return time.perf_counter() - age_s


def read_command(pid: int, attached: Optional[float]) -> Optional[str]:
    """Returns a process's command line; None if it is not visible here or started after `attached`."""
    try:
        if attached is not None and not started_before(pid, attached):
            return None
        words = Path(f"/proc/{pid}/cmdline").read_bytes()[:_MAX_COMMAND_BYTES].rstrip(b"\0").split(b"\0")
    except (OSError, ValueError, IndexError):
        return None
    return b" ".join(words).decode("utf-8", "backslashreplace") or None


def read_host_use(pid: int, attached: Optional[float]) -> Optional[HostUse]:
    """Returns a process's CPU time and memory; None if it is not visible here or started after `attached`."""
    try:
        if attached is not None and not started_before(pid, attached):
            return None
        stat = _read_stat(pid)
        ticks, pages = int(stat[11]) + int(stat[12]), int(stat[21])
    except (OSError, ValueError, IndexError):
        return None
    return HostUse(ticks / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGE_SIZE") / 2**30)


def _read_age_s(pid: int) -> float:
    since_boot = int(_read_stat(pid)[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot


def _read_stat(pid: int) -> List[str]:
    """Returns the fields of /proc/PID/stat after the process's name, which may contain anything."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
