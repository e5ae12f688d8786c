"""The pictures of a study, drawn with matplotlib, which is imported only to draw: which ones, and what each shows."""

from __future__ import annotations

import functools
from typing import Any, List, Sequence

from tf_ipu_dp import cli
from tf_ipu_dp.monitoring.drawings import INK, PALETTE, PAPER
from tf_ipu_dp.monitoring.panels import Panel, Titles, legend_below
from tf_ipu_dp.monitoring.text_layout import number, printable
from tf_ipu_dp.scaling import chart_marks, published, report_notes, report_tables
from tf_ipu_dp.scaling.analysis import Analysis, Row, cell_place, engines_of
from tf_ipu_dp.scaling.chart_marks import Behind
from tf_ipu_dp.scaling.compute_calibration import OURS
from tf_ipu_dp.scaling.records import BATCH, COMPARE, INSTANCES, STRONG, WEAK, Extrapolation

_LEGEND_LINE = 0.17  # inches
_MAX_BARS = 24
_SHORT_LABEL, _LONG_LABEL = 16, 30
_MIB = 2**20


def make_panels(analysis: Analysis) -> List[Panel]:
    """Returns the pictures that there is data for."""
    mode, done = analysis.study.mode, [row for row in analysis.rows if row.samples_per_s is not None]
    panels = []
    if done and mode in (WEAK, STRONG, INSTANCES):
        behind = _choose_behind(analysis, done)
        lines = len(engines_of(done)) + len(behind) + 3
        for name, title, draw in (
            ("throughput", f"Throughput against {analysis.study.unit}", draw_throughput),
            ("efficiency", f"Efficiency against {analysis.study.unit}", draw_efficiency),
        ):
            made = functools.partial(draw, analysis=analysis, behind=behind)
            panels.append(Panel(name, title, 2.9 + _LEGEND_LINE * lines, made, _note(analysis, done)))
    if done and mode == BATCH:
        knees = " ".join(report_notes.knee_sentence(analysis, knee) for knee in analysis.knees)
        height = 2.9 + _LEGEND_LINE * (len(engines_of(done)) + 1)
        panels.append(
            Panel("batch", "Throughput against batch", height, functools.partial(draw_batch, analysis=analysis), knees)
        )
        if any(row.memory_bytes is not None for row in done):
            draw = functools.partial(draw_memory, analysis=analysis)
            note = "The most that all processes had at once."
            panels.append(Panel("memory", "Memory against batch", height - 0.3, draw, note))
    if done and mode == COMPARE:
        draw = functools.partial(draw_layouts, analysis=analysis)
        panels.append(Panel("throughput", "Throughput by layout", 1.2 + 0.3 * len(done), draw, _note(analysis, done)))
    bars = _choose_bars(analysis)
    if bars:
        per = "sample" if mode == BATCH else "update"
        draw = functools.partial(draw_parts, analysis=analysis, bars=bars)
        note = " ".join(report_notes.part_notes(analysis)) if any(row.parts for row in done) else ""
        count = sum((row.parts is not None) + (row.predicted is not None) for row in bars)
        panels.append(Panel("parts", f"Where the time of one {per} goes", 1.6 + 0.26 * count, draw, note))
    if analysis.study.extrapolations:
        draw = functools.partial(draw_extrapolation, analysis=analysis)
        found = analysis.study.extrapolations
        lines = len({each.fabric for each in found}) + len(_extrapolated_behind(found)) + 2
        note = "A prediction: none of these sizes was measured. Bands are those of the prediction."
        panels.append(Panel("extrapolation", "Efficiency, predicted", 2.9 + _LEGEND_LINE * lines, draw, note))
    return panels


def draw_throughput(plot: Any, name: str, analysis: Analysis, behind: Behind) -> Titles:
    """Draws samples/s over sizes, both logarithmic, with the ideal line of each engine."""
    rows = _done(analysis)
    bases = {row.cell.engine: row for row in rows if row.efficiency_interval is None}
    chart_marks.size_axis(plot, analysis, rows, behind)
    titles: Titles = {}
    for engine in engines_of(rows):
        titles.update(chart_marks.draw_rates(plot, name, analysis, [row for row in rows if row.cell.engine == engine]))
    chart_marks.draw_predicted(plot, rows)
    for engine, base in bases.items():
        own = [row for row in rows if row.cell.engine == engine]
        ideal = [chart_marks.rate_of(base) * row.cell.replicas / base.cell.replicas for row in own]
        label = "ideal" if base is next(iter(bases.values())) else None
        plot.plot(
            [row.cell.size for row in own], ideal, color=chart_marks.colour_of(engine), linewidth=0.9,
            linestyle=(0, (1, 1.5)), label=label, zorder=2,
        )  # fmt: skip
    chart_marks.mark_legend(plot, rows)
    first = next(iter(bases.values()))
    chart_marks.draw_behind(plot, name, behind, chart_marks.rate_of(first) / first.cell.size)
    chart_marks.rate_axis(plot, rows)
    plot.grid(alpha=0.6, linewidth=0.5)
    legend_below(plot, 1)
    return titles


def draw_efficiency(plot: Any, name: str, analysis: Analysis, behind: Behind) -> Titles:
    """Draws efficiency over sizes, with its intervals."""
    rows = _done(analysis)
    chart_marks.size_axis(plot, analysis, rows, behind)
    titles: Titles = {}
    highest = 100.0
    for engine in engines_of(rows):
        own = [row for row in rows if row.cell.engine == engine]
        across = [row.cell.size for row in own]
        values = [100 * (row.efficiency or 0.0) for row in own]
        spans = [row.efficiency_interval for row in own]
        highest = max(highest, *values)
        chart_marks.draw_line(plot, across, values, engine)
        for size, span in zip(across, spans):
            if span is not None and span.level > 0:
                plot.vlines(
                    size, 100 * span.low, 100 * span.high, color=chart_marks.colour_of(engine), linewidth=1.2, zorder=3
                )
                highest = max(highest, 100 * span.high)
        titles.update(chart_marks.draw_marks(plot, name, analysis, own, across, values))
    plot.axhline(100, color=INK, linewidth=0.9, linestyle=(0, (1, 1.5)), label="ideal", zorder=2)
    chart_marks.mark_legend(plot, rows)
    chart_marks.draw_behind(plot, name, behind, None)
    plot.set_ylim(0, 1.06 * highest)
    plot.yaxis.set_major_formatter(lambda value, _: f"{value:.0f} %")
    plot.set_ylabel("efficiency")
    plot.grid(alpha=0.6, linewidth=0.5)
    legend_below(plot, 1)
    return titles


def draw_batch(plot: Any, name: str, analysis: Analysis) -> Titles:
    """Draws samples/s over the batch, with the knee of each engine marked."""
    rows = _done(analysis)
    chart_marks.size_axis(plot, analysis, rows, ())
    titles: Titles = {}
    for engine in engines_of(rows):
        titles.update(chart_marks.draw_rates(plot, name, analysis, [row for row in rows if row.cell.engine == engine]))
    chart_marks.draw_predicted(plot, rows)
    best = max(row.samples_per_s.high for row in rows if row.samples_per_s is not None)
    plot.set_ylim(0, 1.12 * best)
    for place, knee in enumerate(analysis.knees):
        (row,) = (row for row in rows if row.cell.engine == knee.engine and row.cell.size == knee.size)
        plot.vlines(
            knee.size,
            0,
            chart_marks.rate_of(row),
            color=chart_marks.colour_of(knee.engine),
            linewidth=1,
            linestyle="--",
            zorder=1,
        )
        plot.annotate(
            f"knee of {printable(knee.engine)}: {knee.size:,}", (knee.size, (0.06 + 0.09 * place) * best),
            xytext=(-5, 0), textcoords="offset points", fontsize=8, ha="right", zorder=5,
            color=chart_marks.colour_of(knee.engine),
            bbox={"facecolor": PAPER, "edgecolor": "none", "alpha": 0.8, "pad": 0.8},
        )  # fmt: skip
    plot.yaxis.set_major_formatter(lambda value, _: number(value))
    plot.set_ylabel("samples/s")
    plot.grid(alpha=0.6, linewidth=0.5)
    legend_below(plot, 2)
    return titles


def draw_memory(plot: Any, name: str, analysis: Analysis) -> Titles:
    """Draws the memory of each engine over the batch."""
    rows = [row for row in _done(analysis) if row.memory_bytes is not None]
    chart_marks.size_axis(plot, analysis, rows, ())
    titles: Titles = {}
    for engine in engines_of(rows):
        own = [row for row in rows if row.cell.engine == engine]
        across, values = [row.cell.size for row in own], [(row.memory_bytes or 0) / _MIB for row in own]
        chart_marks.draw_line(plot, across, values, engine)
        titles.update(chart_marks.draw_marks(plot, name, analysis, own, across, values))
    plot.set_ylim(0, 1.1 * max((row.memory_bytes or 0) / _MIB for row in rows))
    plot.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    plot.set_ylabel("MiB")
    plot.grid(alpha=0.6, linewidth=0.5)
    legend_below(plot, 2)
    return titles


def draw_layouts(plot: Any, name: str, analysis: Analysis) -> Titles:
    """Draws samples/s of each layout as a bar with its interval; hollow where the cores of this machine limit it."""
    rows = _done(analysis)
    several = len(engines_of(rows)) > 1
    labels = []
    for place, row in enumerate(rows):
        colour, span = chart_marks.colour_of(row.cell.engine), row.samples_per_s
        plot.barh(
            place,
            chart_marks.rate_of(row),
            height=0.66,
            color=colour,
            alpha=0.35 if row.core_limited else 0.9,
            gid=f"{name}-{place}",
        )
        if span is not None and span.level > 0:
            plot.hlines(place, span.low, span.high, color=INK, linewidth=1.2, zorder=4)
        right = span.high if span is not None else chart_marks.rate_of(row)
        text = f"{number(chart_marks.rate_of(row))}{report_notes.CORE_MARK if row.core_limited else ''}"
        plot.annotate(text, (right, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)
        layout = cell_place(analysis.study, row.cell)
        labels.append(f"{printable(row.cell.engine)}, {layout}" if several else layout)
    plot.set_yticks(range(len(rows)), labels)
    plot.invert_yaxis()
    plot.set_xlim(0, 1.2 * max(row.samples_per_s.high for row in rows if row.samples_per_s is not None))
    plot.xaxis.set_major_formatter(lambda value, _: number(value))
    plot.set_xlabel("samples/s")
    plot.grid(axis="x", alpha=0.6, linewidth=0.5)
    plot.set_axisbelow(True)
    return {f"{name}-{place}": [chart_marks.cell_text(analysis, row)] for place, row in enumerate(rows)}


def draw_parts(plot: Any, name: str, analysis: Analysis, bars: Sequence[Row]) -> Titles:
    """Draws the parts of an update as stacked bars, predicted below measured; of a batch sweep, over its samples."""
    study = analysis.study
    several = len(engines_of(bars)) > 1
    labels: List[str] = []
    titles: Titles = {}
    place = 0.0
    places: List[float] = []
    unit, longest = 1e3, 0.0
    for row in bars:
        about = cell_place(study, row.cell)
        about = f"{printable(row.cell.engine)}, {about}" if several else about
        for kind, parts in (("measured", row.parts), ("predicted", row.predicted.parts if row.predicted else None)):
            if parts is None:
                continue
            over = row.cell.global_batch_size if study.mode == BATCH else 1
            mark = report_notes.CORE_MARK if row.core_limited and kind == "measured" else ""
            beside = "predicted" if row.parts is not None else f"{about}, predicted"
            labels.append(f"{about}{mark}" if kind == "measured" else beside)
            titles.update(chart_marks.draw_bar(plot, f"{name}-{len(places)}", place, parts, unit / over, kind, about))
            places.append(place)
            longest = max(longest, unit / over * parts.total_s)
            place += 1.0
        place += 0.4
    plot.set_yticks(places, labels)
    plot.set_ylim(places[-1] + 0.6, -0.6)
    plot.set_xlim(0, 1.12 * longest)
    plot.set_xlabel(f"ms of one {'sample' if study.mode == BATCH else 'update'}")
    plot.grid(axis="x", alpha=0.6, linewidth=0.5)
    plot.set_axisbelow(True)
    for part, colour in zip(report_tables.PART_NAMES.values(), chart_marks.PART_COLOURS):
        plot.barh([0], [0], color=colour, label=part)
    # Long labels leave less width for the legend, which begins at the axis.
    widest = max(map(len, labels))
    legend_below(plot, 3 if widest <= _SHORT_LABEL else 2 if widest <= _LONG_LABEL else 1)
    return titles


def draw_extrapolation(plot: Any, name: str, analysis: Analysis) -> Titles:
    """Draws predicted efficiency of each fabric with its band, over sizes; published curves at their own sizes."""
    found = analysis.study.extrapolations
    measured = [row for row in _done(analysis) if row.cell.engine == _predicted_engine(analysis)]
    measured = measured if analysis.study.mode in (WEAK, STRONG) else []
    chart_marks.log2_axis(
        plot, sorted({each.size for each in found} | {row.cell.replicas for row in measured}), "replicas"
    )
    titles: Titles = {}
    for place, fabric in enumerate(dict.fromkeys(each.fabric for each in found)):
        own = sorted((each for each in found if each.fabric == fabric), key=lambda each: each.size)
        colour, gid = PALETTE[(1, 2, 3, 4, 5, 6)[place % 6]], f"{name}-{place}"
        across = [each.size for each in own]
        low, high = (
            [100 * each.efficiency * getattr(each, end) / each.samples_per_s for each in own] for end in ("low", "high")
        )
        plot.fill_between(across, low, high, color=colour, alpha=0.15, linewidth=0)
        label = f"{report_tables.extrapolation_name(own[0])}, predicted"
        plot.plot(
            across, [100 * each.efficiency for each in own], color=colour, linestyle=(0, (4, 2)), linewidth=1.4,
            marker=chart_marks.MARKS[place % len(chart_marks.MARKS)], markersize=4, label=label, gid=gid,
            zorder=3,
        )  # fmt: skip
        titles[gid] = [_extrapolation_text(each) for each in own]
    if measured:
        engine = measured[0].cell.engine
        across, values = [row.cell.replicas for row in measured], [100 * (row.efficiency or 0.0) for row in measured]
        chart_marks.draw_line(plot, across, values, engine, "measured here")
        titles.update(chart_marks.draw_marks(plot, f"{name}-own", analysis, measured, across, values))
        chart_marks.mark_legend(plot, measured)
    chart_marks.draw_behind(plot, name, _extrapolated_behind(found), None, absolute=True)
    plot.set_ylim(0, 118)
    plot.yaxis.set_major_formatter(lambda value, _: f"{value:.0f} %")
    plot.set_ylabel("efficiency")
    plot.grid(alpha=0.6, linewidth=0.5)
    legend_below(plot, 1)
    return titles


def _done(analysis: Analysis) -> List[Row]:
    """Returns the measured rows in the order of their engines and sizes."""
    done = [row for row in analysis.rows if row.is_done]
    order = engines_of(done)
    if analysis.study.mode == COMPARE:
        return sorted(done, key=lambda row: order.index(row.cell.engine))
    return sorted(done, key=lambda row: (order.index(row.cell.engine), row.cell.size))


def _choose_bars(analysis: Analysis) -> List[Row]:
    """Returns the rows whose parts are drawn: all of our own engines, or of many sizes those spread over them."""
    # Of other engines only compute and exchange are told apart, and only in predictions.
    ours = [row for row in analysis.rows if row.cell.engine.startswith(OURS)]
    rows = [row for row in ours if row.parts is not None or row.predicted is not None]
    step = -(-2 * len(rows) // _MAX_BARS)
    return rows[:: max(1, step)]


def _choose_behind(analysis: Analysis, done: Sequence[Row]) -> Behind:
    """Returns the published points that lie on the axis, their baselines moved to that of the study."""
    base = min(row.cell.size for row in done)
    largest = max([chart_marks.PUBLISHED_TIMES * base, *(row.cell.size for row in done)])
    found = []
    for curve in published.behind(analysis.study.mode):
        first = curve.points[0].devices
        points = [(base * each.devices / first, 100 * each.efficiency) for each in curve.points]
        points = [(size, value) for size, value in points if size <= largest]
        if len(points) > 1:
            found.append((curve, points))
    return found


def _extrapolated_behind(found: Sequence[Extrapolation]) -> Behind:
    largest = max(each.size for each in found)
    chosen = [
        (curve, [(float(each.devices), 100 * each.efficiency) for each in curve.points if each.devices <= largest])
        for curve in published.behind(WEAK)
        if curve.points[-1].devices >= min(each.size for each in found)
    ]
    return [(curve, points) for curve, points in chosen if len(points) > 1]


def _note(analysis: Analysis, done: Sequence[Row]) -> str:
    limited = (
        f" {report_notes.CORE_MARK} Limited by the cores of this machine." if analysis.study.mode == COMPARE else ""
    )
    limited = limited if any(row.core_limited for row in done) else ""
    return f"Baseline: {analysis.baseline}. {report_notes.interval_note(done)}{limited}"


def _extrapolation_text(each: Extrapolation) -> str:
    return (
        f"{report_tables.extrapolation_name(each)}, {cli.count(each.size, 'replica')}, predicted: "
        f"{number(each.samples_per_s)} samples/s ({number(each.low)}-{number(each.high)}), "
        f"efficiency {100 * each.efficiency:.1f} %"
    )


def _predicted_engine(analysis: Analysis) -> str:
    """Returns the engine that extrapolations are of: the first of ours."""
    engines = analysis.study.engines
    return next((name for name in engines if name.startswith(OURS)), engines[0])
