"""A study's report as text: tables that fit a width, and the sentences below them. Pure. The page shows the same."""

from __future__ import annotations

import dataclasses
from typing import Callable, Dict, List, Optional, Sequence, Tuple

from tf_ipu_dp import cli
from tf_ipu_dp.monitoring import text_layout
from tf_ipu_dp.monitoring.text_layout import (
    BOLD,
    DIM,
    PLAIN,
    WARN,
    Column,
    DisplayOptions,
    Line,
    TextColumn,
    number,
    printable,
)
from tf_ipu_dp.scaling import statistics
from tf_ipu_dp.scaling.analysis import Analysis, Interval, Row, cell_place, engines_of
from tf_ipu_dp.scaling.records import (
    BATCH,
    COMPARE,
    INSTANCES,
    STRONG,
    THIS_CPU,
    WEAK,
    Extrapolation,
    Study,
    UpdateParts,
)

CORE_MARK = "*"
GOOD_ERROR = 0.1
OTHERS = 0.05  # of the cores used by others: more is said
CLOSES = 0.03  # the parts of an update add up to its time within this share
PART_NAMES = {
    "compute_s": "compute",
    "input_wait_s": "input wait",
    "collective_s": "collective",
    "waiting_s": "waiting for the slowest",
    "optimizer_s": "optimizer",
    "overhead_s": "overhead",
}
_SHORT_PARTS = {"input_wait_s": "input", "waiting_s": "waiting"}
_MODE_TITLES = {
    BATCH: "Batch sweep",
    WEAK: "Weak scaling",
    STRONG: "Strong scaling",
    COMPARE: "Replicas and instances compared",
    INSTANCES: "The same replicas over several instances",
}
_MIB = 2**20
_PIPE_TEXT_WIDTH = 120


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


def render(analysis: Analysis, verdict: str, options: DisplayOptions) -> str:
    """Returns the whole report, with the verdict last."""
    study = analysis.study
    lines: List[Line] = [[(title(study), BOLD)]]
    for text in subtitles(study):
        lines += _wrap(text, DIM, options)
    lines += [[], *_render_table(row_table(analysis), options)]
    for text in notes(analysis):
        lines += _wrap(text, DIM, options)
    for heading, table, below in sections(analysis):
        lines += [[], *_wrap(heading, BOLD, options), *_render_table(table, options)]
        for text in below:
            lines += _wrap(text, DIM, options)
    if verdict:
        lines += [[], [("Verdict", BOLD)], *_wrap(printable(verdict), PLAIN, options)]
    return text_layout.render_lines(lines, options)


def title(study: Study) -> str:
    """Returns what a study is about."""
    model = [word.partition("=")[2] for word in study.words if word.lstrip("-").startswith("model=")]
    return printable(": ".join([_MODE_TITLES[study.mode], *model[-1:]]))


def subtitles(study: Study) -> List[str]:
    """Returns what all cells have in common, and the machine."""
    about = [" ".join(study.words), f"emulated hosts {study.fabric}" if study.fabric else ""]
    about += [f"{cli.count(study.repeats, 'repeat')} of about {study.seconds:g} s"]
    facts = [f"{name} {value}" for name, value in study.facts.items()]
    return [printable("; ".join(filter(None, part))) for part in (about, facts) if any(part)]


def sections(analysis: Analysis) -> List[Tuple[str, Table, List[str]]]:
    """Returns the tables after the first, those that there is data for: heading, table, sentences below."""
    found = []
    if any(row.parts is not None for row in analysis.rows):
        found.append(("Where the time of one update goes (ms)", part_table(analysis), part_notes(analysis)))
    if any(row.error is not None for row in analysis.rows):
        found.append(("Scorecard of the predictions", score_table(analysis), [score_sentence(analysis)]))
    if analysis.time_to_accuracy:
        found.append((accuracy_title(analysis), accuracy_table(analysis), accuracy_notes(analysis)))
    if analysis.study.extrapolations:
        heading = "Predicted for other sizes and fabrics, not measured"
        found.append((heading, extrapolation_table(analysis), extrapolation_notes(analysis)))
    return found


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


def notes(analysis: Analysis) -> List[str]:
    """Returns the sentences that a reader of the first table needs."""
    study, rows = analysis.study, analysis.rows
    done = [row for row in rows if row.is_done]
    found = []
    if analysis.baseline and study.mode == BATCH:
        found.append(f"Efficiency: the rate over {analysis.baseline}.")
    elif analysis.baseline:
        found.append(
            f"Baseline of speed-up and efficiency: {analysis.baseline}. Efficiency is the speed-up over the ratio of "
            "replicas."
        )
    if done:
        found.append(interval_note(done))
    limited = [row for row in rows if row.core_limited]
    if limited:
        cores = study.facts.get("cores", "")
        found.append(
            f"{CORE_MARK} Limited by the {f'{cores} ' if cores.isdigit() else ''}cores of this machine, which the "
            "processes share: no statement about scaling on machines of their own."
        )
    disturbed = [row.others_busy for row in done if row.others_busy is not None and row.others_busy > OTHERS]
    if disturbed:
        found.append(
            f"Other processes used up to {100 * max(disturbed):.0f} % of this machine's cores during "
            f"{cli.count(len(disturbed), 'cell')}: measured times are longer than on an idle machine, and predicted "
            "ones too if they were calibrated beside them."
        )
    found += [knee_sentence(analysis, knee) for knee in analysis.knees]
    for row in done:
        if row.failures:
            lost = cli.count(study.repeats - row.repeats, "repeat is", "repeats are")
            found.append(f"{cell_name(analysis, row)}: {lost} missing. {printable(' '.join(row.failures))}")
    return found


def interval_title(rows: Sequence[Row]) -> str:
    """Returns the heading of the intervals: `95 % interval` only where there are repeats enough for one."""
    known = [row.samples_per_s for row in rows if row.samples_per_s is not None]
    return "95 % interval" if known and all(each.level >= statistics.LEVEL for each in known) else "range"


def interval_note(done: Sequence[Row]) -> str:
    """Returns what an interval is, of so many repeats."""
    repeats = min(row.repeats for row in done)
    if repeats >= statistics.MIN_REPEATS:
        return (
            "Median of the repeats, with the interval of its order statistics, which holds the true median with 95 %."
        )
    if repeats == 1:
        return f"One repeat has no interval. 95 % need {statistics.MIN_REPEATS} repeats."
    level = 100 * min(row.samples_per_s.level for row in done if row.samples_per_s is not None)
    return (
        f"Median and range of the repeats. The range of {repeats} holds the true median with {level:.0f} %; "
        f"95 % need {statistics.MIN_REPEATS} repeats."
    )


def knee_sentence(analysis: Analysis, knee: statistics.Knee) -> str:
    """Returns where a larger batch stops paying."""
    sizes = [row.cell.size for row in analysis.rows if row.is_done and row.cell.engine == knee.engine]
    if knee.size == max(sizes):
        return f"{knee.engine}: the rate still rises at the largest batch, {knee.size:,}. Try larger ones for the knee."
    return (
        f"{knee.engine}: the knee is at batch {knee.size:,}, the smallest with at least {100 * knee.share:.0f} % of "
        f"the best rate (batch {knee.best_size:,})."
    )


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


def part_notes(analysis: Analysis) -> List[str]:
    """Returns how well the parts add up to the measured time."""
    errors = [(abs(row.parts_error), row) for row in analysis.rows if row.parts_error is not None]
    found = [
        "Mean of the instances, in the repeat with the median rate. Waiting: for the last instance to arrive. "
        "Overhead: between executions and between epochs."
    ]
    if errors:
        largest, row = max(errors, key=lambda each: each[0])
        held = "within" if largest <= CLOSES else "not within"
        found.append(
            f"The parts add up to the measured time of an update {held} {100 * CLOSES:.0f} %: the largest difference "
            f"is {100 * largest:.1f} % ({cell_name(analysis, row)})."
        )
    return found


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


def score_sentence(analysis: Analysis) -> str:
    """Returns how far the predictions were off, over all cells."""
    errors = [(abs(row.error), row) for row in analysis.rows if row.error is not None]
    largest, worst = max(errors, key=lambda each: each[0])
    good = sum(error <= GOOD_ERROR for error, _ in errors)
    return (
        f"Predicted before it was measured, for {cli.count(len(errors), 'cell')} of tf_ipu_dp: mean error "
        f"{100 * sum(error for error, _ in errors) / len(errors):.1f} %, largest {100 * largest:.1f} % "
        f"({cell_name(analysis, worst)}); {good} of {len(errors)} within {100 * GOOD_ERROR:.0f} %. "
        "Positive: predicted longer than measured."
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


def accuracy_notes(analysis: Analysis) -> List[str]:
    """Returns what the factors of a time to accuracy are."""
    return [
        "Hardware: efficiency of the samples/s. Statistical: samples that the baseline needed over those needed here. "
        f"Overhead: the rest, as first epoch, validations and checkpoints. Baseline: {analysis.baseline}."
    ]


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


def extrapolation_notes(analysis: Analysis) -> List[str]:
    """Returns what a reader of extrapolations must know."""
    found = ["Interval: the band of the prediction."]
    if any(each.compute == THIS_CPU for each in analysis.study.extrapolations):
        found.append(
            "The compute is that of this machine's CPU and not of an IPU, which computes faster: there the same "
            "exchange is a larger share of an update, and the efficiency lower. Give the device's own with "
            "--compute_ms."
        )
    return found


def size_title(study: Study) -> str:
    """Returns the name of the number on the x axis."""
    return "Batch" if study.mode == BATCH else study.unit.capitalize()


def cell_name(analysis: Analysis, row: Row) -> str:
    """Returns a cell in words: `ddp at 4 instances`."""
    return f"{row.cell.engine} at {cell_place(analysis.study, row.cell)}"


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


def _render_table(table: Table, options: DisplayOptions) -> List[Line]:
    left = ("Engine", "Fabric")
    keys = [Column(title, [[(cell, PLAIN)] for cell in cells], title not in left) for title, cells in table.keys]
    numbers = [
        Column(title, [[(cell, _style(title, cell))] for cell in cells], rank=rank)
        for title, cells, rank in table.numbers
    ]
    lines = text_layout.make_table([*keys, *numbers], options)
    beginnings = text_layout.make_table(keys, DisplayOptions(None))
    found: List[Line] = lines[:1]
    for place, line in enumerate(lines[1:]):
        if place not in table.texts:
            found.append(line)
            continue
        beginning = beginnings[1 + place]
        indent = text_layout.line_width(beginning)
        wrapped = text_layout.wrap([(table.texts[place], WARN)], (options.width or _PIPE_TEXT_WIDTH) - indent)
        found.append([*beginning, *wrapped[0]])
        found += [[(" " * indent, PLAIN), *rest] for rest in wrapped[1:]]
    return found


def _style(title: str, cell: str) -> str:
    return WARN if title == "Error %" and cell != "-" and abs(float(cell)) > 100 * GOOD_ERROR else PLAIN


def _wrap(text: str, style: str, options: DisplayOptions) -> List[Line]:
    return text_layout.wrap([(text, style)], options.width or _PIPE_TEXT_WIDTH)


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
