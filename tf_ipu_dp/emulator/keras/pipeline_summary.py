"""The table of a pipelined model's layers and stages that `print_pipeline_stage_assignment_summary` prints."""

from __future__ import annotations

from typing import Any, Iterator, List, Optional, Sequence

from tf_ipu_dp.emulator.keras.stage_assignments import SEQUENTIAL, NestedAssignment, current_assignments, title_of


def render_summary(model: Any, line_length: Optional[int] = None) -> List[str]:
    """Returns the lines of the summary. Without `line_length` they are as long as the longest row needs."""
    if isinstance(model, SEQUENTIAL):
        header = ["Layer (type)", "Pipeline Stage"]
    else:
        header = ["Layer (type) (node index)", "Input Layers", "Pipeline Stage"]
    rows = list(_rows(current_assignments(model), len(header), indent=""))
    widths = [max(len(line[column]) for row in [[header], *rows] for line in row) + 2 for column in range(len(header))]
    length = line_length or max(65, sum(widths))
    # Only the first column is widened or cut to the length: the stage, in the last one, is short.
    widths[0] += length - sum(widths)
    lines = [f'Model: "{model.name}"', "_" * length, _line(header, widths), "=" * length]
    for number, row in enumerate(rows):
        lines += ["_" * length] if number else []
        lines += [_line(line, widths) for line in row]
    return [*lines, "=" * length]


def _rows(entries: Sequence[Any], columns: int, indent: str) -> Iterator[List[List[str]]]:
    """Yields for every entry the lines of its row: a second line has one more input layer."""
    for entry in entries:
        nested = isinstance(entry, NestedAssignment)
        stage = "" if nested else "-" if entry.pipeline_stage is None else str(entry.pipeline_stage)
        title = indent + title_of(entry)
        if columns == 2:
            yield [[title, stage]]
        else:
            names = [layer.name for layer in getattr(entry, "inbound_layers", [])] or [""]
            yield [[title, names[0], stage], *(["", name, ""] for name in names[1:])]
        if nested:
            yield from _rows(entry.pipeline_stage_assignments, columns, indent + "  ")


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    cut = [cell[: max(width - 1, 0)].ljust(max(width, 0)) for cell, width in zip(cells, widths)]
    return "".join(cut).rstrip()
