"""A report as one self-contained HTML page, with values under the pointer. Imports matplotlib to draw."""

from __future__ import annotations

from typing import List

from tf_ipu_dp.collectives import charts, report_text, run_exchanges
from tf_ipu_dp.collectives.report_content import Content
from tf_ipu_dp.monitoring import panels
from tf_ipu_dp.monitoring.panels import escape, render_table

_MAX_ROWS_FIRST = 12


def render_page(content: Content) -> str:
    """Returns the page."""
    title = f"Collectives: {', '.join(content.titles)}"
    pictures = [panels.render_panels(charts.make_panels(content))]
    tables = [*(_tables(content) if content.entries else ()), *map(_last_table, content.runs)]
    # A long table would hide that there are pictures.
    blocks = [*tables, *pictures] if len(content.entries) <= _MAX_ROWS_FIRST else [*pictures, *tables]
    body = "".join([f"<h1>{escape(title)}</h1>", *_results(content), *blocks])
    return panels.render_page(title, body)


def _results(content: Content) -> List[str]:
    parts = []
    for key, result in content.results:
        first, *others = report_text.result_lines(result)
        letter = f"{key} " if len(content.results) > 1 else ""
        lines = "".join(f"<br>{escape(line)}" for line in others if line)
        parts.append(f"<p><strong>{escape(letter + first)}</strong>{lines}</p>")
        if result.description.facts:
            parts.append(panels.render_facts("Machine and network", result.description.facts))
    return parts


def _tables(content: Content) -> List[str]:
    parts = ["<h2>Times and bandwidths</h2>", render_table(report_text.report_columns(content))]
    parts += [f'<p class="note">{escape(note)}</p>' for note in report_text.table_notes(content.entries)]
    if content.pairs:
        parts.append("<h2>Measured against predicted</h2>")
        parts.append(render_table(report_text.pair_columns(content.pairs)))
    return parts


def _last_table(run: run_exchanges.RunExchanges) -> str:
    """Returns how often each instance of a run was last."""
    shares = run_exchanges.last_shares(run)
    columns = [
        ("Instance", [f"{instance:,}" for instance, _ in shares]),
        ("last in % of exchanges", [f"{share:.1f}" for _, share in shares]),
    ]
    return f"<h2>Who was last: {escape(run.name)}</h2>{render_table(columns)}" if shares else ""
