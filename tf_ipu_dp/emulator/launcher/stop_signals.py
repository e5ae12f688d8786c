"""Signals that end poprun, before and while it starts processes. Standard library only.

From its first line on, poprun ends in one line and with 128 plus the signal's number: at once while its modules are
imported, and in order from then on (`Stopped`). While instances run, `supervisor` handles signals.
"""

from __future__ import annotations

import contextlib
import os
import signal
from types import FrameType
from typing import Iterator, NoReturn, Optional, Set

REPORT_VARIABLE = "IPU_EMULATOR_REPORT"  # names the file for the program that has started poprun, if it reports the end
NUMBERS = (signal.SIGINT, signal.SIGTERM)


class Stopped(BaseException):
    """A signal asks poprun to end. Not an Exception, so that nothing on the way handles it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def exit_at_once() -> None:
    """Makes signals end this process at once; also those that a parent has blocked until now."""
    for number in NUMBERS:
        signal.signal(number, _exit)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, NUMBERS)


def raise_stopped() -> None:
    """Makes signals raise `Stopped` in the main thread."""
    for number in NUMBERS:
        signal.signal(number, _raise)


def render(number: int) -> str:
    """Returns the sentence about a signal; empty where the program that started poprun reports the end itself."""
    return "" if os.environ.get(REPORT_VARIABLE) else f"stopped by {signal.Signals(number).name}."


@contextlib.contextmanager
def blocked() -> Iterator[Set[int]]:
    """Inside, signals wait; yields the mask from before, for a child to restore.

    A fork has the handlers of its parent until it sets its own. A signal that arrives in between would be lost.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*NUMBERS, signal.SIGHUP))
    try:
        yield set(before)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def restore_in_child(mask: Set[int]) -> None:
    """Makes signals end this child again, in place of calling its parent's handlers; those that wait do so now."""
    for number in (*NUMBERS, signal.SIGHUP):
        if signal.getsignal(number) not in (signal.SIG_IGN, signal.SIG_DFL):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _exit(number: int, _: Optional[FrameType]) -> NoReturn:
    sentence = render(number)
    if sentence:
        with contextlib.suppress(OSError):
            os.write(2, f"poprun: {sentence}\n".encode())
    os._exit(128 + number)


def _raise(number: int, _: Optional[FrameType]) -> NoReturn:
    raise Stopped(number)
