"""What the monitor costs: its start, a refresh, and the sampler inside a run.

    .venv/bin/python benchmarks/monitor.py [ROUNDS]

One shot of 64 IPUs against bare Python, the fastest of alternating runs; the CPU time of a refresh of 64 IPUs that 16
processes hold, read, drawn and as JSON; and the CPU time of the sampler's thread and of the emulator's heartbeat per
second.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

from tf_ipu_dp.emulator.devices import registry
from tf_ipu_dp.emulator.sdk_api import gcipuinfo
from tf_ipu_dp.monitoring import device_reader, snapshots, tables
from tf_ipu_dp.monitoring.sampler import Sampler
from tf_ipu_dp.monitoring.text_layout import DisplayOptions

COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "monitor": [sys.executable, "-m", "tf_ipu_dp.monitor"],
    "monitor --json": [sys.executable, "-m", "tf_ipu_dp.monitor", "--json"],
    "monitor --free": [sys.executable, "-m", "tf_ipu_dp.monitor", "--free"],
}
HOLD = """
import os, sys
from tf_ipu_dp.emulator.devices import registry
attachment = registry.Partition.from_environment(os.environ).attach(count=4)
print("ready", flush=True)
sys.stdin.read()
"""


def seconds(command):
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def cpu_ms(action, rounds):
    times = []
    for _ in range(rounds):
        started = time.process_time()
        action()
        times.append(1000 * (time.process_time() - started))
    return statistics.median(times)


def main(rounds):
    holders = [
        subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(16)
    ]
    try:
        for holder in holders:
            holder.stdout.readline()
        measure_starts(rounds)
        measure_refresh(rounds)
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate()
    measure_sampling(rounds)


def measure_starts(rounds):
    times = {name: [] for name in COMMANDS}
    for _ in range(rounds + 1):
        for name, command in COMMANDS.items():
            times[name].append(seconds(command))
    # Other programs can only delay a start, so the fastest shows what it costs.
    fastest = {name: min(values[1:]) for name, values in times.items()}
    base = fastest["python -c pass"]
    for name, best in fastest.items():
        print(f"{name:<16} {1000 * best:6.1f} ms  {1000 * (best - base):6.1f} ms more than bare Python")


def measure_refresh(rounds):
    reader = snapshots.SnapshotReader(device_reader.open_reader("emulator"))
    snapshot = reader.read()
    history = {ipu.id: [50.0] * 120 for ipu in snapshot.ipus}
    options = DisplayOptions(width=200, bars=True, colour=True)
    parts = {
        "reading": reader.read,
        "drawing": lambda: tables.render_screen(snapshot, options, 100, history, ""),
        "as JSON": lambda: json.dumps(snapshot.to_json()),
    }
    for name, action in parts.items():
        print(f"a refresh of {len(snapshot.ipus)} IPUs, {name}: {cpu_ms(action, 10 * rounds):.2f} ms of CPU")


def measure_sampling(rounds):
    attachment = registry.Partition.from_environment(os.environ).attach(count=4)
    sampler = Sampler(gcipuinfo, pid=os.getpid())
    sampler.mark()
    sample, beat = cpu_ms(sampler.sample, 10 * rounds), cpu_ms(attachment.write_heartbeat, 10 * rounds)
    attachment.release()
    share = (sample + beat) / 10
    print(f"sampling at 1 Hz takes {sample:.2f} ms of CPU per second, the heartbeat {beat:.2f}: {share:.3f} %")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(IPU_EMULATOR_DIR=f"{folder}/partition", IPU_EMULATOR_IPUS="64", XDG_RUNTIME_DIR=folder)
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 15)
