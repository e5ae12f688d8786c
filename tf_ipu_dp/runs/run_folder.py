"""The folder of one run: where its files are, who may write them, and writing them so that no crash leaves half of one.

No TensorFlow. `RunFolder(path)` only knows the names, which is all that a reader needs, or an instance that reports its
error; `open_folder` makes the folder and holds it for the one process that writes the rest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import re
import shlex
import shutil
import socket
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, TextIO, Tuple, Union

from tf_ipu_dp import cli
from tf_ipu_dp.config import schema
from tf_ipu_dp.runs.json_files import parse_object, plain

_RUNS = "runs"
_LOCK = ".lock"


@dataclasses.dataclass(frozen=True)
class InstanceError:
    """What ended one instance of a run."""

    instance: int
    host: str
    process: int
    time: datetime
    final: bool  # starting again would end the same
    text: str


class RunFolder:
    """The files of one run. What cannot be written is a `cli.UsageError` that names the folder and the reason."""

    def __init__(self, path: Path, lock: Optional[TextIO] = None) -> None:
        self.path = path
        self._lock = lock
        self.config_json = path / "config.json"
        self.run_flags = path / "run.flags"
        self.plan_json = path / "plan.json"
        self.metrics = path / "metrics.jsonl"
        self.result_json = path / "result.json"
        self.checkpoints = path / "checkpoints"
        self.tensorboard = path / "tensorboard"
        self.export = path / "export"
        self.errors = path / "errors"

    def close(self) -> None:
        """Lets other processes use the folder; so does the end of this process, whatever ends it."""
        if self._lock:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read_holder(self) -> str:
        """Returns who has the folder, as he has written it there: the same on all hosts that share it."""
        try:
            return (self.path / _LOCK).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def write_start(self, cfg: schema.TrainConfig, flag_lines: Sequence[str], plan_json: str) -> None:
        """Writes what the run was asked for and how it is laid out; a result of an earlier start is taken away."""
        values = {field.name: getattr(cfg, field.name) for field in dataclasses.fields(cfg)}
        command = f"python -m tf_ipu_dp.train --flagfile={shlex.quote(str(self.run_flags))}"
        lines = [f"# Runs this again: {command}".replace("\n", " "), *flag_lines]
        with _told(self.path):
            with contextlib.suppress(FileNotFoundError):
                self.result_json.unlink()
            write_durably(self.config_json, _render_json(values))
            write_durably(self.run_flags, "\n".join(lines) + "\n")
            write_durably(self.plan_json, plan_json.rstrip("\n") + "\n")

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        """Adds a line of JSON, with null for what is not a finite number; readers see it at once."""
        line = (json.dumps(plain(record)) + "\n").encode()
        with _told(self.path):
            handle = os.open(self.metrics, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                before = os.fstat(handle).st_size
                if os.write(handle, line) < len(line):
                    os.ftruncate(handle, before)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            finally:
                os.close(handle)

    def truncate_metrics(self, after_step: int) -> None:
        """Drops the records of later steps, which a run that goes on from a checkpoint writes again."""
        with _told(self.path):
            kept = [record for record in self.read_metrics() if (record.get("step") or 0) <= after_step]
            text = "".join(json.dumps(record) + "\n" for record in kept)
            if self.metrics.exists() and self.metrics.read_bytes() != text.encode():
                write_durably(self.metrics, text)

    def read_metrics(self) -> List[Dict[str, Any]]:
        """Returns the records; what a crash has left of a line is passed over."""
        try:
            lines = self.metrics.read_bytes().split(b"\n")
        except FileNotFoundError:
            return []
        return [record for record in map(parse_object, lines) if record is not None]

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Writes what came out; `stopped` in it says why the run ended early, if it did."""
        with _told(self.path):
            write_durably(self.result_json, _render_json(result))

    def is_finished(self) -> bool:
        """Whether the run, as it was last started, has come to its end."""
        result = parse_object(self.result_json.read_bytes()) if self.result_json.is_file() else None
        return result is not None and result.get("stopped") is None

    def write_error(self, instance: int, text: str, *, final: bool = False, host: Optional[str] = None) -> Path:
        """Keeps what ended an instance, and when and where; any instance may call it. Returns the file.

        `final` says that the same would happen again if the run were started again. Of the errors of one process the
        first stays: it is nearest to the cause. One that cannot tell itself is told of by another, with its `host`.
        """
        path = self.errors / f"instance-{instance:03d}.txt"
        before = _read_error(path)
        if before and before.process == os.getpid() and before.host == socket.gethostname():
            return path
        now = datetime.now(timezone.utc).isoformat(timespec="microseconds")
        head = {
            "instance": instance,
            "host": host or socket.gethostname(),
            "process": os.getpid(),
            "time": now,
            "final": "yes" if final else "no",
        }
        lines = [*(f"{name}: {value}" for name, value in head.items()), "", text.rstrip("\n")]
        with _told(self.path):
            self.errors.mkdir(parents=True, exist_ok=True)
            write_durably(path, "\n".join(lines) + "\n")
        return path

    def read_errors(self) -> List[InstanceError]:
        """Returns what ended the instances, the earliest first; what is no such file is passed over."""
        found = (_read_error(path) for path in sorted(self.errors.glob("instance-*.txt")))
        return sorted((error for error in found if error), key=lambda error: error.time)

    def set_errors_aside(self) -> None:
        """Renames the errors of an earlier start, so that those of the next one are its own."""
        if self.errors.is_dir() and any(self.errors.iterdir()):
            with _told(self.path):
                number = 1
                while (aside := self.path / f"errors-{number}").exists():
                    number += 1
                self.errors.rename(aside)

    def read_plan(self) -> Optional[Dict[str, Any]]:
        """Returns the plan, as JSON has it, that the checkpoints were made with; None where there are none."""
        if not any(self.checkpoints.glob("step-*")):
            return None
        try:
            return parse_object(self.plan_json.read_bytes())
        except FileNotFoundError:
            return None


def open_folder(run_dir: Optional[str], *, name: str, now: datetime, needed_bytes: int) -> RunFolder:
    """Makes (or takes up) a run's folder and holds it, or refuses where the run could not write into it to its end.

    Without `run_dir` it is a new one below runs/, of the name and the time. A folder is held by one process at a time;
    on a file system that has no locks nobody is kept out.
    """
    wanted = _given_path(run_dir) if run_dir is not None else Path(_RUNS) / _folder_name(name, now)
    label = f"--run_dir={run_dir}" if run_dir is not None else f"The run's folder {wanted}"
    remedy = "Choose another folder with --run_dir."
    try:
        _require_space(label, wanted, needed_bytes)
        path = _make_new(wanted) if run_dir is None else wanted
        path.mkdir(parents=True, exist_ok=True)
        handle = _hold(label, path)
    except OSError as error:
        raise cli.UsageError(f"{label} cannot be used ({_reason(error)}). {remedy}") from error
    folder = RunFolder(path, handle)
    closed = [entry for entry in vars(folder).values() if isinstance(entry, Path) and _is_closed_to_us(entry)]
    if closed:
        folder.close()
        raise cli.UsageError(f"{label} cannot be used ({closed[0].name} in it is not writable). {remedy}")
    # What a process that was killed has left: unfinished files, and the beginning of a line.
    for unfinished in path.glob(".*.tmp") if handle else ():
        unfinished.unlink()
    for trial in path.glob(".trial-*") if handle else ():
        shutil.rmtree(trial, ignore_errors=True)
    folder.truncate_metrics(sys.maxsize)
    return folder


def make_folder(name: str, now: datetime) -> Path:
    """Makes a new folder below runs/, of the name and the time, for a run that another process will take up."""
    wanted = Path(_RUNS) / _folder_name(name, now)
    try:
        return _make_new(wanted)
    except OSError as error:
        raise cli.UsageError(
            f"The run's folder {wanted} cannot be used ({_reason(error)}). Choose another folder with --run_dir."
        ) from error


def read_run_flags(path: Path) -> Tuple[str, ...]:
    """Returns the flags that a run was started with, one per entry, from its folder."""
    try:
        text = RunFolder(path).run_flags.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise cli.UsageError(
            f"--run_dir={path} is not the folder of a run: its run.flags cannot be read ({_reason(error)})."
        ) from error
    return tuple(line for line in text.split("\n") if line and not line.startswith("#"))


def read_flags_to_evaluate(path: Path) -> Tuple[str, ...]:
    """Returns those of a run's flags that its evaluation needs; how the training was divided is none of them."""
    names = (
        "device_iterations", "global_batch_size", "gradient_accumulation", "updates_per_epoch", "epochs",
        "checkpoint_every", "instances", "hosts",
    )  # fmt: skip
    return tuple(flag for flag in read_run_flags(path) if not flag.startswith(tuple(f"--{name}=" for name in names)))


def write_durably(path: Path, content: Union[str, bytes]) -> None:
    """Puts a file in place of what was there: after a crash it is the old one or the new one, never a part."""
    data = content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync(path.parent)


def sync_tree(path: Path) -> None:
    """Forces a folder and all that is below it to the disk."""
    for entry in (*path.rglob("*"), path):
        sync(entry)


def sync(path: Path) -> None:
    """Forces a file, or a folder's names, to the disk: without it a power cut may undo a rename."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def lock_file(path: Path, *, wait: bool) -> Optional[TextIO]:
    """Returns a lock, held until it is closed or the process dies; None on a file system that has no locks.

    Raises BlockingIOError when another has it and `wait` is false.
    """
    handle = path.open("a+", encoding="utf-8")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BaseException as error:
        handle.close()
        if isinstance(error, OSError) and error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
            return None
        raise
    return handle


def _given_path(run_dir: str) -> Path:
    if not run_dir.strip() or "://" in run_dir:
        raise cli.UsageError(f"--run_dir={run_dir} is not a folder of this machine. Give a path like runs/first.")
    return Path(run_dir)


def _folder_name(name: str, now: datetime) -> str:
    return re.sub(r"[^\w.+-]+", "-", f"{name}-{now:%Y%m%d-%H%M%S}", flags=re.ASCII)


def _make_new(wanted: Path) -> Path:
    """Makes a folder that was not there; of two processes that start in the same second each gets its own."""
    wanted.parent.mkdir(parents=True, exist_ok=True)
    path, number = wanted, 1
    while True:
        try:
            path.mkdir()
            return path
        except FileExistsError:
            number += 1
            path = wanted.with_name(f"{wanted.name}-{number}")


def _require_space(label: str, path: Path, needed_bytes: int) -> None:
    """Looks before anything is made, so that a refusal leaves nothing behind."""
    existing = next(entry for entry in (path, *path.absolute().parents) if entry.exists())
    if not existing.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"{existing} is a file")
    free = shutil.disk_usage(existing).free
    if free < needed_bytes:
        raise cli.UsageError(
            f"{label} has {_megabytes(free)} free on its disk and the run needs {_megabytes(needed_bytes)}. "
            "Free some space, lower --keep_checkpoints or choose another folder with --run_dir."
        )


def _hold(label: str, path: Path) -> Optional[TextIO]:
    try:
        handle = lock_file(path / _LOCK, wait=False)
    except BlockingIOError:
        holder = (path / _LOCK).read_text(encoding="utf-8").strip() or "another process"
        raise cli.UsageError(
            f"{label} is in use by {holder}. Wait until it ends, or choose another folder with --run_dir."
        ) from None
    if handle:
        handle.truncate(0)
        handle.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        handle.flush()
    return handle


def _is_closed_to_us(path: Path) -> bool:
    return path.exists() and not os.access(path, os.W_OK)


def _read_error(path: Path) -> Optional[InstanceError]:
    try:
        head, _, text = path.read_text(encoding="utf-8", errors="surrogateescape").partition("\n\n")
        fields = dict(line.split(": ", 1) for line in head.splitlines())
        return InstanceError(
            instance=int(fields["instance"]),
            host=fields["host"],
            process=int(fields["process"]),
            time=datetime.fromisoformat(fields["time"]),
            final=fields["final"] == "yes",
            text=text.rstrip("\n"),
        )
    except (OSError, ValueError, KeyError):
        return None


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise cli.UsageError(f"The run's folder {path} cannot be written ({_reason(error)}).") from error


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


def _render_json(value: Mapping[str, Any]) -> str:
    return json.dumps(plain(value), indent=2) + "\n"
