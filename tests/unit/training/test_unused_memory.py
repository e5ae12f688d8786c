"""Memory that a run no longer uses goes back to the system, although something beside it is still in use."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import subprocess
import sys
import types
import weakref

import pytest

from tf_ipu_dp.training.unused_memory import UnusedMemory


class Node:
    """Refers to itself."""

    def __init__(self):
        self.own = self


def test_objects_that_refer_to_themselves_are_freed_each_time_without_looking_at_the_others_again():
    with contextlib.closing(UnusedMemory()) as memory:
        for _ in range(3):
            freed = weakref.ref(Node())
            memory.give_back()
            assert freed() is None
            assert len(gc.get_objects()) < gc.get_freeze_count()
    assert gc.get_freeze_count() == 0


# In a process of its own: in one with much free memory between its objects, the blocks would be spread among these.
GIVE_BACK = """
import ctypes, re
from pathlib import Path
from tf_ipu_dp.training.unused_memory import UnusedMemory

def resident_bytes():
    return 1024 * int(re.search(r"VmRSS:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])

library = ctypes.CDLL(None)
library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
blocks = [library.malloc(1000) for _ in range(64_000)]
for block in blocks:
    ctypes.memset(block, 1, 1000)
last = blocks.pop()  # the C library itself only returns what is free at the end
for block in blocks:
    library.free(block)
before = resident_bytes()
UnusedMemory().give_back()
print(before - resident_bytes())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library is not glibc")
def test_free_memory_below_a_block_in_use_is_given_back():
    done = subprocess.run([sys.executable, "-c", GIVE_BACK], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 32_000_000


def test_pages_are_given_back_every_two_seconds_at_most(monkeypatch):
    trims = []
    monkeypatch.setattr(ctypes, "CDLL", lambda name: types.SimpleNamespace(malloc_trim=trims.append))
    times = iter([0.0, 0.0, 1.9, 2.0, 2.0])
    with contextlib.closing(UnusedMemory(lambda: next(times))) as memory:
        memory.give_back()
        memory.give_back()  # too soon
        assert trims == [0]
        memory.give_back()
    assert trims == [0, 0] and not list(times)
