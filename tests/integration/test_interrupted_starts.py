"""Ctrl-C and SIGTERM while several instances start: one line, 128 plus the signal's number, and nothing is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tf_ipu_dp import early_signals
from tf_ipu_dp.emulator.devices import registry

pytestmark = pytest.mark.usefixtures("emulator_dir")

# Each is far more than a start takes, and less than the two minutes that instances have to save what they trained.
LIMIT_S = 100
# Sends a signal to this process when a certain module is about to be imported, or at once.
SIGNALLING = """
import os, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["SIGNAL_AT"]:
            os.kill(os.getpid(), int(os.environ["SIGNAL"]))

if os.environ["SIGNAL_AT"]:
    sys.meta_path.insert(0, Finder())
else:
    os.kill(os.getpid(), int(os.environ["SIGNAL"]))
"""
SENTENCES = {
    "launch": "launch: interrupted before the instances were started; nothing was written.\n",
    "train": "train: interrupted before training began; nothing was written.\n",
    "emulator.poprun": "poprun: stopped by {name}.\n",
}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
@pytest.mark.parametrize(
    ("command", "module"),
    [
        ("launch", "absl"), ("launch", "tf_ipu_dp.training.preflight"), ("launch", ""), ("train", "absl"),
        ("emulator.poprun", "tf_ipu_dp.emulator.launcher.run_job"), ("emulator.poprun", ""),
    ],
)  # fmt: skip
def test_a_signal_while_modules_are_imported_is_one_line(command, module, number, tmp_path):
    """Without a module the signal comes while Python itself starts, from a parent that has blocked it until then."""
    (tmp_path / "sitecustomize.py").write_text(SIGNALLING, encoding="utf-8")
    environ = {**os.environ, "SIGNAL_AT": module, "SIGNAL": str(int(number)), "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", f"tf_ipu_dp.{command}", "--dry_run"], env=environ, capture_output=True, text=True,
        check=False, timeout=LIMIT_S, preexec_fn=None if module else early_signals.block,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (128 + number, ""), done.stderr
    assert done.stderr == SENTENCES[command].format(name=number.name)


# A program that poprun preloads, and a module of it whose import does not end.
PRELOADED = """
# poprun preloads: never_imported
print("started")
"""
NEVER_IMPORTED = """
import os, threading
from pathlib import Path
Path(__file__).with_name(f"importing-{os.getpid()}").touch()
threading.Event().wait()
"""


def imports_tensorflow(pid):
    try:
        return "libtensorflow_framework" in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")
    except OSError:
        return False


def test_a_signal_while_modules_are_preloaded_ends_poprun_before_it_starts_an_instance(
    start_poprun, wait_until, tmp_path
):
    (tmp_path / "program.py").write_text(PRELOADED, encoding="utf-8")
    (tmp_path / "never_imported.py").write_text(NEVER_IMPORTED, encoding="utf-8")
    process = start_poprun(2, 2, "python3", tmp_path / "program.py")
    wait_until((tmp_path / f"importing-{process.pid}").exists)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, out, err) == (143, "", "poprun: stopped by SIGTERM.\n")


# The first instance waits for the other one as in Horovod's init, where Python calls no handler.
CONNECTING = """
import os, signal, time, urllib.request
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
rank = os.environ["HOROVOD_RANK"]
if rank == "0":
    url = "http://{HOROVOD_GLOO_RENDEZVOUS_ADDR}:{HOROVOD_GLOO_RENDEZVOUS_PORT}/global/0".format(**os.environ)
    urllib.request.urlopen(urllib.request.Request(url, b"address", method="PUT")).read()
print("arrived" if rank == "0" else "late", flush=True)
time.sleep(300)
"""


def test_instances_that_wait_for_each_other_get_no_time_to_save(start_poprun):
    process = start_poprun(2, 2, sys.executable, "-c", CONNECTING)
    lines = [process.stdout.readline() for _ in range(2)]  # until both handle signals
    assert sorted(lines) == ["[1,0]<stdout>:arrived\n", "[1,1]<stdout>:late\n"]
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, err) == (130, "poprun: stopped by SIGINT.\n")


TRAIN = ("--sdk=emulator", "--model=mlp", "--dataset=synthetic", "--image_size=28", "--ipus=2", "--epochs=9999999steps")


def descendants(pid):
    """Returns the processes below one, with their command lines."""
    found = {}
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in path.read_text(encoding="ascii").split():
            try:
                found[int(child)] = Path(f"/proc/{child}/cmdline").read_text(encoding="utf-8").split("\0")
            except OSError:
                continue
            found.update(descendants(child))
    return found


def is_preloading(process, _):
    return any(imports_tensorflow(pid) for pid in descendants(process.pid))


def has_forked_an_instance(process, _):
    return any(words[1:3] == ["-m", "tf_ipu_dp.train"] for words in descendants(process.pid).values())


def is_compiling(_, folder):
    files = list(folder.glob("status/instance-*.json"))
    return len(files) == 2 and all('"compiling"' in path.read_text(encoding="utf-8") for path in files)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "number"),
    [(is_preloading, signal.SIGINT), (has_forked_an_instance, signal.SIGINT), (has_forked_an_instance, signal.SIGTERM),
     (is_compiling, signal.SIGTERM)],
)  # fmt: skip
def test_launch_stops_in_one_line_whatever_its_instances_do(
    moment, number, start_command, wait_until, tmp_path, emulator_dir
):
    folder = tmp_path / "run"
    process = start_command("launch", "--instances=2", "--", *TRAIN, f"--run_dir={folder}")
    wait_until(lambda: process.poll() is not None or moment(process, folder))
    below = descendants(process.pid)
    process.send_signal(number)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + number, err
    own = [line for line in err.splitlines() if not line.startswith("[1,0]<stderr>:")]
    assert own[0] == f"launch: 2 instances x 1 replica; {folder}"
    assert re.fullmatch(r"launch: stopped after .*\. Resume with: .*", own[1]) and len(own) == 2, err
    assert "Traceback" not in err and "KeyboardInterrupt" not in err
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below))
    assert not list(folder.glob("status/*"))
    partition = registry.Partition.from_environment({"IPU_EMULATOR_DIR": str(emulator_dir)})
    partition.attach(count=64).release()  # all IPUs are free
