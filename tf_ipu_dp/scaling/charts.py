"""The pictures of a study, drawn with matplotlib, which is imported only to draw.

An engine has the same colour in all pictures and studies. A hollow mark is a cell that the cores of this machine limit.
"""

from __future__ import annotations

import functools
from typing import Any, Dict, List, Optional, Sequence, Tuple

from tf_ipu_dp import cli
from tf_ipu_dp.collectives.quantities import render_seconds
from tf_ipu_dp.monitoring.drawings import INK, PALETTE, PAPER
from tf_ipu_dp.monitoring.panels import Panel, Titles, legend_below
from tf_ipu_dp.monitoring.text_layout import number, printable
from tf_ipu_dp.scaling import published, report_text
from tf_ipu_dp.scaling.analysis import Analysis, Row, cell_place, engines_of
from tf_ipu_dp.scaling.records import BATCH, COMPARE, INSTANCES, STRONG, WEAK, Extrapolation, UpdateParts

_COLOURS = {"tf_ipu_dp": 0, "tf_ipu_dp_mpi": 5, "horovod": 1, "ddp": 2, "keras": 3}
_MARKS = "os^Dv"
_PART_COLOURS = (PALETTE[0], PALETTE[4], PALETTE[1], PALETTE[6], PALETTE[2], PALETTE[7])
_GREY = PALETTE[7]
_PUBLISHED_STYLES = ((0, (1, 1)), (0, (4, 1.5)), (0, (4, 1.5, 1, 1.5)), (0, (6, 2, 1, 2, 1, 2)), "-")
_PUBLISHED_TIMES = 8  # times the baseline to which the axis reaches for published curves
_LEGEND_LINE = 0.17  # inches
_MAX_BARS = 24
_MAX_TICKS = 9
_MIN_LOG_RATIO, _MANY_DOUBLINGS = 2.0, 16
_SHORT_LABEL, _LONG_LABEL = 16, 30
_MIB = 2**20

Behind = Sequence[Tuple[published.Curve, List[Tuple[float, float]]]]  # with sizes and efficiencies


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
        knees = " ".join(report_text.knee_sentence(analysis, knee) for knee in analysis.knees)
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
        note = " ".join(report_text.part_notes(analysis)) if any(row.parts for row in done) else ""
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
    _size_axis(plot, analysis, rows, behind)
    titles: Titles = {}
    for engine in engines_of(rows):
        titles.update(_draw_rates(plot, name, analysis, [row for row in rows if row.cell.engine == engine]))
    _draw_predicted(plot, rows)
    for engine, base in bases.items():
        own = [row for row in rows if row.cell.engine == engine]
        ideal = [_rate(base) * row.cell.replicas / base.cell.replicas for row in own]
        label = "ideal" if base is next(iter(bases.values())) else None
        plot.plot(
            [row.cell.size for row in own], ideal, color=_colour(engine), linewidth=0.9, linestyle=(0, (1, 1.5)),
            label=label, zorder=2,
        )  # fmt: skip
    _mark_legend(plot, rows)
    first = next(iter(bases.values()))
    _draw_behind(plot, name, behind, _rate(first) / first.cell.size)
    _rate_axis(plot, rows)
    plot.grid(alpha=0.6, linewidth=0.5)
    legend_below(plot, 1)
    return titles


def draw_efficiency(plot: Any, name: str, analysis: Analysis, behind: Behind) -> Titles:
    """Draws efficiency over sizes, with its intervals."""
    rows = _done(analysis)
    _size_axis(plot, analysis, rows, behind)
    titles: Titles = {}
    highest = 100.0
    for engine in engines_of(rows):
        own = [row for row in rows if row.cell.engine == engine]
        across = [row.cell.size for row in own]
        values = [100 * (row.efficiency or 0.0) for row in own]
        spans = [row.efficiency_interval for row in own]
        _draw_line(plot, across, values, engine)
        for size, span in zip(across, spans):
            if span is not None and span.level > 0:
                plot.vlines(size, 100 * span.low, 100 * span.high, color=_colour(engine), linewidth=1.2, zorder=3)
                highest = max(highest, 100 * span.high)
        titles.update(_draw_marks(plot, name, analysis, own, across, values))
    plot.axhline(100, color=INK, linewidth=0.9, linestyle=(0, (1, 1.5)), label="ideal", zorder=2)
    _mark_legend(plot, rows)
    _draw_behind(plot, name, behind, None)
    plot.set_ylim(0, 1.06 * highest)
    plot.yaxis.set_major_formatter(lambda value, _: f"{value:.0f} %")
    plot.set_ylabel("efficiency")
    plot.grid(alpha=0.6, linewidth=0.5)
    legend_below(plot, 1)
    return titles


def draw_batch(plot: Any, name: str, analysis: Analysis) -> Titles:
    """Draws samples/s over the batch, with the knee of each engine marked."""
    rows = _done(analysis)
    _size_axis(plot, analysis, rows, ())
    titles: Titles = {}
    for engine in engines_of(rows):
        titles.update(_draw_rates(plot, name, analysis, [row for row in rows if row.cell.engine == engine]))
    _draw_predicted(plot, rows)
    best = max(row.samples_per_s.high for row in rows if row.samples_per_s is not None)
    plot.set_ylim(0, 1.12 * best)
    for place, knee in enumerate(analysis.knees):
        (row,) = (row for row in rows if row.cell.engine == knee.engine and row.cell.size == knee.size)
        plot.vlines(knee.size, 0, _rate(row), color=_colour(knee.engine), linewidth=1, linestyle="--", zorder=1)
        plot.annotate(
            f"knee of {printable(knee.engine)}: {knee.size:,}", (knee.size, (0.06 + 0.09 * place) * best),
            xytext=(-5, 0), textcoords="offset points", fontsize=8, ha="right", color=_colour(knee.engine), zorder=5,
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
    _size_axis(plot, analysis, rows, ())
    titles: Titles = {}
    for engine in engines_of(rows):
        own = [row for row in rows if row.cell.engine == engine]
        across, values = [row.cell.size for row in own], [(row.memory_bytes or 0) / _MIB for row in own]
        _draw_line(plot, across, values, engine)
        titles.update(_draw_marks(plot, name, analysis, own, across, values))
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
        colour, span = _colour(row.cell.engine), row.samples_per_s
        plot.barh(
            place, _rate(row), height=0.66, color=colour, alpha=0.35 if row.core_limited else 0.9, gid=f"{name}-{place}"
        )
        if span is not None and span.level > 0:
            plot.hlines(place, span.low, span.high, color=INK, linewidth=1.2, zorder=4)
        right = span.high if span is not None else _rate(row)
        text = f"{number(_rate(row))}{report_text.CORE_MARK if row.core_limited else ''}"
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
    return {f"{name}-{place}": [_text(analysis, row)] for place, row in enumerate(rows)}


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
            mark = report_text.CORE_MARK if row.core_limited and kind == "measured" else ""
            both = row.parts is not None and row.predicted is not None
            labels.append(f"{about}{mark}" if kind == "measured" or not both else "predicted")
            titles.update(_draw_bar(plot, f"{name}-{len(places)}", place, parts, unit / over, kind, about))
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
    for part, colour in zip(report_text.PART_NAMES.values(), _PART_COLOURS):
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
    _log2_axis(plot, sorted({each.size for each in found} | {row.cell.replicas for row in measured}), "replicas")
    titles: Titles = {}
    for place, fabric in enumerate(dict.fromkeys(each.fabric for each in found)):
        own = sorted((each for each in found if each.fabric == fabric), key=lambda each: each.size)
        colour, gid = PALETTE[(1, 2, 3, 4, 5, 6)[place % 6]], f"{name}-{place}"
        across = [each.size for each in own]
        low, high = (
            [100 * each.efficiency * getattr(each, end) / each.samples_per_s for each in own] for end in ("low", "high")
        )
        plot.fill_between(across, low, high, color=colour, alpha=0.15, linewidth=0)
        label = f"{report_text.extrapolation_name(own[0])}, predicted"
        plot.plot(
            across, [100 * each.efficiency for each in own], color=colour, linestyle=(0, (4, 2)), linewidth=1.4,
            marker=_MARKS[place % len(_MARKS)], markersize=4, label=label, gid=gid,
            zorder=3,
        )  # fmt: skip
        titles[gid] = [_extrapolation_text(each) for each in own]
    if measured:
        engine = measured[0].cell.engine
        across, values = [row.cell.replicas for row in measured], [100 * (row.efficiency or 0.0) for row in measured]
        _draw_line(plot, across, values, engine, "measured here")
        titles.update(_draw_marks(plot, f"{name}-own", analysis, measured, across, values))
        _mark_legend(plot, measured)
    _draw_behind(plot, name, _extrapolated_behind(found), None, absolute=True)
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
    """Returns the rows whose parts are drawn: all, or of many sizes those spread over them."""
    rows = [row for row in analysis.rows if row.parts is not None or row.predicted is not None]
    step = -(-2 * len(rows) // _MAX_BARS)
    return rows[:: max(1, step)]


def _choose_behind(analysis: Analysis, done: Sequence[Row]) -> Behind:
    """Returns the published points that lie on the axis, their baselines moved to that of the study."""
    base = min(row.cell.size for row in done)
    largest = max([_PUBLISHED_TIMES * base, *(row.cell.size for row in done)])
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


def _draw_behind(plot: Any, name: str, behind: Behind, rate_of_one: Optional[float], absolute: bool = False) -> None:
    """Draws published curves faintly, with numbers; as efficiencies, or as rates if that of one size is given."""
    for place, (curve, points) in enumerate(behind):
        across = [size for size, _ in points]
        values = [value if rate_of_one is None else value / 100 * size * rate_of_one for size, value in points]
        first = curve.points[0].devices
        devices = cli.count(first, curve.unit[:-1])
        label = f"{place + 1}  {curve.title}" + (f" (100 % at {devices})" if absolute or first > 1 else "")
        plot.plot(
            across, values, color=_GREY, alpha=0.55, linewidth=1, marker=".", markersize=3, label=label, zorder=1.5,
            linestyle=_PUBLISHED_STYLES[place % len(_PUBLISHED_STYLES)], gid=f"{name}-published{place}",
        )  # fmt: skip
        plot.annotate(
            str(place + 1), (across[-1], values[-1]), xytext=(4, 0), textcoords="offset points", va="center",
            fontsize=7, color=_GREY, annotation_clip=False,
        )  # fmt: skip


def _draw_rates(plot: Any, name: str, analysis: Analysis, own: Sequence[Row]) -> Titles:
    across, values = [row.cell.size for row in own], [_rate(row) for row in own]
    engine = own[0].cell.engine
    _draw_line(plot, across, values, engine)
    for row in own:
        span = row.samples_per_s
        if span is not None and span.level > 0:
            plot.vlines(row.cell.size, span.low, span.high, color=_colour(engine), linewidth=1.2, zorder=3)
    return _draw_marks(plot, name, analysis, own, across, values)


def _draw_line(plot: Any, across: Sequence[float], values: Sequence[float], engine: str, label: str = "") -> None:
    mark = _mark(engine)
    plot.plot(
        across, values, color=_colour(engine), linewidth=1.4, label=label or printable(engine), zorder=3, marker=mark,
        markersize=4.5,
    )  # fmt: skip


def _draw_marks(
    plot: Any, name: str, analysis: Analysis, own: Sequence[Row], across: Sequence[float], values: Sequence[float]
) -> Titles:
    """Draws hollow marks over the cells that this machine limits, and gives all marks their text."""
    engine = own[0].cell.engine
    limited = [place for place, row in enumerate(own) if row.core_limited]
    plot.plot(
        [across[place] for place in limited], [values[place] for place in limited], linestyle="", marker=_mark(engine),
        markersize=5, markerfacecolor=PAPER, markeredgecolor=_colour(engine), zorder=4,
    )  # fmt: skip
    gid = f"{name}-{engine}"
    plot.plot(across, values, linestyle="", marker="o", markersize=9, color=INK, alpha=0, gid=gid, zorder=6)
    return {gid: [_text(analysis, row) for row in own]}


def _draw_predicted(plot: Any, rows: Sequence[Row]) -> None:
    """Draws a short line where a rate was predicted."""
    label: Optional[str] = "predicted before measuring"
    for engine in engines_of(rows):
        known = [row for row in rows if row.cell.engine == engine and row.predicted is not None]
        if not known:
            continue
        plot.plot(
            [row.cell.size for row in known], [_predicted_rate(row) for row in known], linestyle="", marker="_",
            markersize=13, markeredgewidth=1.6, color=_colour(engine), alpha=0.6, label=label, zorder=2.5,
        )  # fmt: skip
        label = None


def _draw_bar(plot: Any, gid: str, place: float, parts: UpdateParts, unit: float, kind: str, about: str) -> Titles:
    titles: Titles = {}
    left = 0.0
    plot.barh(place, unit * parts.total_s, height=0.8, color=PAPER)  # no grid behind bars that are light
    for number_, ((part, seconds), colour) in enumerate(zip(report_text.part_items(parts), _PART_COLOURS)):
        width = unit * seconds
        style: Dict[str, Any] = {} if kind == "measured" else {"alpha": 0.55}
        plot.barh(place, width, left=left, height=0.8, color=colour, gid=f"{gid}-{number_}", **style)
        share = seconds / parts.total_s if parts.total_s > 0 else 0.0
        took = render_seconds(width / 1e3)
        titles[f"{gid}-{number_}"] = [f"{about}, {kind}: {part} {took} ({100 * share:.1f} %)"]
        left += width
    plot.annotate(number(left), (left, place), xytext=(3, 0), textcoords="offset points", va="center", fontsize=7)
    return titles


def _mark_legend(plot: Any, rows: Sequence[Row]) -> None:
    """Explains hollow marks, if there are any."""
    if any(row.core_limited for row in rows):
        plot.plot(
            [], [], linestyle="", marker="o", markersize=5, markerfacecolor=PAPER, markeredgecolor=INK,
            label="hollow: limited by the cores of this machine",
        )  # fmt: skip


def _size_axis(plot: Any, analysis: Analysis, rows: Sequence[Row], behind: Behind) -> None:
    sizes = {row.cell.size for row in rows}
    if behind:
        sizes |= {size * min(sizes) for size in (1, 2, 4, _PUBLISHED_TIMES)}
    _log2_axis(plot, sorted(sizes), report_text.size_title(analysis.study).lower())


def _rate_axis(plot: Any, rows: Sequence[Row]) -> None:
    """Makes the axis of rates logarithmic, so that ideal scaling is a straight line.

    It is linear from 0 where neither the rates nor what is ideal differ by enough for a logarithm.
    """
    from matplotlib.ticker import LogLocator

    rates = [_rate(row) for row in rows]
    replicas = [row.cell.replicas for row in rows]
    low, high = plot.get_ylim()
    if max(max(rates) / min(rates), max(replicas) / min(replicas)) >= _MIN_LOG_RATIO:
        plot.set_yscale("log", base=2)
        few = high / max(low, 1e-9) < _MANY_DOUBLINGS
        plot.yaxis.set_major_locator(LogLocator(2, (1.0, 1.5) if few else (1.0,)))
        plot.minorticks_off()
        plot.set_ylabel("samples/s (logarithmic)")
    else:
        plot.set_ylim(0, 1.05 * high)
        plot.set_ylabel("samples/s")
    plot.yaxis.set_major_formatter(lambda value, _: number(value))


def _log2_axis(plot: Any, sizes: Sequence[int], label: str) -> None:
    plot.set_xscale("log", base=2)
    room = (sizes[-1] / sizes[0]) ** 0.06 if sizes[-1] > sizes[0] else 1.5
    plot.set_xlim(sizes[0] / room, sizes[-1] * room)
    ticks = sizes[:: -(-len(sizes) // _MAX_TICKS)]
    plot.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    plot.minorticks_off()
    plot.set_xlabel(label)


def _note(analysis: Analysis, done: Sequence[Row]) -> str:
    limited = (
        f" {report_text.CORE_MARK} Limited by the cores of this machine." if analysis.study.mode == COMPARE else ""
    )
    limited = limited if any(row.core_limited for row in done) else ""
    return f"Baseline: {analysis.baseline}. {report_text.interval_note(done)}{limited}"


def _text(analysis: Analysis, row: Row) -> str:
    """Returns what is shown under the pointer at a cell."""
    interval = report_text.render_interval(row.samples_per_s)
    words = [f"{printable(report_text.cell_name(analysis, row))}: {number(_rate(row))} samples/s"]
    words[0] += f" ({interval})" if interval else ""
    words.append(f"efficiency {100 * (row.efficiency or 0.0):.1f} %")
    if row.memory_bytes is not None:
        words.append(f"{row.memory_bytes / _MIB:,.0f} MiB")
    if row.error is not None:
        words.append(f"predicted time {100 * row.error:+.1f} %")
    if row.core_limited:
        words.append("limited by the cores of this machine")
    return ", ".join(words)


def _extrapolation_text(each: Extrapolation) -> str:
    return (
        f"{report_text.extrapolation_name(each)}, {cli.count(each.size, 'replica')}, predicted: "
        f"{number(each.samples_per_s)} samples/s ({number(each.low)}-{number(each.high)}), "
        f"efficiency {100 * each.efficiency:.1f} %"
    )


def _predicted_engine(analysis: Analysis) -> str:
    """Returns the engine that extrapolations are of: the first that was predicted, otherwise the study's first."""
    cells = {cell.key: cell.engine for cell in analysis.study.cells}
    return next((cells[each.cell] for each in analysis.study.predictions), analysis.study.engines[0])


def _rate(row: Row) -> float:
    assert row.samples_per_s is not None
    return row.samples_per_s.median


def _predicted_rate(row: Row) -> float:
    assert row.predicted is not None
    return row.cell.global_batch_size / row.predicted.update_s


def _colour(engine: str) -> str:
    return PALETTE[_COLOURS.get(engine, 4)]


def _mark(engine: str) -> str:
    return _MARKS[list(_COLOURS).index(engine) % len(_MARKS)] if engine in _COLOURS else "P"
