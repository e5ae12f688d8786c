"""Trials of a collective, measured or simulated, and the folder they are kept in.

`collective.json` says what was done and where; `trials.csv` has every trial, with the time of every rank where it is
known. Imports numpy; neither TensorFlow nor Horovod.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import re
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from tf_ipu_dp import cli
from tf_ipu_dp.runs import json_files, safe_files
from tf_ipu_dp.runs.records import Record, RecordError

Array = Any  # numpy has no types that hold for both releases

DESCRIPTION = "collective.json"
TRIALS = "trials.csv"
_MAX_VALUE = 1e15  # of seconds and counts
_MAX_TRIALS_BYTES = 1 << 29  # ten times what simulations of 10,000 trials have written
MEASURED, SIMULATED = "measured", "simulated"
INTERRUPTED, FAILED = "interrupted", "failed"
_COUNTED = ("timeouts", "probes", "fast_retransmissions")


@dataclasses.dataclass(frozen=True)
class SeriesFacts(Record):
    """What all trials of a series have in common."""

    ranks: int
    bytes: int
    # Per direction, of the slowest link that the collective uses; None where no link limits it.
    link_bytes_per_s: Optional[float] = None
    link_burst_bytes: int = 0  # that pass before the link's rate applies
    wrong_sums: int = 0
    label: str = ""  # distinguishes series of the same ranks and bytes, for example an algorithm
    shortest_timeout_s: float = 0.2  # that a retransmission timeout can take, in the time that trials are given in


@dataclasses.dataclass(frozen=True, eq=False)
class Series:
    """The trials of one size on one number of ranks.

    A trial's time is the maximum over ranks, after a barrier. Arrays with one row per trial and one column per rank are
    None where only the maximum is known.
    """

    facts: SeriesFacts
    seconds: Array  # of each trial
    rank_seconds: Optional[Array] = None
    late_s: Optional[Array] = None  # how much later than the first rank each rank began the trial
    engine_s: Optional[Array] = None  # of each trial: the engine's own time, without the wait for its start
    # Of each trial, on all hosts, until the ranks met again after it: TCP's retransmission timeouts, its probes for the
    # end of a message, and its fast retransmissions.
    timeouts: Optional[Array] = None
    probes: Optional[Array] = None
    fast_retransmissions: Optional[Array] = None


@dataclasses.dataclass(frozen=True)
class Description(Record):
    """What was measured or simulated, and where. `facts` are shown as they are: name and value."""

    kind: str
    title: str
    engine: str
    algorithm: str
    series: Tuple[SeriesFacts, ...]
    fabric: Optional[str] = None
    facts: Dict[str, str] = dataclasses.field(default_factory=dict)
    notes: Tuple[str, ...] = ()  # sentences for the reader, for example that the cores were the limit
    command: Tuple[str, ...] = ()
    round_trip_s: Optional[float] = None  # between two hosts, as measured before the first trial
    ended_early: Optional[str] = None  # INTERRUPTED or FAILED, where not all trials were made


@dataclasses.dataclass(frozen=True, eq=False)
class Result:
    """A measurement or a simulation."""

    description: Description
    series: Tuple[Series, ...]


def write(result: Result, folder: Path) -> None:
    """Writes a result into a folder, which is made if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    safe_files.write_durably(folder / TRIALS, render_trials(result.series).encode())
    safe_files.write_durably(folder / DESCRIPTION, (json.dumps(result.description.to_json(), indent=2) + "\n").encode())


def read(folder: Path) -> Result:
    """Returns the result in a folder; UsageError if there is none or it is damaged."""
    value = json_files.read_object(folder / DESCRIPTION)
    if value is None:
        raise cli.UsageError(f"{folder} has no {DESCRIPTION}. Give a folder that measure or simulate wrote.")
    try:
        description = Description.from_json(value)
        trials = safe_files.read_bytes(folder / TRIALS, _MAX_TRIALS_BYTES).decode("utf-8")
        rows = list(csv.DictReader(io.StringIO(trials, newline="")))
        series = tuple(_read_series(number, facts, rows) for number, facts in enumerate(description.series))
    except (OSError, RecordError, ValueError, KeyError, csv.Error) as error:
        raise cli.UsageError(f"{folder} cannot be read: {error}. Measure or simulate again.") from error
    return Result(description, series)


def render_trials(series: Sequence[Series]) -> str:
    """Returns all trials as CSV: one line per trial, columns that are not known are empty."""
    ranks = max((each.facts.ranks for each in series if each.rank_seconds is not None), default=0)
    names = ["series", "ranks", "bytes", "trial", "seconds", "engine_s", *_COUNTED]
    names += [f"rank{rank}_s" for rank in range(ranks)] + [f"rank{rank}_late_s" for rank in range(ranks)]
    stream = io.StringIO()
    writer = csv.DictWriter(stream, names, restval="", lineterminator="\n")
    writer.writeheader()
    for number, each in enumerate(series):
        writer.writerows(_rows(number, each))
    return stream.getvalue()


def _rows(number: int, series: Series) -> List[Dict[str, Any]]:
    rows = []
    for trial, seconds in enumerate(series.seconds):
        row: Dict[str, Any] = {
            "series": number,
            "ranks": series.facts.ranks,
            "bytes": series.facts.bytes,
            "trial": trial,
        }
        row["seconds"] = _text(seconds)
        if series.engine_s is not None:
            row["engine_s"] = _text(series.engine_s[trial])
        for name in _COUNTED:
            counts = getattr(series, name)
            if counts is not None:
                row[name] = int(counts[trial])
        for suffix, values in (("s", series.rank_seconds), ("late_s", series.late_s)):
            if values is not None:
                row.update({f"rank{rank}_{suffix}": _text(value) for rank, value in enumerate(values[trial])})
        rows.append(row)
    return rows


def _text(seconds: float) -> str:
    return "" if np.isnan(seconds) else f"{seconds:.9g}"


def _read_series(number: int, facts: SeriesFacts, rows: Sequence[Mapping[str, str]]) -> Series:
    own = [row for row in rows if int(row["series"]) == number]
    if not own:
        raise ValueError(f"{TRIALS} has no trial of series {number}")

    def read(name: str) -> Array:
        values = np.array([float(row.get(name) or "nan") for row in own])
        if (np.isinf(values) | (np.abs(values) > _MAX_VALUE)).any():
            raise ValueError(f"{TRIALS} has no possible {name} for a trial of series {number}")
        return values

    def column(name: str, *, is_whole: bool = False) -> Optional[Array]:
        values = read(name)
        if np.isnan(values).all():
            return None
        if is_whole and np.isnan(values).any():
            raise ValueError(f"{TRIALS} has a trial of series {number} without {name}")
        return values

    def by_rank(suffix: str) -> Optional[Array]:
        if not own[0].get(f"rank0_{suffix}"):
            return None
        names = [name for name in own[0] if re.fullmatch(f"rank[0-9]+_{suffix}", name or "")]
        values = np.array([read(name) for name in names[: facts.ranks]]).T
        if len(names) < facts.ranks or np.isnan(values).any():
            raise ValueError(f"{TRIALS} has a trial of series {number} without the times of all ranks")
        return values

    seconds = column("seconds", is_whole=True)
    if seconds is None or (seconds <= 0).any():
        raise ValueError(f"{TRIALS} has a trial of series {number} that took no seconds")
    rank_seconds, late_s = by_rank("s"), by_rank("late_s")
    if rank_seconds is None:
        late_s = None  # they are written together
    counts = (column(name, is_whole=True) for name in _COUNTED)
    return Series(facts, seconds, rank_seconds, late_s, column("engine_s"), *counts)
