"""The pictures of a report, drawn with matplotlib, which is imported only to draw."""

from __future__ import annotations

import functools
from typing import Any, Dict, List, Sequence, Tuple

import numpy as np

from tf_ipu_dp.collectives import outliers, report_text, run_exchanges, statistics, terminal_plots
from tf_ipu_dp.collectives.quantities import render_seconds
from tf_ipu_dp.collectives.report_content import Content, Entry, Pair, cdf, render_size
from tf_ipu_dp.monitoring import drawings
from tf_ipu_dp.monitoring.drawings import INK, PALETTE
from tf_ipu_dp.monitoring.panels import Panel, Titles, legend_below
from tf_ipu_dp.monitoring.text_layout import printable

Array = Any

_MAX_DELAYS, _MAX_MAPS = 4, 4
_MAX_POINTS = 2000
_MAX_GROUPS, _MAX_ROWS = 50, 32
_MAX_LEGEND = len(PALETTE)
_MAX_LABEL = 62
_MIN_SWEEP = 3
_MAX_NAMED = 2  # curves whose percentiles are written beside them
_ERROR_BAND_PCT = 10
_CAUSE_MARKS = {
    outliers.TIMEOUT: (PALETTE[1], "^"),
    outliers.PROBE: (PALETTE[5], "v"),
    outliers.FAST: (PALETTE[2], "D"),
    outliers.LATE: (PALETTE[3], "s"),
    outliers.OTHER: (PALETTE[4], "o"),
}
_HOVER_PER_MILLE = (10, 100, 250, 750, 900, 950, 999)


def make_panels(content: Content) -> List[Panel]:
    """Returns the pictures that there is data for."""
    panels = _entry_panels(content) if content.entries else []
    for number, run in enumerate(content.runs):
        title = f"Exchanges of gradients: {printable(run.name)}"
        draw = functools.partial(run_exchanges.draw, run=run)
        panels.append(Panel(f"run{number}", title, 2.8, draw, " ".join(run_exchanges.sentences(run))))
    return panels


def draw_cdf(plot: Any, name: str, entries: Sequence[Entry]) -> Titles:
    """Draws the share of trials by time, with p50 and p99 marked; predictions are dashed."""
    titles: Titles = {}
    _time_axis(plot.xaxis, np.concatenate([entry.series.seconds for entry in entries]), 6)
    for level in (0.5, 0.99):
        plot.axhline(level, color=INK, linewidth=0.6, linestyle=":", alpha=0.6, zorder=1)
    for number, (entry, colour) in enumerate(zip(entries, entry_colours(entries))):
        times, shares = cdf(entry.series.seconds, 600)
        times, shares = np.maximum(np.append(times[:1], times), 1e-12), np.append([0.0], shares)
        dashed = "-" if entry.is_measured else (0, (4, 2))
        label = _shorten(printable(entry.name)) if len(entries) <= _MAX_LEGEND else None
        plot.step(
            times, shares, where="post", color=colour, linestyle=dashed, linewidth=1.4, label=label,
            gid=f"{name}-line{number}",
        )  # fmt: skip
        titles[f"{name}-line{number}"] = [_entry_text(entry)]
        visible = len(entries) <= _MAX_LEGEND
        titles.update(_mark_percentiles(plot, f"{name}-mark{number}", entry, colour, visible=visible))
    if len(entries) <= _MAX_NAMED:
        _name_percentiles(plot, entries)
    plot.set_ylim(0, 1.03)
    plot.set_yticks([0, 0.25, 0.5, 0.75, 0.99])
    plot.set_yticklabels(["0 %", "25 %", "p50", "75 %", "p99"])
    plot.set_ylabel("share of trials")
    plot.set_xlabel("time of a trial (logarithmic)")
    plot.grid(alpha=0.6, linewidth=0.5)
    legend_below(plot, 1)
    return titles


def draw_delays(plot: Any, name: str, entry: Entry) -> Titles:
    """Draws the time of each trial, with outliers marked by cause and the totals of TCP's timeouts as lines."""
    seconds: Array = np.asarray(entry.series.seconds, dtype=float)
    titles: Titles = {}
    _time_axis(plot.yaxis, seconds, 8)
    body: Array = np.ones(len(seconds), dtype=bool)
    body[[each.trial for each in entry.outliers]] = False
    trials = np.nonzero(body)[0]
    if len(trials) <= _MAX_POINTS:
        plot.plot(
            trials, seconds[body], linestyle="", marker=".", markersize=3, color=PALETTE[0], label="trial", zorder=2
        )
    else:
        edges: Array = np.linspace(0, len(trials), 401).round().astype(int)[:-1]
        low, high = (function.reduceat(seconds[body], edges) for function in (np.minimum, np.maximum))
        label = "trials (min to max)"
        plot.vlines(trials[edges], low, high, color=PALETTE[0], linewidth=1.2, label=label, zorder=2)
    for cause, count in report_text.cause_counts(entry):
        colour, marker = _CAUSE_MARKS[cause]
        chosen = _slowest([each for each in entry.outliers if each.cause == cause], _MAX_POINTS)
        gid = f"{name}-{cause.replace(' ', '_')}"
        plot.plot(
            [each.trial for each in chosen], [each.seconds for each in chosen], linestyle="", marker=marker,
            markersize=4.5, color=colour, label=f"{cause} ({count:,})", gid=gid, zorder=3,
        )  # fmt: skip
        titles[gid] = [_outlier_text(each) for each in chosen]
        _name_late_ranks(plot, chosen, len(seconds))
    if any(each.cause in (outliers.TIMEOUT, outliers.PROBE) for each in entry.outliers):
        _draw_timeout_totals(plot, entry)
    plot.set_xlim(-0.01 * len(seconds) - 0.5, 1.01 * len(seconds) - 0.5)
    _count_axis(plot)
    plot.set_ylabel("time (logarithmic)")
    plot.grid(alpha=0.6, linewidth=0.5)
    legend_below(plot, 2)
    return titles


def draw_last(plot: Any, name: str, found: outliers.LastShares) -> Titles:
    """Draws which share of consecutive trials each rank was last in."""
    import matplotlib
    from matplotlib.collections import PolyCollection

    names, by_group, shares = report_text.group_ranks(found, _MAX_ROWS)
    cells, values, texts = [], [], []
    for row, ranks in enumerate(names):
        for group, share in enumerate(by_group[row]):
            if np.isnan(share):
                continue
            first, end = found.edges[group], found.edges[group + 1]
            top, bottom = row - 0.5, row + 0.5
            cells.append([(first, top), (end, top), (end, bottom), (first, bottom)])
            values.append(share)
            texts.append(f"rank {ranks}, trials {first:,} to {end - 1:,}: last in {100 * share:.0f} %")
    colours = matplotlib.colormaps["viridis"]
    mesh = PolyCollection(cells, cmap=colours, gid=f"{name}-cells", linewidth=0.3, edgecolors="face")
    mesh.set_array(np.array(values))
    mesh.set_clim(0, max(values))
    plot.add_collection(mesh)
    plot.set_xlim(0, found.edges[-1])
    plot.set_ylim(len(names) - 0.5, -0.5)
    plot.set_yticks(range(len(names)))
    plot.set_yticklabels(
        [f"{ranks} ({100 * share:.0f} %)" for ranks, share in zip(names, shares)], fontsize=6 if len(names) > 12 else 8
    )
    plot.set_ylabel("rank (share of all)")
    _count_axis(plot)
    bar = plot.figure.colorbar(mesh, ax=plot, pad=0.01, ticks=[0, max(values) / 2, max(values)])
    bar.ax.set_yticklabels([f"{100 * share:.0f} %" for share in (0, max(values) / 2, max(values))])
    bar.set_label("last in")
    return {f"{name}-cells": texts}


def draw_pairs(plot: Any, name: str, pairs: Sequence[Pair]) -> Titles:
    """Draws how far predicted medians are from measured ones, over the measured ones, with the band of 10 %.

    A diagonal of times from microseconds to seconds would hide errors of 10 %.
    """
    _time_axis(plot.xaxis, np.array([each.measured_p50_s for each in pairs]), 6)
    plot.axhspan(-_ERROR_BAND_PCT, _ERROR_BAND_PCT, color=PALETTE[0], alpha=0.15, linewidth=0, label="within 10 %")
    plot.axhline(0, color=INK, linewidth=0.8)
    titles: Titles = {}
    for number, count in enumerate(sorted({each.ranks for each in pairs})):
        chosen = [each for each in pairs if each.ranks == count]
        gid = f"{name}-{number}"
        plot.plot(
            [each.measured_p50_s for each in chosen], [each.error_pct for each in chosen], linestyle="",
            marker="os^Dv"[number % 5], markersize=5, color=PALETTE[(number + 1) % len(PALETTE)], alpha=0.9, gid=gid,
            label=f"{count:,} ranks",
        )  # fmt: skip
        titles[gid] = [
            f"{each.ranks:,} ranks, {render_size(each.bytes)}: measured {render_seconds(each.measured_p50_s)}, "
            f"predicted {render_seconds(each.predicted_p50_s)} ({each.error_pct:+.1f} %)"
            for each in chosen
        ]
    largest = max(1.5 * _ERROR_BAND_PCT, 1.15 * max(abs(each.error_pct) for each in pairs))
    plot.set_ylim(-largest, largest)
    plot.yaxis.set_major_formatter(lambda value, _: f"{value:+.0f} %" if value else "0 %")
    plot.set_xlabel("measured p50 (logarithmic)")
    plot.set_ylabel("predicted - measured")
    plot.grid(alpha=0.6, linewidth=0.5)
    legend_below(plot, 4)
    return titles


def draw_sweep(plot: Any, name: str, curves: Sequence[Tuple[str, List[Entry]]], field: str) -> Titles:
    """Draws medians over sizes or over ranks, with a band from the minimum to p99 where that is known."""
    titles: Titles = {}
    every = [entry for _, entries in curves for entry in entries]
    _time_axis(plot.yaxis, np.array([value for entry in every for value in _band(entry)]), 8)
    colours = entry_colours([entries[0] for _, entries in curves])
    for number, (label, entries) in enumerate(curves):
        across = [getattr(entry.summary, field) for entry in entries]
        gid, colour = f"{name}-{number}", colours[number]
        plot.plot(
            across, [entry.summary.p50_s for entry in entries], color=colour, marker="o", markersize=3.5, linewidth=1.2,
            linestyle="-" if entries[0].is_measured else (0, (4, 2)), label=printable(label), gid=gid, zorder=3,
        )  # fmt: skip
        band = np.array([_band(entry) for entry in entries])
        plot.fill_between(across, band[:, 0], band[:, 1], color=colour, alpha=0.12, linewidth=0)
        titles[gid] = [_entry_text(entry) for entry in entries]
    plot.set_xscale("log", base=2)
    ticks = sorted({getattr(entry.summary, field) for entry in every})
    ticks = ticks[:: -(-len(ticks) // 8)]
    plot.set_xticks(ticks, [render_size(tick) if field == "bytes" else f"{tick:,}" for tick in ticks])
    plot.minorticks_off()
    plot.set_xlabel("bytes of each rank" if field == "bytes" else "ranks")
    plot.set_ylabel("p50; band: min to p99")
    plot.grid(alpha=0.6, linewidth=0.5)
    legend_below(plot, 2)
    return titles


def entry_colours(entries: Sequence[Entry]) -> List[Any]:
    """Returns a colour for each entry: a prediction has that of the measurement it belongs to."""
    pending: Dict[Tuple[int, int], List[int]] = {}
    groups: List[int] = [-1] * len(entries)
    order = sorted(range(len(entries)), key=lambda place: not entries[place].is_measured)
    for count, place in enumerate(order):
        summary, groups[place] = entries[place].summary, count
        waiting = pending.setdefault((summary.ranks, summary.bytes), [])
        if entries[place].is_measured:
            waiting.append(count)
        elif waiting:
            groups[place] = waiting.pop(0)
    used = {group: number for number, group in enumerate(sorted(set(groups)))}
    colours = _colours(len(used))
    return [colours[used[group]] for group in groups]


def _entry_panels(content: Content) -> List[Panel]:
    entries = content.entries
    few = len(entries) <= _MAX_LEGEND
    note = "" if few else f"{len(entries):,} series: from dark to bright in the order of the table."
    draw = functools.partial(draw_cdf, entries=entries)
    height = 2.8 + 0.17 * len(entries) if few else 2.8
    panels = [Panel("cdf", "Share of trials by time (CDF)", height, draw, note)]
    for name, field in (("size", "bytes"), ("ranks", "ranks")):
        curves = _sweeps(entries, field)
        if curves:
            draw = functools.partial(draw_sweep, curves=curves, field=field)
            panels.append(Panel(f"by_{name}", f"Time by {name} (p50)", 3.4, draw))
    chosen = report_text.choose_delays(entries, _MAX_DELAYS if few else _MAX_DELAYS // 2)
    for number, entry in enumerate(chosen):
        title = f"Time of each trial: {printable(entry.name)}"
        draw = functools.partial(draw_delays, entry=entry)
        notes = [report_text.outlier_sentence(entry)]
        last = outliers.last_shares(entry.series, 1)
        notes += [report_text.last_sentence(last)] if last is not None and not last.late else []
        panels.append(Panel(f"delay{number}", title, 2.9, draw, " ".join(notes)))
    found_last = [(entry, outliers.last_shares(entry.series, _MAX_GROUPS)) for entry in entries]
    known = [(entry, found) for entry, found in found_last if found is not None and found.late and entry in chosen]
    for number, (entry, found) in enumerate(known[:_MAX_MAPS]):
        rows = min(len(found.share), _MAX_ROWS)
        height = 0.9 + (0.2 * max(4, rows) if rows <= 8 else 0.12 * rows)
        draw = functools.partial(draw_last, found=found)
        title = f"Who was last: {printable(entry.name)}"
        panels.append(Panel(f"last{number}", title, height, draw, report_text.last_sentence(found)))
    if content.pairs:
        draw = functools.partial(draw_pairs, pairs=content.pairs)
        note = report_text.error_sentence(content.pairs)
        panels.append(Panel("pairs", "Measured against predicted (medians)", 2.9, draw, note))
    return panels


def _colours(count: int) -> List[Any]:
    """Returns colours that are told apart, or, for many, those of a scale."""
    if count <= len(PALETTE):
        return list(PALETTE[:count])
    import matplotlib

    return [matplotlib.colormaps["viridis"](0.1 + 0.85 * number / (count - 1)) for number in range(count)]


def _sweeps(entries: Sequence[Entry], field: str) -> List[Tuple[str, List[Entry]]]:
    """Returns the series that differ in one field only, if there are enough for a curve; also of several results."""
    curves: Dict[Tuple[object, ...], List[Entry]] = {}
    for entry in entries:
        other = entry.summary.ranks if field == "bytes" else entry.summary.bytes
        about = entry.description
        same = (about.kind, about.engine, about.algorithm, about.fabric, entry.summary.label, other)
        taken = {getattr(each.summary, field) for each in curves.get(same, ())}
        # A result of the same kind that has the same size again is a curve of its own.
        curves.setdefault((*same, entry.key) if getattr(entry.summary, field) in taken else same, []).append(entry)
    several = len({entry.key for entry in entries}) > 1
    found = []
    for chosen in curves.values():
        if len({getattr(entry.summary, field) for entry in chosen}) < _MIN_SWEEP:
            continue
        summary = chosen[0].summary
        fixed = f"{summary.ranks:,} ranks" if field == "bytes" else render_size(summary.bytes)
        keys = {entry.key for entry in chosen}
        words = [*(keys if several and len(keys) == 1 else ()), chosen[0].description.kind, fixed, summary.label]
        found.append((" ".join(filter(None, words)), sorted(chosen, key=lambda entry: getattr(entry.summary, field))))
    return found


def _band(entry: Entry) -> Tuple[float, float]:
    summary = entry.summary
    return summary.min_s, summary.p50_s if summary.p99_s is None else summary.p99_s


def _mark_percentiles(plot: Any, gid: str, entry: Entry, colour: Any, *, visible: bool) -> Titles:
    """Marks p50 and p99 on a curve. Others have no mark, but a text under the pointer."""
    marked = [("p50", 0.5, entry.summary.p50_s), ("p99", 0.99, entry.summary.p99_s)]
    shown = [(label, share, value) for label, share, value in marked if value is not None]
    plot.plot(
        [max(value, 1e-12) for *_, value in shown], [share for _, share, _ in shown], linestyle="", marker="o",
        markersize=5, markerfacecolor=colour, markeredgecolor=drawings.PAPER, gid=gid, zorder=4,
        alpha=1 if visible else 0,
    )  # fmt: skip
    found = [(mille, statistics.percentile(entry.series.seconds, mille)) for mille in _HOVER_PER_MILLE]
    known = [(mille, value) for mille, value in found if value is not None]
    plot.plot(
        [max(value, 1e-12) for _, value in known], [mille / 1000 for mille, _ in known], linestyle="", marker="o",
        markersize=7, color=colour, alpha=0, gid=f"{gid}-more",
    )  # fmt: skip
    name = printable(entry.name)
    return {
        gid: [f"{name}: {label} {render_seconds(value)}" for label, _, value in shown],
        f"{gid}-more": [f"{name}: p{mille / 10:g} {render_seconds(value)}" for mille, value in known],
    }


def _name_percentiles(plot: Any, entries: Sequence[Entry]) -> None:
    """Writes p50 and p99 beside their marks; below each other where the marks of two curves are close."""
    colours = entry_colours(entries)
    kinds = len({entry.description.kind for entry in entries}) > 1
    for label, share in (("p50", 0.5), ("p99", 0.99)):
        found = [(entry.summary.p50_s if share == 0.5 else entry.summary.p99_s) for entry in entries]
        known = [(value, entry, colour) for value, entry, colour in zip(found, entries, colours) if value]
        places = [float(plot.transAxes.inverted().transform(plot.transData.transform((v, 0)))[0]) for v, *_ in known]
        close = len(places) > 1 and abs(places[0] - places[1]) < 0.3
        for line, (value, entry, colour) in enumerate(known):
            place, across = (max(places), max(value for value, *_ in known)) if close else (places[line], value)
            side = ("left" if place < 0.7 else "right") if share == 0.5 or place < 0.3 or place > 0.8 else "center"
            down = 11 * line * close + (11 if share > 0.9 else -2)
            plot.annotate(
                f"{label} {render_seconds(value)}" + (f" {entry.description.kind}" if kinds else ""), (across, share),
                xytext=({"left": 8, "right": -8, "center": 0}[side], -down), textcoords="offset points", ha=side,
                va="center", fontsize=8, color=colour, zorder=5,
                bbox={"facecolor": drawings.PAPER, "edgecolor": "none", "alpha": 0.8, "pad": 0.8},
            )  # fmt: skip


def _draw_timeout_totals(plot: Any, entry: Entry) -> None:
    """Draws a line where a trial ends that had to wait for one timeout, or for one that doubled."""
    low, high = plot.get_ylim()
    for total in outliers.DOUBLING_TIMEOUTS_S:
        place = entry.summary.p50_s + total
        if low < place < high:
            plot.axhline(place, color=PALETTE[1], linewidth=0.7, linestyle=":", alpha=0.8, zorder=1)
            plot.annotate(
                f"p50 + {total:g} s", (1, place), xycoords=("axes fraction", "data"), xytext=(3, 0),
                textcoords="offset points", ha="left", va="center", fontsize=7, color=PALETTE[1],
            )  # fmt: skip


def _name_late_ranks(plot: Any, chosen: Sequence[outliers.Outlier], trials: int) -> None:
    for each in _slowest([each for each in chosen if each.rank is not None], 3):
        left = each.trial > 0.85 * trials
        plot.annotate(
            f"rank {each.rank}", (each.trial, each.seconds), xytext=(-5 if left else 5, 0),
            textcoords="offset points", fontsize=7, va="center", ha="right" if left else "left", color=PALETTE[3],
        )  # fmt: skip


def _slowest(chosen: Sequence[outliers.Outlier], count: int) -> List[outliers.Outlier]:
    return sorted(sorted(chosen, key=lambda each: -each.seconds)[:count], key=lambda each: each.trial)


def _time_axis(axis: Any, seconds: Array, max_ticks: int) -> None:
    """Makes an axis of times logarithmic, with ticks like 20 ms."""
    made = terminal_plots.time_axis(seconds, max_ticks)
    plot, along = axis.axes, axis.axis_name
    getattr(plot, f"set_{along}scale")("log")
    getattr(plot, f"set_{along}lim")(made.low, made.high)
    axis.set_ticks([tick for tick, _ in made.ticks])
    axis.set_ticklabels([text for _, text in made.ticks])
    axis.set_ticks([], minor=True)


def _count_axis(plot: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    plot.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    plot.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    plot.set_xlabel("trial")


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_LABEL else f"{text[: _MAX_LABEL - 2]}.."


def _entry_text(entry: Entry) -> str:
    p99 = entry.summary.p99_s
    tail = "" if p99 is None else f", p99 {render_seconds(p99)}"
    longest = render_seconds(entry.summary.max_s)
    return f"{printable(entry.name)}: p50 {render_seconds(entry.summary.p50_s)}{tail}, max {longest}"


def _outlier_text(each: outliers.Outlier) -> str:
    rank = "" if each.rank is None else f" {each.rank}"
    return f"trial {each.trial:,}: {render_seconds(each.seconds)}, {each.cause}{rank}"
