"""What the monitor shows: a snapshot as tables, or as a screen of a given size. Pure: returns text.

A dash means that a value is not known; the reason is in its row or in the notes below the tables.
"""

from __future__ import annotations

import dataclasses
from typing import Iterator, List, Mapping, Optional, Sequence, Tuple

from tf_ipu_dp import cli
from tf_ipu_dp.monitoring import ipu_table, notes, process_table
from tf_ipu_dp.monitoring.devices import Ipu
from tf_ipu_dp.monitoring.ipu_table import History, IpuRow
from tf_ipu_dp.monitoring.selection import View
from tf_ipu_dp.monitoring.snapshots import Snapshot
from tf_ipu_dp.monitoring.text_layout import (
    BAD,
    BOLD,
    DIM,
    GAP,
    GOOD,
    PLAIN,
    SPARKLINE_WIDTH,
    WARN,
    Column,
    DisplayOptions,
    Line,
    cell_width,
    id_ranges,
    line_width,
    make_table,
    printable,
    render_lines,
    sparkline,
    wrap,
)

_MIN_WIDTH, _MIN_HEIGHT = 20, 4
_TOO_SMALL = ("The terminal is too small for all IPUs; --json lists them.", "Too small; --json.")
# Shown even without a value: what a row is about.
_KEY_COLUMNS = ("IPU", "Owner", "PID", "State", "")
_HELP = (
    ("q", "quit"),
    ("p", "pause, and go on"),
    ("s", "sort by the next column"),
    ("h or ?", "show this, and go back"),
    ("Ctrl-Z", "suspend; fg returns"),
    ("", ""),
    ("Util %", "busy since the last sample"),
    ("Session %", "the same since attaching"),
    ("Input %", "waiting for input"),
    ("ETA", "without validations"),
    ("Loss", "of the last log line"),
    ("CPU %", "of one core of this host"),
    ("Mem GiB", "resident on this host"),
)


def render(snapshot: Snapshot, options: DisplayOptions, view: Optional[View] = None) -> str:
    """Returns all tables and notes."""
    view = view or View()
    whole = ipu_table.share_board_values(snapshot)
    shown = view.apply(whole)
    rows = ipu_table.rows_of_ipus(shown.ipus) if view.each_ipu else ipu_table.rows_of_processes(shown)
    ipus, no_ipu_values = _drop_empty(ipu_table.make_columns(rows, options, {}) if rows else [])
    processes, no_process_values = _drop_empty(_process_columns(shown, options))
    free = [] if view.each_ipu or view.filtered else _free_line(shown.ipus)
    said = view.describe(whole)
    lines: List[Line] = [
        *([[(printable(said), BOLD)]] if said else []),
        *notes.verdict_lines(shown),
        *notes.note_lines(shown, [*no_ipu_values, *no_process_values]),
        *notes.too_narrow(
            [title for columns in (ipus, processes) for title in notes.hidden_titles(columns, options.width)],
            options.width,
        ),
    ]
    blocks = [
        wrap([(_headline(whole), BOLD)], options.width),
        [*(make_table(ipus, options) if ipus else []), *free],
        make_table(processes, options) if processes else [],
        [line for each in lines for line in wrap(each, options.width)],
    ]
    return "\n".join(render_lines(block, options) for block in blocks if block)


def render_screen(
    snapshot: Snapshot,
    options: DisplayOptions,
    height: int,
    history: History,
    footer: str,
    view: Optional[View] = None,
) -> List[str]:
    """Returns exactly `height` lines of at most the given width, with as much detail as fits."""
    view = view or View()
    whole = ipu_table.share_board_values(snapshot)
    shown = view.apply(whole)
    width = max(options.width or 80, _MIN_WIDTH)
    options = dataclasses.replace(options, width=width)
    height = max(height, _MIN_HEIGHT)
    said = view.describe(whole)
    verdicts: List[Line] = [*([[(printable(said), BOLD)]] if said else []), *notes.verdict_lines(shown)]
    verdict_lines = [line for each in verdicts for line in wrap(each, width)]
    columns, left_out = _drop_empty(_process_columns(shown, options))
    processes = make_table(columns, options) if columns else []
    ipu_columns = ipu_table.make_columns(ipu_table.rows_of_ipus(shown.ipus), options, history) if shown.ipus else []
    ipu_columns, no_ipu_values = _drop_empty(ipu_columns)
    every_ipu = make_table(ipu_columns, options) if ipu_columns else []
    left_out = [*no_ipu_values, *left_out]
    note_lines = [line for each in notes.note_lines(shown, left_out) for line in wrap(each, width)]
    below: List[List[Line]] = [[[], *processes, [], *verdict_lines, *note_lines], [[], *processes, [], *verdict_lines]]
    head: List[Line] = [[(_headline(whole, width), BOLD)], []]
    room = height - len(head) - 1
    layouts = _layouts(shown.ipus, every_ipu, options, history, below)
    fitting = ([*ipus, *rest] for ipus, rest in layouts if len(ipus) + len(rest) <= room)
    chosen = next(fitting, None) or _small_layout(shown.ipus, processes, options, history, room)
    lines = [*head[: height - 1 - len(chosen)], *chosen]
    lines += [[] for _ in range(height - 1 - len(lines))]
    return render_lines([*lines, [(footer, DIM)]], options).split("\n")[:-1]


def render_help_screen(options: DisplayOptions, height: int) -> List[str]:
    """Returns exactly `height` lines with the keys of the live view, and what some columns mean."""
    width = max(options.width or 80, _MIN_WIDTH)
    height = max(height, _MIN_HEIGHT)
    room = max(len(key) for key, _ in _HELP) + GAP
    lines: List[Line] = [[("Keys and columns", BOLD)], []]
    lines += [[(f"{key:<{room}}", BOLD), (meaning, PLAIN)] for key, meaning in _HELP]
    lines = [*lines[: height - 1], *([[]] * (height - 1 - len(lines)))]
    footer: Line = [("h back  q quit", DIM)]
    return render_lines([*lines, footer], dataclasses.replace(options, width=width)).split("\n")[:-1]


def render_health(
    faults: Sequence[str], event: Mapping[str, str], path: Optional[str], checked: int, emulated: bool
) -> str:
    """Returns the faults, or that there are none, and the last event of an application."""
    lines = [f"fault  {printable(fault)}" for fault in faults]
    if not faults:
        lines.append(f"{cli.count(checked, 'IPU')} checked, no faults found.")
    if event:
        width = max(map(cell_width, event))
        lines += ["", "Last application event"]
        lines += [f"  {printable(key):<{width}}  {printable(value)}" for key, value in event.items()]
    elif path:
        lines.append(f"No application has recorded an event in {printable(path)}.")
    else:
        lines.append("Application events are not read: set IPU_APP_EVENT_RECORD_PATH, or use --events=PATH.")
    if emulated:
        lines.append("Emulated: these IPUs are this host's CPU.")
    return "\n".join(lines) + "\n"


def _headline(snapshot: Snapshot, width: Optional[int] = None) -> str:
    """Returns how many IPUs there are and in use; how busy these are only where it fits a width."""
    ipus = snapshot.ipus
    title = {"poplar": "Poplar SDK", "emulator": "emulated"}.get(snapshot.sdk, snapshot.sdk)
    failed = sum(ipu.problem is not None for ipu in ipus)
    used = len(ipus) - len(snapshot.free) - failed
    known = [ipu.utilisation_pct for ipu in ipus if ipu.pid and ipu.utilisation_pct is not None]
    busy = f" ({sum(known) / len(known):.0f} % busy)" if known else ""
    rest = f"{len(snapshot.free)} free" + (f", {failed} not answering" if failed else "")
    whole, short = (f"{cli.count(len(ipus), 'IPU')} ({title}), {used} in use{part}, {rest}" for part in (busy, ""))
    return whole if width is None or len(whole) <= width else short


def _process_columns(snapshot: Snapshot, options: DisplayOptions) -> List[Column]:
    return process_table.make_columns(snapshot.processes, options) if snapshot.processes else []


def _drop_empty(columns: Sequence[Column]) -> Tuple[List[Column], List[str]]:
    """Returns the columns with a value in some row, and the titles of the others."""
    kept = [column for column in columns if column.title in _KEY_COLUMNS or not column.unknown]
    if all(column.title != "Util %" for column in kept):
        kept = [column for column in kept if column.title]  # the bar has no title, and shows the same
    return kept, [column.title for column in columns if column.title and column not in kept]


def _ipu_rows(rows: Sequence[IpuRow], options: DisplayOptions, history: History) -> List[Line]:
    columns, _ = _drop_empty(ipu_table.make_columns(rows, options, history) if rows else [])
    return make_table(columns, options) if columns else []


def _layouts(
    ipus: Sequence[Ipu],
    every_ipu: List[Line],
    options: DisplayOptions,
    history: History,
    below: Sequence[List[Line]],
) -> Iterator[Tuple[List[Line], List[Line]]]:
    """Yields layouts of the IPUs and the lines below them, the best first: rows of IPUs matter more than notes."""
    yield every_ipu, below[0]
    used = ipu_table.rows_of_ipus([ipu for ipu in ipus if not ipu.free])
    in_use = [*_ipu_rows(used, options, history), *_free_line(ipus)]
    yield from ((in_use, rest) for rest in below)
    yield from ((grid, rest) for rest in below for grid in _grids(ipus, options, history))


def _small_layout(
    ipus: Sequence[Ipu], processes: Sequence[Line], options: DisplayOptions, history: History, room: int
) -> List[Line]:
    """Returns a grid of the IPUs, or why there is none, and as many processes as fit.

    At most one line more than `room`, which replaces the blank line below the headline.
    """
    grids = list(_grids(ipus, options, history))
    fitting = [grid for grid in grids if len(grid) + min(len(processes), max(room // 4, 2)) <= room]
    fitting += [
        lines for lines in [*grids, *(wrap([(text, WARN)], options.width) for text in _TOO_SMALL)] if len(lines) <= room
    ]
    left = room - len(fitting[0])
    return [*fitting[0], *_first_processes(processes, left if len(processes) <= left else left + 1)]


def _first_processes(table: Sequence[Line], room: int) -> List[Line]:
    """Returns as many rows of the processes as fit, and the number of the others."""
    if len(table) <= room:
        return [[], *table] if table and len(table) < room else list(table)
    kept = max(room - 2, 0)
    word = "more process" if kept else "process"
    more = cli.count(len(table) - 1 - kept, word, f"{word}es")
    above = table[: kept + 1] if kept else [[]] * (room - 1)
    return [*above, [(f"and {more}", WARN)]]


def _grids(ipus: Sequence[Ipu], options: DisplayOptions, history: History) -> Iterator[List[Line]]:
    """Yields grids of the IPUs in use, with shorter sparklines each time."""
    in_use = [ipu for ipu in ipus if not ipu.free]
    for sparkline_width in (SPARKLINE_WIDTH, 8, 0):
        yield [*_grid(in_use, options, history, sparkline_width), *_free_line(ipus)]


def _grid(ipus: Sequence[Ipu], options: DisplayOptions, history: History, sparkline_width: int) -> List[Line]:
    """Returns the IPUs as cells of id, utilisation and sparkline, in columns from top to bottom."""
    cells: List[Line] = []
    digits = max((len(str(ipu.id)) for ipu in ipus), default=1)
    for ipu in ipus:
        percent, style = ("fails", BAD) if ipu.problem else ipu_table.utilisation(ipu.utilisation_pct)
        cell = [(f"{'-' if ipu.id is None else ipu.id:>{digits}}", PLAIN), (f" {percent:>5}", style)]
        if sparkline_width:
            line = sparkline(ipu_table.history_of(ipu, history), options.unicode)
            cell.append((" " + line[-sparkline_width:], GOOD))
        cells.append(cell)
    size = max(map(line_width, cells), default=1) + GAP
    across = max(((options.width or 80) + GAP) // size, 1)
    down = -(-len(cells) // across)
    lines: List[Line] = []
    for row in range(down):
        line_of_cells: Line = []
        for cell in cells[row::down]:
            line_of_cells += [*cell, (" " * (size - line_width(cell)), PLAIN)]
        lines.append(line_of_cells)
    return lines


def _free_line(ipus: Sequence[Ipu]) -> List[Line]:
    free = [ipu.id for ipu in ipus if ipu.free and ipu.id is not None]
    return [[(f"free: IPU {id_ranges(free)}", DIM)]] if free else []
