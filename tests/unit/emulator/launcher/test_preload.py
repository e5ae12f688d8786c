"""Instances that are forked with TensorFlow in memory see what those that are started afresh see."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tf_ipu_dp import train
from tf_ipu_dp.emulator.launcher import preload

POPRUN = (sys.executable, "-m", "tf_ipu_dp.emulator.poprun")
PROGRAM = """
import atexit, glob, json, os, random, signal, sys, threading, time
import numpy as np
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
    "loader": getattr(__loader__, "__name__", type(__loader__).__name__), "annotations": __annotations__,
    "spec": getattr(__spec__, "name", None), "given": getattr(sys, "orig_argv", [])[-2:],
    "streams": [sys.stdin is sys.__stdin__, sys.stdout is sys.__stdout__], "main_file": os.path.basename(__file__),
    "sum": float(tf.reduce_sum(tf.ones([3]))), "unset": os.environ.get("IPU_EMULATOR_REPORT"),
}
print(json.dumps(facts, sort_keys=True))
never_closed = open(f"drawn-{facts['rank']}", "w")
never_closed.write(f"{random.random()} {np.random.rand()} {float(tf.random.normal([]))}")
atexit.register(print, "handlers run")
threading.Thread(target=lambda: (threading.Event().wait(0.1), print("threads end"))).start()
# Both end at the same time, and neither is ended for the other's failure.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(f"ready-{os.getppid()}-{facts['rank']}", "w").close()
while len(glob.glob(f"ready-{os.getppid()}-*")) < 2:
    time.sleep(0.01)
how = sys.argv[1]
if how == "raise":
    raise ValueError("of the program")
sys.exit({"3": 3, "word": "a word", "none": None}[how])
"""
HELPER = """
class Kept:
    def __del__(self):
        print("goodbye")
kept = Kept()
"""


with_forks = pytest.mark.skipif(
    not preload.CAN_FORK_WITH_THREADS, reason="this Python calls forks of a process with threads deprecated"
)


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM, encoding="utf-8")
    (tmp_path / "helper_beside_it.py").write_text(HELPER, encoding="utf-8")
    return path


def run(program, how, preload, module=False):
    words = ["-m", "program"] if module else [str(program)]
    done = subprocess.run(
        [*POPRUN, "--num-instances=2", "--num-replicas=2", "python3", *words, how, "--flag"],
        capture_output=True, text=True, check=False, cwd=program.parent, timeout=240,
        env={**os.environ, "IPU_EMULATOR_PRELOAD": preload, "OWN": "ö", "TF_CPP_MIN_LOG_LEVEL": "3"},
    )  # fmt: skip
    tagged = [line for line in done.stderr.splitlines() if line.startswith("[1,") and "^" not in line]
    return done.returncode, sorted(done.stdout.splitlines()), sorted(tagged)


@with_forks
@pytest.mark.slow
@pytest.mark.parametrize(("how", "module"), [("3", True), ("raise", False)])
def test_a_fork_sees_what_a_fresh_python_sees_and_ends_as_it_does(program, environs, how, module):
    assert preload.can_fork(["python3", str(program)], environs)
    fresh, forked = (run(program, how, preload, module) for preload in "01")
    assert all(f"[1,0]<stdout>:{words}" in fresh[1] for words in ("goodbye", "handlers run", "threads end"))
    assert forked == fresh
    drawn = [(program.parent / f"drawn-{rank}").read_text().split() for rank in range(2)]
    assert all(len(numbers) == 3 for numbers in drawn) and not set(drawn[0]) & set(drawn[1])


@pytest.fixture
def environs(monkeypatch):
    monkeypatch.setattr(preload, "CAN_FORK_WITH_THREADS", True)  # the other conditions hold for every Python
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return [{**os.environ, "PATH": path, "RANK": str(rank)} for rank in range(2)]


def test_only_programs_of_this_python_with_tensorflow_are_forked(environs, tmp_path):
    assert preload.can_fork(["python3", "-c", "import tensorflow"], environs)
    assert preload.can_fork([sys.executable, "-m", "tf_ipu_dp.train"], environs)  # by its declaration
    assert not preload.can_fork(["python3", "-c", "print()"], environs)
    assert not preload.can_fork(["python3", "-u", "-c", "import tensorflow"], environs)
    assert not preload.can_fork(["/bin/sh", "-c", "import tensorflow"], environs)
    assert not preload.can_fork(["python3", "-c", "import tensorflow"], environs[:1])
    assert not preload.can_fork(["python3", "-c", "import tensorflow"], [environs[0], {**environs[1], "TF_X": "1"}])
    assert not preload.can_fork(["python3", "-m", "no.such.module"], environs)
    (tmp_path / "sitecustomize.py").write_text("")
    hooked = [{**environ, "PYTHONPATH": str(tmp_path)} for environ in environs]
    assert not preload.can_fork(["python3", "-c", "import tensorflow"], hooked)


def test_the_check_whether_a_module_can_be_forked_imports_nothing(environs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "package_of_the_user"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    for name, text in (("module", "import tensorflow"), ("__main__", "import tensorflow"), ("other", "")):
        (package / f"{name}.py").write_text(text)
    for name, expected in ((".module", True), ("", True), (".other", False), (".absent", False), (".module.x", False)):
        assert preload.can_fork(["python3", "-m", f"{package.name}{name}"], environs) == expected, name


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("os.environ['OMP_NUM_THREADS'] = '1'", False),
        ("os.environ.update(TF_CPP_MIN_LOG_LEVEL='1')", False),
        ("os.putenv('KMP_BLOCKTIME', '0')", False),
        ("os.environ['TF_POPLAR_FLAGS'] = '--use_synthetic_data'", True),
        ("os.environ['OWN'] = '1'", True),
    ],
)
def test_a_program_that_sets_what_tensorflow_reads_at_its_import_is_not_forked(environs, text, expected):
    assert preload.can_fork(["python3", "-c", f"import os; {text}; import tensorflow"], environs) == expected


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({"TZ": "Asia/Tokyo"}, False),
        ({"MALLOC_ARENA_MAX": "1"}, False),
        ({"LC_ALL": "C"}, False),
        ({"PYTHONHASHSEED": "77"}, False),
        ({"IPU_EMULATOR_JOB": "x" * (1 << 20)}, False),
        ({"IPU_EMULATOR_JOB": "x" * 32, "PYTHONUNBUFFERED": "1"}, True),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_variables_that_a_fork_cannot_apply_or_show_mean_a_fresh_start(environs, own, expected):
    given = [{**environ, **own} for environ in environs]
    assert preload.can_fork(["python3", "-c", "import tensorflow"], given) == expected


def test_a_program_declares_modules_to_preload_and_may_then_set_what_tensorflow_reads(environs):
    text = "# poprun preloads: first.part, second\nimport os; os.environ['TF_CPP_MIN_LOG_LEVEL'] = '1'"
    assert preload.declared_modules(text) == ("first.part", "second")
    assert preload.can_fork(["python3", "-c", text], environs)
    assert preload.declared_modules("x = 1  # poprun preloads: nothing") == ()


def test_a_python_that_calls_forks_with_threads_deprecated_starts_every_instance_afresh(environs, monkeypatch):
    monkeypatch.setattr(preload, "CAN_FORK_WITH_THREADS", False)
    assert not preload.can_fork(["python3", "-c", "import tensorflow"], environs)


def test_the_modules_to_preload_exist():
    declared = preload.declared_modules(Path(train.__file__).read_text(encoding="utf-8"))
    own = [name for name in preload.MODULES if name.startswith("tf_ipu_dp")]
    assert declared and own
    assert not [name for name in (*declared, *own) if find_spec(name) is None]


@with_forks
@pytest.mark.slow
def test_declared_modules_beside_a_program_are_imported_once_by_poprun(tmp_path):
    (tmp_path / "own_module.py").write_text("import os\nimported_by = os.getpid()\n", encoding="utf-8")
    program = tmp_path / "program.py"
    lines = ["# poprun preloads: own_module", "import os", "import own_module", "import tensorflow"]
    lines.append("print(own_module.imported_by == os.getppid())")
    program.write_text("\n".join(lines), encoding="utf-8")
    done = subprocess.run(
        [*POPRUN, "--num-instances=2", "--num-replicas=2", "python3", str(program)],
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert sorted(done.stdout.splitlines()) == ["[1,0]<stdout>:True", "[1,1]<stdout>:True"], done.stderr
