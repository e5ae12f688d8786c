"""Heartbeats: the status of each instance of a run, written to a small file once a second. Standard library only.

The files are in the run's folder, which all hosts share; a pointer to each is in the user's runtime directory, so that
a monitor finds the run of a process. `stall_watch` watches them for stalls.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

from tf_ipu_dp.runs import safe_files
from tf_ipu_dp.runs.json_files import read_object
from tf_ipu_dp.runs.records import Record, RecordError

PERIOD_S = 1.0
PHASES = ("starting", "compiling", "training", "evaluating", "saving", "exporting")
INPUT, OTHERS, NOTHING = "input", "other instances", "nothing"
_STATUS = "status"
_NAME = re.compile(r"instance-[0-9]+\.json")
_MAX_CHANGES = 16
_MAX_RATE = 1e15
_MAX_SECONDS = 1e10  # about three hundred years: no clock shows more
# No heartbeat is longer; a longer file is something else.
_MAX_BYTES = 1 << 16


@dataclasses.dataclass(frozen=True)
class Status(Record):
    """One instance at one moment: the content of a heartbeat."""

    run_dir: str
    instance: int
    instances: int
    host: str
    pid: int
    phase: str = "starting"
    step: int = 0
    planned_steps: int = 0
    samples_per_s: Optional[float] = None  # recent, of the whole job
    waits_for: Optional[str] = None  # input, other instances or nothing; None: not known
    still_s: float = 0.0  # since the phase or the step last changed
    time: float = 0.0  # when this was written, in seconds since the epoch
    changes: Tuple[Tuple[str, float], ...] = ()  # the last phases and when each began, in seconds since the epoch
    loss: Optional[float] = None  # of the last training record; None: not known, or not finite
    eta_s: Optional[float] = None  # expected training left after the last step, validations not counted

    def name(self) -> str:
        """Returns `instance 1 on host b (pid 42)`."""
        return f"instance {self.instance} on {self.host} (pid {self.pid})"

    def place(self) -> str:
        """Returns `training after step 40, waiting for input`."""
        waiting = f", waiting for {self.waits_for}" if self.waits_for not in (None, NOTHING) else ""
        return f"{self.phase} after step {self.step:,}{waiting}"

    @classmethod
    def _upgrade(cls, value: Dict[str, Any], schema: int) -> Dict[str, Any]:
        """Drops phases without a plausible time: they are only displayed."""
        changes = value.get("changes")
        pairs = [each for each in changes if isinstance(each, list)] if isinstance(changes, list) else []
        value["changes"] = [
            pair for pair in pairs if len(pair) == 2 and isinstance(pair[0], str) and _is_time(pair[1])
        ][-_MAX_CHANGES:]
        return super()._upgrade(value, schema)


class StatusReporter:
    """Writes the heartbeat of this instance once a second. Any thread may call its methods."""

    def __init__(
        self,
        folder: Path,
        *,
        instance: int = 0,
        instances: int = 1,
        planned_steps: int = 0,
        waits_for: Callable[[], Optional[str]] = lambda: None,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._status = Status(
            str(folder.resolve()), instance, instances, socket.gethostname(), os.getpid(), planned_steps=planned_steps
        )
        self._status = dataclasses.replace(self._status, changes=((self._status.phase, time.time()),))
        self._path, self._waits_for, self._environ = path_of(folder, instance), waits_for, environ
        self._progress_at = time.monotonic()
        self._guard = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name="heartbeat", daemon=True)
        self.watched = False  # whether the current phase has a known length, so that no progress means a stall

    def start(self) -> None:
        """Writes the first heartbeat, and from then on one each second."""
        self._write_pointer()
        self.write()
        self._thread.start()

    def update(
        self, phase: str, step: Optional[int] = None, samples_per_s: Optional[float] = None, *, watched: bool = True
    ) -> None:
        """Records progress. Phases of unknown length, like compiling, are not watched."""
        with self._guard:
            now = self._status
            changes = now.changes if phase == now.phase else (*now.changes, (phase, time.time()))
            self._status = dataclasses.replace(
                now,
                phase=phase,
                changes=changes[-_MAX_CHANGES:],
                step=now.step if step is None else step,
                samples_per_s=now.samples_per_s if samples_per_s is None else samples_per_s,
            )
            self._progress_at = time.monotonic()
            self.watched = watched

    def report_training(self, loss: Optional[float], eta_s: Optional[float]) -> None:
        """Sets the loss of the last training record, and how long training is expected to go on."""
        with self._guard:
            self._status = dataclasses.replace(self._status, loss=loss, eta_s=eta_s)

    def discount_pause(self, seconds: float) -> None:
        """Excludes seconds in which this process was stopped from the time without progress."""
        with self._guard:
            self._progress_at += seconds

    def stop(self) -> None:
        """Removes the files: the run has ended."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join(2 * PERIOD_S)
        self.remove()

    def remove(self) -> None:
        """Removes the files, also from another thread while this process ends."""
        self._stopped.set()
        for path in (self._path, _pointer(self._environ, self._status.pid)):
            with contextlib.suppress(OSError):
                if not path.parent.is_symlink():
                    path.unlink()
        with contextlib.suppress(OSError):
            self._path.parent.rmdir()

    def status(self) -> Status:
        """Returns the current status of this instance."""
        with self._guard:
            still_s = time.monotonic() - self._progress_at
            now = self._status
        return dataclasses.replace(now, waits_for=self._waits_for(), still_s=still_s, time=time.time())

    def write(self) -> None:
        """Writes a heartbeat now. Errors are ignored: a run does not fail because of its heartbeat."""
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if not self._path.parent.is_symlink():
                safe_files.replace(self._path, json.dumps(self.status().to_json()))

    def _repeat(self) -> None:
        while not self._stopped.wait(PERIOD_S):
            self.write()

    def _write_pointer(self) -> None:
        # Without XDG_RUNTIME_DIR it is in the temporary directory, where anybody may have made a folder of that name.
        # Then there is no pointer: a monitor does not find the run by its process, only by --run.
        with contextlib.suppress(OSError):
            pointer = _pointer(self._environ, self._status.pid)
            safe_files.make_private_folder(pointer.parent)
            safe_files.replace(pointer, json.dumps({"status": str(self._path.resolve())}))


def read(path: Path) -> Optional[Status]:
    """Returns the heartbeat in a file; None if it is missing or not valid."""
    try:
        status = Status.from_json(read_object(path, _MAX_BYTES))
    except RecordError:
        return None
    times = (status.still_s, status.time, *(() if status.eta_s is None else (status.eta_s,)))
    rates = (status.samples_per_s or 0.0, status.loss or 0.0)
    counts = (status.instance, status.instances, status.pid, status.step, status.planned_steps)
    is_plausible = all(map(_is_time, times)) and all(abs(rate) <= _MAX_RATE for rate in rates)
    return status if is_plausible and min(counts) >= 0 and "\0" not in status.run_dir else None


def read_run(folder: Path) -> List[Status]:
    """Returns the last heartbeats of a run's instances, in their order."""
    found = (read(path) for path in safe_files.list_folder(folder / _STATUS) if _NAME.fullmatch(path.name))
    return sorted((status for status in found if status), key=lambda status: status.instance)


def find(pid: int, environ: Mapping[str, str] = os.environ) -> Optional[Status]:
    """Returns the heartbeat of a process of this user and machine, if it belongs to a run."""
    pointer = _pointer(environ, pid)
    try:
        safe_files.require_private_folder(pointer.parent)
    except OSError:
        return None
    value = read_object(pointer, _MAX_BYTES)
    path = value.get("status") if value else None
    status = read(Path(path)) if isinstance(path, str) else None
    return status if status and status.pid == pid else None


def path_of(folder: Path, instance: int) -> Path:
    """Returns the file of an instance's heartbeat."""
    return folder / _STATUS / f"instance-{instance:03d}.json"


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and -_MAX_SECONDS < value < _MAX_SECONDS


def _pointer(environ: Mapping[str, str], pid: int) -> Path:
    base = environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(base) / f"tf_ipu_dp-{os.getuid()}" / f"{pid}.json"
