"""Finds and kills every process of a job by a mark in its environment. Standard library only.

Processes can leave their process group and outlive their parent, but all of them inherit the environment. Run as a
script it is the job's orphan reaper: `python orphans.py MARK` waits until its input closes, and kills the marked
processes unless it has read that the job is done. So they are killed even when poprun itself was killed.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import List, Mapping

JOB_VARIABLE = "IPU_EMULATOR_JOB"
DONE = b"done"
_MAX_ROUNDS = 50
_PAUSE_S = 0.02


def add_mark(environ: Mapping[str, str], mark: str) -> str:
    """Returns the variable's value for a job's processes; those of a job within a job carry both marks."""
    return ":".join(filter(None, (environ.get(JOB_VARIABLE, ""), mark)))


def find(mark: str) -> List[int]:
    """Returns the running processes that carry the mark; none on systems without /proc."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
            state = (folder / "stat").read_bytes().rsplit(b")", 1)[1].split()[0]
        except (OSError, IndexError):  # it has ended, or belongs to another user
            continue
        prefix = JOB_VARIABLE.encode() + b"="
        value = next((variable[len(prefix) :] for variable in variables if variable.startswith(prefix)), b"")
        if mark.encode() in value.split(b":") and state not in (b"Z", b"X"):
            found.append(int(folder.name))
    return found


def kill(mark: str) -> None:
    """Kills the marked processes, and those that they start meanwhile."""
    for _ in range(_MAX_ROUNDS):
        found = [pid for pid in find(mark) if pid != os.getpid()]
        if not found:
            return
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        time.sleep(_PAUSE_S)


def _reap(mark: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.stdin.buffer.read() != DONE:
        kill(mark)


if __name__ == "__main__":
    _reap(sys.argv[1])
