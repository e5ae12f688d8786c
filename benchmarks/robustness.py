"""Tries input and damage that nobody wants, in numbers: no traceback, no hang, no injection, nothing lost.

    .venv/bin/python benchmarks/robustness.py flags [--count=100000] [--seed=0] [--out=runs/robustness] [--minutes=7]
    .venv/bin/python benchmarks/robustness.py telemetry      100,000 records of devices and runs, through the monitor
    .venv/bin/python benchmarks/robustness.py folders        10,000 damaged run folders; --resumes=20 really resume
    .venv/bin/python benchmarks/robustness.py names          1,000 names: terminal, JSON, labels, HTML, remote commands
    .venv/bin/python benchmarks/robustness.py disks          full and read-only disks
    .venv/bin/python benchmarks/robustness.py memory         100,000 updates: memory, descriptors, threads

Case number N depends on the seed and N alone. A part is written to OUT/CAMPAIGN-SEED.jsonl when it is done; the same
command continues after the last part, and stops when its minutes are over. Exits with 1 if any case failed.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import json
import random
import sys
import time
import traceback
from pathlib import Path

import kills

# Cases of each campaign, and in one part.
CAMPAIGNS = {
    "flags": (100_000, 500),
    "telemetry": (100_000, 500),
    "folders": (10_000, 100),
    "names": (1_000, 50),
    "disks": (12, 1),
    "memory": (1, 1),
}
MAX_SHOWN = 10


def read_parts(path):
    """Returns the parts that are done; a line that was cut off is left out."""
    parts = []
    for line in path.read_bytes().split(b"\n") if path.exists() else ():
        try:
            parts.append(json.loads(line))
        except ValueError:
            continue
    return parts


def try_part(module, state, first, count, seed, limit_s):
    """Tries some cases; returns what came out of them, and those that failed."""
    outcomes, failures, slowest = collections.Counter(), [], 0.0
    for number in range(first, first + count):
        chance = random.Random(f"{seed}/{number}")
        began = time.perf_counter()
        try:
            outcome, problem = module.try_case(number, chance, state)
        except Exception:  # noqa: BLE001 - whatever it is, the case has failed
            outcome, problem = "traceback", traceback.format_exc(limit=-6)
        seconds = time.perf_counter() - began
        slowest = max(slowest, seconds)
        if problem is None and seconds > limit_s:
            problem = f"it took {seconds:.1f} s"
        outcomes[outcome] += 1
        if problem is not None:
            failures.append({"case": number, "problem": problem})
    return {"first": first, "count": count, "outcomes": outcomes, "failures": failures, "slowest_s": round(slowest, 3)}


def show(name, parts, wanted):
    """Prints what came out so far; returns the number of failures."""
    outcomes, failures = collections.Counter(), []
    for part in parts:
        outcomes.update(part["outcomes"])
        failures += part["failures"]
    done = sum(part["count"] for part in parts)
    slowest = max((part["slowest_s"] for part in parts), default=0.0)
    print(f"{name}: {done:,} of {wanted:,} cases, {len(failures):,} failed, the slowest took {slowest:.2f} s")
    for outcome, count in outcomes.most_common():
        print(f"  {count:9,}  {outcome}")
    for failure in failures[:MAX_SHOWN]:
        print(f"case {failure['case']}: {failure['problem']}")
    return len(failures)


def main():
    """Runs a campaign, from where it stopped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("campaign", choices=list(CAMPAIGNS))
    parser.add_argument("--count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/robustness"))
    parser.add_argument("--minutes", type=float, default=7.0)
    parser.add_argument("--limit_s", type=float, help="a case that takes longer has failed; each campaign has its own")
    parser.add_argument("--resumes", type=int, default=0, help="folders: so many of them are really resumed")
    options = parser.parse_args()
    wanted, size = CAMPAIGNS[options.campaign]
    wanted = options.count or wanted
    module = importlib.import_module(f"robustness_{options.campaign}")
    options.out = options.out.absolute()  # some campaigns work in a folder of their own
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{options.campaign}-{options.seed}.jsonl"
    parts = read_parts(path)
    done = sum(part["count"] for part in parts)
    deadline = time.monotonic() + 60 * options.minutes
    limit_s = options.limit_s or module.LIMIT_S
    with module.prepare(options) as state:
        while done < wanted and time.monotonic() < deadline:
            count = min(size, wanted - done)
            part = try_part(module, state, done, count, options.seed, limit_s)
            parts.append(part)
            kills.append_line(path, part)
            done += count
            failed = sum(len(each["failures"]) for each in parts)
            print(
                f"\r{options.campaign}: {done:,} of {wanted:,}, {failed:,} failed", end="", file=sys.stderr, flush=True
            )
        print(file=sys.stderr)
    if done < wanted:
        print(f"stopped after {options.minutes:g} minutes; the same command continues.")
    return 1 if show(options.campaign, parts, wanted) else 0


if __name__ == "__main__":
    sys.exit(main())
