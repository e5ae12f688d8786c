"""The tables of a study's report, as columns of text. Pure. Text and page show the same ones."""

from __future__ import annotations

import dataclasses
from typing import Callable, Dict, List, Optional, Sequence, Tuple

from tf_ipu_dp.monitoring.text_layout import TextColumn, number, printable
from tf_ipu_dp.scaling import statistics
from tf_ipu_dp.scaling.analysis import Analysis, Interval, Row, engines_of
from tf_ipu_dp.scaling.records import BATCH, COMPARE, INSTANCES, Extrapolation, Study, UpdateParts
from tf_ipu_dp.scaling.report_notes import CORE_MARK

PART_NAMES = {
    "compute_s": "compute",
    "input_wait_s": "input wait",
    "collective_s": "collective",
    "waiting_s": "waiting for the slowest",
    "optimizer_s": "optimizer",
    "overhead_s": "overhead",
}
_SHORT_PARTS = {"input_wait_s": "input", "waiting_s": "waiting"}
_MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of rows that each are a cell: the columns that say which one, then numbers.

    A number's rank is how early it is left out where the width is short. A row with a text has no numbers: the text
    stands in their place.
    """

    keys: Tuple[TextColumn, ...]
    numbers: Tuple[Tuple[str, List[str], int], ...]
    texts: Dict[int, str] = dataclasses.field(default_factory=dict)

    @property
    def columns(self) -> List[TextColumn]:
        return [*self.keys, *((title, cells) for title, cells, _ in self.numbers)]


def row_table(analysis: Analysis) -> Table:
    """Returns the table of all cells. An engine of which no cell could be measured, for one reason, is one row."""
    study = analysis.study
    lost = {
        engine: {row.reason for row in analysis.rows if row.cell.engine == engine}
        for engine in engines_of([row for row in analysis.rows if not row.is_done])
    }
    cells_of = [row.cell.engine for row in analysis.rows]
    whole = [
        engine for engine, reasons in lost.items()
        if len(reasons) == 1 and "" not in reasons and cells_of.count(engine) > 1
    ]  # fmt: skip
    rows = [row for row in analysis.rows if row.cell.engine not in whole]
    rows += [next(row for row in analysis.rows if row.cell.engine == engine) for engine in whole]
    unequal = any(row.is_done and row.repeats < study.repeats for row in rows)
    found: List[Tuple[str, Callable[[Row], Optional[str]], int]] = [
        ("Global batch", lambda row: None if study.mode == BATCH else f"{row.cell.global_batch_size:,}", 9),
        ("Repeats", lambda row: f"{row.repeats} of {study.repeats}" if unequal else None, 8),
        ("samples/s", lambda row: number(row.samples_per_s.median) if row.samples_per_s else None, 0),
        (interval_title(rows), lambda row: render_interval(row.samples_per_s), 3),
        ("per replica", lambda row: None if study.mode == BATCH else _number(row.samples_per_s_per_replica), 6),
        ("Speed-up", lambda row: None if study.mode == BATCH else _marked(row, row.speedup, 1, 2), 2),
        ("Efficiency %", lambda row: _marked(row, row.efficiency, 100, 1), 0),
        ("Memory MiB", lambda row: _number(None if row.memory_bytes is None else row.memory_bytes / _MIB), 4),
        ("Input wait %", lambda row: _percent(row.input_wait_share), 5),
        ("Update ms", lambda row: _milliseconds(row.update_s), 11),
        ("predicted", lambda row: _milliseconds(row.predicted.update_s if row.predicted else None), 10),
        ("Error %", lambda row: None if row.error is None else f"{100 * row.error:+.1f}", 1),
    ]
    numbers = []
    for name, cell, rank in found:
        cells = [cell(row) for row in rows]
        if rank == 0 or any(text is not None for text in cells):
            numbers.append((name, ["-" if text is None else text for text in cells], rank))
    texts = {place: printable(row.reason) for place, row in enumerate(rows) if not row.is_done}
    keys = _keys(analysis, rows)
    for name, places in keys:
        if name != "Engine":
            places[len(rows) - len(whole) :] = ["all "] * len(whole)
    return Table(tuple(keys), tuple(numbers), texts)


def interval_title(rows: Sequence[Row]) -> str:
    """Returns the heading of the intervals: `95 % interval` only where there are repeats enough for one."""
    known = [row.samples_per_s for row in rows if row.samples_per_s is not None]
    return "95 % interval" if known and all(each.level >= statistics.LEVEL for each in known) else "range"


def part_table(analysis: Analysis) -> Table:
    """Returns the parts of one update in milliseconds, with their sum beside the measured time."""
    rows = [row for row in analysis.rows if row.parts is not None]
    every = [row.parts for row in rows if row.parts is not None]
    numbers = [
        (_SHORT_PARTS.get(name, title), [_milliseconds(getattr(parts, name)) or "-" for parts in every], rank)
        for rank, (name, title) in zip((0, 0, 0, 0, 1, 0), PART_NAMES.items())
    ]
    numbers.append(("sum", [_milliseconds(parts.total_s) or "-" for parts in every], 2))
    numbers.append(("measured", [_milliseconds(row.parts_update_s) or "-" for row in rows], 3))
    return Table(tuple(_keys(analysis, rows)), tuple(numbers))


def score_table(analysis: Analysis) -> Table:
    """Returns predicted beside measured times of an update."""
    rows = [row for row in analysis.rows if row.error is not None]
    pairs = [(row, row.predicted) for row in rows if row.predicted is not None]
    return Table(
        tuple(_keys(analysis, rows)),
        (
            ("predicted ms", [_milliseconds(each.update_s) or "-" for _, each in pairs], 0),
            ("8 of 10 in", [_span(1e3 * each.low_s, 1e3 * each.high_s) for _, each in pairs], 2),
            ("measured ms", [_milliseconds(row.update_s) or "-" for row, _ in pairs], 0),
            ("Error %", [f"{100 * (row.error or 0.0):+.1f}" for row, _ in pairs], 0),
            ("inside", ["yes" if each.low_s <= (row.update_s or 0) <= each.high_s else "no" for row, each in pairs], 1),
        ),
    )


def accuracy_title(analysis: Analysis) -> str:
    """Returns the heading of the table of times to accuracy."""
    return f"Time to an accuracy of {100 * (analysis.study.target_accuracy or 0.0):g} %"


def accuracy_table(analysis: Analysis) -> Table:
    """Returns times to accuracy, and the factors of their efficiency."""
    by_key = {row.cell.key: row for row in analysis.rows}
    found = analysis.time_to_accuracy
    numbers = [
        ("seconds", [_number(each.seconds) or "-" for each in found], 0),
        ("epochs", [_number(each.epochs) or "-" for each in found], 1),
        ("Efficiency", [_factor(each.efficiency) for each in found], 0),
        ("= hardware", [_factor(each.hardware) for each in found], 0),
        ("x statistical", [_factor(each.statistical) for each in found], 0),
        ("x overhead", [_factor(each.overhead) for each in found], 0),
    ]
    texts = {
        place: "the accuracy was not reached" if each.is_evaluated else "not evaluated: of this engine samples/s only"
        for place, each in enumerate(found)
        if each.seconds is None
    }
    return Table(tuple(_keys(analysis, [by_key[each.cell] for each in found])), tuple(numbers), texts)


def extrapolation_table(analysis: Analysis) -> Table:
    """Returns what is predicted for sizes that are not measured."""
    found = analysis.study.extrapolations
    return Table(
        (
            ("Fabric", [extrapolation_name(each) for each in found]),
            ("Replicas", [f"{each.size:,}" for each in found]),
        ),
        (
            ("samples/s", [number(each.samples_per_s) for each in found], 0),
            ("interval", [_span(each.low, each.high) for each in found], 1),
            ("Efficiency %", [f"{100 * each.efficiency:.1f}" for each in found], 0),
            ("Update ms", [_milliseconds(each.parts.total_s) or "-" for each in found], 2),
            ("collective", [_milliseconds(each.parts.collective_s) or "-" for each in found], 3),
        ),
    )


def extrapolation_name(each: Extrapolation) -> str:
    """Returns the fabric of an extrapolation, and whose compute is combined with it."""
    return printable(", ".join(filter(None, (each.fabric, each.compute))))


def size_title(study: Study) -> str:
    """Returns the name of the number on the x axis."""
    return "Batch" if study.mode == BATCH else study.unit.capitalize()


def render_interval(interval: Optional[Interval]) -> Optional[str]:
    """Returns `430-450`; None for one repeat."""
    return None if interval is None or interval.level == 0 else _span(interval.low, interval.high)


def part_items(parts: UpdateParts) -> List[Tuple[str, float]]:
    """Returns the parts of an update with their names, in the order in which they are stacked."""
    return [(title, getattr(parts, name)) for name, title in PART_NAMES.items()]


def _keys(analysis: Analysis, rows: Sequence[Row]) -> List[TextColumn]:
    """Returns the columns that say which cell a row is."""
    study = analysis.study
    keys: List[TextColumn] = []
    if len(engines_of(rows)) > 1:
        keys.append(("Engine", [printable(row.cell.engine) for row in rows]))
    if study.mode in (COMPARE, INSTANCES):
        keys.append(("Replicas", [f"{row.cell.replicas:,}" for row in rows]))
        keys.append(("Instances", [_mark(row, f"{row.cell.instances:,}") for row in rows]))
    else:
        keys.append((size_title(study), [_mark(row, f"{row.cell.size:,}") for row in rows]))
    return keys


def _mark(row: Row, text: str) -> str:
    return f"{text}{CORE_MARK if row.core_limited else ' '}"


def _marked(row: Row, value: Optional[float], factor: float, digits: int) -> Optional[str]:
    return None if value is None else _mark(row, f"{factor * value:.{digits}f}")


def _number(value: Optional[float]) -> Optional[str]:
    return None if value is None else number(value)


def _milliseconds(seconds: Optional[float]) -> Optional[str]:
    return None if seconds is None else number(1e3 * seconds)


def _percent(share: Optional[float]) -> Optional[str]:
    return None if share is None else f"{100 * share:.1f}"


def _factor(value: Optional[float]) -> str:
    return "-" if value is None else f"{value:.3f}"


def _span(low: float, high: float) -> str:
    return f"{number(low)}-{number(high)}"
