"""A report as text: tables and terminal plots. Pure: takes the content and what the terminal can show."""

from __future__ import annotations

import math
from typing import Any, Callable, List, Optional, Sequence, Tuple

import numpy as np

from tf_ipu_dp import cli
from tf_ipu_dp.collectives import outliers, quantities, run_exchanges, terminal_plots
from tf_ipu_dp.collectives.report_content import Content, Entry, Pair, cdf, render_size
from tf_ipu_dp.collectives.results import Result
from tf_ipu_dp.collectives.statistics import Summary
from tf_ipu_dp.monitoring import text_layout
from tf_ipu_dp.monitoring.text_layout import (
    BAD,
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

Array = Any

MAX_CURVES = 8  # colours and marks
_MAX_DELAYS = 2
_MAX_MAPS = 2
_MAX_MAP_ROWS = 16
_PIPE_WIDTH = 80
_PIPE_TEXT_WIDTH = 120
_FIRST_NUMBER = 2  # columns before it say which series a row is
_PLOT_HEIGHT = 16
_CAUSE_MARKS = {
    outliers.TIMEOUT: ("T", BAD),
    outliers.PROBE: ("P", BAD),
    outliers.FAST: ("F", "36"),
    outliers.LATE: ("L", "35"),
    outliers.OTHER: ("?", WARN),
}

Cell = Callable[[Summary], str]


def render(content: Content, options: DisplayOptions) -> str:
    """Returns the whole report."""
    blocks = [_results(content, options)]
    if content.entries:
        blocks.append(_tables(content, options))
    if content.pairs:
        blocks.append(pair_table(content.pairs, options))
    # A plot needs a width. In a pipe it gets the width of the usual terminal.
    drawn = DisplayOptions(options.width or _PIPE_WIDTH, options.bars, options.colour, options.unicode)
    if content.entries:
        blocks += [_cdf(content.entries, drawn), *_delays(content.entries, drawn), *_last(content.entries, drawn)]
    blocks += [run_exchanges.render(run, drawn) for run in content.runs]
    return "\n".join(text_layout.render_lines(lines, options) for lines in blocks if lines)


def time_unit(seconds: Sequence[float]) -> Tuple[float, str]:
    """Returns the unit in which a table shows times: its seconds and its name."""
    largest, smallest = max(seconds, default=0.0), min((each for each in seconds if each > 0), default=0.0)
    return (1e-6, "us") if largest < 1e-3 else (1.0, "s") if smallest >= 1 else (1e-3, "ms")


def rate_unit(rates: Sequence[float]) -> Tuple[float, str]:
    """Returns the unit in which a table shows bandwidths."""
    return (1e9, "GB/s") if rates and min(rates) >= 1e9 else (1e6, "MB/s")


def summary_columns(summaries: Sequence[Summary]) -> List[TextColumn]:
    """Returns titles and cells of the numbers of a report, in the order in which they are shown."""
    time, time_name = time_unit([each.p50_s for each in summaries])
    rate, rate_name = rate_unit([each.algbw_bytes_per_s for each in summaries if each.algbw_bytes_per_s])

    def scaled(value: Optional[float], unit: float) -> str:
        return number(None if value is None else value / unit)

    found: List[Tuple[str, Cell]] = [
        ("Ranks", lambda each: f"{each.ranks:,}"),
        ("Bytes", lambda each: render_size(each.bytes)),
        ("Trials", lambda each: f"{each.trials:,}"),
        (f"min {time_name}", lambda each: scaled(each.min_s, time)),
        ("p50", lambda each: scaled(each.p50_s, time)),
        ("p90", lambda each: scaled(each.p90_s, time)),
        ("p99", lambda each: scaled(each.p99_s, time)),
        ("p99.9", lambda each: scaled(each.p99_9_s, time)),
        ("max", lambda each: scaled(each.max_s, time)),
        ("mean", lambda each: scaled(each.mean_s, time)),
        (f"algbw {rate_name}", lambda each: scaled(each.algbw_bytes_per_s, rate)),
        ("busbw", lambda each: scaled(each.busbw_bytes_per_s, rate)),
        ("Ideal %", lambda each: "-" if each.ideal_pct is None else f"{each.ideal_pct:.1f}"),
        ("Wrong", lambda each: f"{each.wrong_sums:,}"),
    ]
    if any(each.engine_p50_s is not None for each in summaries):
        found += [
            ("Engine p50", lambda each: scaled(each.engine_p50_s, time)),
            ("Outside", lambda each: scaled(each.outside_engine_p50_s, time)),
        ]
    return [(title, [cell(each) for each in summaries]) for title, cell in found]


def report_columns(content: Content) -> List[TextColumn]:
    """Returns titles and cells of the table of all entries: the result's letter, the numbers, and the label."""
    columns = summary_columns([entry.summary for entry in content.entries])
    labels = [printable(entry.summary.label) for entry in content.entries]
    if any(labels):
        columns.insert(_FIRST_NUMBER, ("Series", labels))
    if len(content.results) > 1:
        columns.insert(0, ("", [entry.key for entry in content.entries]))
    return columns


def table_notes(entries: Sequence[Entry]) -> List[str]:
    """Returns the sentences that a reader of the table needs."""
    summaries = [entry.summary for entry in entries]
    notes = []
    few = [name for name, values in _percentiles(summaries) if None in values]
    if few:
        notes.append(
            f"A dash instead of {cli.alternatives(few)}: too few trials, it would be the slowest one "
            "(p90 needs 10 trials, p99 100, p99.9 1,000)."
        )
    if any(each.ideal_pct is not None for each in summaries):
        notes.append("Ideal %: the time that the slowest link alone would take, over the time it took.")
    if any(each.engine_p50_s is not None for each in summaries):
        notes.append("Outside: Horovod's own time before and after the engine's (its cycle, negotiation and copies).")
    wrong = sum(each.wrong_sums for each in summaries)
    if wrong:
        notes.append(f"{cli.count(wrong, 'sum was', 'sums were')} wrong: these times are not those of an all-reduce.")
    return notes


def cause_counts(entry: Entry) -> List[Tuple[str, int]]:
    """Returns how many outliers have each cause, without those that none has."""
    counts = [(cause, sum(each.cause == cause for each in entry.outliers)) for cause in outliers.CAUSES]
    return [(cause, count) for cause, count in counts if count]


def outlier_sentence(entry: Entry) -> str:
    """Returns how many outliers a series has and why."""
    if not entry.outliers:
        return "No outliers."
    causes = ", ".join(f"{count:,} {cause}" for cause, count in cause_counts(entry))
    share = 100 * len(entry.outliers) / entry.summary.trials
    limit = quantities.render_seconds(outliers.limit_s(entry.series.seconds))
    return f"{cli.count(len(entry.outliers), 'outlier')} ({share:.2g} %, above {limit}): {causes}."


def last_sentence(found: outliers.LastShares) -> str:
    """Returns in how many trials a rank was late, and which one most often."""
    limit = quantities.render_seconds(found.limit_s)
    if not found.late:
        return f"Nobody was late: in all of {cli.count(found.trials, 'trial')} the ranks began within {limit}."
    rank = int(np.argmax(found.share))
    return (
        f"A rank was late, by more than {limit}, in {found.late:,} of {cli.count(found.trials, 'trial')}. Rank {rank} "
        f"was last most often: in {100 * found.share[rank] * found.trials / found.late:.0f} % of these; an equal share "
        f"is {100 / len(found.share):.2g} %."
    )


def result_lines(result: Result) -> List[str]:
    """Returns what a result is about: its title, then engine, algorithm and fabric, then its notes."""
    about = result.description
    facts = [about.engine, about.algorithm, *([f"fabric {about.fabric}"] if about.fabric else [])]
    title = printable(f"{about.kind}: {about.title}")
    return [title, printable("; ".join(filter(None, facts))), *map(printable, about.notes)]


def fact_lines(content: Content) -> List[str]:
    """Returns the facts of each result in one text. Of several results: those in which they differ."""
    every = [result.description.facts for _, result in content.results]
    names = [name for facts in every for name in facts]
    differing = {name for name in names if len({facts.get(name) for facts in every}) > 1}
    return [
        "; ".join(printable(f"{name} {value}") for name, value in facts.items() if len(every) == 1 or name in differing)
        for facts in every
    ]


def pair_columns(pairs: Sequence[Pair]) -> List[TextColumn]:
    """Returns titles and cells of the table of measured and predicted times."""
    time, unit = time_unit([value for each in pairs for value in (each.measured_p50_s, each.predicted_p50_s)])
    return [
        ("Ranks", [f"{each.ranks:,}" for each in pairs]),
        ("Bytes", [render_size(each.bytes) for each in pairs]),
        (f"measured p50 {unit}", [number(each.measured_p50_s / time) for each in pairs]),
        ("predicted", [number(each.predicted_p50_s / time) for each in pairs]),
        ("Error %", [f"{each.error_pct:+.1f}" for each in pairs]),
        ("measured p99", [_scaled(each.measured_p99_s, time) for each in pairs]),
        ("predicted", [_scaled(each.predicted_p99_s, time) for each in pairs]),
    ]


def pair_table(pairs: Sequence[Pair], options: DisplayOptions) -> List[Line]:
    """Returns the table of measured and predicted times, with the mean error below it."""
    columns = [Column(title, [_cell(cell) for cell in cells]) for title, cells in pair_columns(pairs)]
    columns[-2].rank, columns[-1].rank = 2, 1  # left out where the terminal is narrow
    for cell, pair in zip(columns[4].cells, pairs):
        cell[0] = (cell[0][0], _error_style(pair.error_pct))
    heading: Line = [("Measured against predicted", BOLD)]
    below = text_layout.wrap([(error_sentence(pairs), PLAIN)], options.width)
    return [heading, *text_layout.make_table(columns, options), *below]


def error_sentence(pairs: Sequence[Pair]) -> str:
    """Returns how far predictions are off, over all pairs."""
    errors = [abs(each.error_pct) for each in pairs]
    return (
        f"Mean error {np.mean(errors):.1f} %, largest {max(errors):.1f} %, of {cli.count(len(errors), 'pair')}. "
        "Positive: predicted longer than measured."
    )


def _results(content: Content, options: DisplayOptions) -> List[Line]:
    lines: List[Line] = []
    for (key, result), facts in zip(content.results, fact_lines(content)):
        title, about, *notes = result_lines(result)
        prefix = f"{key}  " if len(content.results) > 1 else ""
        lines.append([(prefix + title, BOLD)])
        indent = " " * len(prefix)
        room = (options.width or _PIPE_TEXT_WIDTH) - len(prefix)
        for text, style in ((about, PLAIN), (facts, DIM), *((note, PLAIN) for note in notes)):
            wrapped = text_layout.wrap([(text, style)], room) if text else []
            lines += [[(indent + part, style)] for ((part, _),) in wrapped]
    return lines


def _tables(content: Content, options: DisplayOptions) -> List[Line]:
    """Returns the numbers as one table, or as several below each other where the terminal is narrow."""
    entries = content.entries
    columns = [Column(title, [_cell(cell) for cell in cells]) for title, cells in report_columns(content)]
    for column in columns:
        if column.title == "Wrong":
            column.cells = [[(text, BAD if text != "0" else PLAIN)] for ((text, _),) in column.cells]
    # Ranks, bytes and label say which series a row is: they stand in front of every part of a table.
    split = [column.title for column in columns].index("Trials")
    keys, numbers = columns[:split], columns[split:]
    lines: List[Line] = []
    for part in _fit(keys, numbers, options.width):
        lines += [*([[]] if lines else []), *text_layout.make_table([*keys, *part], DisplayOptions(None))]
    for note in table_notes(entries):
        lines += [[(text, DIM)] for ((text, _),) in text_layout.wrap([(note, DIM)], options.width)]
    return lines


def _fit(keys: Sequence[Column], numbers: Sequence[Column], width: Optional[int]) -> List[List[Column]]:
    """Divides columns into groups that fit a width together with the keys."""
    if width is None:
        return [list(numbers)]
    groups: List[List[Column]] = [[]]
    room = width - sum(column.width + text_layout.GAP for column in keys)
    left = room
    for column in numbers:
        if groups[-1] and column.width > left:
            groups.append([])
            left = room
        groups[-1].append(column)
        left -= column.width + text_layout.GAP
    return groups


def _cdf(entries: Sequence[Entry], options: DisplayOptions) -> List[Line]:
    shown = choose_curves(entries, MAX_CURVES)
    heading: Line = [("Share of trials by time (CDF)", BOLD)]
    if len(shown) < len(entries):
        heading.append((f": {len(shown)} of {len(entries)} series; choose with --ranks and --bytes", PLAIN))
    marked = not options.colour and len(shown) > 1
    width = options.width or _PIPE_WIDTH
    axis = terminal_plots.time_axis(np.concatenate([entry.series.seconds for entry in shown]), max(3, width // 12))
    share = terminal_plots.Axis(0, 1, False, ((0, "0 %"), (0.25, "25 %"), (0.5, "p50"), (0.75, "75 %"), (0.99, "p99")))
    guide = np.exp(np.linspace(math.log(axis.low), math.log(axis.high), width // 3))
    dot = "·" if options.unicode else "."
    groups = [terminal_plots.Points(guide, np.full(len(guide), level), DIM, dot) for level in (0.5, 0.99)]
    legend: List[Line] = []
    for place, entry in enumerate(shown):
        times, shares = cdf(entry.series.seconds, 2000)
        style = terminal_plots.COLOURS[place]
        own = terminal_plots.mark(place, options.unicode)
        steps = width if marked or not options.unicode else 2 * width
        x, y = terminal_plots.interpolate(times, shares, steps, axis)
        groups.append(terminal_plots.Points(x, y, style, own if marked or not options.unicode else ""))
        p99 = entry.summary.p99_s
        numbers = f"p50 {quantities.render_seconds(entry.summary.p50_s)}"
        numbers += "" if p99 is None else f", p99 {quantities.render_seconds(p99)}"
        legend.append([(f"{own} ", style), (f"{printable(entry.name)}: {numbers}", PLAIN)])
    return [heading, *terminal_plots.plot(groups, axis, share, _PLOT_HEIGHT, options), *legend]


def choose_curves(entries: Sequence[Entry], limit: int) -> List[Entry]:
    """Returns entries that are spread over all of them, the first and the last included."""
    if len(entries) <= limit:
        return list(entries)
    return [entries[place] for place in np.linspace(0, len(entries) - 1, limit).round().astype(int)]


def _delays(entries: Sequence[Entry], options: DisplayOptions) -> List[List[Line]]:
    blocks = []
    width = options.width or _PIPE_WIDTH
    for entry in choose_delays(entries, _MAX_DELAYS):
        seconds = np.asarray(entry.series.seconds)
        trials = np.arange(len(seconds))
        body: Array = np.ones(len(seconds), dtype=bool)
        body[[each.trial for each in entry.outliers]] = False
        groups = [terminal_plots.Points(trials[body], seconds[body], terminal_plots.COLOURS[0])]
        # Rare causes are drawn last, so that others do not cover them.
        for cause, _ in sorted(cause_counts(entry), key=lambda each: -each[1]):
            own, style = _CAUSE_MARKS[cause]
            chosen = [each for each in entry.outliers if each.cause == cause]
            places = np.array([each.trial for each in chosen])
            groups.append(terminal_plots.Points(places, np.array([each.seconds for each in chosen]), style, own))
        lines: List[Line] = [[("Time of each trial", BOLD), (f": {printable(entry.name)}", PLAIN)]]
        lines += terminal_plots.plot(
            groups,
            terminal_plots.count_axis(len(seconds), max(3, width // 12)),
            terminal_plots.time_axis(seconds, _PLOT_HEIGHT // 2),
            _PLOT_HEIGHT,
            options,
        )
        lines += _cause_legend([cause for cause, _ in cause_counts(entry)], width)
        blocks.append([*lines, *text_layout.wrap([(outlier_sentence(entry), PLAIN)], options.width)])
    return blocks


def _cause_legend(causes: Sequence[str], width: int) -> List[Line]:
    """Returns the marks of causes, in as many lines as they need."""
    lines: List[Line] = []
    left = 0
    for cause in causes:
        own, style = _CAUSE_MARKS[cause]
        needed = len(own) + 1 + len(cause)
        if needed > left or not lines:
            lines.append([])
            left = width
        lines[-1] += [(f"{own} ", style), (f"{cause}   " if left >= needed + 3 else cause, PLAIN)]
        left -= needed + 3
    return lines


def choose_delays(entries: Sequence[Entry], limit: int) -> List[Entry]:
    """Returns the entries whose trials are drawn one by one: those with the most outliers, measured ones first."""
    order = sorted(entries, key=lambda entry: (not entry.is_measured, -len(entry.outliers)))
    chosen = {id(entry) for entry in order[:limit]}
    return [entry for entry in entries if id(entry) in chosen]


def _last(entries: Sequence[Entry], options: DisplayOptions) -> List[List[Line]]:
    blocks: List[List[Line]] = []
    for entry in entries:
        found = outliers.last_shares(entry.series, max(10, (options.width or _PIPE_WIDTH) - 20))
        if found is None or len(blocks) == _MAX_MAPS:
            continue
        names, by_group, shares = group_ranks(found, _MAX_MAP_ROWS)
        labels = [f"rank {name} {100 * share:3.0f} %" for name, share in zip(names, shares)]
        lines: List[Line] = [[("Who was last", BOLD), (f", by trial: {printable(entry.name)}", PLAIN)]]
        lines += terminal_plots.shaded_map(labels, by_group, options) if found.late else []
        blocks.append([*lines, *text_layout.wrap([(last_sentence(found), PLAIN)], options.width)])
    return blocks


def group_ranks(found: outliers.LastShares, max_rows: int) -> Tuple[List[str], Array, Array]:
    """Returns names, shares by group of trials, and shares of ranks; neighbours are added up where ranks are many."""
    ranks = len(found.share)
    size = -(-ranks // max_rows)
    starts = range(0, ranks, size)
    names = [str(start) if size == 1 else f"{start}-{min(start + size, ranks) - 1}" for start in starts]
    by_group = np.array([found.by_group[start : start + size].sum(axis=0) for start in starts])
    return names, by_group, np.array([found.share[start : start + size].sum() for start in starts])


def _percentiles(summaries: Sequence[Summary]) -> List[Tuple[str, List[Optional[float]]]]:
    return [
        ("p90", [each.p90_s for each in summaries]),
        ("p99", [each.p99_s for each in summaries]),
        ("p99.9", [each.p99_9_s for each in summaries]),
    ]


def _cell(text: str) -> Line:
    return [(text, PLAIN)]


def _scaled(value: Optional[float], unit: float) -> str:
    return number(None if value is None else value / unit)


def _error_style(error_pct: float) -> str:
    return WARN if abs(error_pct) > 10 else PLAIN
