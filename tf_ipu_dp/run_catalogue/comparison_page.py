"""A comparison of runs as a file: PNG, SVG, or one self-contained HTML page. Imports matplotlib to draw."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, List

from tf_ipu_dp import __version__, cli
from tf_ipu_dp.monitoring import drawings, panels
from tf_ipu_dp.monitoring.panels import Panel, Titles, escape, escape_flags
from tf_ipu_dp.monitoring.text_layout import number, printable
from tf_ipu_dp.run_catalogue import comparison_text
from tf_ipu_dp.run_catalogue.comparison import Comparison
from tf_ipu_dp.run_catalogue.comparison import title as comparison_title

_LEGEND_LINE = 0.18  # inches
_STYLE = ".numbers td:first-child,.numbers th:first-child{text-align:left}"
_LINES = ("-", (0, (5, 1.5)), (0, (1.5, 1)))  # more runs than colours differ in their lines


def write(comparison: Comparison, path: Path) -> None:
    """Writes the comparison in the format of the file's type."""
    kind = path.suffix.lower()
    if kind == ".html":
        content = render_page(comparison).encode("utf-8", "backslashreplace")
    else:
        figure, _ = panels.make_figure(make_panels(comparison), one_file=True)
        content = drawings.render_figure(figure, kind[1:], "comparison")
    drawings.write_file("out", path, content)


def render_page(comparison: Comparison) -> str:
    """Returns the page: results, flags that differ, and a picture of each curve."""
    title = f"Comparison of {cli.count(len(comparison.runs), 'run')}"
    parts = [f"<h1>{escape(title)}</h1>", panels.render_table(comparison_text.result_columns(comparison))]
    parts += [
        f'<p class="note"><strong>{escape(run.name)}</strong>: {escape_flags(run.problem or run.verdict or "")}</p>'
        for run in comparison.runs
        if run.problem or run.verdict
    ]
    if comparison.differences:
        parts += ["<h2>Flags that differ</h2>", panels.render_table(comparison_text.flag_columns(comparison))]
    else:
        parts.append("<p>The flags do not differ.</p>")
    if comparison.curves:
        parts.append(panels.render_panels(make_panels(comparison)))
    else:
        parts.append("<p>The runs have no records to draw.</p>")
    versions = {run.name: f"tf_ipu_dp {run.version}" for run in comparison.runs if run.version}
    parts.append(panels.render_facts("Versions", {**versions, "this page": f"tf_ipu_dp {__version__}"}))
    return panels.render_page(title, "".join(parts), _STYLE)


def make_panels(comparison: Comparison) -> List[Panel]:
    """Returns a picture for each curve that a run has."""
    lines = len(comparison.runs)
    return [
        Panel(
            metric.replace("_", "-"), f"{comparison_title(metric)} over {comparison.axis}", 2.3 + _LEGEND_LINE * lines,
            functools.partial(_draw, comparison, metric),
        )
        for metric in comparison.curves
    ]  # fmt: skip


def _draw(comparison: Comparison, metric: str, plot: Any, gid: str) -> Titles:
    import numpy as np

    titles: Titles = {}
    for curve in comparison.curves[metric]:
        name = printable(comparison.names[curve.run])
        colour = drawings.PALETTE[curve.run % len(drawings.PALETTE)]
        line = _LINES[curve.run // len(drawings.PALETTE) % len(_LINES)]
        x, y = np.asarray(curve.x), np.asarray(curve.y)
        # A name that begins with an underscore would be left out of the legend.
        plot.plot(
            x, y, label=f"\u200b{name}" if name.startswith("_") else name, color=colour, linestyle=line, linewidth=1.3,
            marker="." if len(x) < 12 else "",
        )  # fmt: skip
        told = functools.partial(_tell, name, comparison.axis)
        titles.update(panels.tell_values(plot, f"{gid}-{curve.run}", x, y, told))
    plot.set_xlabel(comparison.axis)
    plot.grid(alpha=0.6, linewidth=0.5)
    panels.legend_below(plot, 1)
    return titles


def _tell(name: str, axis: str, place: float, value: float) -> str:
    return f"{name}: {number(value)} at {axis} {number(place)}"
