"""Kills instances of two-instance runs with SIGKILL: no progress may be lost, and no process may be left.

    .venv/bin/python benchmarks/kills.py [--count=100] [--seed=0]

One instance of a run is killed at a random moment (while it starts, trains or saves), and the run is resumed until it
is complete. Checked after every kill: how long until the job has ended, whether the instance is named, whether a
process is left. Checked at the end of every run: whether the weights are those of an undisturbed run, bit by bit. Exits
with 1 if any check failed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LIMIT_S = 10.0
INSTANCES = 2
STEPS = 200
TRAIN = [
    sys.executable, "-m", "tf_ipu_dp.emulator.poprun", "--num-instances", str(INSTANCES), "--num-replicas", "4",
    "python3", "-m", "tf_ipu_dp.train", "--sdk=emulator", "--model=mlp", "--dataset=synthetic", "--image_size=28",
    "--micro_batch_size=16", f"--epochs={STEPS}steps", "--checkpoint_every=4", "--log_every=2", "--deterministic",
]  # fmt: skip


def start(folder):
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [*TRAIN, f"--run_dir={folder}"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environ)


def digest(folder):
    """Returns a digest of the last checkpoint's weights and optimizer state."""
    import tensorflow as tf

    (newest,) = sorted((folder / "checkpoints").glob(f"step-{STEPS:08d}"))
    reader = tf.train.load_checkpoint(str(newest / "state"))
    total = hashlib.sha256()
    for name in sorted(reader.get_variable_to_shape_map()):
        if name.startswith(("model/", "optimizer/")):
            total.update(name.encode() + reader.get_tensor(name).tobytes())
    return total.hexdigest()


def last_step(folder):
    try:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
    except OSError:
        return 0
    return json.loads(lines[-1])["step"] if lines else 0


def instances_of(process):
    """Returns the pids of the job's running instances, by their index."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            environ = (path / "environ").read_bytes().split(b"\0")
            words = (path / "cmdline").read_bytes()
        except OSError:
            continue
        offsets = [each.split(b"=")[1] for each in environ if each.startswith(b"POPDIST_REPLICA_INDEX_OFFSET=")]
        if offsets and b"tf_ipu_dp.train" in words and _is_descendant(int(path.name), process.pid):
            found[int(offsets[0]) // (4 // INSTANCES)] = int(path.name)
    return found


def _is_descendant(pid, ancestor):
    while pid > 1:
        if pid == ancestor:
            return True
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            return False
    return False


def run_and_kill(folder, chance):
    """Starts the run and kills an instance; returns what happened, or None if the run ended before the kill."""
    process = start(folder)
    victim = chance.randrange(INSTANCES)
    began = time.monotonic()
    if chance.random() < 0.25:
        moment, until, goal = "starting", began + chance.uniform(0.5, 5.0), STEPS + 1
    else:
        moment, until, goal = "training", began + 120, last_step(folder) + chance.randrange(2, 40)
    while process.poll() is None and time.monotonic() < until and last_step(folder) < goal:
        time.sleep(0.005)
    pids = instances_of(process)
    if process.poll() is not None or victim not in pids:
        _, stderr = process.communicate()
        return None if process.returncode == 0 else {"moment": moment, "problems": [stderr[-2000:]], "seconds": 0.0}
    time.sleep(chance.uniform(0, 0.05))
    began = time.monotonic()
    os.kill(pids[victim], signal.SIGKILL)
    _, stderr = process.communicate()
    seconds = time.monotonic() - began
    checks = {
        f"it took {seconds:.1f} s": seconds < LIMIT_S,
        f"exit code {process.returncode}": process.returncode == 137,
        f"instance {victim} is not named:\n{stderr[-1000:]}": f"instance {victim} " in stderr,
        "a process is left": not any(Path(f"/proc/{pid}").exists() for pid in pids.values()),
        f"a traceback:\n{stderr[-2000:]}": "Traceback" not in stderr,
    }
    return {"moment": moment, "seconds": seconds, "problems": [text for text, fine in checks.items() if not fine]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    chance = random.Random(args.seed)
    kills, problems, runs = [], [], 0
    with tempfile.TemporaryDirectory() as base:
        os.environ["IPU_EMULATOR_DIR"] = f"{base}/partition"
        reference = Path(base) / "undisturbed"
        start(reference).communicate()
        expected = digest(reference)
        while len(kills) < args.count:
            runs += 1
            folder = Path(base) / f"run-{runs}"
            while len(kills) < args.count and (kill := run_and_kill(folder, chance)) is not None:
                kills.append(kill)
                problems += kill["problems"]
                for problem in kill["problems"]:
                    print(f"\n{problem}", file=sys.stderr)
                print(f"\r{len(kills)}/{args.count} kills, {len(problems)} problems", end="", file=sys.stderr)
            start(folder).communicate()
            if digest(folder) != expected:
                problems.append(f"run {runs} ended with different weights")
    print(file=sys.stderr)
    seconds = [kill["seconds"] for kill in kills]
    early = sum(kill["moment"] == "starting" for kill in kills)
    print(
        f"{len(kills)} kills in {runs} runs ({early} while starting, {len(kills) - early} while training): "
        f"{len(problems)} problems. The job ended {statistics.median(seconds):.1f} s after the kill "
        f"(at most {max(seconds):.1f} s)."
    )
    for problem in problems:
        print(f"- {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
