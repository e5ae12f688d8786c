"""Who uses which IPU, and what each process does there: one snapshot of telemetry, processes and runs. No TensorFlow.

Nothing here writes, locks or signals what it looks at.
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
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from tf_ipu_dp.monitoring import devices
from tf_ipu_dp.runs import heartbeat

SCHEMA = 1
STALE_S = 5.0
RUNNING, STALE, GONE = "running", "stale", "gone"
_GONE_SHOWN_S = 10.0
_MOST_COMMAND = 4096
_STILL_S = 10.0  # without a step for so long: the last speed is over
_WAITS = {heartbeat.INPUT: "input", heartbeat.OTHERS: "collective", heartbeat.NOTHING: "nothing"}


@dataclasses.dataclass(frozen=True)
class Process:
    """A process that holds IPUs, or an instance of a run that does. From `run_dir` on: what our own runs tell."""

    pid: int
    user: Optional[str]
    command: Optional[str]
    elapsed_s: Optional[float]
    ipus: Tuple[int, ...]
    state: str  # running; stale: it has not told anything for so long; gone
    silent_s: Optional[float] = None  # since it last told anything
    run_dir: Optional[str] = None
    run: Optional[str] = None
    instance: Optional[int] = None
    instances: Optional[int] = None
    phase: Optional[str] = None
    step: Optional[int] = None
    planned_steps: Optional[int] = None
    samples_per_s: Optional[float] = None  # only while it makes steps
    waits_for: Optional[str] = None  # compiling, input, collective or nothing; None: not known
    changes: Tuple[Tuple[str, float], ...] = ()  # the last phases and when each began, in seconds since the epoch


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """All that is known at one moment."""

    time: float  # seconds since the epoch
    sdk: str
    ipus: Tuple[devices.Ipu, ...]
    processes: Tuple[Process, ...]
    note: Optional[str] = None  # why these are not the Poplar SDK's devices
    problem: Optional[str] = None  # why no device answers

    @property
    def free(self) -> Tuple[int, ...]:
        """Returns the ids of the IPUs that are known to be free."""
        return tuple(ipu.id for ipu in self.ipus if ipu.free and ipu.id is not None)

    def to_value(self) -> Dict[str, Any]:
        """Returns it for a program: typed, with the units in the keys, None for what is not known."""
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


class Watcher:
    """Makes snapshots, and remembers what it takes to tell what has gone since the last one."""

    def __init__(self, reader: devices.Reader, environ: Mapping[str, str] = os.environ) -> None:
        self._reader, self._environ = reader, environ
        self._commands: Dict[Tuple[int, Optional[str]], Optional[str]] = {}
        self._last: Dict[int, Process] = {}
        self._left: Dict[int, Tuple[Process, float]] = {}  # those that hold no IPU any more, and were alive
        self._gone: Dict[int, Tuple[Process, float]] = {}

    def look(self) -> Snapshot:
        """Returns what is the case now."""
        found = self._reader.look()
        held: Dict[int, List[devices.Ipu]] = {}
        for ipu in found.ipus:
            if ipu.pid:
                held.setdefault(ipu.pid, []).append(ipu)
        processes = {pid: self._describe(pid, ipus, found.time) for pid, ipus in held.items()}
        for process in self._without_ipus(list(processes.values()), found.time):
            processes.setdefault(process.pid, process)
        if found.problem is None:
            self._note_gone(processes, found.time)
        shown = [*processes.values(), *(process for process, _ in self._gone.values())]
        return Snapshot(found.time, self._reader.name, found.ipus, tuple(shown), self._reader.note, found.problem)

    def _describe(self, pid: int, ipus: Sequence[devices.Ipu], now: float) -> Process:
        first = ipus[0]
        command = self._command(pid, first)
        status = heartbeat.find(pid, self._environ)
        ages = [ipu.heartbeat_age_s for ipu in ipus if ipu.heartbeat_age_s is not None]
        started = _seconds(first.start_time)
        return _judged(
            Process(
                pid=pid,
                user=first.user,
                command=command,
                elapsed_s=None if started is None else max(0.0, now - started),
                ipus=tuple(ipu.id for ipu in ipus if ipu.id is not None),
                state=RUNNING,
                silent_s=max(ages, default=None),
            ),
            status,
            now,
        )

    def _command(self, pid: int, ipu: devices.Ipu) -> Optional[str]:
        key = (pid, ipu.start_time)
        if key not in self._commands:
            self._commands = {each: text for each, text in self._commands.items() if each[0] in self._last}
            self._commands[key] = read_command(pid, _seconds(ipu.start_time)) or ipu.executable
        return self._commands[key]

    def _without_ipus(self, processes: Sequence[Process], now: float) -> List[Process]:
        """Returns the instances on this host, of the runs that are seen, which hold no IPU: not yet, or no more."""
        host = socket.gethostname()
        known = {process.pid for process in processes}
        found = []
        for folder in sorted({process.run_dir for process in processes if process.run_dir}):
            for status in _read_run(folder):
                if status.host == host and status.pid not in known:
                    state = RUNNING if is_alive(status.pid) else GONE
                    command = read_command(status.pid, None) if state == RUNNING else None
                    found.append(_judged(Process(status.pid, None, command, None, (), state), status, now))
        return found

    def _note_gone(self, processes: Mapping[int, Process], now: float) -> None:
        left = {pid: (process, now) for pid, process in self._last.items() if process.state != GONE}
        left = {pid: each for pid, each in {**self._left, **left}.items() if pid not in processes}
        alive = {pid for pid in left if is_alive(pid)}
        for pid in left.keys() - alive:
            gone = dataclasses.replace(left[pid][0], state=GONE, ipus=(), samples_per_s=None, waits_for=None)
            self._gone[pid] = (gone, now)
        self._left = {pid: left[pid] for pid in alive if now - left[pid][1] < _GONE_SHOWN_S}
        self._gone = {
            pid: (process, since)
            for pid, (process, since) in self._gone.items()
            if pid not in processes and now - since < _GONE_SHOWN_S
        }
        self._last = dict(processes)


def is_alive(pid: int) -> bool:
    """Whether a process of this machine has not ended; one that only waits to be reaped has."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    with contextlib.suppress(OSError, IndexError):
        return _stat(pid)[0] not in ("Z", "X")
    return True


def is_under_way(status: heartbeat.Status, now: float) -> bool:
    """Whether an instance has not ended: its process is there or, on another host, was heard of lately.

    A process that began after the status was written is another one of the same number.
    """
    if status.host != socket.gethostname():
        return now - status.time <= STALE_S
    if not is_alive(status.pid):
        return False
    with contextlib.suppress(OSError, ValueError, IndexError):
        return _started(status.pid) <= status.time + STALE_S
    return True


def read_command(pid: int, attached: Optional[float]) -> Optional[str]:
    """Returns a process's command line, if this machine shows it, and if the process is not younger than `attached`.

    In a container the same number may be another process.
    """
    folder = Path(f"/proc/{pid}")
    try:
        if attached is not None and _started(pid) > attached + STALE_S:
            return None
        words = (folder / "cmdline").read_bytes()[:_MOST_COMMAND].rstrip(b"\0").split(b"\0")
    except (OSError, ValueError, IndexError):
        return None
    return b" ".join(words).decode("utf-8", "backslashreplace") or None


def utc(seconds: float) -> str:
    """Returns a moment as ISO 8601 text."""
    moment = datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _judged(process: Process, status: Optional[heartbeat.Status], now: float) -> Process:
    """Adds what the process's run tells, and how long it has told nothing."""
    silences = [] if process.silent_s is None else [process.silent_s]
    if status is not None:
        silences.append(max(0.0, now - status.time))
    silent_s = max(silences, default=None)
    state = process.state
    if state == RUNNING and silent_s is not None and silent_s > STALE_S:
        state = STALE
    process = dataclasses.replace(process, state=state, silent_s=silent_s)
    if status is None:
        return process
    folder = _folder(status)
    waits = "compiling" if status.phase == "compiling" else _WAITS.get(str(status.waits_for))
    rate = status.samples_per_s
    moves = state == RUNNING and status.phase == "training" and status.still_s <= _STILL_S
    told = moves and type(rate) in (int, float) and math.isfinite(rate or 0.0)
    return dataclasses.replace(
        process,
        run_dir=str(folder),
        run=folder.name,
        instance=status.instance,
        instances=status.instances,
        phase=status.phase,
        step=status.step,
        planned_steps=status.planned_steps or None,
        samples_per_s=rate if told else None,
        waits_for=waits if state == RUNNING else None,
        changes=status.changes,
    )


def _read_run(folder: str) -> List[heartbeat.Status]:
    try:
        return heartbeat.read_run(Path(folder))
    except (OSError, ValueError):  # it is gone, or no path at all
        return []


def _folder(status: heartbeat.Status) -> Path:
    """Returns the run's folder; its process may have been started in another directory than this one."""
    folder = Path(status.run_dir)
    if not folder.is_absolute() and status.host == socket.gethostname():
        with contextlib.suppress(OSError):
            folder = Path(os.readlink(f"/proc/{status.pid}/cwd")) / folder
    return folder


def _started(pid: int) -> float:
    """Returns when a process began, in seconds since the epoch."""
    since_boot = int(_stat(pid)[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot


def _stat(pid: int) -> List[str]:
    """Returns what the kernel tells of a process after its name, which may contain anything."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()


def _seconds(text: Optional[str]) -> Optional[float]:
    """Returns the seconds since the epoch of a telemetry's moment."""
    with contextlib.suppress(ValueError):
        moment = datetime.datetime.strptime(text or "", "%Y-%m-%dT%H:%M:%SZ")
        return moment.replace(tzinfo=datetime.timezone.utc).timestamp()
    return None
