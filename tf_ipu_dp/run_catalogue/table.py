"""The table of runs: which of them are shown, in which order, as text or JSON. Pure: takes summaries, returns text."""

from __future__ import annotations

import dataclasses
import datetime
import fnmatch
import json
from typing import Any, Dict, List, Optional, Sequence

from tf_ipu_dp import cli
from tf_ipu_dp.monitoring import text_layout
from tf_ipu_dp.monitoring.text_layout import BAD, DIM, GOOD, PLAIN, WARN, Column, DisplayOptions, Line, printable
from tf_ipu_dp.run_catalogue import summaries
from tf_ipu_dp.run_catalogue.summaries import RunSummary
from tf_ipu_dp.runs.json_files import plain

SCHEMA = 1
# What the table can be sorted by, and whether the largest comes first.
SORTS: Dict[str, bool] = {
    "name": False,
    "started": True,
    "model": False,
    "dataset": False,
    "step": True,
    "accuracy": True,
    "loss": False,
    "samples_per_s": True,
    "state": False,
}
_FIELDS = {"accuracy": "best_accuracy", "loss": "best_loss"}
_STYLES = {
    summaries.RUNNING: GOOD,
    summaries.FINISHED: PLAIN,
    summaries.INTERRUPTED: WARN,
    summaries.FAILED: BAD,
    summaries.DAMAGED: BAD,
}
_MAX_NUMBER = 1e12  # a larger one is not a count of anything, and would only be wide
_MAX_CELL = 48
_LEAST_NAME = 8


@dataclasses.dataclass(frozen=True)
class Selection:
    """Which runs are meant. Empty fields do not restrict it."""

    match: str = ""  # a pattern of names, like 2024-*
    model: str = ""
    dataset: str = ""
    states: Sequence[str] = ()

    def choose(self, runs: Sequence[RunSummary]) -> List[RunSummary]:
        """Returns the runs that are meant, in their order."""
        return [each for each in runs if self._has(each)]

    def _has(self, run: RunSummary) -> bool:
        return (
            (not self.match or fnmatch.fnmatchcase(run.name, self.match))
            and (not self.model or run.model == self.model)
            and (not self.dataset or run.dataset == self.dataset)
            and (not self.states or run.state in self.states)
        )


def sort(runs: Sequence[RunSummary], key: str, *, reverse: bool = False) -> List[RunSummary]:
    """Returns the runs in an order; those for which its value is not known are last."""
    field = _FIELDS.get(key, key)

    def value(run: RunSummary) -> Any:
        return getattr(run, field)

    known = sorted((each for each in runs if value(each) is not None), key=lambda each: each.name)
    known.sort(key=value, reverse=SORTS[key] != reverse)
    return [*known, *(each for each in runs if value(each) is None)]


def render(runs: Sequence[RunSummary], options: DisplayOptions) -> str:
    """Returns the table; a narrow terminal gets fewer columns, and names are cut only where nothing else is left."""
    state = Column("State", [[(each.state, _STYLES.get(each.state, PLAIN))] for each in runs], right=False)
    room = _MAX_CELL if options.width is None else max(options.width - state.width - text_layout.GAP, _LEAST_NAME)
    columns = [
        _column("Run", [_cut_in_the_middle(shown_text(each.name), room) for each in runs], right=False),
        _column("Started", [when(each.started) for each in runs], right=False, rank=4),
        _column("Model", [shown_text(each.model) for each in runs], right=False, rank=2),
        _column("Data", [shown_text(each.dataset) for each in runs], right=False, rank=5),
        _column("Layout", [each.layout for each in runs], right=False, rank=6),
        _column("Steps", [steps(each) for each in runs], rank=3),
        _column("Accuracy %", [per_cent(each.best_accuracy) for each in runs], rank=1),
        _column("Samples/s", [number(each.samples_per_s, 0) for each in runs], rank=3),
        state,
        Column("Verdict", [_verdict(each) for each in runs], right=False, rank=7),
    ]
    return text_layout.render_lines(text_layout.make_table(columns, options), options)


def render_json(runs: Sequence[RunSummary]) -> str:
    """Returns the runs as one JSON object. None is null."""
    value = {"schema": SCHEMA, "runs": [plain(dataclasses.asdict(each)) for each in runs]}
    return json.dumps(value, indent=2, allow_nan=False) + "\n"


def when(seconds: Optional[float]) -> str:
    """Returns a time since the epoch as `2026-11-18 09:05`, in the time zone of this machine; a dash if not known."""
    if seconds is None:
        return "-"
    try:
        return datetime.datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")
    except (ValueError, OverflowError, OSError):  # a file may have any time
        return "-"


def steps(run: RunSummary) -> str:
    """Returns `40/160`."""
    if run.step is None and run.planned_steps is None:
        return "-"
    return "/".join(number(value, 0) for value in (run.step, run.planned_steps))


def per_cent(share: Optional[float]) -> str:
    """Returns a share in per cent, or a dash."""
    return "-" if share is None else f"{100 * share:.2f}"


def number(value: Optional[float], digits: int) -> str:
    """Returns a number, or a dash; what is too large to be true is shortened."""
    if value is None:
        return "-"
    if not -_MAX_NUMBER < value < _MAX_NUMBER:
        return f"more than {_MAX_NUMBER:.0e}" if value > 0 else f"less than -{_MAX_NUMBER:.0e}"
    return f"{value:,.{digits}f}"


def size(count: int) -> str:
    """Returns a number of bytes as `12.3 MB`."""
    amount, units = float(count), ("bytes", "kB", "MB", "GB", "TB")
    for unit in units:
        if amount < 1000 or unit == units[-1]:
            return f"{amount:,.0f} bytes" if unit == "bytes" else f"{amount:,.1f} {unit}"
        amount /= 1000
    raise AssertionError


def summary_line(runs: Sequence[RunSummary]) -> str:
    """Returns `12 runs: 1 running, 10 finished, 1 failed`."""
    counts = {state: sum(each.state == state for each in runs) for state in summaries.STATES}
    parts = ", ".join(f"{count:,} {state}" for state, count in counts.items() if count)
    return f"{cli.count(len(runs), 'run')}: {parts}" if parts else "0 runs"


def shown_text(value: Optional[str]) -> str:
    """Returns a text from a file: what moves the cursor is escaped, and what is very long is cut."""
    shown = printable(value) if value else "-"
    return shown if len(shown) <= _MAX_CELL else f"{shown[: _MAX_CELL - 1]}~"


def _cut_in_the_middle(name: str, room: int) -> str:
    """Returns a name of at most a width: its end, often a time, tells runs apart as much as its beginning."""
    if text_layout.cell_width(name) <= room:
        return name
    half = (room - 1) // 2
    return f"{name[: room - 1 - half]}~{name[-half:]}"


def _verdict(run: RunSummary) -> Line:
    text = run.problem or run.verdict
    return [(printable(text) if text else "-", DIM if run.problem is None else _STYLES.get(run.state, PLAIN))]


def _column(title: str, cells: Sequence[str], *, right: bool = True, rank: int = 0) -> Column:
    return Column(title, [[(cell, PLAIN)] for cell in cells], right, rank)
