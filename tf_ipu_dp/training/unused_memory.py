"""Gives back memory that a long run no longer uses. Not TensorFlow's own: what Python and the C library keep."""

from __future__ import annotations

import ctypes
import gc
import time
from typing import Callable

_TRIM_EVERY_S = 2.0  # asking for it again takes some milliseconds, too long for epochs that are shorter than this


class UnusedMemory:
    """Of one run, between its epochs and after its checkpoints.

    The graphs of an epoch's dataset refer to each other: most of a MiB, but too few objects for Python to collect them
    soon. Until then other memory is spread around them, in the heap of each thread that tf.data has started.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._trimmed_at_s = -_TRIM_EVERY_S
        self._is_frozen = False

    def give_back(self) -> None:
        """Collects garbage, and returns free pages of the heap to the system where the C library can do that.

        Looking at all objects of TensorFlow takes an eighth of a second, so those of the first time are left out later.
        """
        gc.collect()
        if not self._is_frozen:
            gc.freeze()
            self._is_frozen = True
        if self._clock() - self._trimmed_at_s < _TRIM_EVERY_S:
            return
        self._trimmed_at_s = self._clock()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
        if trim is not None:
            trim(0)

    def close(self) -> None:
        """Lets Python collect everything again."""
        if self._is_frozen:
            gc.unfreeze()
