"""Run folders with one to four damages: the right checkpoint, the right flags, and nothing outside the folder touched.

The folder is that of a real run. Bits are flipped, files cut, emptied, removed, filled with other JSON, or replaced by
folders, links and pipes. With --resumes=N, N of the folders (as far as they can be opened) are resumed by a real run,
whose last weights must be those of the undisturbed one, bit by bit.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from datetime import datetime
from pathlib import Path

import kills

from tf_ipu_dp import cli
from tf_ipu_dp.config import train_flags
from tf_ipu_dp.distributed import job
from tf_ipu_dp.monitoring import diagnosis
from tf_ipu_dp.runs import checkpoints, heartbeat, run_folder, saved_flags

LIMIT_S = 120.0
STEPS = 12
TRAIN = [
    sys.executable, "-m", "tf_ipu_dp.train", "--sdk=emulator", "--model=mlp", "--dataset=synthetic", "--image_size=28",
    "--ipus=2", "--micro_batch_size=4", "--updates_per_epoch=4", "--checkpoint_every=4", "--log_every=1",
    "--deterministic", "--noexport", "--keep_checkpoints=9",
]  # fmt: skip
GARBAGE = (
    b"", b"{", b"null", b"\xff\xfe\x00", b"[" * 50_000, b'{"a": ' * 20_000, b'{"schema": 99}',
    b'{"step": ' + b"9" * 5000 + b"}", b"\0" * 4096, b"--flagfile=/etc/passwd\n", b"--ipus=nan\n", b"\x1b[2J\n",
)  # fmt: skip


class State:
    """The original folder, what it must give, and where cases are made."""

    def __init__(self, top, options):
        self.top, self.resumes, self.count = top, options.resumes, options.count or 10_000
        self.original, self.case, self.outside = top / "original", top / "case", top / "outside"
        self.outside.write_text("precious")
        self.resumed = set()  # of so many cases in a row, the first that can be resumed is
        trained = options.out / "folders-run"  # for all parts of the campaign
        if not trained.exists():
            train(self.original, STEPS)
            shutil.copytree(self.original, trained)
        shutil.rmtree(self.original, ignore_errors=True)
        shutil.copytree(trained, self.original)
        self.digest = digest(self.original)
        # As if it had been killed before its last checkpoint: what a resumed run must repeat.
        shutil.rmtree(self.original / "checkpoints" / f"step-{STEPS:08d}")
        (self.original / "result.json").unlink()
        self.files = [path.relative_to(self.original) for path in sorted(self.original.rglob("*")) if path.is_file()]
        self.contents = {name: (self.original / name).read_bytes() for name in self.files}
        self.config = saved_flags.complete([f"--run_dir={self.original}"]).config
        self.batch = job.read_saved_batch(self.config)
        self.steps = checkpoints.Store(self.original / "checkpoints", 9, print).steps()


@contextlib.contextmanager
def prepare(options):
    """Trains the run that all cases are damaged copies of, in memory where that is possible."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as top:
        yield State(Path(top), options)


def train(folder, steps):
    """Trains or resumes a run; returns the completed process."""
    done = subprocess.run(
        [*TRAIN, f"--epochs={steps}steps", f"--run_dir={folder}"], capture_output=True, text=True, check=False,
        timeout=600, env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"code {done.returncode}: {done.stderr[-2000:]}")
    return done


def digest(folder):
    """Returns a digest of the last checkpoint's state, by its manifest."""
    found = checkpoints.Store(folder / "checkpoints", 9, print).newest()
    assert found is not None and found.manifest.step == STEPS
    return kills.digest_of(found.path)


def damage(chance, state):
    """Damages one file of the case; returns its name and what was done to it."""
    name = chance.choice(state.files)
    path = state.case / name
    content = state.contents[name]
    kind = chance.choice(
        ("flip", "flip", "flip", "cut", "garbage", "append", "remove", "folder", "link", "pipe", "swap")
    )
    if os.path.lexists(path):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    if kind == "flip":
        spoiled = bytearray(content or b"\0")
        spoiled[chance.randrange(len(spoiled))] ^= 1 << chance.randrange(8)
        path.write_bytes(bytes(spoiled))
    elif kind == "cut":
        path.write_bytes(content[: chance.randrange(len(content) + 1)])
    elif kind == "garbage":
        path.write_bytes(chance.choice(GARBAGE))
    elif kind == "append":
        path.write_bytes(content + chance.choice(GARBAGE))
    elif kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(state.outside)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "swap":
        path.write_bytes(state.contents[chance.choice(state.files)])
    return name, kind


def is_intact(state, step):
    """Whether a checkpoint of the case has the files of the original, and nothing else."""
    folder = state.case / "checkpoints" / f"step-{step:08d}"
    names = [name for name in state.files if folder.name in name.parts]
    paths = [state.case / name for name in names]
    return all(p.is_file() and not p.is_symlink() and p.read_bytes() == state.contents[n] for p, n in zip(paths, names))


def try_case(number, chance, state):
    """Makes a damaged copy, and asks of it what a resumed run and a monitor ask."""
    shutil.rmtree(state.case, ignore_errors=True)
    shutil.copytree(state.original, state.case)
    done = [damage(chance, state) for _ in range(chance.randrange(1, 5))]
    about = ", ".join(f"{kind} {name}" for name, kind in done)
    outcome, problem = look(state)
    if problem is None and state.outside.read_text() != "precious":
        problem = "the file outside was changed"
    every = max(state.count // state.resumes, 1) if state.resumes else 0
    if every and number // every not in state.resumed and outcome == "resumes from the right checkpoint":
        state.resumed.add(number // every)
        train(state.case, STEPS)
        outcome = "really resumed, with the same weights"
        problem = None if digest(state.case) == state.digest else "other weights"
    return outcome, None if problem is None else f"{about}: {problem}"


def look(state):  # noqa: PLR0911 - one for each thing that is asked
    """Returns what the folder gives, and what is wrong with that."""
    folder = run_folder.RunFolder(state.case)
    heartbeat.read_run(state.case)
    folder.read_result(), folder.read_errors(), folder.read_exchange_times(), folder.read_last_metrics(1 << 16)
    with contextlib.suppress(cli.UsageError):
        diagnosis.explain(state.case)
    good = [step for step in state.steps if is_intact(state, step)]
    found = checkpoints.Store(state.case / "checkpoints", 9, lambda text: None).newest()
    newest = found.manifest.step if found else None
    if newest != max(good, default=None):
        return "wrong", f"the newest checkpoint is {newest}, of {good}"
    try:
        with run_folder.open_folder(str(state.case), name="x", now=datetime(2026, 1, 5), needed_bytes=0) as opened:
            opened.read_metrics()
    except cli.UsageError:
        return "refused: something in it is no file", None
    if not good:
        return "no good checkpoint is left", None
    try:
        command = saved_flags.complete([f"--run_dir={state.case}"])
    except cli.UsageError as error:
        return "flags", f"refused although step {newest} is good: {error}"
    tied = train_flags.names_tied_to_weights()
    texts = {name: cli.typed(getattr(state.config, name)) for name in tied}
    saved = {**train_flags.default_texts(), **found.manifest.flags}
    for name in tied:
        now = cli.typed(getattr(command.config, name))
        if now not in (texts[name], saved.get(name)):
            return "flags", f"--{name} is {now} instead of {texts[name]}"
    batch = job.read_saved_batch(command.config)
    if batch is None or batch.global_batch_size != state.batch.global_batch_size:
        return "batch", f"{batch} instead of {state.batch}"
    return "resumes from the right checkpoint", None
