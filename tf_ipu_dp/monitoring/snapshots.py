"""Which process uses which IPU, and its status: one snapshot of devices, processes and runs. No TensorFlow.

Reading a snapshot writes nothing, takes no lock and sends no signal.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import math
import os
import socket
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from tf_ipu_dp import sdk
from tf_ipu_dp.monitoring import device_reader, devices, process_info
from tf_ipu_dp.runs import heartbeat

SCHEMA = 1
STALE_S = 5.0
RUNNING, STALE, GONE = "running", "stale", "gone"
_GONE_SHOWN_S = 10.0
_STALLED_S = 10.0  # after this time without a step, the last throughput is outdated
_WAITS = {heartbeat.INPUT: "input", heartbeat.OTHERS: "collective", heartbeat.NOTHING: "nothing"}


@dataclasses.dataclass(frozen=True)
class Process:
    """A process that holds IPUs, or an instance of a run that does. From `run_dir` on: tf_ipu_dp runs only."""

    pid: int
    user: Optional[str]
    command: Optional[str]
    elapsed_s: Optional[float]
    ipus: Tuple[int, ...]
    state: str  # running, stale (no heartbeat for more than STALE_S) or gone
    silent_s: Optional[float] = None  # since the last heartbeat
    run_dir: Optional[str] = None
    run: Optional[str] = None
    instance: Optional[int] = None
    instances: Optional[int] = None
    phase: Optional[str] = None
    step: Optional[int] = None
    planned_steps: Optional[int] = None
    samples_per_s: Optional[float] = None  # only while steps are made
    waits_for: Optional[str] = None  # compiling, input, collective or nothing; None: not known
    changes: Tuple[Tuple[str, float], ...] = ()  # the last phases and when each began, in seconds since the epoch


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """IPUs and processes at one moment."""

    time: float  # seconds since the epoch
    sdk: str
    ipus: Tuple[devices.Ipu, ...]
    processes: Tuple[Process, ...]
    note: Optional[str] = None  # why these are not the Poplar SDK's devices
    problem: Optional[str] = None  # why no device answers

    @property
    def free(self) -> Tuple[int, ...]:
        """Returns the ids of the IPUs that are certainly free."""
        return tuple(ipu.id for ipu in self.ipus if ipu.free and ipu.id is not None)

    @property
    def emulated(self) -> bool:
        return sdk.is_emulated(self.sdk)

    def to_json(self) -> Dict[str, Any]:
        """Returns the value for `--json`: typed, with units in the keys, None for what is not known."""
        return {
            "schema": SCHEMA,
            "time": utc(self.time),
            "sdk": self.sdk,
            "note": self.note,
            "problem": self.problem,
            "ipus": [{**vars(ipu), "other": dict(ipu.other)} for ipu in self.ipus],
            "processes": [
                {
                    **vars(process),
                    "ipus": list(process.ipus),
                    "changes": [{"phase": phase, "time": utc(began)} for phase, began in process.changes],
                }
                for process in self.processes
            ],
        }


class SnapshotReader:
    """Reads snapshots, and compares each with the last one to find processes that have ended."""

    def __init__(self, reader: device_reader.DeviceReader, environ: Mapping[str, str] = os.environ) -> None:
        self._reader, self._environ = reader, environ
        self._commands: Dict[Tuple[int, Optional[str]], Optional[str]] = {}
        self._last: Dict[int, Process] = {}
        self._released: Dict[int, Tuple[Process, float]] = {}  # alive, but without an IPU since this time
        self._gone: Dict[int, Tuple[Process, float]] = {}

    def read(self) -> Snapshot:
        """Returns the current state of all IPUs and of the processes that use them."""
        reading = self._reader.read()
        ipus_by_pid: Dict[int, List[devices.Ipu]] = {}
        for ipu in reading.ipus:
            if ipu.pid:
                ipus_by_pid.setdefault(ipu.pid, []).append(ipu)
        processes = {pid: self._describe(pid, ipus, reading.time) for pid, ipus in ipus_by_pid.items()}
        for process in _read_instances_without_ipus(list(processes.values()), reading.time):
            processes.setdefault(process.pid, process)
        if reading.problem is None:
            self._update_gone(processes, reading.time)
        shown = [*processes.values(), *(process for process, _ in self._gone.values())]
        return Snapshot(
            reading.time, self._reader.sdk_name, reading.ipus, tuple(shown), self._reader.note, reading.problem
        )

    def _describe(self, pid: int, ipus: Sequence[devices.Ipu], now: float) -> Process:
        first = ipus[0]
        ages = [ipu.heartbeat_age_s for ipu in ipus if ipu.heartbeat_age_s is not None]
        started = _parse_time(first.start_time)
        process = Process(
            pid=pid,
            user=first.user,
            command=self._read_command(pid, first),
            elapsed_s=None if started is None else max(0.0, now - started),
            ipus=tuple(ipu.id for ipu in ipus if ipu.id is not None),
            state=RUNNING,
            silent_s=max(ages, default=None),
        )
        return _add_run_status(process, heartbeat.find(pid, self._environ), now)

    def _read_command(self, pid: int, ipu: devices.Ipu) -> Optional[str]:
        key = (pid, ipu.start_time)
        if key not in self._commands:
            self._commands = {each: text for each, text in self._commands.items() if each[0] in self._last}
            self._commands[key] = process_info.read_command(pid, _parse_time(ipu.start_time)) or ipu.executable
        return self._commands[key]

    def _update_gone(self, processes: Mapping[int, Process], now: float) -> None:
        """Finds processes that have ended since the last snapshot; they are shown for some more seconds."""
        missing = {pid: (process, now) for pid, process in self._last.items() if process.state != GONE}
        missing = {pid: each for pid, each in {**self._released, **missing}.items() if pid not in processes}
        alive = {pid for pid in missing if process_info.is_alive(pid)}
        for pid in missing.keys() - alive:
            gone = dataclasses.replace(missing[pid][0], state=GONE, ipus=(), samples_per_s=None, waits_for=None)
            self._gone[pid] = (gone, now)
        self._released = {pid: missing[pid] for pid in alive if now - missing[pid][1] < _GONE_SHOWN_S}
        self._gone = {
            pid: (process, since)
            for pid, (process, since) in self._gone.items()
            if pid not in processes and now - since < _GONE_SHOWN_S
        }
        self._last = dict(processes)


def is_instance_running(status: heartbeat.Status, now: float) -> bool:
    """Whether an instance has not ended: its process is alive or, on another host, had a recent heartbeat."""
    if status.host != socket.gethostname():
        return now - status.time <= STALE_S
    if not process_info.is_alive(status.pid):
        return False
    with contextlib.suppress(OSError, ValueError, IndexError):
        return process_info.started_before(status.pid, status.time)
    return True


def utc(seconds: float) -> str:
    """Returns a time since the epoch as ISO 8601 text."""
    moment = datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _read_instances_without_ipus(processes: Sequence[Process], now: float) -> List[Process]:
    """Returns instances on this host, of the runs of these processes, that hold no IPU yet or no longer."""
    host = socket.gethostname()
    known = {process.pid for process in processes}
    found = []
    for folder in sorted({process.run_dir for process in processes if process.run_dir}):
        for status in _read_run(folder):
            if status.host == host and status.pid not in known:
                state = RUNNING if process_info.is_alive(status.pid) else GONE
                command = process_info.read_command(status.pid, None) if state == RUNNING else None
                found.append(_add_run_status(Process(status.pid, None, command, None, (), state), status, now))
    return found


def _add_run_status(process: Process, status: Optional[heartbeat.Status], now: float) -> Process:
    """Adds what the process's run reports, and how long ago its last heartbeat was."""
    ages = [] if process.silent_s is None else [process.silent_s]
    if status is not None:
        ages.append(max(0.0, now - status.time))
    silent_s = max(ages, default=None)
    state = process.state
    if state == RUNNING and silent_s is not None and silent_s > STALE_S:
        state = STALE
    process = dataclasses.replace(process, state=state, silent_s=silent_s)
    if status is None:
        return process
    folder = _run_folder(status)
    waits_for = "compiling" if status.phase == "compiling" else _WAITS.get(str(status.waits_for))
    rate = status.samples_per_s
    makes_steps = state == RUNNING and status.phase == "training" and status.still_s <= _STALLED_S
    has_rate = makes_steps and type(rate) in (int, float) and math.isfinite(rate or 0.0)
    return dataclasses.replace(
        process,
        run_dir=str(folder),
        run=folder.name,
        instance=status.instance,
        instances=status.instances,
        phase=status.phase,
        step=status.step,
        planned_steps=status.planned_steps or None,
        samples_per_s=rate if has_rate else None,
        waits_for=waits_for if state == RUNNING else None,
        changes=status.changes,
    )


def _read_run(folder: str) -> List[heartbeat.Status]:
    try:
        return heartbeat.read_run(Path(folder))
    except (OSError, ValueError):  # the folder is gone, or the text is not a path
        return []


def _run_folder(status: heartbeat.Status) -> Path:
    """Returns the run's folder as an absolute path if possible; it may be relative to the process's directory."""
    folder = Path(status.run_dir)
    if not folder.is_absolute() and status.host == socket.gethostname():
        with contextlib.suppress(OSError):
            folder = Path(os.readlink(f"/proc/{status.pid}/cwd")) / folder
    return folder


def _parse_time(text: Optional[str]) -> Optional[float]:
    """Returns the seconds since the epoch of an IPU's start time."""
    with contextlib.suppress(ValueError):
        moment = datetime.datetime.strptime(text or "", "%Y-%m-%dT%H:%M:%SZ")
        return moment.replace(tzinfo=datetime.timezone.utc).timestamp()
    return None
