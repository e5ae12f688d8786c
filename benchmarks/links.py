"""Cuts, losses and slow-downs of the network between two hosts that train together: the weights must not differ.

    .venv/bin/python benchmarks/links.py --folder=DIR [--count=50] [--minutes=7] [--seed=0]

The hosts are network namespaces of this machine, joined by a bridge, with an instance each; needs root, `ip` and `tc`.
While a run trains, the link of one host is disturbed again and again:

- cut: no packet passes for 0.3 to 5 s. The run goes on.
- loss: for 4 s the link is dead for 20 to 100 ms at a time, and what is sent meanwhile is lost. The run goes on.
- slow: for 5 s the link passes 4 Mbit/s with a queue of 6 KB, so that it also drops packets. The run goes on.
- gone: no packet passes for 30 s. The job ends with a sentence about the host, and is resumed when the link is back.

Checked: exit codes, that nothing hangs, no traceback, no process left on the hosts, and weights that are those of an
undisturbed run, bit by bit. The campaign is kept in the folder, a line for each disturbance in links.jsonl: the same
command continues it. Exits with 1 if any check has failed so far.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import kills

from tf_ipu_dp.collectives import namespaces

LIMIT_S = 240.0
STEPS = 400
KINDS = ("cut", "cut", "loss", "loss", "slow", "slow", "gone")
AGENT = """#!/bin/sh
host=$1
shift
exec env -i HOME="$HOME" PATH="$PATH" ip netns exec "{prefix}-$host" sh -c "$*"
"""


class Hosts:
    """Two hosts, named by their addresses."""

    def __init__(self, folder):
        self.claim = namespaces.claim()
        number = os.getpid() % 250 + 1
        self.names = [f"10.214.{number}.{last}" for last in (1, 2)]
        self._bridge = f"lk{os.getpid() % 100_000}"
        self._links = {name: f"{self._bridge}{letter}" for name, letter in zip(self.names, "ab")}
        self.agent = folder / "agent"
        self.agent.write_text(AGENT.format(prefix=self.claim.prefix), encoding="utf-8")
        self.agent.chmod(0o755)
        namespaces.run("ip", "link", "add", self._bridge, "type", "bridge")
        namespaces.run("ip", "addr", "add", f"10.214.{number}.254/24", "dev", self._bridge)
        namespaces.run("ip", "link", "set", self._bridge, "up")
        for name, link in self._links.items():
            whole = self.claim.add(name)
            namespaces.run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", whole)
            namespaces.run("ip", "link", "set", link, "master", self._bridge, "up")
            namespaces.run("ip", "-n", whole, "addr", "add", f"{name}/24", "dev", "eth0")
            for interface in ("lo", "eth0"):
                namespaces.run("ip", "-n", whole, "link", "set", interface, "up")

    def set_link(self, host, state):
        namespaces.run("ip", "link", "set", self._links[host], state)

    def set_slow(self, host, slow):
        link = ["dev", self._links[host], "root"]
        limits = ["tbf", "rate", "4mbit", "burst", "4kb", "limit", "6kb"] if slow else []
        namespaces.run("tc", "qdisc", "add" if slow else "del", *link, *limits)

    def pids(self):
        return [pid for name in self.names for pid in namespaces.read_pids(f"{self.claim.prefix}-{name}")]

    def remove(self):
        self.claim.release()
        for link in (*self._links.values(), self._bridge):
            subprocess.run(["ip", "link", "del", link], capture_output=True, check=False)


def start(hosts, folder):
    words = [
        sys.executable, "-m", "tf_ipu_dp.launch", "--instances=2", f"--hosts={','.join(hosts.names)}", "--",
        "--sdk=emulator", "--model=mlp", "--dataset=synthetic", "--image_size=28", "--micro_batch_size=16",
        f"--epochs={STEPS}steps", "--checkpoint_every=10", "--log_every=2", "--deterministic", f"--run_dir={folder}",
    ]  # fmt: skip
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "OMPI_MCA_plm_rsh_agent": str(hosts.agent)}
    with folder.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=log, env=environ)


def disturb(hosts, host, kind, chance):
    """Disturbs a host's link, and repairs it."""
    if kind == "slow":
        hosts.set_slow(host, True)
        time.sleep(5.0)
        hosts.set_slow(host, False)
        return
    pauses = {"cut": [chance.uniform(0.3, 5.0)], "gone": [30.0], "loss": [chance.uniform(0.02, 0.1) for _ in range(12)]}
    for seconds in pauses[kind]:
        hosts.set_link(host, "down")
        time.sleep(seconds)
        hosts.set_link(host, "up")
        time.sleep(chance.uniform(0.1, 0.4))


def wait_for_end(process):
    """Returns the exit code; None after the limit, when it was killed."""
    try:
        return process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.wait()
        return None


def disturb_once(hosts, process, folder, number, seed):
    """Disturbs a run that is training; returns what happened, or None if it ended before."""
    chance = random.Random(f"{seed}-{number}")
    kind, host = chance.choice(KINDS), chance.choice(hosts.names)
    goal, deadline = kills.last_step(folder) + chance.randrange(4, 30), time.monotonic() + LIMIT_S
    while process.poll() is None and kills.last_step(folder) < goal and time.monotonic() < deadline:
        time.sleep(0.01)
    if process.poll() is not None:
        return None
    began, step = time.monotonic(), kills.last_step(folder)
    disturb(hosts, host, kind, chance)
    problems = []
    if kind == "gone":
        code = wait_for_end(process)
        err = folder.with_suffix(".log").read_text(encoding="utf-8")
        if code != 1 or host not in err or "Traceback" in err:
            problems.append(f"exit code {code}:\n{err[-2000:]}")
    else:
        while process.poll() is None and kills.last_step(folder) <= step and time.monotonic() - began < LIMIT_S:
            time.sleep(0.01)
        if process.poll() is None and kills.last_step(folder) <= step:
            problems.append(f"no progress for {LIMIT_S:.0f} s")
    seconds = time.monotonic() - began
    return {"number": number, "kind": kind, "step": step, "seconds": round(seconds, 1), "problems": problems}


def check_end(hosts, process, folder, expected):
    """Returns what is wrong with a run that has ended or is about to."""
    code, err = wait_for_end(process), folder.with_suffix(".log").read_text(encoding="utf-8")
    checks = {
        f"exit code {code}": code == 0,
        "different weights": code != 0 or kills.digest(folder) == expected,
        "processes are left on the hosts": not hosts.pids(),
        "a traceback": "Traceback" not in err,
    }
    return [f"{text}:\n{err[-2000:]}" for text, fine in checks.items() if not fine]


def render(records):
    disturbed = [each for each in records if "kind" in each]
    problems = [problem for each in records for problem in each["problems"]]
    counted = collections.Counter(each["kind"] for each in disturbed)
    lines = [
        f"{len(disturbed)} disturbances ({', '.join(f'{count} {kind}' for kind, count in counted.most_common())}) in "
        f"{len(records) - len(disturbed)} complete runs: {len(problems)} problems."
    ]
    for kind in counted:
        seconds = [each["seconds"] for each in disturbed if each["kind"] == kind]
        what = "until the job had ended" if kind == "gone" else "until the next step"
        lines.append(f"{kind}: {min(seconds):.1f} to {max(seconds):.1f} s from its beginning {what}")
    return "\n".join([*lines, *(f"- {problem}" for problem in problems)])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    kills.STEPS = STEPS
    args.folder.mkdir(parents=True, exist_ok=True)
    os.environ["IPU_EMULATOR_DIR"] = str(args.folder / "partition")
    path, deadline = args.folder / "links.jsonl", time.monotonic() + 60 * args.minutes

    def keep(made):
        kills.append_line(path, made)
        for problem in made["problems"]:
            print(problem, flush=True)

    hosts = Hosts(args.folder)
    with contextlib.ExitStack() as stack:
        stack.callback(hosts.remove)
        reference = args.folder / "undisturbed"
        if not (reference / "result.json").exists():
            start(hosts, reference).wait()
        expected = kills.digest(reference)
        while time.monotonic() < deadline:
            records = kills.read_lines(path)
            done = sum("kind" in each for each in records)
            if done >= args.count:
                break
            folder = args.folder / f"run-{len(records) - done}"
            process = start(hosts, folder)
            while done < args.count and time.monotonic() < deadline:
                made = disturb_once(hosts, process, folder, done, args.seed)
                if made is None:
                    break
                keep(made)
                done += 1
                if made["kind"] == "gone":
                    process = start(hosts, folder)
            keep({"run": folder.name, "problems": check_end(hosts, process, folder, expected)})
    records = kills.read_lines(path)
    print(render(records))
    return 1 if any(each["problems"] for each in records) else 0


if __name__ == "__main__":
    sys.exit(main())
