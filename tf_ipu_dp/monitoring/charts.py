"""The report of a recording, drawn as PNG, SVG or one HTML page. Imports matplotlib only to draw."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import html
import math
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from tf_ipu_dp import cli
from tf_ipu_dp.monitoring import drawings, text_layout, timeline
from tf_ipu_dp.monitoring.recorder import Recording, Sample

_PHASE_COLOURS = {
    "starting": "#bbbbbb",
    "compiling": "#e69f00",
    "training": "#009e73",
    "evaluating": "#56b4e9",
    "saving": "#cc79a7",
    "exporting": "#f0e442",
}
_UNKNOWN_COLOUR = "#dddddd"
_FREE = -1.0  # marks a free IPU among utilisations
_MAX_BINS = 1200
_MAX_CURVES = 8  # more IPUs are drawn as a heat map
_MAX_BANDS = 16
_MIN_PHASE_WIDTH = 1 / 1000  # share of the drawing: a narrower phase would not be visible
_GAP_PERIODS = 3  # a longer gap between samples is left blank


@dataclasses.dataclass(frozen=True)
class _TimeAxis:
    """Turns seconds since the epoch into the units of the horizontal axis."""

    start: float
    scale: float
    unit: str

    def position(self, seconds: Any) -> Any:
        """Returns the place of a time, or of an array of times."""
        return (seconds - self.start) / self.scale


def check_report_name(path: Path) -> None:
    """Raises a UsageError for a report that cannot be drawn, before anything is recorded."""
    drawings.check_file("report", path)


def draw(recording: Recording, path: Path) -> None:
    """Writes the report in the format of its file type."""
    check_report_name(path)
    kind = path.suffix.lower()
    content = drawings.render_figure(make_figure(recording), "png" if kind == ".png" else "svg", "recording")
    if kind == ".html":
        content = render_page(recording, content.decode()).encode()
    drawings.write_file("report", path, content)


def make_figure(recording: Recording) -> Any:
    """Returns the drawing over time: utilisation of each IPU, power where it is reported, and phases of the runs."""
    import matplotlib
    import numpy as np
    from matplotlib.figure import Figure

    times = np.array([sample.time for sample in recording.samples])
    utilisation, power = (
        _utilisation(recording),
        np.array([_total_power_w(each, recording) for each in recording.samples]),
    )
    has_power = bool(np.isfinite(power).any())
    all_bands = timeline.make_bands(recording)
    bands = dict(list(all_bands.items())[:_MAX_BANDS])
    hidden_bands = len(all_bands) - len(bands)
    axis = _time_axis(recording)
    positions = axis.position(times)
    end = max(float(positions[-1]), 1e-3)
    gap = _GAP_PERIODS * recording.period_s

    with matplotlib.rc_context(drawings.STYLE):
        many = len(recording.ipus) > _MAX_CURVES
        heights = [max(2.6, min(7.0, 0.11 * len(recording.ipus))) if many else 3.0]
        heights += [1.6] if has_power else []
        heights += [0.5 + 0.28 * (len(bands) + (hidden_bands > 0))] if bands else []
        figure = Figure(figsize=(11, sum(heights) + 1.3), layout="constrained")
        plots = list(np.atleast_1d(figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)))
        ids = [ipu.id for ipu in recording.ipus]
        if many:
            _draw_heat_map(figure, plots[0], positions, utilisation, ids, gap / axis.scale)
        else:
            _draw_curves(plots[0], positions, utilisation, ids)
        changes = timeline.find_phase_changes(bands)
        for moment, phase in changes:
            for plot in plots[: 2 if has_power else 1]:
                colour = _PHASE_COLOURS.get(phase, drawings.INK)
                plot.axvline(axis.position(moment), color=colour, linewidth=0.9, alpha=0.8, linestyle="--")
        if has_power:
            gaps = np.nonzero(np.diff(times) > gap)[0] + 1
            _draw_power(plots[1], np.insert(positions, gaps, np.nan), np.insert(power, gaps, np.nan))
        if bands:
            saves = [(row, axis.position(moment)) for row, moment in timeline.find_saves(recording, bands)]
            scaled = {
                name: [
                    timeline.PhaseInterval(axis.position(each.start), axis.position(each.end), each.phase)
                    for each in intervals
                ]
                for name, intervals in bands.items()
            }
            _draw_bands(plots[-1], scaled, saves, end, bool(changes), hidden_bands)
        plots[-1].set_xlabel(f"{axis.unit} since {_format_time(times[0])}")
        plots[-1].set_xlim(0, end)
        figure.suptitle(_title(recording, utilisation, has_power), fontsize=11)
    return figure


def render_page(recording: Recording, drawing: str) -> str:
    """Returns one self-contained HTML page with the drawing."""
    svg = drawings.make_inline(drawing, {}, "Utilisation, power and phases over time")
    rows = []
    for each in timeline.summarise(recording):
        phases = ", ".join(f"{name} {seconds:.{0 if seconds >= 10 else 1}f} s" for name, seconds in each.phases.items())
        busy = None if each.utilisation_pct is None else f"{each.utilisation_pct:.1f}"
        cells = (
            each.pid, each.user, each.run, each.instance, text_layout.id_ranges(each.ipus) or None, busy, each.step,
            phases, each.command,
        )  # fmt: skip
        texts = ["-" if cell is None else html.escape(text_layout.printable(str(cell))) for cell in cells]
        rows.append("".join(f"<td>{text}</td>" for text in texts))
    header = "".join(
        f"<th>{name}</th>"
        for name in ("PID", "User", "Run", "Instance", "IPUs", "Mean util %", "Last step", "Phases", "Command")
    )
    body = "".join(f"<tr>{row}</tr>" for row in rows) or '<tr><td colspan="9">No process held an IPU.</td></tr>'
    first, last = recording.samples[0].time, recording.samples[-1].time
    facts = (
        f"{cli.count(len(recording.ipus), 'IPU')}, {cli.count(len(recording.samples), 'sample')} from "
        f"{_format_time(first)} to {_format_time(last)}, recorded in {recording.path.name}"
    )
    return drawings.render_page(
        "IPU report",
        f"<h1>IPU report</h1><p>{html.escape(text_layout.printable(facts))}</p>{svg}<h2>Processes</h2>"
        f'<div class="wide"><table><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table></div>',
        "td:nth-child(3){min-width:6em}td:last-child{min-width:12em}",
    )


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


def _total_power_w(sample: Sample, recording: Recording) -> float:
    """Returns the power of all boards, or of all IPUs where boards report none; NaN where neither does."""
    serials = {ipu.id: ipu.board_serial for ipu in recording.ipus}
    boards = {serials.get(ipu.id): ipu.board_power_w for ipu in sample.ipus if ipu.board_power_w is not None}
    chips = [ipu.power_w for ipu in sample.ipus if ipu.power_w is not None]
    return float(sum(boards.values())) if boards else float(sum(chips)) if chips else math.nan


def _draw_curves(plot: Any, positions: Any, utilisation: Any, ids: Sequence[Optional[int]]) -> None:
    import numpy as np

    for label, values in _group_equal(ids, np.where(utilisation == _FREE, np.nan, utilisation)):
        plot.plot(positions, values, label=f"IPU {label}", linewidth=1.2)
    plot.set_ylim(-2, 102)
    plot.set_ylabel("utilisation (%)")
    plot.grid(alpha=0.3)
    if plot.lines:
        plot.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False)


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
    figure: Any, plot: Any, positions: Any, utilisation: Any, ids: Sequence[Optional[int]], gap: float
) -> None:
    import matplotlib
    import numpy as np

    edges, cells = _average_in_bins(positions, utilisation, gap)
    colours = copy.copy(matplotlib.colormaps["viridis"])
    colours.set_under("white")
    mesh = plot.pcolormesh(edges, np.arange(len(ids) + 1) - 0.5, cells, vmin=0, vmax=100, cmap=colours, rasterized=True)
    plot.set_facecolor(_UNKNOWN_COLOUR)
    plot.invert_yaxis()
    step = next(step for step in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2**20) if len(ids) / step <= 32)
    plot.set_yticks(range(0, len(ids), step))
    plot.set_yticklabels([str(number) for number in ids[::step]], fontsize=7)
    plot.set_ylabel("IPU")
    figure.colorbar(mesh, ax=plot, label="utilisation (%); white: free, grey: unknown", pad=0.01)


def _average_in_bins(positions: Any, values: Any, gap: float) -> Tuple[Any, Any]:
    """Returns the edges of time bins and the mean in each; NaN where there was no sample for longer than the gap."""
    import numpy as np

    span = float(positions[-1]) or 1.0
    count = int(min(_MAX_BINS, len(positions)))
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


def _draw_power(plot: Any, positions: Any, power: Any) -> None:
    plot.plot(positions, power, color=drawings.PALETTE[1], linewidth=1.2)
    plot.set_ylabel("power (W)")
    plot.set_ylim(bottom=0)
    plot.grid(alpha=0.3)


def _draw_bands(
    plot: Any, bands: timeline.Bands, saves: Sequence[Tuple[int, float]], end: float, has_changes: bool, hidden: int
) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    seen: List[str] = []
    for row, intervals in enumerate(bands.values()):
        seen += [phase for phase in dict.fromkeys(each.phase for each in intervals) if phase not in seen]
        # Short phases are drawn last: they are widened to be visible, and must not be covered.
        longest_first = sorted(intervals, key=lambda each: each.start - each.end)
        plot.broken_barh(
            [(each.start, max(each.end - each.start, _MIN_PHASE_WIDTH * end)) for each in longest_first],
            (row - 0.35, 0.7),
            facecolors=[_PHASE_COLOURS.get(each.phase, _UNKNOWN_COLOUR) for each in longest_first], linewidth=0,
        )  # fmt: skip
    handles: List[Any] = [Patch(color=_PHASE_COLOURS.get(phase, _UNKNOWN_COLOUR), label=phase) for phase in seen]
    if saves:
        moments = [moment for _, moment in saves]
        plot.plot(moments, [row for row, _ in saves], linestyle="", marker="v", color=drawings.INK, markersize=5)
        handles.append(Line2D([], [], linestyle="", marker="v", color=drawings.INK, markersize=5, label="saved"))
    if has_changes:
        handles.append(Line2D([], [], linestyle="--", color="#777777", linewidth=0.9, label="next phase"))
    labels = [*map(text_layout.printable, bands), *([f"and {hidden:,} more"] if hidden else [])]
    plot.set_yticks(range(len(labels)))
    plot.set_yticklabels(labels, fontsize=8)
    plot.set_ylim(len(labels) - 0.5, -0.5)
    plot.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False)


def _title(recording: Recording, utilisation: Any, has_power: bool) -> str:
    import numpy as np

    seconds = recording.samples[-1].time - recording.samples[0].time
    in_use = utilisation[np.isfinite(utilisation) & (utilisation != _FREE)]
    busy = f", IPUs in use {in_use.mean():.0f} % busy" if in_use.size else ""
    kind = " (emulated)" if recording.emulated else ""
    power = "" if has_power else "; power was not reported"
    return f"{cli.count(len(recording.ipus), 'IPU')}{kind}, {text_layout.duration(seconds)}{busy}{power}"


def _time_axis(recording: Recording) -> _TimeAxis:
    start = recording.samples[0].time
    seconds = recording.samples[-1].time - start
    if seconds < 600:
        return _TimeAxis(start, 1.0, "seconds")
    return _TimeAxis(start, 60.0, "minutes") if seconds < 6 * 3600 else _TimeAxis(start, 3600.0, "hours")


def _format_time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
