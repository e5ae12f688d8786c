"""Time and memory of the simulator's fast mode at 65,536 replicas and 10,000 trials, each in a process of its own.

    .venv/bin/python benchmarks/collectives.py [ROUNDS]

Bars, on one core: 1 s without loss, 3 s with loss, 512 MB. The time is that of the whole command, interpreter and all;
the one of the simulation alone is shown beside it.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import time

from tf_ipu_dp.collectives import formulas

JOB = ["--replicas=65536", "--bytes=971048", "--topology=pod64x1024", "--trials=10000", "--seed=1", "--mode=fast"]
DISTURBANCES = {
    "jitter": ["--jitter=lognormal:0.1", "--start_jitter=exponential:10us"],
    "loss 1e-8": ["--loss=1e-8"],
    "loss 1e-6": ["--loss=1e-6"],
    "loss 1 %": ["--loss=0.01", "--jitter=lognormal:0.1"],
}
TIMED = """
import sys, time
from tf_ipu_dp.collectives import simulate
started = time.perf_counter()
simulate.main(sys.argv[1:])
sys.stderr.write(f"{time.perf_counter() - started}")
"""


def run(words):
    """Returns the seconds of the command, of the simulation in it, and the CPU seconds, on one core."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    done = subprocess.run(
        ["taskset", "-c", "0", sys.executable, "-c", TIMED, *words],
        check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    elapsed = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return elapsed, float(done.stderr), after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main(rounds):
    print(f"{'algorithm':<20}{'disturbances':<14}{'command s':>10}{'simulation s':>14}{'CPU s':>8}")
    for algorithm in ("auto", *formulas.ALGORITHMS):
        for name, words in DISTURBANCES.items():
            times = [run([*JOB, *words, f"--algorithm={algorithm}"]) for _ in range(rounds)]
            command, simulation, cpu = (statistics.median(values) for values in zip(*times))
            print(f"{algorithm:<20}{name:<14}{command:>10.2f}{simulation:>14.2f}{cpu:>8.2f}", flush=True)
    # The maximum over all processes that ended.
    print(f"peak memory {resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024:.0f} MB")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
