"""Snapshots kept as JSON lines, and a report drawn from them: PNG, SVG or one HTML page. No TensorFlow.

The first line says what the IPUs are; the others say what changes. A line that was cut off by a crash is left out.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import datetime
import html
import io
import json
import math
import warnings
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, TextIO, Tuple

from tf_ipu_dp import cli
from tf_ipu_dp.monitoring import tables
from tf_ipu_dp.monitoring.snapshots import SCHEMA, Snapshot, utc
from tf_ipu_dp.runs import run_folder

FORMATS = (".png", ".svg", ".html")
_KIND = "tf_ipu_dp recording"
_LASTING = ("id", "board_type", "board_serial", "board_ipu_index", "architecture", "partition", "host")
_CHANGING = (
    "id", "utilisation_pct", "session_utilisation_pct", "input_wait_pct", "power_w", "board_power_w", "die_temp_c",
    "board_temp_c", "error_state", "host_link_errors", "link_errors", "pid", "problem",
)  # fmt: skip
_PHASES = {
    "starting": "#bbbbbb",
    "compiling": "#e69f00",
    "training": "#009e73",
    "evaluating": "#56b4e9",
    "saving": "#cc79a7",
    "exporting": "#f0e442",
}
_UNKNOWN_COLOUR = "#dddddd"
_FREE = -1.0  # in the place of a utilisation
_MOST_BINS = 1200
_LINES_UP_TO = 8
_MOST_BANDS = 16
_MOST_MARKS = 60
_LEAST_STRETCH = 1 / 1000  # of the width: what is shorter would not be seen
_STYLE = {"text.parse_math": False, "svg.fonttype": "none", "font.size": 9}

Stretch = Tuple[float, float, str]  # from when to when, and what
Bands = Mapping[str, List[Stretch]]  # what each process did


@dataclasses.dataclass(frozen=True)
class Recording:
    """A recording as it was read."""

    path: Path
    sdk: str
    ipus: Tuple[Mapping[str, Any], ...]
    samples: Tuple[Mapping[str, Any], ...]  # with "seconds" since the epoch
    period_s: float


class Recorder:
    """Writes a recording. What cannot be written is a `cli.UsageError` that names the file."""

    def __init__(self, path: Path, period_s: float) -> None:
        self.path, self.samples, self._period_s = path, 0, period_s
        self._saved: Dict[str, float] = {}
        self._changes: Dict[int, Tuple[Tuple[str, float], ...]] = {}
        try:
            self._file: TextIO = path.open("x", encoding="utf-8")
        except FileExistsError:
            raise cli.UsageError(
                f"--record={path} is there already, and is not written over. Use another name, "
                "or add --report=FILE to draw it."
            ) from None
        except OSError as error:
            raise self._refusal(error) from error

    def write(self, snapshot: Snapshot) -> None:
        """Appends a snapshot."""
        if not self.samples:
            lasting = [{name: getattr(ipu, name) for name in _LASTING} for ipu in snapshot.ipus]
            self._append(
                {"schema": SCHEMA, "kind": _KIND, "sdk": snapshot.sdk, "period_s": self._period_s, "ipus": lasting}
            )
        self._append(
            {
                "time": utc(snapshot.time),
                "problem": snapshot.problem,
                "ipus": [_known({name: getattr(ipu, name) for name in _CHANGING}) for ipu in snapshot.ipus],
                "processes": [
                    _known({**vars(each), "ipus": list(each.ipus), "changes": None}) for each in snapshot.processes
                ],
                "saved": self._new_checkpoints(snapshot),
                "changes": self._new_changes(snapshot),
            }
        )
        self.samples += 1

    def close(self) -> None:
        """Ends the recording."""
        try:
            self._file.close()
        except OSError as error:
            raise self._refusal(error) from error

    def _new_checkpoints(self, snapshot: Snapshot) -> List[Dict[str, Any]]:
        """Returns when runs have saved since the last sample: that is over too quickly to be seen in a sample."""
        found = []
        for process in snapshot.processes:
            if process.run_dir and process.instance == 0:
                since = self._saved.setdefault(process.run_dir, snapshot.time - self._period_s)
                for path in Path(process.run_dir, "checkpoints").glob("step-*"):
                    with contextlib.suppress(OSError):
                        saved = path.stat().st_mtime
                        if saved > since:
                            found.append({"pid": process.pid, "time": utc(saved)})
                            self._saved[process.run_dir] = max(saved, self._saved[process.run_dir])
        return found

    def _new_changes(self, snapshot: Snapshot) -> List[Dict[str, Any]]:
        """Returns which phases have begun since the last sample, and when: one may be over before the next sample."""
        found = []
        for process in snapshot.processes:
            before = self._changes.get(process.pid, ())
            found += [
                {"pid": process.pid, "phase": phase, "time": utc(began)}
                for phase, began in process.changes
                if (phase, began) not in before
            ]
            self._changes[process.pid] = process.changes or before
        return found

    def _append(self, value: Mapping[str, Any]) -> None:
        try:
            self._file.write(json.dumps(value) + "\n")
            self._file.flush()
        except OSError as error:
            raise self._refusal(error) from error

    def _refusal(self, error: OSError) -> cli.UsageError:
        return cli.UsageError(f"--record={self.path} cannot be written ({error.strerror}). Use another place.")


def read(path: Path) -> Recording:
    """Returns a recording; `cli.UsageError` for what is none."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise cli.UsageError(f"--record={path} cannot be read ({error.strerror}).") from error
    values = [value for value in map(_object, lines) if value is not None]
    head = values[0] if values else {}
    if head.get("kind") != _KIND or not isinstance(head.get("ipus"), list):
        raise cli.UsageError(f"--record={path} is not a recording of this monitor. Make one with --record alone.")
    if head.get("schema") != SCHEMA:
        raise cli.UsageError(f"--record={path} is of schema {head.get('schema')}; this version reads {SCHEMA}.")
    samples = []
    for value in values[1:]:
        seconds = _seconds(value.get("time"))
        if seconds is not None:
            parts = {
                name: [each for each in _list(value.get(name)) if isinstance(each, dict)]
                for name in ("ipus", "processes", "saved", "changes")
            }
            samples.append({"seconds": seconds, **parts})
    if len(samples) < 2:
        raise cli.UsageError(f"--record={path} has {cli.count(len(samples), 'sample')}; a report needs two or more.")
    ipus = tuple(each for each in head["ipus"] if isinstance(each, dict))
    period: Any = head.get("period_s")
    return Recording(path, str(head.get("sdk")), ipus, tuple(samples), float(period) if _is_number(period) else 1.0)


def check_report_name(path: Path) -> None:
    """Refuses a report that cannot be drawn, before anything is recorded for it."""
    if path.suffix.lower() not in FORMATS:
        raise cli.UsageError(f"--report={path} has no known ending. Use one of {', '.join(FORMATS)}.")
    if not path.absolute().parent.is_dir():
        raise cli.UsageError(f"--report={path} cannot be written: there is no folder {path.absolute().parent}.")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise cli.UsageError(
            f"--report={path} needs matplotlib ({error}). Install it with: pip install 'matplotlib>=3.6,<3.10'"
        ) from error


def draw(recording: Recording, path: Path) -> None:
    """Writes the report in the format of its name."""
    check_report_name(path)
    kind = path.suffix.lower()
    stream = io.BytesIO()
    import matplotlib

    with warnings.catch_warnings(), matplotlib.rc_context(_STYLE):
        warnings.simplefilter("ignore")  # a name may have characters that the font lacks
        figure = make_figure(recording)
        figure.savefig(stream, format="png" if kind == ".png" else "svg", dpi=120, facecolor="white")
    content = stream.getvalue()
    if kind == ".html":
        content = render_page(recording, content.decode("utf-8")).encode("utf-8")
    try:
        run_folder.write_durably(path, content)
    except OSError as error:
        raise cli.UsageError(f"--report={path} cannot be written ({error.strerror}). Use another place.") from error


def summarise(recording: Recording) -> List[Dict[str, Any]]:
    """Returns one row per process: its run, IPUs, mean utilisation while it was there, and seconds per phase."""
    rows: Dict[int, Dict[str, Any]] = {}
    spans, runs = _spans(recording), _run_names(recording)
    for sample, span in zip(recording.samples, spans):
        used: Dict[Any, List[float]] = {}
        for ipu in sample["ipus"]:
            if _is_number(ipu.get("utilisation_pct")):
                used.setdefault(ipu.get("pid"), []).append(ipu["utilisation_pct"])
        for process in sample["processes"]:
            pid = process.get("pid")
            if not isinstance(pid, int) or process.get("state") == "gone":
                continue
            row = rows.setdefault(
                pid, {"pid": pid, "busy": 0.0, "watched": 0.0, "seconds": 0.0, "phases": {}, "ipus": set()}
            )
            row.update({key: process[key] for key in ("instance", "user", "command", "step") if key in process})
            row.update({"run": runs[_run(process)]} if "run" in process else {})
            row["ipus"] |= {ipu for ipu in process.get("ipus") or [] if isinstance(ipu, int)}
            row["seconds"] += span
            if used.get(pid):
                row["busy"] += span * sum(used[pid]) / len(used[pid])
                row["watched"] += span
    stretches = _stretches(recording)
    for row in rows.values():
        for start, end, phase in stretches.get(row["pid"], ()):
            row["phases"][phase] = row["phases"].get(phase, 0.0) + end - start
        row["utilisation_pct"] = row["busy"] / row["watched"] if row["watched"] else None
    return list(rows.values())


def make_figure(recording: Recording) -> Any:
    """Returns the drawing: utilisation of each IPU, power where it was reported, and what the runs did, over time."""
    import matplotlib
    import numpy as np
    from matplotlib.figure import Figure

    times = np.array([sample["seconds"] for sample in recording.samples])
    ids = [ipu.get("id") for ipu in recording.ipus]
    rows = {identity: row for row, identity in enumerate(ids)}
    utilisation = np.full((len(ids), len(times)), np.nan)
    power = np.full(len(times), np.nan)
    for column, sample in enumerate(recording.samples):
        for ipu in sample["ipus"]:
            if ipu.get("id") in rows and _is_number(ipu.get("utilisation_pct")):
                free = "pid" not in ipu and not ipu["utilisation_pct"]
                utilisation[rows[ipu["id"]], column] = _FREE if free else ipu["utilisation_pct"]
        power[column] = _total_power(sample, recording)
    every = _bands(recording)
    bands = dict(list(every.items())[:_MOST_BANDS])
    has_power = bool(np.isfinite(power).any())
    scale, unit = _time_unit(float(times[-1] - times[0]))
    many = len(ids) > _LINES_UP_TO

    with matplotlib.rc_context(_STYLE):
        heights = [max(2.6, min(7.0, 0.11 * len(ids))) if many else 3.0]
        heights += [1.6] if has_power else []
        heights += [0.5 + 0.28 * (len(bands) + (len(every) > len(bands)))] if bands else []
        figure = Figure(figsize=(11, sum(heights) + 1.3), layout="constrained")
        axes = list(np.atleast_1d(figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)))
        top = axes[0]
        shown_times = (times - times[0]) / scale
        end = max(float(shown_times[-1]), 1e-3)
        if many:
            _draw_heat(figure, top, shown_times, utilisation, ids, 3 * recording.period_s / scale)
        else:
            for identities, values in _alike(ids, np.where(utilisation == _FREE, np.nan, utilisation)):
                top.plot(shown_times, values, label=f"IPU {identities}", linewidth=1.2)
            top.set_ylim(-2, 102)
            top.set_ylabel("utilisation (%)")
            top.grid(alpha=0.3)
            if top.lines:
                top.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False)
        marks = [((moment - times[0]) / scale, phase) for moment, phase in _changes(bands)]
        for moment, phase in marks:
            for axis in axes[: 2 if has_power else 1]:
                axis.axvline(moment, color=_PHASES.get(phase, "black"), linewidth=0.9, alpha=0.8, linestyle="--")
        if has_power:
            gaps = np.nonzero(np.diff(times) > 3 * recording.period_s)[0] + 1
            axes[1].plot(
                np.insert(shown_times, gaps, np.nan), np.insert(power, gaps, np.nan), color="#d55e00", linewidth=1.2
            )
            axes[1].set_ylabel("power (W)")
            axes[1].set_ylim(bottom=0)
            axes[1].grid(alpha=0.3)
        if bands:
            saves = _saves(recording, bands, scale)
            _draw_bands(axes[-1], _scaled(bands, times[0], scale), saves, end, bool(marks), len(every) - len(bands))
        axes[-1].set_xlabel(f"{unit} since {_words(times[0])}")
        axes[-1].set_xlim(0, end)
        figure.suptitle(_title(recording, ids, utilisation, has_power), fontsize=11)
    return figure


def render_page(recording: Recording, drawing: str) -> str:
    """Returns one HTML page with the drawing in it and nothing to load."""
    svg = drawing[drawing.index("<svg") :]
    rows = []
    for row in summarise(recording):
        phases = ", ".join(
            f"{name} {seconds:.{0 if seconds >= 10 else 1}f} s" for name, seconds in row["phases"].items()
        )
        busy = "-" if row["utilisation_pct"] is None else f"{row['utilisation_pct']:.1f}"
        cells = (
            row["pid"], row.get("user", "-"), row.get("run", "-"), row.get("instance", "-"),
            tables.id_ranges(row["ipus"]) or "-", busy, row.get("step", "-"), phases, row.get("command", "-"),
        )  # fmt: skip
        rows.append("".join(f"<td>{html.escape(tables.printable(str(cell)))}</td>" for cell in cells))
    header = "".join(
        f"<th>{name}</th>"
        for name in ("PID", "User", "Run", "Instance", "IPUs", "Mean util %", "Last step", "Phases", "Command")
    )
    body = "".join(f"<tr>{row}</tr>" for row in rows) or '<tr><td colspan="9">No process held an IPU.</td></tr>'
    first, last = recording.samples[0]["seconds"], recording.samples[-1]["seconds"]
    facts = (
        f"{cli.count(len(recording.ipus), 'IPU')}, {cli.count(len(recording.samples), 'sample')} from {_words(first)} "
        f"to {_words(last)}, recorded in {recording.path.name}"
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>IPU report</title><style>'
        "body{font:14px/1.5 sans-serif;margin:2em auto;max-width:75em;padding:0 1em;color:#222}"
        "svg{width:100%;height:auto}table{border-collapse:collapse;width:100%}"
        "th,td{text-align:left;padding:.3em .6em;border-bottom:1px solid #ddd;vertical-align:top}"
        "td{overflow-wrap:anywhere}td:nth-child(3){min-width:6em}"
        f"</style></head><body><h1>IPU report</h1><p>{html.escape(tables.printable(facts))}</p>{svg}"
        f"<h2>Processes</h2><table><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table></body></html>\n"
    )


def _alike(ids: Sequence[Any], rows: Any) -> List[Tuple[str, Any]]:
    """Returns one curve for all IPUs that have the same, with their ids; IPUs of which nothing is known have none."""
    import numpy as np

    curves: Dict[bytes, Tuple[List[Any], Any]] = {}
    for identity, row in zip(ids, rows):
        if np.isfinite(row).any():
            curves.setdefault(row.tobytes(), ([], row))[0].append(identity)
    return [
        (tables.id_ranges(same) if all(isinstance(each, int) for each in same) else "-", row)
        for same, row in curves.values()
    ]


def _draw_heat(figure: Any, axis: Any, times: Any, utilisation: Any, ids: Sequence[Any], gap: float) -> None:
    import copy

    import matplotlib
    import numpy as np

    edges, cells = _binned(times, utilisation, gap)
    colours = copy.copy(matplotlib.colormaps["viridis"])
    colours.set_under("white")
    mesh = axis.pcolormesh(edges, np.arange(len(ids) + 1) - 0.5, cells, vmin=0, vmax=100, cmap=colours, rasterized=True)
    axis.set_facecolor(_UNKNOWN_COLOUR)
    axis.invert_yaxis()
    step = next(step for step in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2**20) if len(ids) / step <= 32)
    axis.set_yticks(range(0, len(ids), step))
    axis.set_yticklabels([str(identity) for identity in ids[::step]], fontsize=7)
    axis.set_ylabel("IPU")
    figure.colorbar(mesh, ax=axis, label="utilisation (%); white: free, grey: not known", pad=0.01)


def _binned(times: Any, values: Any, gap: float) -> Tuple[Any, Any]:
    """Returns the edges of time bins and the mean in each; where nothing was sampled for longer than a gap, NaN."""
    import numpy as np

    span = float(times[-1]) or 1.0
    count = int(min(_MOST_BINS, len(times)))
    edges = np.linspace(0.0, span, count + 1)
    which = np.clip(np.searchsorted(edges, times, side="right") - 1, 0, count - 1)
    cells = np.full((values.shape[0], count), np.nan)
    last: Optional[int] = None
    for bin_ in range(count):
        columns = np.nonzero(which == bin_)[0]
        if len(columns):
            chosen = values[:, columns]
            held = np.isfinite(chosen) & (chosen != _FREE)
            counts = held.sum(axis=1)
            means = np.where(held, chosen, 0.0).sum(axis=1) / np.maximum(counts, 1)
            rest = np.where((chosen == _FREE).any(axis=1), _FREE, np.nan)
            cells[:, bin_] = np.where(counts > 0, means, rest)
            last = bin_
        elif last is not None and edges[bin_] - edges[last] <= gap:
            cells[:, bin_] = cells[:, last]
    return edges, cells


def _draw_bands(
    axis: Any, bands: Bands, saves: Sequence[Tuple[int, float]], end: float, marked: bool, left_out: int
) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    seen: List[str] = []
    for row, stretches in enumerate(bands.values()):
        seen += [phase for phase in dict.fromkeys(phase for _, _, phase in stretches) if phase not in seen]
        longest_first = sorted(stretches, key=lambda stretch: stretch[0] - stretch[1])
        axis.broken_barh(
            [(start, max(stop - start, _LEAST_STRETCH * end)) for start, stop, _ in longest_first], (row - 0.35, 0.7),
            facecolors=[_PHASES.get(phase, _UNKNOWN_COLOUR) for _, _, phase in longest_first], linewidth=0,
        )  # fmt: skip
    handles: List[Any] = [Patch(color=_PHASES.get(phase, _UNKNOWN_COLOUR), label=phase) for phase in seen]
    if saves:
        moments = [moment for _, moment in saves]
        axis.plot(moments, [row for row, _ in saves], linestyle="", marker="v", color="black", markersize=5)
        handles.append(Line2D([], [], linestyle="", marker="v", color="black", markersize=5, label="saved"))
    if marked:
        handles.append(Line2D([], [], linestyle="--", color="grey", linewidth=0.9, label="next phase"))
    labels = [*map(tables.printable, bands), *([f"and {left_out:,} more"] if left_out else [])]
    axis.set_yticks(range(len(labels)))
    axis.set_yticklabels(labels, fontsize=8)
    axis.set_ylim(len(labels) - 0.5, -0.5)
    axis.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False)


def _bands(recording: Recording) -> Dict[str, List[Stretch]]:
    """Returns what each process did, by its name; a run that was started again goes on in its band."""
    bands: Dict[str, List[Stretch]] = {}
    names = _names(recording)
    for pid, stretches in _stretches(recording).items():
        bands[names[pid]] = sorted([*bands.get(names[pid], []), *stretches])
    return bands


def _stretches(recording: Recording) -> Dict[Any, List[Stretch]]:
    """Returns what each process did: from the moments that it told and, where it told none, from the samples."""
    began: Dict[Any, List[Tuple[float, str]]] = {}
    for sample in recording.samples:
        for change in sample["changes"]:
            moment = _seconds(change.get("time"))
            if moment is not None:
                began.setdefault(_hashable(change.get("pid")), []).append((moment, str(change.get("phase"))))
    for moments in began.values():
        moments.sort(key=lambda each: each[0])
    times = {pid: [moment for moment, _ in moments] for pid, moments in began.items()}
    found: Dict[Any, List[Stretch]] = {}
    for sample, span in zip(recording.samples, _spans(recording)):
        for process in sample["processes"]:
            if process.get("state") == "gone" or span <= 0:
                continue
            pid, start = _hashable(process.get("pid")), sample["seconds"]
            moments = began.get(pid, [])
            first = bisect.bisect_right(times.get(pid, []), start)
            after = bisect.bisect_left(times.get(pid, []), start + span)
            phase = "not told"
            if process.get("phase"):
                phase = moments[first - 1][1] if first else str(process["phase"])
            parts = [(start, phase), *moments[first:after]]
            for (since, what), until in zip(parts, [*(moment for moment, _ in parts[1:]), start + span]):
                _extend(found.setdefault(pid, []), since, until, what)
    return found


def _extend(stretches: List[Stretch], start: float, end: float, phase: str) -> None:
    if stretches and stretches[-1][2] == phase and start - stretches[-1][1] < 1e-6:
        stretches[-1] = (stretches[-1][0], end, phase)
    elif end > start:
        stretches.append((start, end, phase))


def _scaled(bands: Bands, began: float, scale: float) -> Bands:
    return {
        name: [((start - began) / scale, (end - began) / scale, phase) for start, end, phase in stretches]
        for name, stretches in bands.items()
    }


def _saves(recording: Recording, bands: Bands, scale: float) -> List[Tuple[int, float]]:
    """Returns the row and the moment of each checkpoint."""
    rows = {name: row for row, name in enumerate(bands)}
    names = _names(recording)
    began = recording.samples[0]["seconds"]
    found = []
    for sample in recording.samples:
        for each in sample["saved"]:
            moment, name = _seconds(each.get("time")), names.get(_hashable(each.get("pid")))
            if moment is not None and name in rows:
                found.append((rows[name], (moment - began) / scale))
    return found


def _names(recording: Recording) -> Dict[Any, str]:
    """Returns what to call each process: its run and instance, if it has ever told them."""
    names: Dict[Any, str] = {}
    runs = _run_names(recording)
    for sample in recording.samples:
        for process in sample["processes"]:
            pid = _hashable(process.get("pid"))
            if "run" in process:
                names[pid] = f"{runs[_run(process)]} {process.get('instance', '')}"
            else:
                names.setdefault(pid, f"pid {pid}")
    return names


def _run_names(recording: Recording) -> Dict[Tuple[str, str], str]:
    """Returns what to call each run: its name or, where others have the same, as much of its folder as they differ."""
    runs = {_run(process): None for sample in recording.samples for process in sample["processes"] if "run" in process}
    names = {}
    for name, folder in runs:
        others = [other.split("/")[::-1] for same, other in runs if same == name and other != folder]
        parts = folder.split("/")[::-1]
        depth = 1
        while any(other[:depth] == parts[:depth] for other in others):
            depth += 1
        names[name, folder] = "/".join(reversed(parts[:depth])) if others and folder else name
    return names


def _run(process: Mapping[str, Any]) -> Tuple[str, str]:
    return str(process["run"]), str(process.get("run_dir", ""))


def _changes(bands: Bands) -> List[Tuple[float, str]]:
    """Returns when the first instance of each run went over to something else; what is too often to be seen is not."""
    first = {name.rpartition(" ")[0]: stretches for name, stretches in reversed(list(bands.items()))}
    found: List[Tuple[float, str]] = []
    for unmarked in ((), ("saving",), ("saving", "evaluating")):
        found = []
        for stretches in first.values():
            marked = [(start, phase) for start, _, phase in stretches if phase not in unmarked]
            found += [now for before, now in zip(marked, marked[1:]) if before[1] != now[1]]
        if len(found) <= _MOST_MARKS:
            return found
    return []


def _spans(recording: Recording) -> List[float]:
    """Returns how long each sample stands: to the next one, but no longer than a few periods."""
    times = [sample["seconds"] for sample in recording.samples]
    most = 3 * recording.period_s
    return [min(max(after - now, 0.0), most) for now, after in zip(times, times[1:])] + [0.0]


def _total_power(sample: Mapping[str, Any], recording: Recording) -> float:
    """Returns the watts of all boards, or of all IPUs where boards do not tell; NaN where neither does."""
    serials = {ipu.get("id"): ipu.get("board_serial") for ipu in recording.ipus}
    boards = {
        serials.get(ipu.get("id")): ipu["board_power_w"]
        for ipu in sample["ipus"]
        if _is_number(ipu.get("board_power_w"))
    }
    chips = [ipu["power_w"] for ipu in sample["ipus"] if _is_number(ipu.get("power_w"))]
    return float(sum(boards.values())) if boards else float(sum(chips)) if chips else math.nan


def _title(recording: Recording, ids: Sequence[Any], utilisation: Any, has_power: bool) -> str:
    import numpy as np

    seconds = recording.samples[-1]["seconds"] - recording.samples[0]["seconds"]
    held = utilisation[np.isfinite(utilisation) & (utilisation != _FREE)]
    busy = f", those in use {held.mean():.0f} % busy" if held.size else ""
    kind = " (emulated)" if recording.sdk == "emulator" else ""
    power = "" if has_power else "; power was not reported"
    return f"{cli.count(len(ids), 'IPU')}{kind}, {tables.duration(seconds)}{busy}{power}"


def _time_unit(seconds: float) -> Tuple[float, str]:
    return (1.0, "seconds") if seconds < 600 else (60.0, "minutes") if seconds < 6 * 3600 else (3600.0, "hours")


def _words(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def _known(value: Mapping[str, Any]) -> Dict[str, Any]:
    return {key: each for key, each in value.items() if each is not None}


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _list(value: Any) -> List[Any]:
    return value if isinstance(value, list) else []


def _hashable(pid: Any) -> Any:
    return pid if isinstance(pid, int) else str(pid)


def _object(line: str) -> Optional[Dict[str, Any]]:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _seconds(text: Any) -> Optional[float]:
    try:
        return datetime.datetime.fromisoformat(str(text).replace("Z", "+00:00")).timestamp()
    except ValueError:
        return None
