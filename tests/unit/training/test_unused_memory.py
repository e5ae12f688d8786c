"""Memory that a run no longer uses goes back to the system, although something beside it is still in use."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import re
import weakref
from pathlib import Path

import pytest

from tf_ipu_dp.training.unused_memory import UnusedMemory

BLOCK, BLOCKS = 1000, 64_000


class Node:
    """Refers to itself."""

    def __init__(self):
        self.own = self


def resident_bytes():
    return 1024 * int(re.search(r"VmRSS:\s*(\d+)", Path("/proc/self/status").read_text())[1])


def test_objects_that_refer_to_themselves_are_freed_each_time_without_looking_at_the_others_again():
    with contextlib.closing(UnusedMemory()) as memory:
        for _ in range(3):
            freed = weakref.ref(Node())
            memory.give_back()
            assert freed() is None
            assert len(gc.get_objects()) < gc.get_freeze_count()
    assert gc.get_freeze_count() == 0


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library is not glibc")
def test_free_memory_below_a_block_in_use_is_given_back():
    library = ctypes.CDLL(None)
    library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    blocks = [library.malloc(BLOCK) for _ in range(BLOCKS)]
    for block in blocks:
        ctypes.memset(block, 1, BLOCK)
    last = blocks.pop()  # the C library itself only returns what is free at the end
    for block in blocks:
        library.free(block)
    times = iter([0.0, 0.0, 1.9, 2.0, 2.0])
    with contextlib.closing(UnusedMemory(lambda: next(times))) as memory:
        before = resident_bytes()
        memory.give_back()
        given_back = before - resident_bytes()
        library.free(last)
        assert given_back > BLOCK * BLOCKS / 2
        memory.give_back()  # too soon to ask for pages and give them back again
        memory.give_back()
    assert not list(times)
