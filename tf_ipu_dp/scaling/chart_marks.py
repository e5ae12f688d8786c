"""How the pictures of a study show rates, marks, bars, published curves and axes.

An engine has the same colour in all pictures and studies. A hollow mark is a cell that the cores of this machine limit.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Tuple

from tf_ipu_dp import cli
from tf_ipu_dp.collectives.quantities import render_seconds
from tf_ipu_dp.monitoring.drawings import INK, PALETTE, PAPER
from tf_ipu_dp.monitoring.panels import Titles
from tf_ipu_dp.monitoring.text_layout import number, printable
from tf_ipu_dp.scaling import published, report_notes, report_tables
from tf_ipu_dp.scaling.analysis import Analysis, Row, engines_of
from tf_ipu_dp.scaling.records import UpdateParts

PART_COLOURS = (PALETTE[0], PALETTE[4], PALETTE[1], PALETTE[6], PALETTE[2], PALETTE[7])
GREY = PALETTE[7]
PUBLISHED_TIMES = 8  # times the baseline to which the axis reaches for published curves
_COLOURS = {"tf_ipu_dp": 0, "tf_ipu_dp_mpi": 5, "horovod": 1, "ddp": 2, "keras": 3}
MARKS = "os^Dv"
_PUBLISHED_STYLES = ((0, (1, 1)), (0, (4, 1.5)), (0, (4, 1.5, 1, 1.5)), (0, (6, 2, 1, 2, 1, 2)), "-")
_MAX_TICKS = 9
_MIB = 2**20
_MIN_LOG_RATIO, _MANY_DOUBLINGS = 2.0, 16

Behind = Sequence[Tuple[published.Curve, List[Tuple[float, float]]]]  # with sizes and efficiencies


def draw_behind(plot: Any, name: str, behind: Behind, rate_of_one: Optional[float], absolute: bool = False) -> None:
    """Draws published curves faintly, with numbers; as efficiencies, or as rates if that of one size is given."""
    for place, (curve, points) in enumerate(behind):
        across = [size for size, _ in points]
        values = [value if rate_of_one is None else value / 100 * size * rate_of_one for size, value in points]
        first = curve.points[0].devices
        devices = cli.count(first, curve.unit[:-1])
        label = f"{place + 1}  {curve.title}" + (f" (100 % at {devices})" if absolute or first > 1 else "")
        plot.plot(
            across, values, color=GREY, alpha=0.55, linewidth=1, marker=".", markersize=3, label=label, zorder=1.5,
            linestyle=_PUBLISHED_STYLES[place % len(_PUBLISHED_STYLES)], gid=f"{name}-published{place}",
        )  # fmt: skip
        plot.annotate(
            str(place + 1), (across[-1], values[-1]), xytext=(4, 0), textcoords="offset points", va="center",
            fontsize=7, color=GREY, annotation_clip=False,
        )  # fmt: skip


def draw_rates(plot: Any, name: str, analysis: Analysis, own: Sequence[Row]) -> Titles:
    """Draws the rates of one engine, with their intervals."""
    across, values = [row.cell.size for row in own], [rate_of(row) for row in own]
    engine = own[0].cell.engine
    draw_line(plot, across, values, engine)
    for row in own:
        span = row.samples_per_s
        if span is not None and span.level > 0:
            plot.vlines(row.cell.size, span.low, span.high, color=colour_of(engine), linewidth=1.2, zorder=3)
    return draw_marks(plot, name, analysis, own, across, values)


def draw_line(plot: Any, across: Sequence[float], values: Sequence[float], engine: str, label: str = "") -> None:
    """Draws the line of an engine, in its colour."""
    mark = _mark(engine)
    plot.plot(
        across, values, color=colour_of(engine), linewidth=1.4, label=label or printable(engine), zorder=3, marker=mark,
        markersize=4.5,
    )  # fmt: skip


def draw_marks(
    plot: Any, name: str, analysis: Analysis, own: Sequence[Row], across: Sequence[float], values: Sequence[float]
) -> Titles:
    """Draws hollow marks over the cells that this machine limits, and gives all marks their text."""
    engine = own[0].cell.engine
    limited = [place for place, row in enumerate(own) if row.core_limited]
    plot.plot(
        [across[place] for place in limited], [values[place] for place in limited], linestyle="", marker=_mark(engine),
        markersize=5, markerfacecolor=PAPER, markeredgecolor=colour_of(engine), zorder=4,
    )  # fmt: skip
    gid = f"{name}-{engine}"
    plot.plot(across, values, linestyle="", marker="o", markersize=9, color=INK, alpha=0, gid=gid, zorder=6)
    return {gid: [cell_text(analysis, row) for row in own]}


def draw_predicted(plot: Any, rows: Sequence[Row]) -> None:
    """Draws a short line where a rate was predicted."""
    label: Optional[str] = "predicted before measuring"
    for engine in engines_of(rows):
        known = [row for row in rows if row.cell.engine == engine and row.predicted is not None]
        if not known:
            continue
        plot.plot(
            [row.cell.size for row in known], [_predicted_rate(row) for row in known], linestyle="", marker="_",
            markersize=13, markeredgewidth=1.6, color=colour_of(engine), alpha=0.6, label=label, zorder=2.5,
        )  # fmt: skip
        label = None


def draw_bar(plot: Any, gid: str, place: float, parts: UpdateParts, unit: float, kind: str, about: str) -> Titles:
    """Draws the parts of one update as a bar."""
    titles: Titles = {}
    left = 0.0
    plot.barh(place, unit * parts.total_s, height=0.8, color=PAPER)  # no grid behind bars that are light
    for number_, ((part, seconds), colour) in enumerate(zip(report_tables.part_items(parts), PART_COLOURS)):
        width = unit * seconds
        style: Dict[str, Any] = {} if kind == "measured" else {"alpha": 0.55}
        plot.barh(place, width, left=left, height=0.8, color=colour, gid=f"{gid}-{number_}", **style)
        share = seconds / parts.total_s if parts.total_s > 0 else 0.0
        took = render_seconds(width / 1e3)
        titles[f"{gid}-{number_}"] = [f"{about}, {kind}: {part} {took} ({100 * share:.1f} %)"]
        left += width
    plot.annotate(number(left), (left, place), xytext=(3, 0), textcoords="offset points", va="center", fontsize=7)
    return titles


def mark_legend(plot: Any, rows: Sequence[Row]) -> None:
    """Explains hollow marks, if there are any."""
    if any(row.core_limited for row in rows):
        plot.plot(
            [], [], linestyle="", marker="o", markersize=5, markerfacecolor=PAPER, markeredgecolor=INK,
            label="hollow: limited by the cores of this machine",
        )  # fmt: skip


def size_axis(plot: Any, analysis: Analysis, rows: Sequence[Row], behind: Behind) -> None:
    """Makes the axis of sizes, with room for published curves."""
    sizes = {row.cell.size for row in rows}
    if behind:
        sizes |= {size * min(sizes) for size in (1, 2, 4, PUBLISHED_TIMES)}
    log2_axis(plot, sorted(sizes), report_tables.size_title(analysis.study).lower())


def rate_axis(plot: Any, rows: Sequence[Row]) -> None:
    """Makes the axis of rates logarithmic, so that ideal scaling is a straight line.

    It is linear from 0 where neither the rates nor what is ideal differ by enough for a logarithm.
    """
    from matplotlib.ticker import LogLocator

    rates = [rate_of(row) for row in rows]
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


def log2_axis(plot: Any, sizes: Sequence[int], label: str) -> None:
    """Makes an axis of sizes that double."""
    plot.set_xscale("log", base=2)
    room = (sizes[-1] / sizes[0]) ** 0.06 if sizes[-1] > sizes[0] else 1.5
    plot.set_xlim(sizes[0] / room, sizes[-1] * room)
    ticks = sizes[:: -(-len(sizes) // _MAX_TICKS)]
    plot.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    plot.minorticks_off()
    plot.set_xlabel(label)


def cell_text(analysis: Analysis, row: Row) -> str:
    """Returns what is shown under the pointer at a cell."""
    interval = report_tables.render_interval(row.samples_per_s)
    words = [f"{printable(report_notes.cell_name(analysis, row))}: {number(rate_of(row))} samples/s"]
    words[0] += f" ({interval})" if interval else ""
    words.append(f"efficiency {100 * (row.efficiency or 0.0):.1f} %")
    if row.memory_bytes is not None:
        words.append(f"{row.memory_bytes / _MIB:,.0f} MiB")
    if row.error is not None:
        words.append(f"predicted time {100 * row.error:+.1f} %")
    if row.core_limited:
        words.append("limited by the cores of this machine")
    return ", ".join(words)


def rate_of(row: Row) -> float:
    """Returns the measured samples/s of a row that has them."""
    assert row.samples_per_s is not None
    return row.samples_per_s.median


def _predicted_rate(row: Row) -> float:
    assert row.predicted is not None
    return row.cell.global_batch_size / row.predicted.update_s


def colour_of(engine: str) -> str:
    """Returns the colour of an engine."""
    return PALETTE[_COLOURS.get(engine, 4)]


def _mark(engine: str) -> str:
    return MARKS[list(_COLOURS).index(engine) % len(MARKS)] if engine in _COLOURS else "P"
