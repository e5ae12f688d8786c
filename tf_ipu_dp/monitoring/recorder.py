"""Snapshots as JSON lines: a recorder that appends them, and a reader that returns typed samples. No TensorFlow.

The first line describes the IPUs; each other line is a sample of values that change. A truncated line is skipped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, TextIO, Tuple

from tf_ipu_dp import cli, sdk
from tf_ipu_dp.monitoring import devices
from tf_ipu_dp.monitoring.snapshots import SCHEMA, Snapshot, utc
from tf_ipu_dp.runs import json_files, safe_files
from tf_ipu_dp.runs.records import Verdict

_KIND = "tf_ipu_dp recording"
# What is beyond was not measured: charts would have no room for it.
_MAX_VALUE = 1e15
_MAX_TIME_S = 1e10
_CHANGING = (
    "id", "utilisation_pct", "session_utilisation_pct", "input_wait_pct", "power_w", "board_power_w", "die_temp_c",
    "board_temp_c", "error_state", "host_link_errors", "link_errors", "pid", "problem",
)  # fmt: skip


ProcessKey = Tuple[Optional[str], int]  # host, which older recordings lack, and process id


@dataclasses.dataclass(frozen=True)
class RecordedIpu:
    """An IPU in the first line."""

    id: Optional[int]
    board_serial: Optional[str]


@dataclasses.dataclass(frozen=True)
class IpuSample:
    """An IPU in one sample."""

    id: Optional[int]
    pid: Optional[int]
    utilisation_pct: Optional[float]
    power_w: Optional[float]
    board_power_w: Optional[float]


@dataclasses.dataclass(frozen=True)
class ProcessSample:
    """A process in one sample."""

    pid: int
    state: Optional[str]
    ipus: Tuple[int, ...]
    user: Optional[str]
    command: Optional[str]
    run: Optional[str]
    run_dir: str
    instance: Optional[int]
    step: Optional[int]
    phase: Optional[str]
    host: Optional[str] = None
    samples_per_s: Optional[float] = None
    loss: Optional[float] = None

    @property
    def key(self) -> ProcessKey:
        """Returns what tells this process from all others."""
        return (self.host, self.pid)


@dataclasses.dataclass(frozen=True)
class PhaseChange:
    """The start of a phase between two samples."""

    pid: int
    phase: str
    time: float
    host: Optional[str] = None

    @property
    def key(self) -> ProcessKey:
        return (self.host, self.pid)


@dataclasses.dataclass(frozen=True)
class CheckpointSave:
    """A checkpoint that a process saved between two samples."""

    pid: int
    time: float
    host: Optional[str] = None

    @property
    def key(self) -> ProcessKey:
        return (self.host, self.pid)


@dataclasses.dataclass(frozen=True)
class RunVerdict:
    """The bottleneck of a run at one moment."""

    run_dir: str
    sentence: str


@dataclasses.dataclass(frozen=True)
class Sample:
    """One line of a recording. Times are seconds since the epoch."""

    time: float
    ipus: Tuple[IpuSample, ...]
    processes: Tuple[ProcessSample, ...]
    saves: Tuple[CheckpointSave, ...]
    changes: Tuple[PhaseChange, ...]
    verdicts: Tuple[RunVerdict, ...] = ()  # those that have changed since the last sample


@dataclasses.dataclass(frozen=True)
class Recording:
    """A recording of two or more samples."""

    path: Path
    sdk: str
    ipus: Tuple[RecordedIpu, ...]
    samples: Tuple[Sample, ...]
    period_s: float

    @property
    def emulated(self) -> bool:
        return sdk.is_emulated(self.sdk)


class Recorder:
    """Writes a recording. A file that cannot be written is a `cli.UsageError` that names it."""

    def __init__(self, path: Path, period_s: float) -> None:
        self.path, self.samples, self._period_s = path, 0, period_s
        self._last_save: Dict[str, float] = {}
        self._known_changes: Dict[ProcessKey, Tuple[Tuple[str, float], ...]] = {}
        self._known_verdicts: Dict[str, Verdict] = {}
        try:
            self._file: TextIO = path.open("x", encoding="utf-8")
        except FileExistsError:
            raise cli.UsageError(
                f"--record={path} already exists and is not overwritten. Use another name, "
                "or add --report=FILE to draw it."
            ) from None
        except OSError as error:
            raise self._write_error(error) from error

    def write(self, snapshot: Snapshot) -> None:
        """Appends a snapshot."""
        if not self.samples:
            ipus = [{name: getattr(ipu, name) for name in devices.CONSTANT} for ipu in snapshot.ipus]
            self._append(
                {"schema": SCHEMA, "kind": _KIND, "sdk": snapshot.sdk, "period_s": self._period_s, "ipus": ipus}
            )
        self._append(
            {
                "time": utc(snapshot.time),
                "problem": snapshot.problem,
                "ipus": [_drop_unknown({name: getattr(ipu, name) for name in _CHANGING}) for ipu in snapshot.ipus],
                "processes": [
                    _drop_unknown({**vars(each), "ipus": list(each.ipus), "changes": None})
                    for each in snapshot.processes
                ],
                "saved": self._find_new_saves(snapshot),
                "changes": self._find_new_changes(snapshot),
                "verdicts": self._find_new_verdicts(snapshot),
            }
        )
        self.samples += 1

    def close(self) -> None:
        """Closes the recording."""
        try:
            self._file.close()
        except OSError as error:
            raise self._write_error(error) from error

    def _find_new_saves(self, snapshot: Snapshot) -> List[Dict[str, Any]]:
        """Returns the checkpoints since the last sample: saving is often too short for a sample to show it."""
        saves = []
        for process in snapshot.processes:
            if process.run_dir and process.instance == 0:
                since = self._last_save.setdefault(process.run_dir, snapshot.time - self._period_s)
                checkpoints: List[Path] = []
                # Any name may stand in a record; one that no path can have finds nothing.
                with contextlib.suppress(ValueError):
                    checkpoints = list(Path(process.run_dir, "checkpoints").glob("step-*"))
                for path in checkpoints:
                    with contextlib.suppress(OSError):
                        saved = path.stat().st_mtime
                        if saved > since:
                            saves.append({"pid": process.pid, "host": process.host, "time": utc(saved)})
                            self._last_save[process.run_dir] = max(saved, self._last_save[process.run_dir])
        return saves

    def _find_new_changes(self, snapshot: Snapshot) -> List[Dict[str, Any]]:
        """Returns the phases that began since the last sample: one may begin and end between two samples."""
        changes = []
        for process in snapshot.processes:
            known = self._known_changes.get(process.key, ())
            changes += [
                {"pid": process.pid, "host": process.host, "phase": phase, "time": utc(began)}
                for phase, began in process.changes
                if (phase, began) not in known
            ]
            self._known_changes[process.key] = process.changes or known
        return changes

    def _find_new_verdicts(self, snapshot: Snapshot) -> List[Dict[str, Any]]:
        """Returns the verdicts that are not those of the last sample."""
        found = {run: each for run, each in snapshot.verdicts.items() if self._known_verdicts.get(run) != each}
        self._known_verdicts.update(found)
        return [{"run_dir": run, "kind": each.kind, "sentence": each.sentence} for run, each in found.items()]

    def _append(self, value: Mapping[str, Any]) -> None:
        try:
            self._file.write(json.dumps(value) + "\n")
            self._file.flush()
        except OSError as error:
            raise self._write_error(error) from error

    def _write_error(self, error: OSError) -> cli.UsageError:
        return cli.UsageError(f"--record={self.path} cannot be written ({error.strerror}). Use another path.")


def read(path: Path) -> Recording:
    """Returns the recording in a file; `cli.UsageError` if it is not valid."""
    try:
        lines = list(safe_files.read_lines(path, follow_links=True))
    except OSError as error:
        raise cli.UsageError(
            f"--record={path} cannot be read ({error.strerror}). Give a file that --record=FILE has made."
        ) from error
    values = [value for value in map(json_files.parse_object, lines) if value is not None]
    head = values[0] if values else {}
    if head.get("kind") != _KIND or not isinstance(head.get("ipus"), list):
        raise cli.UsageError(
            f"--record={path} is not a recording of this monitor. Make one with --record=OTHER.jsonl alone."
        )
    if head.get("schema") != SCHEMA:
        raise cli.UsageError(
            f"--record={path} has schema {head.get('schema')}; this version reads schema {SCHEMA}. "
            "Draw it with the version that recorded it, or record again with --record=OTHER.jsonl."
        )
    samples = [sample for sample in map(_parse_sample, values[1:]) if sample is not None]
    if len(samples) < 2:
        raise cli.UsageError(
            f"--record={path} has {cli.count(len(samples), 'sample')}; a report needs two or more. "
            "Record for longer, with --record=OTHER.jsonl."
        )
    ipus = [RecordedIpu(_whole(ipu.get("id")), _text(ipu.get("board_serial"))) for ipu in _objects(head["ipus"])]
    return Recording(path, str(head.get("sdk")), tuple(ipus), tuple(samples), _number(head.get("period_s")) or 1.0)


def _parse_sample(value: Mapping[str, Any]) -> Optional[Sample]:
    time = _parse_time(value.get("time"))
    if time is None:
        return None
    saves, changes = [], []
    for each in _objects(value.get("saved")):
        pid, moment = _whole(each.get("pid")), _parse_time(each.get("time"))
        if pid is not None and moment is not None:
            saves.append(CheckpointSave(pid, moment, _text(each.get("host"))))
    for each in _objects(value.get("changes")):
        pid, moment = _whole(each.get("pid")), _parse_time(each.get("time"))
        if pid is not None and moment is not None:
            changes.append(PhaseChange(pid, str(each.get("phase")), moment, _text(each.get("host"))))
    processes = [_parse_process(each) for each in _objects(value.get("processes"))]
    return Sample(
        time,
        tuple(map(_parse_ipu, _objects(value.get("ipus")))),
        tuple(process for process in processes if process is not None),
        tuple(saves),
        tuple(changes),
        tuple(
            RunVerdict(each["run_dir"], each["sentence"])
            for each in _objects(value.get("verdicts"))
            if isinstance(each.get("run_dir"), str) and isinstance(each.get("sentence"), str)
        ),
    )


def _parse_ipu(value: Mapping[str, Any]) -> IpuSample:
    return IpuSample(
        id=_whole(value.get("id")),
        pid=_whole(value.get("pid")),
        utilisation_pct=_number(value.get("utilisation_pct")),
        power_w=_number(value.get("power_w")),
        board_power_w=_number(value.get("board_power_w")),
    )


def _parse_process(value: Mapping[str, Any]) -> Optional[ProcessSample]:
    pid, ipus = _whole(value.get("pid")), value.get("ipus")
    if pid is None:
        return None
    return ProcessSample(
        pid=pid,
        state=_text(value.get("state")),
        ipus=tuple(ipu for ipu in ipus if type(ipu) is int) if isinstance(ipus, list) else (),
        user=_text(value.get("user")),
        command=_text(value.get("command")),
        run=_text(value.get("run")),
        run_dir=_text(value.get("run_dir")) or "",
        instance=_whole(value.get("instance")),
        step=_whole(value.get("step")),
        phase=_text(value.get("phase")),
        host=_text(value.get("host")),
        samples_per_s=_number(value.get("samples_per_s")),
        loss=_number(value.get("loss")),
    )


def _drop_unknown(value: Mapping[str, Any]) -> Dict[str, Any]:
    return {key: each for key, each in value.items() if each is not None}


def _objects(value: object) -> List[Dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _number(value: Any) -> Optional[float]:
    return float(value) if type(value) in (int, float) and abs(value) <= _MAX_VALUE else None


def _whole(value: Any) -> Optional[int]:
    return value if type(value) is int else None


def _text(value: Any) -> Optional[str]:
    return value if isinstance(value, str) else None


def _parse_time(text: object) -> Optional[float]:
    try:
        moment = datetime.datetime.fromisoformat(str(text).replace("Z", "+00:00")).timestamp()
    except (ValueError, OverflowError, OSError):
        return None
    return moment if 0 <= moment <= _MAX_TIME_S else None
