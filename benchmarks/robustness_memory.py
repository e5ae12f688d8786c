"""One run of 100,000 updates: its memory, descriptors and threads must not grow after the first 1,000."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

LIMIT_S = 86_400.0
UPDATES = 100_000
SETTLED = 1_000
MAX_GROWTH = 0.03
TRAIN = [
    sys.executable, "-m", "tf_ipu_dp.train", "--sdk=emulator", "--model=mlp", "--dataset=synthetic", "--image_size=28",
    "--micro_batch_size=2", f"--epochs={UPDATES}steps", "--updates_per_epoch=1000", "--log_every=100",
    "--checkpoint_every=5000", "--novalidate", "--noexport", "--device_iterations=10",
]  # fmt: skip


@contextlib.contextmanager
def prepare(options):
    """Returns the folder of the run, which a later call of this command resumes."""
    yield options.out / f"memory-{options.seed}"


def try_case(number, chance, folder):
    """Trains, and compares the process at the end with itself after the first updates."""
    del number, chance
    log = folder.with_suffix(".log")  # not a pipe: nobody reads while it runs, and the run would wait
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [*TRAIN, f"--run_dir={folder}"], stdout=subprocess.DEVNULL, stderr=stream,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        )  # fmt: skip
    samples = []
    while process.poll() is None:
        step = last_step(folder)
        found = read_process(process.pid)
        if found and (not samples or step > samples[-1]["step"]):
            samples.append({"step": step, **found})
        time.sleep(0.5)
    path = folder / "memory_samples.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in samples), encoding="utf-8")
    if process.returncode:
        return "ended", log.read_text(encoding="utf-8", errors="replace")[-2000:]
    settled = next(each for each in samples if each["step"] >= samples[0]["step"] + SETTLED)
    last = samples[-1]
    growth = last["rss_kib"] / settled["rss_kib"] - 1
    outcome = (
        f"{last['step'] - settled['step']:,} updates after step {settled['step']:,}: memory {settled['rss_kib']:,} to "
        f"{last['rss_kib']:,} KiB ({100 * growth:+.1f} %), descriptors {settled['descriptors']} to "
        f"{last['descriptors']}, threads {settled['threads']} to {last['threads']}"
    )
    # Checkpoints have threads and descriptors of their own for a moment: the most of the last tenth counts.
    tenth = max(len(samples) // 10, 1)
    most = [
        [max(each[name] for each in part) for name in ("descriptors", "threads")]
        for part in (samples[:tenth], samples[-tenth:])
    ]
    is_flat = growth <= MAX_GROWTH and all(now <= before for before, now in zip(*most))
    return outcome, None if is_flat else outcome


def last_step(folder):
    """Returns the step of the last whole line of the run's metrics."""
    try:
        lines = (Path(folder) / "metrics.jsonl").read_bytes().split(b"\n")
    except OSError:
        return 0
    return json.loads(lines[-2])["step"] if len(lines) > 1 else 0


def read_process(pid):
    """Returns memory, descriptors and threads of a process; None once it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except OSError:
        return None
    rss, threads = (re.search(rf"^{name}:\s*(\d+)", status, re.MULTILINE) for name in ("VmRSS", "Threads"))
    return {"rss_kib": int(rss[1]), "threads": int(threads[1]), "descriptors": descriptors} if rss and threads else None
