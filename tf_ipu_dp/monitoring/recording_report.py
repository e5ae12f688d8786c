"""The report of a recording as a file: PNG, SVG, or one HTML page with panels and a table of the processes."""

from __future__ import annotations

from pathlib import Path
from typing import Dict, List, Optional, Tuple

from tf_ipu_dp import cli
from tf_ipu_dp.monitoring import charts, drawings, panels, process_table, text_layout, timeline
from tf_ipu_dp.monitoring.recorder import Recording

_STYLE = (
    ".processes td,.processes th{white-space:nowrap}.processes{width:auto}"
    ".processes .text{white-space:normal;overflow-wrap:anywhere;min-width:15em}"
    "dt{font-weight:bold;overflow-wrap:anywhere}dd{margin:0 0 .5em}"
)


def check_report_name(path: Path) -> None:
    """Raises a UsageError for a report that cannot be drawn, before anything is recorded."""
    drawings.check_file("report", path)


def draw(recording: Recording, path: Path) -> None:
    """Writes the report in the format of its file type."""
    check_report_name(path)
    kind = path.suffix.lower()
    if kind == ".html":
        content = render_page(recording).encode()
    else:
        content = drawings.render_figure(charts.make_figure(recording), kind[1:], "recording")
    drawings.write_file("report", path, content)


def render_page(recording: Recording) -> str:
    """Returns one self-contained HTML page."""
    first, last = recording.samples[0].time, recording.samples[-1].time
    facts = (
        f"{cli.count(len(recording.ipus), 'IPU')}, {cli.count(len(recording.samples), 'sample')} from "
        f"{charts.format_time(first)} to {charts.format_time(last)}, recorded in {recording.path.name}"
    )
    verdicts = timeline.last_verdicts(recording)
    told = "".join(
        f"<dt>{panels.escape(run)}</dt><dd>{panels.escape_flags(sentence)}</dd>" for run, sentence in verdicts.items()
    )
    parts = [
        f"<h1>IPU report</h1><p>{panels.escape(facts)}</p>",
        f"<h2>Bottlenecks</h2><dl>{told}</dl>" if told else "",
        panels.render_panels(charts.make_panels(recording)),
        "<h2>Processes</h2>",
        _render_processes(recording),
    ]
    return panels.render_page("IPU report", "".join(parts), _STYLE)


def _render_processes(recording: Recording) -> str:
    """Returns a table of the processes, without columns that have no value."""
    summaries = timeline.summarise(recording)
    if not summaries:
        return "<p>No process held an IPU.</p>"
    several_hosts = len({each.host for each in summaries}) > 1
    columns: List[Tuple[str, List[Optional[str]]]] = [
        ("PID", [str(each.pid) for each in summaries]),
        ("Host", [each.host if several_hosts else None for each in summaries]),
        ("User", [each.user for each in summaries]),
        ("Run", [each.run for each in summaries]),
        ("Instance", [None if each.instance is None else str(each.instance) for each in summaries]),
        ("IPUs", [text_layout.id_ranges(each.ipus) or None for each in summaries]),
        ("Mean util %", [_optional(each.utilisation_pct, ".1f") for each in summaries]),
        ("Last step", [_optional(each.step, ",d") for each in summaries]),
        ("Last samples/s", [_optional(each.samples_per_s, ",.0f") for each in summaries]),
        ("Last loss", [_optional(each.loss, ".4f") for each in summaries]),
        ("Phases", [_render_phases(each.phases) or None for each in summaries]),
        ("Command", [each.command and process_table.shorten_command(each.command) for each in summaries]),
    ]
    shown = [(title, cells) for title, cells in columns if any(cell is not None for cell in cells)]
    header = "".join(f"<th>{title}</th>" for title, _ in shown)
    rows = []
    for place in range(len(summaries)):
        texts = [(title, panels.escape_flags(cells[place] or "-")) for title, cells in shown]
        rows.append(
            "".join(
                f'<td class="text">{text}</td>' if title in ("Phases", "Command") else f"<td>{text}</td>"
                for title, text in texts
            )
        )
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    table = f"<thead><tr>{header}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="wide"><table class="processes">{table}</table></div>'


def _render_phases(phases: Dict[str, float]) -> str:
    return ", ".join(f"{name} {charts.render_seconds(seconds)}" for name, seconds in phases.items())


def _optional(value: Optional[float], form: str) -> Optional[str]:
    return None if value is None else format(value, form)
