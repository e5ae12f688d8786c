"""Starts of several instances: all connect, every time; those that do not are started again, once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("emulator_dir")

ROOT = Path(__file__).parents[2]

# Instances that hang as in Horovod's init: they write their addresses, and never connect to each other.
PROGRAM = """
import os, sys, threading, urllib.request
from pathlib import Path

rank = os.environ["HOROVOD_RANK"]
starts = Path(sys.argv[1])
(starts / f"{rank}-{len(list(starts.glob(rank + '-*')))}").touch()
if len(list(starts.glob(rank + "-*"))) <= int(sys.argv[2]):
    address, port = (os.environ["HOROVOD_GLOO_RENDEZVOUS_" + name] for name in ("ADDR", "PORT"))
    url = "http://" + address + ":" + port + "/global/" + rank  # as Horovod does it
    urllib.request.urlopen(urllib.request.Request(url, b"address", method="PUT")).read()
    threading.Event().wait()

import horovod.tensorflow as hvd
import tensorflow as tf

hvd.init()
print(int(hvd.allreduce(tf.constant(1), op=hvd.Sum)))
"""
SENTENCE = (
    "poprun: the 2 instances have not connected to each other within 1 s, although all have started Horovod. "
    "On a slow or busy machine set IPU_EMULATOR_CONNECT_TIMEOUT to more seconds."
)


def run(poprun, tmp_path, hanging_starts, timeout_s):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    starts = tmp_path / "starts"
    starts.mkdir()
    done = poprun(2, 2, "python3", program, starts, hanging_starts, IPU_EMULATOR_CONNECT_TIMEOUT=timeout_s)
    return done, len(list(starts.iterdir()))


def test_instances_that_do_not_connect_are_started_again(poprun, tmp_path):
    (code, out, err), starts = run(poprun, tmp_path, 1, "5")
    assert (code, sorted(out.splitlines()), starts) == (0, ["[1,0]<stdout>:2", "[1,1]<stdout>:2"], 4), err
    assert f"{SENTENCE.replace('within 1 s', 'within 5 s')} All instances are started again.\n" in err


def test_after_two_starts_without_a_connection_the_job_ends_with_a_sentence(poprun, tmp_path):
    (code, out, err), starts = run(poprun, tmp_path, 9, "1")
    assert (code, out, starts) == (1, "", 4)
    assert err.splitlines() == [f"{SENTENCE} All instances are started again.", SENTENCE]


# Instance 1 stops at its first start, before it has called Horovod's init.
STOPPING = """
import os, signal, sys
from pathlib import Path

import horovod.tensorflow as hvd
import tensorflow as tf

if os.environ["HOROVOD_RANK"] == "1" and not Path(sys.argv[1]).exists():
    Path(sys.argv[1]).touch()
    os.kill(os.getpid(), signal.SIGSTOP)
hvd.init()
print(int(hvd.allreduce(tf.constant(1), op=hvd.Sum)))
"""


def test_an_instance_that_is_stopped_before_they_have_met_is_named_and_all_are_started_again(poprun, tmp_path):
    (tmp_path / "program.py").write_text(STOPPING, encoding="utf-8")
    words = ("python3", tmp_path / "program.py", tmp_path / "started")
    code, out, err = poprun(2, 2, *words, IPU_EMULATOR_STALL_TIMEOUT="20")
    assert (code, sorted(out.splitlines())) == (0, ["[1,0]<stdout>:2", "[1,1]<stdout>:2"]), err
    assert err == (
        "poprun: instance 1 has not begun to connect to the other instances within 20 s of its start: it is stopped, "
        "or hangs before Horovod's init. All instances are started again.\n"
    )


def test_a_timeout_that_is_none_is_refused(poprun):
    code, _, err = poprun(2, 2, "python3", "-c", "pass", IPU_EMULATOR_CONNECT_TIMEOUT="soon")
    told = "poprun: IPU_EMULATOR_CONNECT_TIMEOUT=soon is not a number of seconds above 0. The default is 60.\n"
    assert (code, err) == (1, told)


@pytest.mark.slow
def test_repeated_starts_connect_and_end_in_order():
    """Rare races need many starts: set TF_IPU_DP_STARTS=200. Four are of fresh Pythons; other tests start forks."""
    count = os.environ.get("TF_IPU_DP_STARTS", "4")
    command = [sys.executable, ROOT / "benchmarks" / "starts.py", f"--count={count}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and f"{count} starts: 0 problems" in done.stdout, done.stdout
