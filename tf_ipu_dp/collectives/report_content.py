"""What a report shows, computed from results: entries with their numbers, and pairs of measured and predicted. Pure."""

from __future__ import annotations

import dataclasses
import string
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import numpy as np

from tf_ipu_dp.collectives import outliers, statistics
from tf_ipu_dp.collectives.results import MEASURED, SIMULATED, Description, Result, Series
from tf_ipu_dp.collectives.run_exchanges import RunExchanges
from tf_ipu_dp.runs.records import Record

Array = Any

_SIZE_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


@dataclasses.dataclass(frozen=True, eq=False)
class Entry:
    """One series in a report."""

    key: str  # the letter of its result
    description: Description
    series: Series
    summary: statistics.Summary
    outliers: Tuple[outliers.Outlier, ...]
    name: str  # for legends, unlike all others of the report

    @property
    def is_measured(self) -> bool:
        return self.description.kind == MEASURED


@dataclasses.dataclass(frozen=True)
class Pair(Record):
    """Medians of the same ranks and bytes, measured and predicted."""

    ranks: int
    bytes: int
    measured: str  # names of the entries
    predicted: str
    measured_p50_s: float
    predicted_p50_s: float
    measured_p99_s: Optional[float]
    predicted_p99_s: Optional[float]

    @property
    def error_pct(self) -> float:
        """How much longer the prediction is than the measurement."""
        return 100 * (self.predicted_p50_s / self.measured_p50_s - 1)


@dataclasses.dataclass(frozen=True, eq=False)
class Content:
    """A report, before it is drawn."""

    results: Tuple[Tuple[str, Result], ...]  # with their letters
    entries: Tuple[Entry, ...]
    pairs: Tuple[Pair, ...]
    runs: Tuple[RunExchanges, ...] = ()

    @property
    def titles(self) -> List[str]:
        """Returns what the report is about."""
        return [*(result.description.title for _, result in self.results), *(run.name for run in self.runs)]


def make_content(found: Sequence[Result], runs: Sequence[RunExchanges] = ()) -> Content:
    """Returns what a report of some results, and of the exchanges of some runs, shows."""
    lettered = tuple(zip(_letters(), found))
    entries = tuple(_entries(lettered))
    return Content(lettered, entries, tuple(_pairs(entries)), tuple(runs))


def cdf(seconds: Array, max_points: int) -> Tuple[Array, Array]:
    """Returns times and the share of trials that did not exceed them; all of the slowest, fewer of the others."""
    times: Array = np.sort(np.asarray(seconds, dtype=float))
    count = len(times)
    if count <= max_points:
        chosen = np.arange(count)
    else:
        tail = max_points // 2
        chosen = np.unique(np.linspace(0, count - tail - 1, max_points - tail).round().astype(int))
        chosen = np.concatenate([chosen, np.arange(count - tail, count)])
    return times[chosen], (chosen + 1) / count


def render_size(size: int) -> str:
    """Returns a size to the byte: 4 MiB, or 971,048 B where no unit divides it."""
    for unit, factor in _SIZE_UNITS:
        if size % factor == 0:
            return f"{size // factor:,} {unit}"
    return f"{size:,} B"


def _letters() -> Iterator[str]:
    """Yields A to Z, then AA, AB and so on."""
    yield from string.ascii_uppercase
    for first in string.ascii_uppercase:
        yield from (first + second for second in string.ascii_uppercase)


def _entries(lettered: Sequence[Tuple[str, Result]]) -> Iterator[Entry]:
    several = len({result.description.fabric for _, result in lettered} - {None}) > 1
    for key, result in lettered:
        for series in result.series:
            summary = statistics.summarise(series)
            ranks = f"{summary.ranks:,} rank{'s' * (summary.ranks != 1)}"
            fabric = result.description.fabric if several else None
            parts = [ranks, render_size(summary.bytes), *filter(None, [fabric, summary.label])]
            name = ", ".join([result.description.kind, *parts])
            name = f"{key} {name}" if len(lettered) > 1 else name
            yield Entry(key, result.description, series, summary, outliers.find(series), name)


def _pairs(entries: Sequence[Entry]) -> Iterator[Pair]:
    predicted: Dict[Tuple[int, int], List[Entry]] = {}
    for entry in entries:
        if entry.description.kind == SIMULATED:
            predicted.setdefault((entry.summary.ranks, entry.summary.bytes), []).append(entry)
    for entry in entries:
        if entry.is_measured and entry.summary.p50_s > 0:
            a = entry.summary
            for other in predicted.get((a.ranks, a.bytes), []):
                b = other.summary
                yield Pair(a.ranks, a.bytes, entry.name, other.name, a.p50_s, b.p50_s, a.p99_s, b.p99_s)
