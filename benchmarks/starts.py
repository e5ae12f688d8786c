"""Starts two instances again and again: each start must connect them, and each must end without an abort.

    .venv/bin/python benchmarks/starts.py [--count=200] [--busy=1]

A program under poprun connects its instances, makes one all-reduce and ends. By turns it calls Horovod itself or
popdist, and its instances are forks or fresh Pythons. Every second start has `--busy` processes beside it that compute.
A start that is still running after `--limit` seconds is ended, after its threads are shown (with gdb, if there is one).
Exits with 1 if any start was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROGRAMS = {
    "horovod": """
import tensorflow as tf, horovod.tensorflow as hvd
hvd.init()
print("sum", int(hvd.allreduce(tf.constant(hvd.rank() + 1), op=hvd.Sum)))
""",
    "popdist": """
import tensorflow as tf, popdist
from tensorflow.python.ipu import distributed
popdist.init()
print("sum", int(distributed.allreduce(tf.constant(popdist.getInstanceIndex() + 1), tf.distribute.ReduceOp.SUM)))
""",
}
POPRUN = [sys.executable, "-m", "tf_ipu_dp.emulator.poprun", "--num-instances", "2", "--num-replicas", "2"]
EXPECTED = ["[1,0]<stdout>:sum 3", "[1,1]<stdout>:sum 3"]


@contextlib.contextmanager
def busy_processes(count):
    """Keeps this many cores busy."""
    running = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def start(program, preload, limit_s):
    """Starts the program once and returns the seconds it took, and what was wrong."""
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "IPU_EMULATOR_PRELOAD": preload}
    began = time.monotonic()
    process = subprocess.Popen(
        [*POPRUN, "python3", "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ
    )
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        stacks = "\n".join(map(threads_of, descendants_of(process.pid)))
        process.terminate()
        out, err = process.communicate()
        return time.monotonic() - began, f"still running after {limit_s:g} s\n{stacks}\n{out}{err}"
    right = process.returncode == 0 and sorted(out.splitlines()) == EXPECTED and "terminate called" not in err
    return time.monotonic() - began, "" if right else f"exit code {process.returncode}\n{out}{err}"


def descendants_of(pid):
    children = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            children.setdefault(int(path.read_text().rsplit(")", 1)[1].split()[1]), []).append(int(path.parent.name))
    found = [pid]
    for each in found:
        found += children.get(each, ())
    return found[1:]


def threads_of(pid):
    """Returns what the threads of a process are doing."""
    if shutil.which("gdb") is None:
        return f"process {pid}: install gdb to see its threads"
    command = ["gdb", "-p", str(pid), "-batch", "-ex", "set pagination off", "-ex", "thread apply all bt 20"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("Thread", "#"))]
    return "\n".join([f"process {pid}:", *lines])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--busy", type=int, default=1)
    parser.add_argument("--limit", type=float, default=200.0)
    args = parser.parse_args()
    kinds = list(itertools.product(("0", "1"), PROGRAMS, (0, args.busy)))
    seconds, problems = [], []
    with tempfile.TemporaryDirectory() as base:
        os.environ["IPU_EMULATOR_DIR"] = f"{base}/partition"
        for number in range(args.count):
            preload, program, busy = kinds[number % len(kinds)]
            with busy_processes(busy):
                took, problem = start(PROGRAMS[program], preload, args.limit)
            seconds.append(took)
            if problem:
                problems.append(problem)
                print(f"start {number} ({program}, preload {preload}, {busy} busy): {problem}", flush=True)
            print(f"\r{number + 1}/{args.count} starts, {len(problems)} problems", end="", file=sys.stderr)
    print(file=sys.stderr)
    median, most = statistics.median(seconds), max(seconds)
    print(f"{args.count} starts: {len(problems)} problems. A start took {median:.1f} s (at most {most:.1f} s).")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
