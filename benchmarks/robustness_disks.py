"""Full and read-only disks under a run: a sentence and exit code 1, the earlier checkpoint still good, nothing left.

A case mounts a small file system (tmpfs, in a mount namespace of its own) for the run's folder, for the emulated IPUs
or for the temporary directory, which is full from the start, becomes full while the run trains, or is read-only.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

LIMIT_S = 300.0
TRAIN = (
    f"{sys.executable} -m tf_ipu_dp.train --sdk=emulator --model=mlp --dataset=synthetic --image_size=28 --ipus=2 "
    "--micro_batch_size=4 --updates_per_epoch=8 --checkpoint_every=8 --log_every=1 --keep_checkpoints=2 --noexport"
)
# What is mounted how large, what is done between two starts, and whether the last start must succeed.
CASES = (
    ("the run's folder, full from the start", "run", "1m", "", False),
    ("the run's folder, full after the first epoch", "run", "64m", "fill", False),
    ("the run's folder, full and then with room again", "run", "64m", "fill-free", True),
    ("the run's folder, read-only", "run", "64m", "read-only", False),
    ("the run's folder, read-only and then writable again", "run", "64m", "read-only-free", True),
    ("the emulated IPUs, full", "ipus", "16k", "fill", False),
    ("the emulated IPUs, full and then with room again", "ipus", "16k", "fill-free", True),
    ("the emulated IPUs, read-only", "ipus", "1m", "read-only", False),
    ("the temporary directory, full", "tmp", "16k", "fill", True),
    ("the temporary directory, read-only", "tmp", "1m", "read-only", True),
    ("the temporary directory, full, with two instances", "tmp", "16k", "fill2", True),
    ("the run's folder, full after the first epoch, with two instances", "run", "64m", "fill2", False),
)
# The file of a process that has ended is removed by the next start, which would make room again.
FILL = "rm -f {mounted}/partition/owner-*; dd if=/dev/zero of={mounted}/filler bs=512 2>/dev/null"
FREE = "rm -f {mounted}/filler; mount -o remount,rw {mounted}"


@contextlib.contextmanager
def prepare(options):
    """Yields a folder for the mounts."""
    del options
    with tempfile.TemporaryDirectory() as top:
        yield Path(top)


def try_case(number, chance, top):
    """Runs one case."""
    del chance
    about, what, size, action, succeeds = CASES[number]
    folders = {name: top / name for name in ("run", "ipus", "tmp")}
    for path in folders.values():
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(mode=0o700)
    mounted = folders[what]
    train = TRAIN + f" --run_dir={folders['run']}/x" + (" --instances=2" if action.endswith("2") else "")
    steps = [f"mount -t tmpfs -o size={size},mode=0700 tmpfs {mounted}"]
    if action:
        steps += [f"({train} --epochs=8steps) || exit 90"]  # the disk is good
        steps += [f"mount -o remount,ro {mounted}" if action.startswith("read-only") else FILL.format(mounted=mounted)]
    last = f"{train} --epochs=32steps"
    if action.endswith("free"):
        steps += [f"{last} && exit 91", FREE.format(mounted=mounted)]
    script = "\n".join([*steps, f"{last}; code=$?", "echo; ls -A $PWD_RUN/checkpoints; exit $code"])
    environ = {
        **os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "IPU_EMULATOR_DIR": str(folders["ipus"] / "partition"),
        "TMPDIR": str(folders["tmp"]), "PWD_RUN": str(folders["run"] / "x"),
    }  # fmt: skip
    done = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", script], capture_output=True, text=True, check=False,
        timeout=600, env=environ,
    )  # fmt: skip
    if "unshare" in done.stderr or "mount:" in done.stderr:
        return "not possible on this machine", done.stderr[-500:]
    outcome = f"{about}: {'trained' if succeeds else 'refused in a sentence'}"
    if "Traceback" in done.stderr:
        return "traceback", f"{about}: {done.stderr[-3000:]}"
    if done.returncode != (0 if succeeds else 1):
        return "wrong exit code", f"{about}: code {done.returncode}, {done.stderr[-2000:]}"
    left = done.stdout.split("\n")[-4:]
    if any(".tmp" in name for name in left):
        return "leftovers", f"{about}: {left}"
    return outcome, None
