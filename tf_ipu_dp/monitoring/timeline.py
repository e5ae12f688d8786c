"""What each process of a recording did, and when: phases, checkpoints and a summary. Pure."""

from __future__ import annotations

import bisect
import dataclasses
from typing import Dict, FrozenSet, List, Mapping, NamedTuple, Optional, Set, Tuple

from tf_ipu_dp.monitoring.recorder import CheckpointSave, PhaseChange, ProcessKey, ProcessSample, Recording, Sample
from tf_ipu_dp.monitoring.snapshots import GONE

UNKNOWN_PHASE = "unknown"
_MAX_MARKS = 60


class PhaseInterval(NamedTuple):
    """From when to when, in seconds since the epoch, a process was in a phase."""

    start: float
    end: float
    phase: str


class PhaseMark(NamedTuple):
    """A phase that the first instance of a run began, and the IPUs that the run held then."""

    time: float
    phase: str
    ipus: FrozenSet[int]


class Point(NamedTuple):
    """A value of a run at one moment."""

    time: float
    value: float


Bands = Mapping[str, List[PhaseInterval]]  # the phases of each process, by its name


@dataclasses.dataclass
class ProcessSummary:
    """One process over a whole recording."""

    pid: int
    user: Optional[str] = None
    command: Optional[str] = None
    run: Optional[str] = None
    host: Optional[str] = None
    instance: Optional[int] = None
    step: Optional[int] = None
    samples_per_s: Optional[float] = None  # the last that was reported
    loss: Optional[float] = None  # the same
    ipus: Set[int] = dataclasses.field(default_factory=set)
    seconds: float = 0.0
    measured_s: float = 0.0  # the part of `seconds` in which utilisation was reported
    busy_pct_s: float = 0.0  # utilisation in percent x seconds
    phases: Dict[str, float] = dataclasses.field(default_factory=dict)  # seconds in each

    @property
    def utilisation_pct(self) -> Optional[float]:
        return self.busy_pct_s / self.measured_s if self.measured_s else None


def summarise(recording: Recording) -> List[ProcessSummary]:
    """Returns one summary per process, in the order of their first samples."""
    summaries: Dict[ProcessKey, ProcessSummary] = {}
    runs = _run_names(recording)
    for sample, duration in zip(recording.samples, _sample_durations(recording)):
        utilisation: Dict[Optional[int], List[float]] = {}
        for ipu in sample.ipus:
            if ipu.utilisation_pct is not None:
                utilisation.setdefault(ipu.pid, []).append(ipu.utilisation_pct)
        for process in sample.processes:
            if process.state == GONE:
                continue
            summary = summaries.setdefault(process.key, ProcessSummary(process.pid))
            for name in ("instance", "user", "command", "step", "host", "samples_per_s", "loss"):
                if getattr(process, name) is not None:
                    setattr(summary, name, getattr(process, name))
            if process.run is not None:
                summary.run = runs[process.run, process.run_dir]
            summary.ipus.update(process.ipus)
            summary.seconds += duration
            values = utilisation.get(process.pid) if process.ipus else None
            if values:
                summary.busy_pct_s += duration * sum(values) / len(values)
                summary.measured_s += duration
    intervals = _intervals_by_process(recording)
    for key, summary in summaries.items():
        for start, end, phase in intervals.get(key, ()):
            summary.phases[phase] = summary.phases.get(phase, 0.0) + end - start
    return list(summaries.values())


def make_bands(recording: Recording) -> Dict[str, List[PhaseInterval]]:
    """Returns the phases of each process, by its name; a run that was restarted continues in its band."""
    bands: Dict[str, List[PhaseInterval]] = {}
    names = _process_names(recording)
    for key, intervals in _intervals_by_process(recording).items():
        bands[names[key]] = sorted([*bands.get(names[key], []), *intervals])
    return bands


def read_curves(recording: Recording, name: str) -> Dict[str, List[Point]]:
    """Returns the values of an attribute that each run reported, by the run's name: those of its first instance.

    A value that did not change between two samples is one point: a run reports it once per log line.
    """
    runs = _run_names(recording)
    curves: Dict[str, List[Point]] = {}
    for sample in recording.samples:
        values: Dict[str, Tuple[int, float]] = {}
        for process in sample.processes:
            value = getattr(process, name)
            if process.run is None or value is None or process.state == GONE:
                continue
            run, own = runs[process.run, process.run_dir], (process.instance or 0, value)
            values[run] = min(values.get(run, own), own)
        for run, (_, value) in values.items():
            curve = curves.setdefault(run, [])
            if not curve or curve[-1].value != value:
                curve.append(Point(sample.time, value))
    return curves


def last_verdicts(recording: Recording) -> Dict[str, str]:
    """Returns the last sentence about the bottleneck of each run, by the run's name."""
    names = {folder: name for (_, folder), name in _run_names(recording).items()}
    found = {each.run_dir: each.sentence for sample in recording.samples for each in sample.verdicts}
    return {names.get(folder, folder): sentence for folder, sentence in found.items()}


def mark_phases(recording: Recording, bands: Bands) -> List[PhaseMark]:
    """Returns the phase changes of the runs, each with the IPUs of its run at that time."""
    runs = _run_names(recording)
    held: Dict[str, List[Tuple[float, FrozenSet[int]]]] = {}
    for sample in recording.samples:
        for name, ipus in _ipus_of_runs(sample, runs).items():
            held.setdefault(name, []).append((sample.time, ipus))
    marks = []
    for run, moment, phase in find_phase_changes(bands):
        known = held.get(run, [])
        if known:
            place = bisect.bisect_right([time for time, _ in known], moment)
            marks.append(PhaseMark(moment, phase, known[max(place - 1, 0)][1]))
    return marks


def find_phase_changes(bands: Bands) -> List[Tuple[str, float, str]]:
    """Returns the run whose first instance changed its phase, when, and to which.

    Where there are too many changes to draw, saving and then evaluating are omitted.
    """
    first = {name.rpartition(" ")[0]: intervals for name, intervals in reversed(list(bands.items()))}
    for unmarked in ((), ("saving",), ("saving", "evaluating")):
        changes: List[Tuple[str, float, str]] = []
        for run, intervals in first.items():
            marked = [(run, each.start, each.phase) for each in intervals if each.phase not in unmarked]
            changes += [now for before, now in zip(marked, marked[1:]) if before[2] != now[2]]
        if len(changes) <= _MAX_MARKS:
            return changes
    return []


def find_saves(recording: Recording, bands: Bands) -> List[Tuple[int, float]]:
    """Returns the row of the band and the time of each checkpoint."""
    rows = {name: row for row, name in enumerate(bands)}
    names = _process_names(recording)
    saves: List[CheckpointSave] = [save for sample in recording.samples for save in sample.saves]
    return [(rows[names[save.key]], save.time) for save in saves if names.get(save.key) in rows]


def _ipus_of_runs(sample: Sample, runs: Mapping[Tuple[str, str], str]) -> Dict[str, FrozenSet[int]]:
    found: Dict[str, FrozenSet[int]] = {}
    for process in sample.processes:
        if process.run is not None and process.ipus:
            name = runs[process.run, process.run_dir]
            found[name] = found.get(name, frozenset()).union(process.ipus)
    return found


def _intervals_by_process(recording: Recording) -> Dict[ProcessKey, List[PhaseInterval]]:
    """Returns the phases of each process: from its phase changes or, without any, from the samples."""
    changes: Dict[ProcessKey, List[PhaseChange]] = {}
    for sample in recording.samples:
        for change in sample.changes:
            changes.setdefault(change.key, []).append(change)
    for each in changes.values():
        each.sort(key=lambda change: change.time)
    times = {key: [change.time for change in each] for key, each in changes.items()}
    found: Dict[ProcessKey, List[PhaseInterval]] = {}
    for sample, duration in zip(recording.samples, _sample_durations(recording)):
        for process in sample.processes:
            if process.state == GONE or duration <= 0:
                continue
            key, start, end = process.key, sample.time, sample.time + duration
            first = bisect.bisect_right(times.get(key, []), start)
            after = bisect.bisect_left(times.get(key, []), end)
            phase = UNKNOWN_PHASE
            if process.phase:
                phase = changes[key][first - 1].phase if first else process.phase
            parts = [(start, phase), *((change.time, change.phase) for change in changes.get(key, [])[first:after])]
            ends = [*(since for since, _ in parts[1:]), end]
            for (since, what), until in zip(parts, ends):
                _append_interval(found.setdefault(key, []), PhaseInterval(since, until, what))
    return found


def _append_interval(intervals: List[PhaseInterval], new: PhaseInterval) -> None:
    """Adds an interval, or extends the last one if it is of the same phase and ends where the new one starts."""
    last = intervals[-1] if intervals else None
    if last and last.phase == new.phase and new.start - last.end < 1e-6:
        intervals[-1] = last._replace(end=new.end)
    elif new.end > new.start:
        intervals.append(new)


def _process_names(recording: Recording) -> Dict[ProcessKey, str]:
    """Returns the name of each process: its run and instance, if it reported them."""
    names: Dict[ProcessKey, str] = {}
    runs = _run_names(recording)
    for process in _processes(recording):
        if process.run is not None:
            instance = "" if process.instance is None else process.instance
            names[process.key] = f"{runs[process.run, process.run_dir]} {instance}"
        else:
            names.setdefault(process.key, f"pid {process.pid}")
    return names


def _run_names(recording: Recording) -> Dict[Tuple[str, str], str]:
    """Returns the name of each run; runs of the same name are shown with enough of their folders to be distinct."""
    runs = {(each.run, each.run_dir): None for each in _processes(recording) if each.run is not None}
    names = {}
    for name, folder in runs:
        others = [other.split("/")[::-1] for same, other in runs if same == name and other != folder]
        parts = folder.split("/")[::-1]
        depth = 1
        while any(other[:depth] == parts[:depth] for other in others):
            depth += 1
        names[name, folder] = "/".join(reversed(parts[:depth])) if others and folder else name
    return names


def _processes(recording: Recording) -> List[ProcessSample]:
    return [process for sample in recording.samples for process in sample.processes]


def _sample_durations(recording: Recording) -> List[float]:
    """Returns how long each sample counts: until the next one, but no longer than a few periods."""
    times = [sample.time for sample in recording.samples]
    longest = 3 * recording.period_s
    return [min(max(after - now, 0.0), longest) for now, after in zip(times, times[1:])] + [0.0]
