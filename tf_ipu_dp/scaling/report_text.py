"""A study's report as text: tables that fit a width, and the sentences below them. Pure. The page shows the same."""

from __future__ import annotations

from typing import List, Tuple

from tf_ipu_dp import cli
from tf_ipu_dp.monitoring import text_layout
from tf_ipu_dp.monitoring.text_layout import BOLD, DIM, PLAIN, WARN, Column, DisplayOptions, Line, printable
from tf_ipu_dp.scaling import report_notes, report_tables
from tf_ipu_dp.scaling.analysis import Analysis
from tf_ipu_dp.scaling.records import BATCH, COMPARE, INSTANCES, STRONG, WEAK, Study
from tf_ipu_dp.scaling.report_tables import Table

_MODE_TITLES = {
    BATCH: "Batch sweep",
    WEAK: "Weak scaling",
    STRONG: "Strong scaling",
    COMPARE: "Replicas and instances compared",
    INSTANCES: "The same replicas over several instances",
}
_PIPE_TEXT_WIDTH = 120


def render(analysis: Analysis, verdict: str, options: DisplayOptions) -> str:
    """Returns the whole report, with the verdict last."""
    study = analysis.study
    lines: List[Line] = [[(title(study), BOLD)]]
    for text in subtitles(study):
        lines += _wrap(text, DIM, options)
    lines += [[], *_render_table(report_tables.row_table(analysis), options)]
    for text in report_notes.notes(analysis):
        lines += _wrap(text, DIM, options)
    for heading, table, below in sections(analysis):
        lines += [[], *_wrap(heading, BOLD, options), *_render_table(table, options)]
        for text in below:
            lines += _wrap(text, DIM, options)
    if verdict:
        lines += [[], [("Verdict", BOLD)], *_wrap(printable(verdict), PLAIN, options)]
    return text_layout.render_lines(lines, options)


def title(study: Study) -> str:
    """Returns what a study is about."""
    model = [word.partition("=")[2] for word in study.words if word.lstrip("-").startswith("model=")]
    return printable(": ".join([_MODE_TITLES[study.mode], *model[-1:]]))


def subtitles(study: Study) -> List[str]:
    """Returns what all cells have in common, and the machine."""
    about = [" ".join(study.words), f"emulated hosts {study.fabric}" if study.fabric else ""]
    about += [f"{cli.count(study.repeats, 'repeat')} of {_length(study)}"]
    facts = [f"{name} {value}" for name, value in study.facts.items()]
    return [printable("; ".join(filter(None, part))) for part in (about, facts) if any(part)]


def _length(study: Study) -> str:
    """Returns how long a run is: its epochs, its updates, or about its seconds."""
    if study.target_accuracy is not None and study.epochs:
        return f"--epochs={study.epochs}"
    return f"about {study.seconds:g} s" if study.updates is None else cli.count(study.updates, "update")


def sections(analysis: Analysis) -> List[Tuple[str, Table, List[str]]]:
    """Returns the tables after the first, those that there is data for: heading, table, sentences below."""
    found = []
    if any(row.parts is not None for row in analysis.rows):
        heading = "Where the time of one update goes (ms)"
        found.append((heading, report_tables.part_table(analysis), report_notes.part_notes(analysis)))
    if any(row.error is not None for row in analysis.rows):
        heading = "Scorecard of the predictions"
        found.append((heading, report_tables.score_table(analysis), [report_notes.score_sentence(analysis)]))
    if analysis.time_to_accuracy:
        heading = report_tables.accuracy_title(analysis)
        found.append((heading, report_tables.accuracy_table(analysis), report_notes.accuracy_notes(analysis)))
    if analysis.study.extrapolations:
        heading = "Predicted for other sizes and fabrics, not measured"
        found.append((heading, report_tables.extrapolation_table(analysis), report_notes.extrapolation_notes(analysis)))
    return found


def _render_table(table: Table, options: DisplayOptions) -> List[Line]:
    left = ("Engine", "Fabric")
    keys = [Column(title, [[(cell, PLAIN)] for cell in cells], title not in left) for title, cells in table.keys]
    numbers = [
        Column(title, [[(cell, _style(title, cell))] for cell in cells], rank=rank)
        for title, cells, rank in table.numbers
    ]
    shown = text_layout.fit_columns([*keys, *numbers], options.width)
    needed = sum(column.width for column in shown) + text_layout.GAP * (len(shown) - 1)
    if options.width is not None and needed > options.width and not table.texts:
        titles, cells = zip(*table.columns)
        text = cli.render_table(titles, [[cell.strip() for cell in row] for row in zip(*cells)], options.width)
        return [[(line, PLAIN)] for line in text.splitlines()]
    lines = text_layout.make_table([*keys, *numbers], options)
    beginnings = text_layout.make_table(keys, DisplayOptions(None))
    found: List[Line] = lines[:1]
    for place, line in enumerate(lines[1:]):
        if place not in table.texts:
            found.append(line)
            continue
        beginning = beginnings[1 + place]
        indent = text_layout.line_width(beginning)
        wrapped = text_layout.wrap([(table.texts[place], WARN)], (options.width or _PIPE_TEXT_WIDTH) - indent)
        found.append([*beginning, *wrapped[0]])
        found += [[(" " * indent, PLAIN), *rest] for rest in wrapped[1:]]
    return found


def _style(title: str, cell: str) -> str:
    return WARN if title == "Error %" and cell != "-" and abs(float(cell)) > 100 * report_notes.GOOD_ERROR else PLAIN


def _wrap(text: str, style: str, options: DisplayOptions) -> List[Line]:
    return text_layout.wrap([(text, style)], options.width or _PIPE_TEXT_WIDTH)
