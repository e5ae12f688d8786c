"""A comparison of runs for terminals and pipes: results, flags that differ, learning curves. Imports numpy to plot."""

from __future__ import annotations

import json
from typing import List, Sequence

from tf_ipu_dp import cli
from tf_ipu_dp.monitoring import text_layout
from tf_ipu_dp.monitoring.text_layout import BOLD, PLAIN, Column, DisplayOptions, Line, TextColumn, printable
from tf_ipu_dp.run_catalogue import table
from tf_ipu_dp.run_catalogue.comparison import Comparison, Curve
from tf_ipu_dp.run_catalogue.comparison import title as comparison_title
from tf_ipu_dp.runs.json_files import plain

SCHEMA = 1
_PLOT_HEIGHT = 12
_MAX_PLOT_WIDTH = 100
_PIPE_WIDTH = 80
_MARK_EVERY = 3  # columns


def render(comparison: Comparison, metrics: Sequence[str], options: DisplayOptions) -> str:
    """Returns the whole comparison."""
    blocks = [_render_table(result_columns(comparison), options)]
    if comparison.differences:
        heading: Line = [("Flags that differ", BOLD)]
        blocks.append(text_layout.render_lines([heading], options) + _render_table(flag_columns(comparison), options))
    else:
        blocks.append("The flags do not differ.\n")
    for metric in metrics:
        if metric in comparison.curves:
            blocks.append(text_layout.render_lines(_plot(comparison, metric, options), options))
    return "\n".join(blocks)


def render_json(comparison: Comparison) -> str:
    """Returns the comparison as one JSON object."""
    value = {
        "schema": SCHEMA,
        "axis": comparison.axis,
        "runs": [plain(vars(run)) for run in comparison.runs],
        "flags": {each.name: list(each.values) for each in comparison.differences},
        "curves": {
            metric: [{"run": comparison.names[curve.run], "x": curve.x, "y": curve.y} for curve in curves]
            for metric, curves in comparison.curves.items()
        },
    }
    return json.dumps(plain(value), indent=2, allow_nan=False) + "\n"


def result_columns(comparison: Comparison) -> List[TextColumn]:
    """Returns one row per run."""
    runs = comparison.runs
    return [
        ("Run", comparison.names),
        ("State", [run.state for run in runs]),
        ("Steps", [table.steps(run) for run in runs]),
        ("Best accuracy %", [table.per_cent(run.best_accuracy) for run in runs]),
        ("Best loss", [table.number(run.best_loss, 4) for run in runs]),
        ("Samples/s", [table.number(run.samples_per_s, 0) for run in runs]),
        ("Training s", [table.number(run.training_s, 1) for run in runs]),
    ]


def flag_columns(comparison: Comparison) -> List[TextColumn]:
    """Returns one row per flag that differs, and a column for each run."""
    found: List[TextColumn] = [("Flag", [f"--{each.name}" for each in comparison.differences])]
    for number, name in enumerate(comparison.names):
        found.append((name, [each.values[number] for each in comparison.differences]))
    return found


def _render_table(columns: Sequence[TextColumn], options: DisplayOptions) -> str:
    shown = [
        Column(printable(title), [[(printable(cell), PLAIN)] for cell in cells], right=number > 0)
        for number, (title, cells) in enumerate(columns)
    ]
    if options.width is not None and text_layout.table_width(shown) > options.width:  # then it is a list
        rows = list(zip(*(cells for _, cells in columns)))
        return cli.render_table([title for title, _ in columns], rows, options.width)
    return text_layout.render_lines(text_layout.make_table(shown, options), options)


def _plot(comparison: Comparison, metric: str, options: DisplayOptions) -> List[Line]:
    import numpy as np

    from tf_ipu_dp.collectives import terminal_plots

    width = min(options.width or _PIPE_WIDTH, _MAX_PLOT_WIDTH)
    fitting = DisplayOptions(width, colour=options.colour, unicode=options.unicode)
    curves = comparison.curves[metric]
    across = terminal_plots.value_axis(np.concatenate([curve.x for curve in curves]), max(3, width // 12))
    up = terminal_plots.value_axis(np.concatenate([curve.y for curve in curves]), _PLOT_HEIGHT // 2)
    marked = not options.unicode or (len(curves) > 1 and not options.colour)
    groups, legend = [], []
    for place, curve in enumerate(curves):
        style = terminal_plots.COLOURS[place % len(terminal_plots.COLOURS)]
        own = terminal_plots.mark(place, options.unicode)
        x, y = _line(curve, width // _MARK_EVERY if marked else 4 * width)
        groups.append(terminal_plots.Points(x, y, style, own if marked else ""))
        legend.append([(f"  {own if marked else '━━'} ", style), (printable(comparison.names[curve.run]), PLAIN)])
    heading: Line = [(f"{comparison_title(metric)} over {comparison.axis}", BOLD)]
    return [heading, *terminal_plots.plot(groups, across, up, _PLOT_HEIGHT, fitting), *legend]


def _line(curve: Curve, points: int) -> tuple:  # type: ignore[type-arg]
    """Returns the points of a curve, and between them so many that it is drawn as a line."""
    import numpy as np

    order = np.argsort(curve.x, kind="stable")
    x, y = np.asarray(curve.x)[order], np.asarray(curve.y)[order]
    grid = np.linspace(x[0], x[-1], points)
    return np.concatenate([grid, x]), np.concatenate([np.interp(grid, x, y), y])
