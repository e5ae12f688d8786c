"""Reports made of pictures: panels below each other in a file, or beside each other with tables on a page.

A panel is one picture. A page has a drawing for each of them, with values under the pointer. Imports matplotlib only to
draw.
"""

from __future__ import annotations

import dataclasses
import html
import re
import textwrap
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from tf_ipu_dp.monitoring import drawings
from tf_ipu_dp.monitoring.text_layout import TextColumn, printable

Titles = Dict[str, List[str]]  # texts shown under the pointer, by the id of a group of marks

_WIDTH, _FILE_WIDTH = 5.0, 9.0
_NOTE_CHARACTERS = 110  # of a line that fits the width of a file
_MAX_POINTS = 150  # of a curve, that tell their value under the pointer
_LEGEND_OFFSET = 0.42  # inches below the axes
_STYLE = (
    "figure{margin:0}.panels{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,34em),1fr));gap:0 2em}"
    "h2{overflow-wrap:anywhere}.numbers td,.numbers th{text-align:right;white-space:nowrap}"
    "details table{width:auto;font-size:.9em}summary{cursor:pointer}"
    ".numbers .text{text-align:left;white-space:normal}.text span{display:inline-block;max-width:50vw}"
    ".numbers{width:auto}.note{font-size:.9em;opacity:.85}"
    "svg text{font-family:sans-serif}.flag{display:inline-block;max-width:100%;overflow-wrap:anywhere}"
)
_FLAG = re.compile(r"(?<!\S)--\w[^\s<,]*")


@dataclasses.dataclass(frozen=True)
class Panel:
    """One picture: what it is called, how high it is in inches, and how it is drawn on axes."""

    name: str
    title: str
    height: float
    draw: Callable[[Any, str], Titles]  # takes the axes, and the beginning of the ids of its marks
    note: str = ""  # a sentence below it


def make_figure(panels: Sequence[Panel], *, one_file: bool) -> Tuple[Any, Titles]:
    """Returns a figure of some panels below each other, and the texts for its marks."""
    import matplotlib
    from matplotlib.figure import Figure

    titles: Titles = {}
    with matplotlib.rc_context(drawings.STYLE):
        heights = [panel.height + (0.4 if one_file else 0.0) for panel in panels]
        figure: Any = Figure(figsize=(_FILE_WIDTH if one_file else _WIDTH, sum(heights)), layout="constrained")
        figure.get_layout_engine().set(h_pad=0.1 if one_file else 0.04)
        plots = figure.subplots(len(panels), 1, height_ratios=heights, squeeze=False)[:, 0]
        for panel, plot in zip(panels, plots):
            if one_file:
                text = "\n".join([panel.title, *textwrap.wrap(panel.note, _NOTE_CHARACTERS)])
                if len(panels) == 1:
                    figure.suptitle(text, x=0.01, ha="left", fontsize=9.5)
                else:
                    plot.set_title(text, loc="left", fontsize=9.5)
            titles.update(panel.draw(plot, panel.name))
    return figure, titles


def legend_below(plot: Any, columns: int, handles: Optional[Sequence[Any]] = None) -> None:
    """Puts the legend below the label of the horizontal axis, whatever the height of the plot.

    `handles` are its entries where they are not those of the plot.
    """
    from matplotlib.transforms import ScaledTranslation

    entries = plot.get_legend_handles_labels()[0] if handles is None else handles
    if entries:
        down: Any = ScaledTranslation(0, -_LEGEND_OFFSET, plot.figure.dpi_scale_trans)  # type: ignore[no-untyped-call, unused-ignore]
        below = plot.transAxes + down
        plot.legend(
            handles=entries, loc="upper left", bbox_to_anchor=(0.0, 0.0), bbox_transform=below, fontsize=8,
            frameon=False, ncols=columns, borderaxespad=0.0, columnspacing=1.2, handlelength=2.4,
        )  # fmt: skip


def tell_values(plot: Any, gid: str, positions: Any, values: Any, tell: Callable[[float, float], str]) -> Titles:
    """Lays points that cannot be seen over a curve: they tell its values under the pointer."""
    import numpy as np

    known = np.nonzero(np.isfinite(positions) & np.isfinite(values))[0]
    chosen = known[:: max(1, -(-len(known) // _MAX_POINTS))]
    plot.plot(positions[chosen], values[chosen], linestyle="", marker="o", markersize=7, alpha=0, gid=gid)
    return {gid: [tell(place, value) for place, value in zip(positions[chosen], values[chosen])]}


def render_panels(panels: Sequence[Panel]) -> str:
    """Returns panels as a part of a page, beside each other where there is room."""
    parts = ['<div class="panels">']
    for panel in panels:
        figure, texts = make_figure([panel], one_file=False)
        drawing = drawings.render_figure(figure, "svg", panel.name).decode()
        note = f'<figcaption class="note">{escape(panel.note)}</figcaption>' if panel.note else ""
        svg = drawings.make_inline(drawing, texts, panel.title)
        parts.append(f"<section><h2>{escape(panel.title)}</h2><figure>{svg}{note}</figure></section>")
    return "".join([*parts, "</div>"])


def render_table(columns: Sequence[TextColumn], texts: Optional[Mapping[int, str]] = None, keys: int = 0) -> str:
    """Returns a table of numbers, which scrolls inside itself where a page is narrow.

    `texts` has, by the number of a row, a text that stands in place of all cells after the first `keys`.
    """
    header = "".join(f"<th>{escape(title)}</th>" for title, _ in columns)
    rows = []
    for place, row in enumerate(zip(*(cells for _, cells in columns))):
        text = (texts or {}).get(place)
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in (row if text is None else row[:keys]))
        if text is not None:
            cells += f'<td class="text" colspan="{len(columns) - keys}"><span>{escape(text)}</span></td>'
        rows.append(cells)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return (
        f'<div class="wide"><table class="numbers"><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def render_facts(title: str, facts: Dict[str, str]) -> str:
    """Returns names and values as a table that is opened with a click."""
    rows = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in facts.items())
    return f"<details><summary>{escape(title)}</summary><table>{rows}</table></details>"


def render_page(title: str, body: str, style: str = "") -> str:
    """Returns the page of a report."""
    return drawings.render_page(escape(title), body, _STYLE + style)


def escape_flags(text: str) -> str:
    """Returns a text as `escape`, in which a flag is not broken after its dashes."""
    return _FLAG.sub(r'<span class="flag">\g<0></span>', escape(text))


def escape(text: str) -> str:
    """Returns a text that shows as it is, and cannot become markup."""
    return html.escape(printable(text))
