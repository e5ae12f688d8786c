"""Instances that are forked with TensorFlow in memory see what those that are started afresh see."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tf_ipu_dp.emulator import forks

POPRUN = (sys.executable, "-m", "tf_ipu_dp.emulator.poprun")
PROGRAM = """
import atexit, json, os, signal, sys, threading
import tensorflow as tf
import helper_beside_it
handlers = [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
facts = {
    "argv": sys.argv, "name": __name__, "path": sys.path[0], "cwd": os.getcwd(), "handlers": handlers,
    "main": sys.modules["__main__"].__dict__ is globals(), "thread": threading.current_thread().name,
    "session": os.getsid(0) == os.getpid(), "rank": os.environ["OMPI_COMM_WORLD_RANK"], "own": os.environ["OWN"],
    "handles": sorted(os.listdir("/proc/self/fd"), key=int)[:3], "stdin": sys.stdin.read(),
    "words": open("/proc/self/cmdline").read().split("\\0")[: 2 + len(sys.argv)][-len(sys.argv) - 1 : -1],
    "shown": b"POPDIST_REPLICA_INDEX_OFFSET=" in open("/proc/self/environ", "rb").read(),
    "sum": float(tf.reduce_sum(tf.ones([3]))), "unset": os.environ.get("IPU_EMULATOR_REPORT"),
}
print(json.dumps(facts, sort_keys=True))
atexit.register(print, "handlers run")
threading.Thread(target=lambda: (threading.Event().wait(0.1), print("threads end"))).start()
how = sys.argv[1]
if how == "raise":
    raise ValueError("of the program")
sys.exit({"3": 3, "word": "a word", "none": None}[how])
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM, encoding="utf-8")
    (tmp_path / "helper_beside_it.py").write_text("", encoding="utf-8")
    return path


def run(program, how, preload, module=False):
    words = ["-m", "program"] if module else [str(program)]
    done = subprocess.run(
        [*POPRUN, "--num-instances=2", "--num-replicas=2", "python3", *words, how, "--flag"],
        capture_output=True, text=True, check=False, cwd=program.parent, timeout=120,
        env={**os.environ, "IPU_EMULATOR_PRELOAD": preload, "OWN": "ö", "TF_CPP_MIN_LOG_LEVEL": "3"},
    )  # fmt: skip
    tagged = [line for line in done.stderr.splitlines() if line.startswith("[1,") and "^" not in line]
    return done.returncode, sorted(done.stdout.splitlines()), sorted(tagged)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "module"), [("3", True), ("word", False), ("raise", False)])
def test_a_fork_sees_what_a_fresh_python_sees_and_ends_as_it_does(program, how, module):
    fresh, forked = (run(program, how, preload, module) for preload in "01")
    assert fresh[1] and "threads end" in fresh[1][1] + fresh[1][2]
    assert forked == fresh


def test_only_programs_of_this_python_with_tensorflow_are_forked(tmp_path):
    environs = [{"PATH": os.path.dirname(sys.executable), "RANK": str(rank)} for rank in range(2)]  # noqa: PTH120
    assert forks.are_possible(["python3", "-c", "import tensorflow"], environs)
    assert forks.are_possible([sys.executable, "-m", "tf_ipu_dp.train"], environs)
    assert not forks.are_possible(["python3", "-c", "print()"], environs)
    assert not forks.are_possible(["python3", "-u", "-c", "import tensorflow"], environs)
    assert not forks.are_possible(["/bin/sh", "-c", "import tensorflow"], environs)
    assert not forks.are_possible(["python3", "-c", "import tensorflow"], environs[:1])
    assert not forks.are_possible(["python3", "-c", "import tensorflow"], [environs[0], {**environs[1], "TF_X": "1"}])
    assert not forks.are_possible(["python3", "-m", "no.such.module"], environs)
    (tmp_path / "sitecustomize.py").write_text("")
    hooked = [{**environ, "PYTHONPATH": str(tmp_path)} for environ in environs]
    assert not forks.are_possible(["python3", "-c", "import tensorflow"], hooked)
