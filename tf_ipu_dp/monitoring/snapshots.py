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
import time
from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

from tf_ipu_dp import sdk
from tf_ipu_dp.monitoring import device_reader, devices, process_info
from tf_ipu_dp.runs import heartbeat
from tf_ipu_dp.runs.records import Verdict

SCHEMA = 1
STALE_S = 5.0
RUNNING, STALE, GONE = "running", "stale", "gone"
_GONE_SHOWN_S = 10.0
_STALLED_S = 10.0  # after this time without a step, the last throughput is outdated
_MIN_CPU_SPAN_S = 0.05  # CPU time is counted in hundredths of a second
_WAITS = {heartbeat.INPUT: "input", heartbeat.OTHERS: "collective", heartbeat.NOTHING: "nothing"}


_Key = Tuple[Optional[str], int]  # of a process: its host and its number there


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
    host: Optional[str] = None  # where it runs; a process id is unique only there
    loss: Optional[float] = None  # of the last training record
    eta_s: Optional[float] = None  # expected training left, validations not counted
    cpu_pct: Optional[float] = None  # of one core, since the last reading; this host only
    memory_gib: Optional[float] = None  # resident; this host only

    @property
    def key(self) -> _Key:
        """Returns what tells this process from all others."""
        return (self.host, self.pid)

    @property
    def done_pct(self) -> Optional[float]:
        """Returns the share of the planned steps that are done."""
        if self.step is None or not self.planned_steps:
            return None
        return min(100.0 * self.step / self.planned_steps, 100.0)

    def to_json(self) -> Dict[str, Any]:
        """Returns the value for `--json`."""
        changes = [{"phase": phase, "time": utc(began)} for phase, began in self.changes]
        return {**vars(self), "ipus": list(self.ipus), "done_pct": self.done_pct, "changes": changes}


@dataclasses.dataclass(frozen=True)
class RunProgress:
    """One run over all of its instances and hosts. Values are those of its first instance that is shown."""

    run_dir: str
    run: Optional[str]
    hosts: Tuple[str, ...]
    leader: Process
    verdict: Optional[Verdict]  # None: not known yet

    def to_json(self) -> Dict[str, Any]:
        """Returns the value for `--json`."""
        names = (
            "instances", "state", "phase", "step", "planned_steps", "done_pct", "eta_s", "samples_per_s", "loss",
        )  # fmt: skip
        return {
            "run_dir": self.run_dir,
            "run": self.run,
            "hosts": list(self.hosts),
            **{name: getattr(self.leader, name) for name in names},
            "verdict": None if self.verdict is None else self.verdict.to_json(),
        }


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """IPUs and processes at one moment."""

    time: float  # seconds since the epoch
    sdk: str
    ipus: Tuple[devices.Ipu, ...]
    processes: Tuple[Process, ...]
    note: Optional[str] = None  # why these are not the Poplar SDK's devices
    problem: Optional[str] = None  # why no device answers
    verdicts: Mapping[str, Verdict] = dataclasses.field(default_factory=dict)  # the bottlenecks of runs, by folder

    @property
    def runs(self) -> Tuple[RunProgress, ...]:
        """Returns the runs of the processes, in the order in which they are shown."""
        members: Dict[str, List[Process]] = {}
        for process in self.processes:
            if process.run_dir:
                members.setdefault(process.run_dir, []).append(process)
        found = []
        for folder, processes in members.items():
            leader = min(processes, key=lambda each: (each.state == GONE, each.instance or 0))
            hosts = tuple(dict.fromkeys(each.host for each in processes if each.host))
            found.append(RunProgress(folder, leader.run, hosts, leader, self.verdicts.get(folder)))
        return tuple(found)

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
            "processes": [process.to_json() for process in self.processes],
            "runs": [run.to_json() for run in self.runs],
        }


class SnapshotReader:
    """Reads snapshots, and compares each with the last one to find processes that have ended."""

    def __init__(
        self,
        reader: device_reader.DeviceReader,
        environ: Mapping[str, str] = os.environ,
        folders: Sequence[Path] = (),
    ) -> None:
        """`folders` are runs whose instances are shown even if none of them is on this host."""
        self._reader, self._environ, self._folders = reader, environ, folders
        self._commands: Dict[Tuple[int, Optional[str]], Optional[str]] = {}
        self._last: Dict[_Key, Process] = {}
        self._released: Dict[_Key, Tuple[Process, float]] = {}  # alive, but without an IPU since this time
        self._gone: Dict[_Key, Tuple[Process, float]] = {}
        self._host_use: Dict[_Key, Tuple[float, process_info.HostUse]] = {}

    def read(self) -> Snapshot:
        """Returns the current state of all IPUs and of the processes that use them."""
        reading = self._reader.read()
        ipus_by_pid: Dict[int, List[devices.Ipu]] = {}
        for ipu in reading.ipus:
            if ipu.pid:
                ipus_by_pid.setdefault(ipu.pid, []).append(ipu)
        holding = [self._describe(pid, ipus, reading.time) for pid, ipus in ipus_by_pid.items()]
        processes = {process.key: process for process in holding}
        for process in _read_other_instances(holding, self._folders, reading.time):
            processes.setdefault(process.key, process)
        if reading.problem is None:
            self._update_gone(processes, reading.time)
        shown = [*processes.values(), *(process for process, _ in self._gone.values())]
        snapshot = Snapshot(
            reading.time, self._reader.sdk_name, reading.ipus, tuple(shown), self._reader.note, reading.problem
        )
        return self.measure_host_use(snapshot)

    def measure_host_use(self, snapshot: Snapshot) -> Snapshot:
        """Returns the snapshot with the memory of its processes, and their CPU use since the last call."""
        here, measured = socket.gethostname(), {}
        processes = []
        for process in snapshot.processes:
            now = time.monotonic()
            use = None
            if process.host == here and process.state != GONE:
                attached = None if process.elapsed_s is None else snapshot.time - process.elapsed_s
                use = process_info.read_host_use(process.pid, attached)
            cpu_pct = None
            if use is not None:
                measured[process.key] = (now, use)
                since, before = self._host_use.get(process.key, (now, use))
                if now - since >= _MIN_CPU_SPAN_S:
                    cpu_pct = 100 * max(use.cpu_s - before.cpu_s, 0.0) / (now - since)
            memory_gib = None if use is None else use.memory_gib
            processes.append(dataclasses.replace(process, cpu_pct=cpu_pct, memory_gib=memory_gib))
        self._host_use = measured
        return dataclasses.replace(snapshot, processes=tuple(processes))

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
            host=socket.gethostname(),
        )
        return _add_run_status(process, heartbeat.find(pid, self._environ), now)

    def _read_command(self, pid: int, ipu: devices.Ipu) -> Optional[str]:
        key = (pid, ipu.start_time)
        if key not in self._commands:
            known = {each for _, each in self._last}
            self._commands = {each: text for each, text in self._commands.items() if each[0] in known}
            self._commands[key] = process_info.read_command(pid, _parse_time(ipu.start_time)) or ipu.executable
        return self._commands[key]

    def _update_gone(self, processes: Mapping[_Key, Process], now: float) -> None:
        """Finds processes that have ended since the last snapshot; they are shown for some more seconds."""
        missing = {key: (process, now) for key, process in self._last.items() if process.state != GONE}
        missing = {key: each for key, each in {**self._released, **missing}.items() if key not in processes}
        alive = {key for key in missing if key[0] == socket.gethostname() and process_info.is_alive(key[1])}
        for key in missing.keys() - alive:
            gone = dataclasses.replace(missing[key][0], state=GONE, ipus=(), samples_per_s=None, waits_for=None)
            self._gone[key] = (gone, now)
        self._released = {key: missing[key] for key in alive if now - missing[key][1] < _GONE_SHOWN_S}
        self._gone = {
            key: (process, since)
            for key, (process, since) in self._gone.items()
            if key not in processes and now - since < _GONE_SHOWN_S
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


def _read_other_instances(processes: Sequence[Process], folders: Iterable[Path], now: float) -> List[Process]:
    """Returns the other instances of the runs of these processes and in these folders, wherever they run.

    They are on other hosts, or hold no IPU yet or no longer.
    """
    here = socket.gethostname()
    known = {process.key for process in processes}
    sizes = {process.run_dir: process.instances for process in processes if process.run_dir}
    found = []
    for folder in sorted({*filter(None, sizes), *(str(folder.resolve()) for folder in folders)}):
        statuses = _read_run(folder)
        newest = max((status.time for status in statuses), default=0.0)
        size = sizes.get(folder) or next((each.instances for each in statuses if each.time == newest), 0)
        for status in statuses:
            # A file that an earlier and larger start of the run has left behind is not an instance.
            if (status.host, status.pid) in known or status.instances != size:
                continue
            is_here = status.host == here
            state = RUNNING if not is_here or is_instance_running(status, now) else GONE
            command = process_info.read_command(status.pid, None) if is_here and state == RUNNING else None
            process = Process(status.pid, None, command, None, (), state, host=status.host)
            found.append(dataclasses.replace(_add_run_status(process, status, now), run_dir=folder))
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
        loss=status.loss,
        eta_s=_time_left(status) if state == RUNNING else None,
    )


def _time_left(status: heartbeat.Status) -> Optional[float]:
    """Returns the expected rest of the training; it passes only while the run trains.

    None once it has passed without a step: the run does not do what was expected of it.
    """
    if status.phase != "training" or status.eta_s is None:
        return status.eta_s
    left = status.eta_s - status.still_s
    return max(left, 0.0) if left >= 0.0 or status.still_s <= _STALLED_S else None


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
