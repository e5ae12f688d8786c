"""The stand-in for poprun: its options and rules, and processes that live and die together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf_ipu_dp.emulator import poprun

SMALL = st.integers(1, 64)


def start(*words, **environ):
    command = [sys.executable, "-m", "tf_ipu_dp.emulator.poprun", *map(str, words)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environ}
    )


def run(*words, **environ):
    process = start(*words, **environ)
    stdout, stderr = process.communicate(timeout=60)
    return process.returncode, stdout, stderr


@given(SMALL, SMALL, SMALL)
def test_a_job_is_dealt_evenly_or_refused(replicas, instances, ipus_per_replica):
    ipus = replicas * ipus_per_replica
    possible = replicas % instances == 0 and bin(ipus).count("1") == 1
    try:
        job = poprun.plan_job(replicas, instances, ipus_per_replica)
    except poprun.LayoutError:
        assert not possible
        return
    assert possible
    offsets = [int(job.variables(instance)["POPDIST_REPLICA_INDEX_OFFSET"]) for instance in range(instances)]
    assert offsets == list(range(0, replicas, replicas // instances))


PROGRAM = "import os, sys; print(os.environ['POPDIST_REPLICA_INDEX_OFFSET'], sys.argv[1:]); print('e', file=sys.stderr)"


def test_every_instance_gets_its_place_and_its_output_a_tag():
    code, out, err = run("--num-instances", 2, "--num-replicas", 4, sys.executable, "-c", PROGRAM, "--flag", "x")
    assert code == 0
    assert sorted(out.splitlines()) == ["[1,0]<stdout>:0 ['--flag', 'x']", "[1,1]<stdout>:2 ['--flag', 'x']"]
    assert sorted(err.splitlines()) == ["[1,0]<stderr>:e", "[1,1]<stderr>:e"]


def test_the_emulator_is_there_without_the_program_knowing():
    code, out, _ = run(
        "--num-instances",
        1,
        "--num-replicas",
        2,
        "python3",
        "-c",
        "import popdist; print(popdist.getNumTotalReplicas())",
    )
    assert (code, out) == (0, "[1,0]<stdout>:2\n")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--num-instances", "2", "--num-replicas", "3", "x"], "Use --num-replicas 2 or 4."),
        (["--num-replicas", "3", "x"], "powers of two"),
        (["--num-replicas", "x", "y"], "invalid int value"),
        (["--num-replicas", "2"], "no program"),
        (["--num-replicas", "1", "no_such_program"], "cannot be started"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_in_a_sentence(words, text):
    code, out, err = run(*words)
    assert code == 1 and not out and text in err and "Traceback" not in err


FAILING = """
import os, sys, time
if os.environ["OMPI_COMM_WORLD_RANK"] != "1":
    time.sleep(60)
print("last words", file=sys.stderr)
sys.exit(7)
"""


def test_the_first_failure_ends_all_and_its_status_and_last_lines_are_shown():
    began = time.monotonic()
    code, _, err = run(
        "--num-instances", 4, "--num-replicas", 4, "--only-output-from-instance", 0, sys.executable, "-c", FAILING
    )
    assert code == 7 and time.monotonic() - began < 15
    assert "[1,1]<stderr>:last words" in err and "instance 1 ended with 7" in err


SLEEPING = """
import os, subprocess, time
child = subprocess.Popen(["sleep", "300"])
print(os.getpid(), child.pid, flush=True)
time.sleep(300)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=str)
def test_whatever_ends_poprun_ends_the_instances(number):
    process = start("--num-instances", 2, "--num-replicas", 2, sys.executable, "-c", SLEEPING)
    pids = [int(pid) for _ in range(2) for pid in process.stdout.readline().split(":")[1].split()]
    process.send_signal(number)
    process.wait(timeout=15)
    instances = pids[::2] if number == signal.SIGKILL else pids  # a kill leaves what the instances started
    deadline = time.monotonic() + 10
    while any(_is_running(pid) for pid in instances) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in instances if _is_running(pid)]
    for pid in pids:
        if _is_running(pid):
            os.kill(pid, signal.SIGKILL)
    if number != signal.SIGKILL:
        assert process.returncode == 128 + number


def _is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
