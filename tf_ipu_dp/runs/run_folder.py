"""The folder of one run: names of its files, its lock, and atomic writes that survive any crash.

No TensorFlow. `RunFolder(path)` is enough for readers, and for an instance that reports its error; `open_folder` makes
the folder and locks it for the one process that writes everything else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import re
import shlex
import shutil
import socket
import stat
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Iterable, Iterator, List, Mapping, Optional, TextIO, Tuple

from tf_ipu_dp import cli
from tf_ipu_dp.config import train_flags
from tf_ipu_dp.runs import checkpoints, safe_files
from tf_ipu_dp.runs.exchange_times import ExchangeTimes
from tf_ipu_dp.runs.heartbeat import Status
from tf_ipu_dp.runs.json_files import parse_object, plain, read_object
from tf_ipu_dp.runs.manifest import Manifest
from tf_ipu_dp.runs.plan_record import PlanRecord
from tf_ipu_dp.runs.records import MetricsRecord, RecordError, RunResult, metrics_record

_RUNS = "runs"
_LOCK = ".lock"
_FILES_OF_A_RUN = {_LOCK, "run.flags", "plan.json", "config.json", "metrics.jsonl", "checkpoints", "errors", "status"}
_LOGS = {".log", ".out", ".err"}
# What a run reads, writes or removes in its folder: none of it may lead out of the folder.
_FILES = (
    _LOCK, "run.flags", "plan.json", "config.json", "metrics.jsonl", "result.json", "exchange_times.json",
    "checkpoints/.lock", "best/.lock",
)  # fmt: skip
_FOLDERS = ("checkpoints", "best", "errors", "status", "tensorboard", "export", ".export", ".export-old")
TRIAL = ".trial-"  # what the name of a folder for a trial begins with; Python adds eight letters
_TRIAL_NAME = re.compile(re.escape(TRIAL) + "[a-z0-9_]{8}")
_ERROR_FILE = re.compile(r"instance-[0-9]+\.txt")
_MAX_LOCK_BYTES = 4096


@dataclasses.dataclass(frozen=True)
class InstanceError:
    """The error that ended one instance of a run."""

    instance: int
    host: str
    process: int
    time: datetime
    transient: bool  # a restart of the same run may succeed
    text: str
    reported_by: Optional[int] = None  # the instance that found this one stalled
    common: bool = False  # all instances have found it together, and none of them is to blame


class RunFolder:
    """The files of one run. A file that cannot be written is a `cli.UsageError` with the folder and the reason."""

    def __init__(self, path: Path, lock: Optional[TextIO] = None) -> None:
        self.path = path
        self._lock = lock
        self.config_json = path / "config.json"
        self.run_flags = path / "run.flags"
        self.plan_json = path / "plan.json"
        self.metrics = path / "metrics.jsonl"
        self.exchange_times_json = path / "exchange_times.json"
        self.result_json = path / "result.json"
        self.checkpoints = path / "checkpoints"
        self.best = path / "best"  # the checkpoint with the lowest validation loss
        self.tensorboard = path / "tensorboard"
        self.export = path / "export"
        self.errors = path / "errors"

    def stores_of(self, weights: str) -> List[Path]:
        """Returns where to look for a checkpoint: if `weights` is best, first among those that early stopping keeps."""
        return [self.best, self.checkpoints] if weights == "best" else [self.checkpoints]

    def close(self) -> None:
        """Unlocks the folder, as the end of this process does."""
        if self._lock:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read_owner(self) -> str:
        """Returns the text that the process with the lock wrote: the same on all hosts that share the folder."""
        try:
            return safe_files.read_bytes(self.path / _LOCK, _MAX_LOCK_BYTES).decode("utf-8", "replace")
        except OSError:
            return ""

    def write_start(self, cfg: train_flags.TrainConfig, plan: PlanRecord) -> None:
        """Writes flags, config and plan, and removes the result and the exchange times of an earlier start."""
        values = {field.name: getattr(cfg, field.name) for field in dataclasses.fields(cfg)}
        typed = f"python -m tf_ipu_dp.train --flagfile={shlex.quote(str(self.run_flags))}"
        command = cli.as_started(typed, os.environ)
        lines = [f"# Runs this again: {command}".replace("\n", " "), *cfg.flag_lines()]
        with _usage_error_on_failure(self.path):
            for path in (self.result_json, self.exchange_times_json):
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()
            safe_files.write_durably(self.config_json, render_json(values))
            safe_files.write_durably(self.run_flags, "\n".join(lines) + "\n")
            safe_files.write_durably(self.plan_json, render_json(plan.to_json()))

    def append_metrics(self, record: MetricsRecord) -> None:
        """Adds a line to metrics.jsonl; readers see either the whole line or nothing."""
        line = (json.dumps(record.to_json()) + "\n").encode()
        with _usage_error_on_failure(self.path):
            handle = safe_files.open_regular(self.metrics, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            try:
                before = os.fstat(handle).st_size
                if os.write(handle, line) < len(line):
                    os.ftruncate(handle, before)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            finally:
                os.close(handle)

    def truncate_metrics(self, after_step: int) -> None:
        """Drops the records of later steps, which a run that resumes from a checkpoint writes again."""
        with _usage_error_on_failure(self.path):
            if not self.metrics.exists():
                return
            kept = [line for line in self._metrics_lines() if (_step_of(line) or 0) <= after_step]
            content = b"".join(line + b"\n" for line in kept)
            found = self.metrics.stat()
            # Lines are only left out, so a file of the same size is the same. A hard link, as some backups make, is
            # replaced: lines would be added to the other file too.
            if found.st_size != len(content) or found.st_nlink > 1:
                safe_files.write_durably(self.metrics, content)

    def read_metrics(self) -> List[MetricsRecord]:
        """Returns the records; lines that are damaged or of another kind are skipped."""
        try:
            return parse_metrics(self._metrics_lines())
        except OSError:
            return []

    def read_last_metrics(self, max_bytes: int) -> List[MetricsRecord]:
        """Returns the last records only: the file of a long run is large, and a monitor reads it every second."""
        try:
            with os.fdopen(safe_files.open_regular(self.metrics, os.O_RDONLY), "rb") as file:
                file.seek(max(os.fstat(file.fileno()).st_size - max_bytes, 0))
                return parse_metrics(file.read(max_bytes).split(b"\n"))
        except OSError:
            return []

    def _metrics_lines(self) -> List[bytes]:
        """Returns the complete lines; a line cut off by a crash is dropped."""
        try:
            return [line for line in safe_files.read_lines(self.metrics) if parse_object(line) is not None]
        except FileNotFoundError:
            return []

    def write_exchange_times(self, times: ExchangeTimes) -> None:
        """Writes exchange_times.json."""
        with _usage_error_on_failure(self.path):
            safe_files.write_durably(self.exchange_times_json, render_json(times.to_json()))

    def read_exchange_times(self) -> Optional[ExchangeTimes]:
        """Returns the exchanges of the last start, as of its last checkpoint or its end; None if there are none."""
        try:
            return ExchangeTimes.from_json(read_object(self.exchange_times_json))
        except RecordError:
            return None

    def write_result(self, result: RunResult) -> None:
        """Writes result.json."""
        with _usage_error_on_failure(self.path):
            safe_files.write_durably(self.result_json, render_json(result.to_json()))

    def read_result(self) -> Optional[RunResult]:
        """Returns the result of the last start; None while the run continues, or if it was killed."""
        try:
            return RunResult.from_json(read_object(self.result_json))
        except RecordError:
            return None

    def read_plan(self) -> Optional[PlanRecord]:
        """Returns the plan of the last start; None if it is missing or not valid."""
        try:
            found = PlanRecord.from_json(read_object(self.plan_json))
        except RecordError:
            return None
        return found if found.is_plausible else None

    def read_newest_manifest(self) -> Optional[Manifest]:
        """Returns the newest intact manifest of the checkpoints; None without one."""
        found = checkpoints.Store(self.checkpoints, 1, lambda _: None).newest_manifest()
        return found if found and found.plan.is_plausible else None

    def read_saved_plan(self) -> Optional[PlanRecord]:
        """Returns the plan of the newest checkpoint, whose hash proves it; without a checkpoint that of plan.json."""
        manifest = self.read_newest_manifest()
        return manifest.plan if manifest else self.read_plan()

    def has_checkpoints(self) -> bool:
        """Whether there are checkpoints, good or damaged."""
        return any(path.name.startswith("step-") for path in safe_files.list_folder(self.checkpoints))

    def checkpoint_steps(self) -> List[int]:
        """Returns the steps that have a checkpoint, good or damaged."""
        return checkpoints.Store(self.checkpoints, 1, lambda _: None).steps()

    def write_error(self, instance: int, text: str, *, transient: bool = True, common: bool = False) -> Path:
        """Writes the error that ended this process, an instance of the run. Returns the file.

        `transient` is false if the error would repeat after a restart, `common` is true if all instances have it, like
        a loss that is not finite. Of several errors of one process the first is
        kept: it is nearest to the cause.
        """
        error = InstanceError(instance, socket.gethostname(), os.getpid(), _now(), transient, text, common=common)
        return self._write_error(error)

    def write_stall(self, stalled: Status, text: str, *, reported_by: int) -> Path:
        """Writes that an instance has stalled, which another one reports. Returns the file.

        If the stalled process continues, what it writes then is a consequence.
        """
        error = InstanceError(stalled.instance, stalled.host, stalled.pid, _now(), True, text, reported_by)
        return self._write_error(error)

    def _write_error(self, error: InstanceError) -> Path:
        path = self.errors / f"instance-{error.instance:03d}.txt"
        before = _read_error(path)
        if before and (before.process, before.host) == (error.process, error.host):
            return path
        head = {
            "instance": error.instance,
            "host": error.host,
            "process": error.process,
            "time": error.time.isoformat(timespec="microseconds"),
            "transient": "yes" if error.transient else "no",
        }
        if error.reported_by is not None:
            head["reported by"] = error.reported_by
        if error.common:
            head["common"] = "yes"
        lines = [*(f"{name}: {value}" for name, value in head.items()), "", error.text.rstrip("\n")]
        with _usage_error_on_failure(self.path):
            self.errors.mkdir(parents=True, exist_ok=True)
            safe_files.write_durably(path, "\n".join(lines) + "\n")
        return path

    def read_errors(self) -> List[InstanceError]:
        """Returns the errors of the instances, the earliest first; other files are skipped."""
        found = (_read_error(path) for path in safe_files.list_folder(self.errors) if _ERROR_FILE.fullmatch(path.name))
        return sorted((error for error in found if error), key=lambda error: error.time)

    def set_errors_aside(self) -> None:
        """Renames the errors of an earlier start, to keep them apart from those of the next one."""
        if self.errors.is_dir() and any(self.errors.iterdir()):
            with _usage_error_on_failure(self.path):
                number = 1
                while (aside := self.path / f"errors-{number}").exists():
                    number += 1
                self.errors.rename(aside)


def open_folder(run_dir: Optional[str], *, name: str, now: datetime, needed_bytes: int) -> RunFolder:
    """Makes or reuses a run's folder and locks it; UsageError if the run could not write all its files to it.

    Without `run_dir` it makes a new one below runs/, from the name and the time. One process at a time holds the lock;
    on a file system without locks there is no protection.
    """
    wanted, label = _wanted_folder(run_dir, name, now)
    with _refusing(label):
        _require_usable(label, wanted, needed_bytes)
        path = _make_new(wanted) if run_dir is None else wanted
        path.mkdir(parents=True, exist_ok=True)
        handle = _lock_folder(label, path)
    folder = RunFolder(path, handle)
    # What a killed process left: temporary files, and part of a line.
    if handle:
        safe_files.remove_unfinished(path)
        safe_files.remove_unfinished(path / "status")
        for trial in path.iterdir():
            if _TRIAL_NAME.fullmatch(trial.name):
                safe_files.remove(trial)
    folder.truncate_metrics(sys.maxsize)
    return folder


def check_folder(run_dir: Optional[str], *, name: str, now: datetime, needed_bytes: int) -> None:
    """Raises the UsageError that `open_folder` would raise, without making or changing anything."""
    wanted, label = _wanted_folder(run_dir, name, now)
    with _refusing(label):
        _require_usable(label, wanted, needed_bytes)
        if (wanted / _LOCK).exists():
            handle = _try_lock(label, wanted)
            if handle:
                handle.close()


def make_folder(name: str, now: datetime) -> Path:
    """Makes a new folder below runs/, from the name and the time, for a run that another process will open."""
    wanted, label = _wanted_folder(None, name, now)
    with _refusing(label):
        return _make_new(wanted)


def read_run_flags(path: Path, flag: str = "--run_dir=") -> Tuple[str, ...]:
    """Returns the flags that a run was started with, one per entry. `flag` is how the user gave the folder."""
    try:
        text = safe_files.read_bytes(RunFolder(path).run_flags).decode("utf-8", "surrogateescape")
    except OSError as error:
        raise cli.UsageError(
            f"{flag}{path} is not the folder of a run: its run.flags cannot be read ({_reason(error)}). "
            f"Give a run's folder, like {flag}runs/first."
        ) from error
    return tuple(line for line in text.split("\n") if line and not line.startswith("#"))


def _wanted_folder(run_dir: Optional[str], name: str, now: datetime) -> Tuple[Path, str]:
    """Returns where a run's folder is or would be made, and what a refusal calls it."""
    if run_dir is not None:
        return _given_path(run_dir), f"--run_dir={run_dir}"
    wanted = Path(_RUNS) / _folder_name(name, now)
    return wanted, f"The run's folder {wanted}"


@contextlib.contextmanager
def _refusing(label: str) -> Iterator[None]:
    """Turns a failure of the file system into a UsageError."""
    try:
        yield
    except OSError as error:
        raise cli.UsageError(
            f"{label} cannot be used ({_reason(error)}). Choose another folder with --run_dir."
        ) from error


def _require_usable(label: str, path: Path, needed_bytes: int) -> None:
    """Raises a UsageError or OSError for a folder that a run could not write all its files to."""
    existing = next(entry for entry in (path, *path.absolute().parents) if entry.exists())
    if not existing.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"{existing} is a file")
    _require_run_or_empty(label, path)
    _require_no_links(label, path)
    if _is_read_only(existing):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    for entry in vars(RunFolder(path)).values():
        if isinstance(entry, Path) and _is_read_only(entry):
            raise PermissionError(errno.EACCES, f"{entry.name} in it is not writable")
    _require_space(label, existing, needed_bytes)


def _given_path(run_dir: str) -> Path:
    if not run_dir.strip() or "://" in run_dir:
        raise cli.UsageError(f"--run_dir={run_dir} is not a folder of this machine. Give a path like runs/first.")
    return Path(run_dir)


def _require_run_or_empty(label: str, path: Path) -> None:
    """Refuses a folder with other people's files. Logs do not count: a shell makes them before the run starts."""
    found = [each.name for each in path.iterdir()] if path.is_dir() else []
    others = sorted(name for name in found if not name.startswith(".") and Path(name).suffix not in _LOGS)
    if others and _FILES_OF_A_RUN.isdisjoint(found):
        raise cli.UsageError(
            f"{label} is neither empty nor the folder of a run: {others[0]} is in it. "
            f"Give a new folder, like --run_dir={path / 'run-1'}."
        )


def _require_no_links(label: str, path: Path) -> None:
    """Refuses a run's folder in which something leads out of it, or is not what it should be.

    A folder from somebody else could have a link in place of a file, and what the run writes would replace the file
    that the link leads to.
    """
    for name in _FILES:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found = (path / name).lstat()
            if not stat.S_ISREG(found.st_mode):
                kind = safe_files.describe_irregular(found) or "a folder"
                raise cli.UsageError(
                    f"{label} is not used: {name} in it is {kind} and not a file. Remove it, or choose another folder "
                    "with --run_dir."
                )
    for name in _FOLDERS:
        with contextlib.suppress(FileNotFoundError):
            wrong = _find_irregular(path / name)
            if wrong:
                raise cli.UsageError(
                    f"{label} is not used: {wrong[0].relative_to(path)} in it is {wrong[1]}, and a run's folder has "
                    "files and folders only. Replace it by what it leads to, or choose another folder with --run_dir."
                )


def _find_irregular(path: Path) -> Optional[Tuple[Path, str]]:
    """Returns the first entry of a tree that is neither a file nor a folder, and what it is."""
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        return path, safe_files.describe_irregular(found) or "a file"
    pending = [path]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in sorted(entries, key=lambda each: each.name):
                kind = safe_files.describe_irregular(entry.stat(follow_symlinks=False))
                if kind:
                    return Path(entry.path), kind
                if entry.is_dir(follow_symlinks=False):
                    pending.append(Path(entry.path))
    return None


def _folder_name(name: str, now: datetime) -> str:
    return re.sub(r"[^\w.+-]+", "-", f"{name}-{now:%Y%m%d-%H%M%S}", flags=re.ASCII)


def _make_new(wanted: Path) -> Path:
    """Makes a folder with an unused name; two processes that start in the same second get different ones."""
    wanted.parent.mkdir(parents=True, exist_ok=True)
    path, number = wanted, 1
    while True:
        try:
            path.mkdir()
            return path
        except FileExistsError:
            number += 1
            path = wanted.with_name(f"{wanted.name}-{number}")


def _require_space(label: str, existing: Path, needed_bytes: int) -> None:
    free = shutil.disk_usage(existing).free
    if free < needed_bytes:
        raise cli.UsageError(
            f"{label} has {_megabytes(free)} free on its disk and the run needs {_megabytes(needed_bytes)}. "
            "Free some space, lower --keep_checkpoints or choose another folder with --run_dir."
        )


def _try_lock(label: str, path: Path) -> Optional[TextIO]:
    try:
        return safe_files.lock_file(path / _LOCK, wait=False)
    except BlockingIOError:
        holder = RunFolder(path).read_owner().strip() or "another process"
        raise cli.UsageError(
            f"{label} is in use by {holder}. Wait until it ends, or choose another folder with --run_dir."
        ) from None


def _lock_folder(label: str, path: Path) -> Optional[TextIO]:
    handle = _try_lock(label, path)
    if handle:
        handle.truncate(0)
        handle.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        handle.flush()
    return handle


def _is_read_only(path: Path) -> bool:
    return path.exists() and not os.access(path, os.W_OK)


def _read_error(path: Path) -> Optional[InstanceError]:
    try:
        head, _, text = safe_files.read_bytes(path).decode("utf-8", "surrogateescape").partition("\n\n")
        fields = dict(line.split(": ", 1) for line in head.splitlines())
        return InstanceError(
            instance=int(fields["instance"]),
            host=fields["host"],
            process=int(fields["process"]),
            time=datetime.fromisoformat(fields["time"]),
            # Version 0.1 wrote the opposite, `final`.
            transient=fields["transient"] == "yes" if "transient" in fields else fields["final"] == "no",
            text=text.rstrip("\n"),
            reported_by=int(fields["reported by"]) if "reported by" in fields else None,
            common=fields.get("common") == "yes",
        )
    except (OSError, ValueError, KeyError):
        return None


@contextlib.contextmanager
def _usage_error_on_failure(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise cli.UsageError(
            f"The run's folder {path} cannot be written ({_reason(error)}). Mend that and start the run again: it "
            "resumes from its last checkpoint."
        ) from error


def _now() -> datetime:
    return datetime.now(timezone.utc)


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


def render_json(value: Mapping[str, Any]) -> str:
    """Returns an object as the text of a JSON file."""
    return json.dumps(plain(value), indent=2) + "\n"


def parse_metrics(lines: Iterable[bytes]) -> List[MetricsRecord]:
    """Returns the records in some lines of metrics.jsonl; other lines are skipped."""
    found = []
    for line in lines:
        value = parse_object(line)
        if value is not None:
            with contextlib.suppress(RecordError):
                found.append(metrics_record(value))
    return found


def _step_of(line: bytes) -> Optional[int]:
    step = (parse_object(line) or {}).get("step")
    return step if type(step) is int else None
