"""Start-up times of the commands, as ratios of alternating runs.

    .venv/bin/python benchmarks/startup.py [ROUNDS]

--help and --dry_run against `import absl.app, rich` in the same Python, launch/train against the command that it
runs, and the time to plan 65,536 IPUs.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

from tf_ipu_dp.config import train_flags
from tf_ipu_dp.datasets import info
from tf_ipu_dp.planning import plan

ROOT = Path(__file__).resolve().parent.parent
TRAIN = [sys.executable, "-m", "tf_ipu_dp.train"]
COMMANDS = {
    "import absl.app, rich": [sys.executable, "-c", "import absl.app, rich"],
    "train --help": [*TRAIN, "--help"],
    "train --dry_run": [*TRAIN, "--ipus=8", "--dry_run"],
    "launch/train --dry_run": [str(ROOT / "launch" / "train"), "--ipus=8", "--dry_run"],
}


def seconds(command):
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def main(rounds):
    times = {name: [] for name in COMMANDS}
    for _ in range(rounds + 1):
        for name, command in COMMANDS.items():
            times[name].append(seconds(command))
    medians = {name: statistics.median(values[1:]) for name, values in times.items()}
    base = medians["import absl.app, rich"]
    for name, median in medians.items():
        print(f"{name:<24} {median * 1000:6.1f} ms  {median / base:5.2f} x")
    print(f"the wrapper adds {(medians['launch/train --dry_run'] - medians['train --dry_run']) * 1000:.1f} ms")

    cfg = train_flags.parse(
        ["--ipus=65536", "--instances=4096", "--hosts=64", "--micro_batch_size=1", "--dataset=imagenet2012"]
    )
    planning = []
    for _ in range(rounds):
        started = time.perf_counter()
        plan.plan_run(cfg, info.DATASETS[cfg.dataset])
        planning.append(time.perf_counter() - started)
    print(f"planning 65,536 IPUs takes {statistics.median(planning) * 1000:.2f} ms")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 15)
