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
    assert f"{SENTENCE.replace('within 1 s', 'within 5 s')} They are started again.\n" in err


def test_after_two_starts_without_a_connection_the_job_ends_with_a_sentence(poprun, tmp_path):
    (code, out, err), starts = run(poprun, tmp_path, 9, "1")
    assert (code, out, starts) == (1, "", 4)
    assert err.splitlines() == [f"{SENTENCE} They are started again.", SENTENCE]


def test_a_timeout_that_is_none_is_refused(poprun):
    code, _, err = poprun(2, 2, "python3", "-c", "pass", IPU_EMULATOR_CONNECT_TIMEOUT="soon")
    told = "poprun: IPU_EMULATOR_CONNECT_TIMEOUT=soon is not a number of seconds above 0. The default is 60.\n"
    assert (code, err) == (1, told)


@pytest.mark.slow
def test_repeated_starts_connect_and_end_in_order():
    """Rare races need many starts: set TF_IPU_DP_STARTS=200."""
    count = os.environ.get("TF_IPU_DP_STARTS", "8")
    command = [sys.executable, ROOT / "benchmarks" / "starts.py", f"--count={count}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and f"{count} starts: 0 problems" in done.stdout, done.stdout
