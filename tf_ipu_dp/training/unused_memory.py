"""Gives back memory that a long run no longer uses. Not TensorFlow's own: what Python and the C library keep."""

from __future__ import annotations

import ctypes
import gc


def give_back() -> None:
    """Collects garbage, and returns free pages of the heap to the system where the C library can do that.

    The graphs of an epoch's dataset refer to each other: most of a MiB, but too few objects for Python to collect them
    soon. Until then other memory is spread around them, in the heap of each thread that tf.data has started.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
