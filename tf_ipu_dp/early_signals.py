"""Signals that reach a command before it can handle them in order. Standard library only.

While a command imports its modules, Python would show a traceback for Ctrl-C, and end silently on SIGTERM. So `train`
and `launch` call `exit_in_one_line` before their other imports. Between programs that replace each other signals are
blocked (`block`), so that one which arrives while Python itself starts waits for that call.
"""

from __future__ import annotations

import contextlib
import os
import signal
from types import FrameType
from typing import NoReturn, Optional

NUMBERS = (signal.SIGINT, signal.SIGTERM)
# Set for one of several instances, whose launcher reports the end of the job.
_LAUNCHED = ("POPDIST_NUM_TOTAL_REPLICAS", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_STEP_NUM_TASKS")


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM, raised in the main thread. `cli.run` turns it into one line and an exit code."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def is_launched() -> bool:
    """Whether this process is an instance that a launcher has started."""
    return any(name in os.environ for name in _LAUNCHED)


def exit_in_one_line(program: str, moment: str) -> None:
    """Makes signals end this process at once, also those that were blocked until now. Instances do it silently."""

    def leave(number: int, _: Optional[FrameType]) -> NoReturn:
        if not is_launched():
            with contextlib.suppress(OSError):
                os.write(2, f"{program}: interrupted before {moment}; nothing was written.\n".encode())
        os._exit(128 + number)

    for number in NUMBERS:
        signal.signal(number, leave)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, NUMBERS)


def raise_interrupted() -> None:
    """Makes signals raise `Interrupted` in the main thread, so that a command ends in order."""

    def interrupt(number: int, _: Optional[FrameType]) -> NoReturn:
        raise Interrupted(number)

    for number in NUMBERS:
        signal.signal(number, interrupt)


def block() -> None:
    """Makes signals wait, also in a program that replaces this one or is about to be started in this child."""
    signal.pthread_sigmask(signal.SIG_BLOCK, NUMBERS)
