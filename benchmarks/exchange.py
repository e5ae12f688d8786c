"""How long two instances take to sum gradients through shared memory once both have arrived.

    .venv/bin/python benchmarks/exchange.py [--rounds=200]

Two processes, each pinned to a core, sum arrays of the bytes of the MLP's and of ResNet-50's gradients. Before each sum
they touch other memory, as a backward pass does, and wait for each other; the wait is not counted. Reported: median and
90 % quantile of the first process. With MALLOC_MMAP_THRESHOLD_=4000000000 MALLOC_TRIM_THRESHOLD_=8000000000 in its
environment the C library keeps memory that results have left, and the difference is what new memory costs.
"""

from __future__ import annotations

import argparse
import mmap
import os
import socket
import time

import numpy as np

from tf_ipu_dp.emulator.runtime import shared_memory

# Elements of the arrays: the small ones are packed into one.
GRADIENTS = {
    "MLP, 3.3 MB": [3072 * 256, 128 * 256, 9300],
    "ResNet-50, 95 MB": [2359296] * 6 + [1048576] * 6 + [589824] * 2 + [131072] * 16,
}


def time_sums(group, sizes, rounds):
    """Returns the seconds of each sum."""
    arrays = [np.full(size, 1.5, np.float32) for size in sizes]
    other_work, seconds = np.zeros(1 << 21, np.float32), []
    for _ in range(rounds):
        other_work += 1
        group.sum("meet", [np.zeros(1, np.float32)])
        began = time.perf_counter()
        group.sum("gradients", arrays)
        seconds.append(time.perf_counter() - began)
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    rounds = parser.parse_args().rounds
    memory = mmap.mmap(-1, shared_memory.memory_size(2))
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = os.fork()
    rank = 0 if child else 1
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    group = shared_memory.Group(rank, {1 - rank: ends[rank]}, memory)
    for name, sizes in GRADIENTS.items():
        median, most = 1e3 * np.quantile(time_sums(group, sizes, rounds), [0.5, 0.9])
        if rank == 0:
            print(f"{name:20}{median:6.2f} ms, 90 % within {most:.2f} ms", flush=True)
    if child:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
