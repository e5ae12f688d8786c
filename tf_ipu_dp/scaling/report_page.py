"""A study's report as one self-contained HTML page, with values under the pointer. Imports matplotlib to draw."""

from __future__ import annotations

import shlex
from typing import List, Sequence

from tf_ipu_dp.monitoring import panels
from tf_ipu_dp.monitoring.panels import escape
from tf_ipu_dp.scaling import charts, published, report_notes, report_tables, report_text
from tf_ipu_dp.scaling.analysis import Analysis

_PROGRAM = ("python", "-m", "tf_ipu_dp.scaling")
_STYLE = (
    ".verdict{border-left:4px solid var(--colour0);padding:.4em .9em;margin:1em 0;font-size:1.05em}"
    "pre{overflow-x:auto;padding:.6em .8em;border:1px solid var(--faint);border-radius:4px;font-size:.9em}"
    ".numbers td,.numbers th{padding:.3em .5em}"
)


def render_page(analysis: Analysis, verdict: str) -> str:
    """Returns the page: verdict, table, pictures, scorecard and other tables, commands, machine."""
    study = analysis.study
    about, *_ = report_text.subtitles(study)
    parts = [f"<h1>{escape(report_text.title(study))}</h1>", f'<p class="note">{escape(about)}</p>']
    if verdict:
        parts.append(f'<p class="verdict">{escape(verdict)}</p>')
    parts += ["<h2>Measured</h2>", *_table(report_tables.row_table(analysis), report_notes.notes(analysis))]
    parts.append(panels.render_panels(charts.make_panels(analysis)))
    for heading, table, below in report_text.sections(analysis):
        parts += [f"<h2>{escape(heading)}</h2>", *_table(table, below)]
    parts += _commands(analysis)
    if study.facts:
        version = {"tf_ipu_dp": study.version} if study.version else {}
        parts.append(panels.render_facts("Machine and versions", {**study.facts, **version}))
    parts.append(_sources(analysis))
    return panels.render_page(report_text.title(study), "".join(parts), _STYLE)


def _table(table: report_tables.Table, below: List[str]) -> List[str]:
    shown = panels.render_table(table.columns, table.texts, len(table.keys))
    return [shown, *(f'<p class="note">{escape(text)}</p>' for text in below)]


def _commands(analysis: Analysis) -> List[str]:
    study = analysis.study
    if not study.command:
        return []
    parts = ["<h2>Commands</h2>", f"<pre>{escape(_join((*_PROGRAM, *study.command)))}</pre>"]
    rows = "\n".join(escape(f"{cell.key}: {_join((*study.words, *cell.words))}") for cell in study.cells)
    return [*parts, f"<details><summary>Flags of each cell</summary><pre>{rows}</pre></details>"]


def _sources(analysis: Analysis) -> str:
    """Returns where the published curves are from; nothing if none is drawn."""
    study = analysis.study
    curves = published.behind(study.mode)
    if not curves:
        return ""
    return panels.render_facts("Sources of the published curves", {each.title: each.source for each in curves})


def _join(words: Sequence[str]) -> str:
    return " ".join(shlex.quote(word) for word in words)
