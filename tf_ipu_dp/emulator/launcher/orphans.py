"""Finds and ends whatever a job has started, wherever it has gone: by a mark in its environment. Standard library only.

A process group forgets those who have left it, and so does a parent; the environment is inherited by all. Run as a
script, it watches over whoever started it: `python stragglers.py MARK` ends the marked processes when its input closes
without the word that all is done, as it does when the starter has been killed.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import List, Mapping

NAME = "IPU_EMULATOR_JOB"
DONE = b"done"
_ROUNDS = 50
_PAUSE_S = 0.02


def marked(environ: Mapping[str, str], mark: str) -> str:
    """Returns the variable's value for a job's processes; a job within a job carries both marks."""
    return ":".join(filter(None, (environ.get(NAME, ""), mark)))


def find(mark: str) -> List[int]:
    """Returns the running processes that carry the mark. Without /proc there are none to be found."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "environ").read_bytes().split(b"\0")
            state = (folder / "stat").read_bytes().rsplit(b")", 1)[1].split()[0]
        except (OSError, IndexError):  # it has ended, or is another user's
            continue
        value = next((word.partition(b"=")[2] for word in words if word.startswith(NAME.encode() + b"=")), b"")
        if mark.encode() in value.split(b":") and state not in (b"Z", b"X"):
            found.append(int(folder.name))
    return found


def end(mark: str) -> None:
    """Kills the marked processes, and those that they start meanwhile."""
    for _ in range(_ROUNDS):
        found = [pid for pid in find(mark) if pid != os.getpid()]
        if not found:
            return
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        time.sleep(_PAUSE_S)


def _watch(mark: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.stdin.buffer.read() != DONE:
        end(mark)


if __name__ == "__main__":
    _watch(sys.argv[1])
