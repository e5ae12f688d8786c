"""What /proc shows of this process: its command line and environment. Linux only."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Mapping, Sequence, Tuple

_SHOWN_FIRST = ("IPU_EMULATOR_", "POPDIST_")


def room_for_environment() -> int:
    """Returns how many bytes of environment /proc can show."""
    start, end = _areas()[1]
    return end - start


def show(words: Sequence[str], environ: Mapping[str, str], first: str) -> None:
    """Makes /proc show this command line and environment, as far as there is room; the variable `first` comes first.

    They are written over those that the process was started with, to which nothing refers any more.
    """
    variables = [f"{name}={value}" for name, value in environ.items()]
    variables.sort(key=lambda each: (not each.startswith(f"{first}="), not each.startswith(_SHOWN_FIRST)))
    for (start, end), texts in zip(_areas(), (words, variables)):
        room = end - start
        if room > 0:
            content = b"\0".join(os.fsencode(text) for text in texts)[: room - 1]
            ctypes.memmove(start, content.ljust(room, b"\0"), room)


def _areas() -> Tuple[Tuple[int, int], Tuple[int, int]]:
    """Returns where in memory command line and environment are, from and to."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
        words, words_end, variables, variables_end = (int(field) for field in fields[45:49])
    except (OSError, IndexError, ValueError):
        return (0, 0), (0, 0)
    return (words, words_end), (variables, variables_end)
