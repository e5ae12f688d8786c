"""The pictures of a recording over time, each a panel that tells its values under the pointer.

Imports matplotlib only to draw.
"""

from __future__ import annotations

import copy
import dataclasses
import datetime
import functools
import math
from typing import Any, Dict, List, Optional, Sequence, Tuple

from tf_ipu_dp import cli
from tf_ipu_dp.monitoring import drawings, panels, text_layout, timeline
from tf_ipu_dp.monitoring.panels import Panel, Titles
from tf_ipu_dp.monitoring.recorder import Recording, Sample

_PHASE_COLOURS = {
    "starting": drawings.PALETTE[7],
    "compiling": drawings.PALETTE[4],
    "training": drawings.PALETTE[2],
    "evaluating": drawings.PALETTE[5],
    "saving": drawings.PALETTE[3],
    "exporting": "#f0e442",
}
_UNKNOWN_COLOUR = "#9aa0a6"  # visible on light and dark paper
_FREE = -1.0  # marks a free IPU among utilisations
_MAX_BINS = 1200
_MAX_CURVES = 8  # more IPUs are drawn as a heat map
_MAX_BANDS = 16
_MAX_CELLS = 2000  # of a heat map, that do
_MIN_PHASE_WIDTH = 1 / 1000  # share of the drawing: a narrower phase would not be visible
_GAP_PERIODS = 3  # a longer gap between samples is left blank
_LEGEND_LINE = 0.18  # inches


@dataclasses.dataclass(frozen=True)
class _TimeAxis:
    """Turns seconds since the epoch into the units of the horizontal axis."""

    start: float
    scale: float
    unit: str

    def position(self, seconds: Any) -> Any:
        """Returns the place of a time, or of an array of times."""
        return (seconds - self.start) / self.scale


def make_figure(recording: Recording) -> Any:
    """Returns all panels below each other, for a file."""
    figure, _ = panels.make_figure(make_panels(recording), one_file=True)
    return figure


def make_panels(recording: Recording) -> List[Panel]:
    """Returns the pictures over time: utilisation, power, throughput and loss as far as reported, and the phases."""
    import numpy as np

    utilisation = _utilisation(recording)
    power = np.array([_total_power_w(each, recording) for each in recording.samples])
    has_power = bool(np.isfinite(power).any())
    all_bands = timeline.make_bands(recording)
    bands = dict(list(all_bands.items())[:_MAX_BANDS])
    marks = timeline.mark_phases(recording, bands)
    used, unused = _without_unused(recording, utilisation)
    many = len(used.ipus) > _MAX_CURVES
    height = max(2.6, min(7.0, 0.11 * len(used.ipus))) if many else 2.6
    notes = ["Blank: free. Grey: not known. Dashed: the next phase of the run that holds these IPUs."] if many else []
    notes += [f"Free all the time, and not drawn: IPU {unused}."] if unused else []
    made = [
        Panel(
            "utilisation", _title(recording, utilisation, has_power), height,
            functools.partial(_draw_heat_map if many else _draw_curves, used, _utilisation(used), marks),
            " ".join(notes),
        )
    ]  # fmt: skip
    if has_power:
        made.append(Panel("power", "Power", 1.9, functools.partial(_draw_power, recording, power)))
    for name, title, unit in (("samples_per_s", "Throughput", "samples/s"), ("loss", "Loss", "loss")):
        curves = timeline.read_curves(recording, name)
        if any(len(curve) > 1 for curve in curves.values()):
            lines = -(-len(curves) // 2)
            draw_it = functools.partial(_draw_runs, recording, curves, unit)
            made.append(Panel(name, f"{title} of the runs", 2.1 + _LEGEND_LINE * lines, draw_it))
    if bands:
        hidden = len(all_bands) - len(bands)
        draw_it = functools.partial(_draw_bands, recording, bands, hidden)
        made.append(Panel("phases", "Phases", 1.1 + 0.28 * (len(bands) + (hidden > 0)), draw_it))
    return made


def render_seconds(seconds: float) -> str:
    """Returns `0.5 s` or `36 s`."""
    return f"{seconds:.{0 if seconds >= 10 else 1}f} s"


def _utilisation(recording: Recording) -> Any:
    """Returns the utilisation of each IPU (row) in each sample (column): NaN where unknown, _FREE where free."""
    import numpy as np

    rows = {ipu.id: row for row, ipu in enumerate(recording.ipus)}
    values = np.full((len(recording.ipus), len(recording.samples)), np.nan)
    for column, sample in enumerate(recording.samples):
        for ipu in sample.ipus:
            if ipu.id in rows and ipu.utilisation_pct is not None:
                free = ipu.pid is None and not ipu.utilisation_pct
                values[rows[ipu.id], column] = _FREE if free else ipu.utilisation_pct
    return values


def _without_unused(recording: Recording, utilisation: Any) -> Tuple[Recording, str]:
    """Returns a recording of the IPUs that were not always free, and the ids of the others; all if none was used."""
    rows = list(zip(recording.ipus, (utilisation != _FREE).any(axis=1)))
    kept = tuple(ipu for ipu, is_used in rows if is_used)
    if not kept:
        return recording, ""
    free = text_layout.id_ranges(ipu.id for ipu, is_used in rows if not is_used and ipu.id is not None)
    return dataclasses.replace(recording, ipus=kept), free


def _total_power_w(sample: Sample, recording: Recording) -> float:
    """Returns the power of all boards, or of all IPUs where boards report none; NaN where neither does."""
    serials = {ipu.id: ipu.board_serial for ipu in recording.ipus}
    boards = {serials.get(ipu.id): ipu.board_power_w for ipu in sample.ipus if ipu.board_power_w is not None}
    chips = [ipu.power_w for ipu in sample.ipus if ipu.power_w is not None]
    return float(sum(boards.values())) if boards else float(sum(chips)) if chips else math.nan


def _draw_curves(
    recording: Recording, utilisation: Any, marks: Sequence[timeline.PhaseMark], plot: Any, gid: str
) -> Titles:
    import numpy as np

    axis = _time_axis(recording)
    positions = axis.position(_times(recording))
    titles: Titles = {}
    curves = _group_equal([ipu.id for ipu in recording.ipus], np.where(utilisation == _FREE, np.nan, utilisation))
    for place, (label, values) in enumerate(curves):
        colour = drawings.PALETTE[place % len(drawings.PALETTE)]
        plot.plot(positions, values, label=f"IPU {label}", linewidth=1.2, color=colour)
        titles.update(_tell(plot, f"{gid}{place}", axis, positions, values, f"IPU {label}: {{:.1f}} % busy"))
    # Curves of several runs share the plot, so that a mark could not be seen to belong to one of them.
    if len({mark.ipus for mark in marks}) == 1:
        for mark in marks:
            colour = _PHASE_COLOURS.get(mark.phase, drawings.INK)
            plot.axvline(axis.position(mark.time), color=colour, linewidth=0.9, alpha=0.8, linestyle="--")
    plot.set_ylim(-2, 102)
    plot.set_ylabel("utilisation (%)")
    plot.grid(alpha=0.3)
    _finish(plot, recording, 4)
    return titles


def _group_equal(ids: Sequence[Optional[int]], rows: Any) -> List[Tuple[str, Any]]:
    """Returns one curve per set of IPUs with equal values, with their ids; IPUs without values have no curve."""
    import numpy as np

    curves: Dict[bytes, Tuple[List[Optional[int]], Any]] = {}
    for number, row in zip(ids, rows):
        if np.isfinite(row).any():
            curves.setdefault(row.tobytes(), ([], row))[0].append(number)
    return [
        ("-" if None in same else text_layout.id_ranges(number for number in same if number is not None), row)
        for same, row in curves.values()
    ]


def _draw_heat_map(
    recording: Recording, utilisation: Any, marks: Sequence[timeline.PhaseMark], plot: Any, gid: str
) -> Titles:
    import matplotlib
    import numpy as np

    axis = _time_axis(recording)
    positions = axis.position(_times(recording))
    gap = _GAP_PERIODS * recording.period_s / axis.scale
    ids = [ipu.id for ipu in recording.ipus]
    edges, cells = _average_in_bins(positions, utilisation, gap, _MAX_BINS)
    colours = copy.copy(matplotlib.colormaps["viridis"])
    colours.set_under((0.0, 0.0, 0.0, 0.0))  # the paper of the page shows through
    colours.set_bad(_UNKNOWN_COLOUR)
    lines = np.arange(len(ids) + 1) - 0.5
    mesh = plot.pcolormesh(
        edges, lines, cells, vmin=0, vmax=100, cmap=colours, rasterized=True
    )  # fmt: skip
    plot.invert_yaxis()
    step = next(step for step in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2**20) if len(ids) / step <= 32)
    plot.set_yticks(range(0, len(ids), step))
    plot.set_yticklabels([str(number) for number in ids[::step]], fontsize=7)
    plot.set_ylabel("IPU")
    plot.figure.colorbar(mesh, ax=plot, label="utilisation (%)", pad=0.01)
    rows = {number: row for row, number in enumerate(ids) if number is not None}
    for mark in marks:
        colour = _PHASE_COLOURS.get(mark.phase, drawings.INK)
        for first, last in _row_ranges(rows[ipu] for ipu in mark.ipus if ipu in rows):
            across = axis.position(mark.time)
            plot.plot([across, across], [first - 0.5, last + 0.5], color=colour, linewidth=1.1, linestyle="--")
    _finish(plot, recording, 0)
    return _tell_cells(plot, gid, axis, positions, utilisation, ids, gap)


def _row_ranges(rows: Any) -> List[Tuple[int, int]]:
    """Returns the first and the last of each group of rows that are next to each other."""
    found: List[Tuple[int, int]] = []
    for row in sorted(rows):
        if found and row == found[-1][1] + 1:
            found[-1] = (found[-1][0], row)
        else:
            found.append((row, row))
    return found


def _tell_cells(
    plot: Any, gid: str, axis: _TimeAxis, positions: Any, utilisation: Any, ids: Sequence[Optional[int]], gap: float
) -> Titles:
    """Lays cells that cannot be seen over a heat map: they tell its values under the pointer."""
    import numpy as np

    bins = max(min(_MAX_CELLS // max(len(ids), 1), 60), 1)
    edges, cells = _average_in_bins(positions, utilisation, gap, bins)
    lines = np.arange(len(ids) + 1) - 0.5
    plot.pcolormesh(edges, lines, np.zeros_like(cells), cmap="gray", alpha=0.01, edgecolors="none", gid=gid)
    texts = []
    for number, row in zip(ids, cells):
        for place, value in enumerate(row):
            busy = "not known" if not math.isfinite(value) else "free" if value == _FREE else f"{value:.0f} % busy"
            name = "IPU -" if number is None else f"IPU {number}"
            texts.append(f"{name}, {_number(edges[place])} to {_number(edges[place + 1])} {axis.unit}: {busy}")
    return {gid: texts}


def _average_in_bins(positions: Any, values: Any, gap: float, most: int) -> Tuple[Any, Any]:
    """Returns the edges of time bins and the mean in each; NaN where there was no sample for longer than the gap."""
    import numpy as np

    span = float(positions[-1]) or 1.0
    count = int(min(most, len(positions)))
    edges = np.linspace(0.0, span, count + 1)
    bins = np.clip(np.searchsorted(edges, positions, side="right") - 1, 0, count - 1)
    cells = np.full((values.shape[0], count), np.nan)
    last: Optional[int] = None
    for number in range(count):
        columns = np.nonzero(bins == number)[0]
        if len(columns):
            chosen = values[:, columns]
            in_use = np.isfinite(chosen) & (chosen != _FREE)
            counts = in_use.sum(axis=1)
            means = np.where(in_use, chosen, 0.0).sum(axis=1) / np.maximum(counts, 1)
            rest = np.where((chosen == _FREE).any(axis=1), _FREE, np.nan)
            cells[:, number] = np.where(counts > 0, means, rest)
            last = number
        elif last is not None and edges[number] - edges[last] <= gap:
            cells[:, number] = cells[:, last]
    return edges, cells


def _draw_power(recording: Recording, power: Any, plot: Any, gid: str) -> Titles:
    import numpy as np

    axis, times = _time_axis(recording), _times(recording)
    gaps = np.nonzero(np.diff(times) > _GAP_PERIODS * recording.period_s)[0] + 1
    positions, values = np.insert(axis.position(times), gaps, np.nan), np.insert(power, gaps, np.nan)
    plot.plot(positions, values, color=drawings.PALETTE[1], linewidth=1.2)
    plot.set_ylabel("power (W)")
    plot.set_ylim(bottom=0)
    plot.grid(alpha=0.3)
    _finish(plot, recording, 0)
    return _tell(plot, gid, axis, positions, values, "{:,.1f} W")


def _draw_runs(recording: Recording, curves: Dict[str, List[timeline.Point]], unit: str, plot: Any, gid: str) -> Titles:
    import numpy as np

    axis = _time_axis(recording)
    titles: Titles = {}
    form = "{:.4f}" if unit == "loss" else "{:,.0f} " + unit
    for place, (run, points) in enumerate(curves.items()):
        positions = axis.position(np.array([point.time for point in points]))
        values = np.array([point.value for point in points])
        colour, name = drawings.PALETTE[place % len(drawings.PALETTE)], text_layout.printable(run)
        plot.plot(positions, values, label=name, linewidth=1.2, color=colour, marker="." if len(points) < 3 else "")
        titles.update(
            _tell(
                plot, f"{gid}{place}", axis, positions, values, name.replace("{", "{{").replace("}", "}}") + f": {form}"
            )
        )
    plot.set_ylabel(unit)
    plot.set_ylim(bottom=0)
    plot.grid(alpha=0.3)
    _finish(plot, recording, 2)
    return titles


def _draw_bands(recording: Recording, bands: timeline.Bands, hidden: int, plot: Any, gid: str) -> Titles:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    axis = _time_axis(recording)
    end = axis.position(recording.samples[-1].time)
    seen: List[str] = []
    titles: Titles = {}
    for row, (name, intervals) in enumerate(bands.items()):
        seen += [phase for phase in dict.fromkeys(each.phase for each in intervals) if phase not in seen]
        # Short phases are drawn last: they are widened to be visible, and must not be covered.
        longest_first = sorted(intervals, key=lambda each: each.start - each.end)
        places = [(axis.position(each.start), axis.position(each.end)) for each in longest_first]
        plot.broken_barh(
            [(start, max(stop - start, _MIN_PHASE_WIDTH * end)) for start, stop in places], (row - 0.35, 0.7),
            facecolors=[_PHASE_COLOURS.get(each.phase, _UNKNOWN_COLOUR) for each in longest_first], linewidth=0,
            gid=f"{gid}{row}",
        )  # fmt: skip
        titles[f"{gid}{row}"] = [
            f"{text_layout.printable(f'{name}: {each.phase}')} for {render_seconds(each.end - each.start)}, "
            f"from {_number(start)} to {_number(stop)} {axis.unit}"
            for each, (start, stop) in zip(longest_first, places)
        ]
    handles: List[Any] = [
        Patch(color=_PHASE_COLOURS.get(phase, _UNKNOWN_COLOUR), label=text_layout.printable(phase)) for phase in seen
    ]
    saves = [(row, axis.position(moment)) for row, moment in timeline.find_saves(recording, bands)]
    if saves:
        moments = [moment for _, moment in saves]
        plot.plot(
            moments, [row for row, _ in saves], linestyle="", marker="v", color=drawings.INK, markersize=4,
            gid=f"{gid}-saves",
        )  # fmt: skip
        titles[f"{gid}-saves"] = [f"checkpoint saved at {_number(moment)} {axis.unit}" for moment in moments]
        handles.append(Line2D([], [], linestyle="", marker="v", color=drawings.INK, markersize=5, label="saved"))
    labels = [*map(text_layout.printable, bands), *([f"and {hidden:,} more"] if hidden else [])]
    plot.set_yticks(range(len(labels)))
    plot.set_yticklabels(labels, fontsize=8)
    plot.set_ylim(len(labels) - 0.5, -0.5)
    _finish(plot, recording, 4, handles)
    return titles


def _tell(plot: Any, gid: str, axis: _TimeAxis, positions: Any, values: Any, form: str) -> Titles:
    """Tells the values of a curve over time under the pointer."""
    return panels.tell_values(
        plot, gid, positions, values, lambda place, value: f"{form.format(value)} at {_number(place)} {axis.unit}"
    )


def _finish(plot: Any, recording: Recording, columns: int, handles: Optional[List[Any]] = None) -> None:
    """Sets the axis of time, and puts a legend of so many columns below it; none without columns."""
    axis = _time_axis(recording)
    plot.set_xlabel(f"{axis.unit} since {format_time(recording.samples[0].time)}")
    plot.set_xlim(0, max(float(axis.position(recording.samples[-1].time)), 1e-3))
    if columns:
        panels.legend_below(plot, columns, handles)


def _title(recording: Recording, utilisation: Any, has_power: bool) -> str:
    import numpy as np

    seconds = recording.samples[-1].time - recording.samples[0].time
    in_use = utilisation[np.isfinite(utilisation) & (utilisation != _FREE)]
    busy = f", IPUs in use {in_use.mean():.0f} % busy" if in_use.size else ""
    kind = " (emulated)" if recording.emulated else ""
    power = "" if has_power else "; power was not reported"
    return f"Utilisation of {cli.count(len(recording.ipus), 'IPU')}{kind}, {text_layout.duration(seconds)}{busy}{power}"


def _time_axis(recording: Recording) -> _TimeAxis:
    start = recording.samples[0].time
    seconds = recording.samples[-1].time - start
    if seconds < 600:
        return _TimeAxis(start, 1.0, "seconds")
    return _TimeAxis(start, 60.0, "minutes") if seconds < 6 * 3600 else _TimeAxis(start, 3600.0, "hours")


def _times(recording: Recording) -> Any:
    import numpy as np

    return np.array([sample.time for sample in recording.samples])


def _number(value: float) -> str:
    return f"{value:.1f}"


def format_time(seconds: float) -> str:
    """Returns a time since the epoch for readers."""
    return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
