"""What the monitor shows: a snapshot as tables, or as a screen of a given size. Pure: returns text.

A dash means that a value is not known; the reason is in its row or in the notes below the tables.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from tf_ipu_dp import cli
from tf_ipu_dp.monitoring.devices import Ipu
from tf_ipu_dp.monitoring.snapshots import GONE, RUNNING, STALE, Process, Snapshot
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
    Span,
    bar,
    cell_width,
    duration,
    id_ranges,
    line_width,
    make_table,
    printable,
    render_lines,
    sparkline,
    wrap,
)

History = Mapping[int, Sequence[Optional[float]]]  # the last utilisations of each IPU

_MAX_REASONS = 3
_MIN_WIDTH, _MIN_HEIGHT = 20, 4
_TOO_SMALL = ("The terminal is too small for all IPUs; --json lists them.", "Too small; --json.")
_BOARD_FIELDS = ("board_type", "board_temp_c", "board_power_w")


def render(snapshot: Snapshot, options: DisplayOptions, verdicts: Optional[Mapping[str, str]] = None) -> str:
    """Returns all tables and notes; `verdicts` are sentences about the bottlenecks of runs, by their names."""
    snapshot = _share_board_values(snapshot)
    notes = [*_verdict_lines(verdicts or {}), *_note_lines(snapshot)]
    blocks = [
        [[(_headline(snapshot), BOLD)]],
        _ipu_table(snapshot.ipus, options, {}),
        _process_table(snapshot.processes, options),
        [line for each in notes for line in wrap(each, options.width)],
    ]
    return "\n".join(render_lines(block, options) for block in blocks if block)


def render_screen(
    snapshot: Snapshot,
    options: DisplayOptions,
    height: int,
    history: History,
    footer: str,
    verdicts: Mapping[str, str],
) -> List[str]:
    """Returns exactly `height` lines of at most the given width, with as much detail as fits."""
    snapshot = _share_board_values(snapshot)
    width = max(options.width or 80, _MIN_WIDTH)
    options = dataclasses.replace(options, width=width)
    height = max(height, _MIN_HEIGHT)
    verdict_lines = [line for each in _verdict_lines(verdicts) for line in wrap(each, width)]
    notes = [line for each in _note_lines(snapshot) for line in wrap(each, width)]
    processes = _process_table(snapshot.processes, options)
    below: List[List[Line]] = [[[], *processes, [], *verdict_lines, *notes], [[], *processes, [], *verdict_lines]]
    head: List[Line] = [[(_headline(snapshot), BOLD)], []]
    room = height - len(head) - 1
    layouts = _layouts(snapshot.ipus, options, history, below)
    fitting = ([*ipus, *rest] for ipus, rest in layouts if len(ipus) + len(rest) <= room)
    shown = next(fitting, None) or _small_layout(snapshot.ipus, processes, options, history, room)
    lines = [*head[: height - 1 - len(shown)], *shown]
    lines += [[] for _ in range(height - 1 - len(lines))]
    return render_lines([*lines, [(footer, DIM)]], options).split("\n")[:-1]


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


def _headline(snapshot: Snapshot) -> str:
    ipus = snapshot.ipus
    title = {"poplar": "Poplar SDK", "emulator": "emulated"}.get(snapshot.sdk, snapshot.sdk)
    failed = sum(ipu.problem is not None for ipu in ipus)
    used = len(ipus) - len(snapshot.free) - failed
    known = [ipu.utilisation_pct for ipu in ipus if ipu.pid and ipu.utilisation_pct is not None]
    busy = f" ({sum(known) / len(known):.0f} % busy)" if known else ""
    parts = [f"{cli.count(len(ipus), 'IPU')} ({title})", f"{used} in use{busy}", f"{len(snapshot.free)} free"]
    parts += [f"{failed} not answering"] if failed else []
    return ", ".join(parts)


def _ipu_table(ipus: Sequence[Ipu], options: DisplayOptions, history: History) -> List[Line]:
    if not ipus:
        return []
    first = _first_of_boards(ipus)

    def once_per_board(cells: Sequence[Line]) -> List[Line]:
        return [cell if is_first else [("", PLAIN)] for cell, is_first in zip(cells, first)]

    columns = [
        Column("IPU", [[_text(ipu.id)] for ipu in ipus]),
        Column("Board", once_per_board([[_text(ipu.board_serial)] for ipu in ipus]), right=False, rank=3),
        Column("Type", once_per_board([[_text(ipu.board_type)] for ipu in ipus]), right=False, rank=7),
        Column("Clock MHz", [[_number(ipu.clock_mhz, 0)] for ipu in ipus], rank=6),
        Column("Util %", [[_utilisation(ipu.utilisation_pct)] for ipu in ipus]),
    ]
    if options.bars:
        columns.append(Column("", [[bar(ipu.utilisation_pct, options.unicode)] for ipu in ipus], right=False, rank=5))
    if history:
        sparklines = [[(sparkline(_history_of(ipu, history), options.unicode), GOOD)] for ipu in ipus]
        columns.append(Column("Util history", sparklines, right=False, rank=1))
    columns.append(Column("Session %", [[_number(ipu.session_utilisation_pct, 1)] for ipu in ipus], rank=2))
    if any(ipu.input_wait_pct is not None for ipu in ipus):
        waits = [[_number(ipu.input_wait_pct, 1) if ipu.pid else ("", PLAIN)] for ipu in ipus]
        columns.append(Column("Input %", waits, rank=2))
    columns += [
        Column("Die C", [[_number(ipu.die_temp_c, 1)] for ipu in ipus], rank=4),
        Column("Power W", [[_number(ipu.power_w, 1)] for ipu in ipus], rank=4),
        Column("Board C", once_per_board([[_number(ipu.board_temp_c, 1)] for ipu in ipus]), rank=4),
        Column("Board W", once_per_board([[_number(ipu.board_power_w, 1)] for ipu in ipus]), rank=4),
        Column("Errors", [[_errors(ipu)] for ipu in ipus], right=False, rank=1),
        Column("Owner", [[_owner(ipu)] for ipu in ipus], right=False),
    ]
    return make_table(columns, options)


def _process_table(processes: Sequence[Process], options: DisplayOptions) -> List[Line]:
    if not processes:
        return []
    columns = [
        Column("PID", [[_text(each.pid)] for each in processes]),
        Column("User", [[_text(each.user)] for each in processes], right=False, rank=3),
        Column("Time", [[_text(each.elapsed_s, duration)] for each in processes], rank=2),
        Column("IPUs", [[_text(id_ranges(each.ipus) or None)] for each in processes], right=False),
        Column("State", [[_state(each)] for each in processes], right=False),
        Column("Run", [[_text(each.run)] for each in processes], right=False, rank=1),
        Column("Instance", [[_fraction(each.instance, each.instances, " of ")] for each in processes], rank=4),
        Column("Step", [[_fraction(each.step, each.planned_steps, "/")] for each in processes]),
        Column("Samples/s", [[_number(each.samples_per_s, 0)] for each in processes]),
        Column("Waiting for", [[_waiting_for(each)] for each in processes], right=False),
        Column("Command", [[_text(each.command)] for each in processes], right=False),
    ]
    return make_table(columns, options)


def _layouts(
    ipus: Sequence[Ipu], options: DisplayOptions, history: History, below: Sequence[List[Line]]
) -> Iterator[Tuple[List[Line], List[Line]]]:
    """Yields layouts of the IPUs and the lines below them, the best first: rows of IPUs matter more than notes."""
    yield _ipu_table(ipus, options, history), below[0]
    in_use = [*_ipu_table([ipu for ipu in ipus if not ipu.free], options, history), *_free_line(ipus)]
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
        percent, style = ("fails", BAD) if ipu.problem else _utilisation(ipu.utilisation_pct)
        cell = [(f"{'-' if ipu.id is None else ipu.id:>{digits}}", PLAIN), (f" {percent:>5}", style)]
        if sparkline_width:
            line = sparkline(_history_of(ipu, history), options.unicode)
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


def _history_of(ipu: Ipu, history: History) -> Sequence[Optional[float]]:
    return () if ipu.id is None else history.get(ipu.id, ())


def _verdict_lines(verdicts: Mapping[str, str]) -> List[Line]:
    return [[(f"{printable(name)}: {printable(sentence)}", BOLD)] for name, sentence in verdicts.items()]


def _note_lines(snapshot: Snapshot) -> List[Line]:
    """Returns why some values are not known: every dash has its reason here or in its row."""
    return [[note] for note in [*_ipu_notes(snapshot), *_process_notes(snapshot.processes)]]


def _ipu_notes(snapshot: Snapshot) -> List[Span]:
    ipus = snapshot.ipus
    answering = [ipu for ipu in ipus if ipu.problem is None]
    real = [ipu for ipu in answering if not ipu.emulated]
    unmeasured = [ipu for ipu in real if None in (ipu.power_w, ipu.board_power_w, ipu.board_temp_c, ipu.die_temp_c)]
    stale = {ipu for each in snapshot.processes if each.state == STALE for ipu in each.ipus}
    notes = []
    if snapshot.problem:
        notes.append((f"No device answers: {printable(snapshot.problem)}.", BAD))
    else:
        failed = [ipu for ipu in ipus if ipu.problem is not None]
        notes += [
            (f"IPU {'-' if ipu.id is None else ipu.id} does not answer: {printable(ipu.problem or '')}.", BAD)
            for ipu in failed[:_MAX_REASONS]
        ]
    if snapshot.emulated:
        why = f"; {printable(snapshot.note)}" if snapshot.note else ""
        notes.append((f"Emulated: these IPUs are this host's CPU{why}.", PLAIN))
    if any(ipu.emulated for ipu in ipus):
        notes.append(("Clock is nominal; emulated IPUs have no temperature and no power.", PLAIN))
    if any(ipu.pid for ipu in unmeasured):
        notes.append(("Power and temperature need GCDA_MONITOR=1 in the environment of the application.", PLAIN))
    if any(not ipu.pid for ipu in unmeasured):
        notes.append(("Power and temperature are reported only while an application runs.", PLAIN))
    current = [ipu for ipu in answering if ipu.id not in stale]
    new = {ipu.id for ipu in current if ipu.emulated and ipu.pid and ipu.input_wait_pct is None}
    unreported = _unreported_columns([ipu for ipu in current if ipu.id not in new])
    if unreported:
        notes.append((f"A dash means that the driver does not report the value: {', '.join(unreported)}.", PLAIN))
    if new:
        notes.append(("Utilisation is known one second after a process attaches.", PLAIN))
    return notes


def _process_notes(processes: Sequence[Process]) -> List[Span]:
    stale = [each for each in processes if each.state == STALE]
    running = [each for each in processes if each.state == RUNNING and each.run is not None]
    notes = [
        (f"No heartbeat for {each.silent_s or 0:.0f} s: process {each.pid} or its host is stopped or stuck.", WARN)
        for each in stale[:_MAX_REASONS]
    ]
    if any(each.state == GONE for each in processes):
        notes.append(("Gone: the process has ended and released its IPUs.", WARN))
    if any(each.run is None and each.state != GONE for each in processes):
        notes.append(("Run, step and speed are known only for this user's tf_ipu_dp runs on this host.", PLAIN))
    if any(each.samples_per_s is None for each in running):
        notes.append(("Samples/s is known only during training, after the first step.", PLAIN))
    if any(each.waits_for is None for each in running):
        notes.append(("What a run is waiting for is reported by the emulator, but not by the Poplar SDK.", PLAIN))
    if any(None in (each.user, each.command, each.elapsed_s) for each in processes):
        notes.append(("Less is known about a process that holds no IPU or is not visible on this host.", PLAIN))
    return notes


def _unreported_columns(ipus: Sequence[Ipu]) -> List[str]:
    """Returns the columns, other than power and temperature, that some IPU does not report."""
    values: Mapping[str, Callable[[Ipu], Any]] = {
        "IPU": lambda ipu: ipu.id,
        "Board": lambda ipu: ipu.board_serial,
        "Type": lambda ipu: ipu.board_type,
        "Clock": lambda ipu: ipu.clock_mhz,
        "Util": lambda ipu: ipu.utilisation_pct,
        "Session": lambda ipu: ipu.session_utilisation_pct,
        "Errors": lambda ipu: None if _errors(ipu)[0] == "-" else True,
        "Owner": lambda ipu: ipu.free or ((ipu.user and ipu.pid) or None),
    }
    return [title for title, read in values.items() if any(read(ipu) is None for ipu in ipus)]


def _share_board_values(snapshot: Snapshot) -> Snapshot:
    """Returns the snapshot with the board's values on every IPU of a board, though only one may report them."""
    known: Dict[str, Dict[str, Any]] = {}
    for ipu in snapshot.ipus:
        if ipu.board_serial is not None:
            board = known.setdefault(ipu.board_serial, {})
            for name in _BOARD_FIELDS:
                if board.get(name) is None:
                    board[name] = getattr(ipu, name)
    ipus = []
    for ipu in snapshot.ipus:
        missing = {
            name: value for name, value in known.get(ipu.board_serial or "", {}).items()
            if value is not None and getattr(ipu, name) is None
        }  # fmt: skip
        ipus.append(dataclasses.replace(ipu, **missing) if missing else ipu)
    return dataclasses.replace(snapshot, ipus=tuple(ipus))


def _first_of_boards(ipus: Sequence[Ipu]) -> List[bool]:
    """Returns which IPUs are the first of their board; an IPU without a known board counts as one."""
    boards = [ipu.board_serial for ipu in ipus]
    first = {board: row for row, board in reversed(list(enumerate(boards)))}
    return [board is None or first[board] == row for row, board in enumerate(boards)]


def _text(value: object, form: Callable[[Any], str] = str) -> Span:
    return ("-", DIM) if value is None else (printable(form(value)), PLAIN)


def _number(value: Optional[float], digits: int) -> Span:
    return ("-", DIM) if value is None else (f"{value:,.{digits}f}", PLAIN)


def _fraction(value: Optional[int], total: Optional[int], separator: str) -> Span:
    if value is None:
        return ("-", DIM)
    return (str(value) if total is None else f"{value}{separator}{total}", PLAIN)


def _utilisation(percent: Optional[float]) -> Span:
    if percent is None:
        return ("-", DIM)
    return (f"{percent:.1f}", DIM if percent == 0 else GOOD if percent >= 80 else WARN)


def _errors(ipu: Ipu) -> Span:
    if ipu.error_state is not None and ipu.error_state != "no errors":
        return (printable(ipu.error_state), BAD)
    counts = [count for count in (ipu.host_link_errors, ipu.link_errors) if count is not None]
    if any(counts):
        return (f"{sum(counts)} corrected", WARN)
    return ("none", DIM) if ipu.error_state is not None or counts else ("-", DIM)


def _owner(ipu: Ipu) -> Span:
    if ipu.problem is not None:
        return (f"no answer: {printable(ipu.problem)}", BAD)
    if ipu.free:
        return ("free", DIM)
    words = [printable(ipu.user) if ipu.user else "-", str(ipu.pid) if ipu.pid else "-"]
    return (" ".join(words), PLAIN)


def _state(process: Process) -> Span:
    if process.state == GONE:
        return ("gone", BAD)
    if process.state == STALE:
        return (f"stale {process.silent_s or 0:.0f} s", WARN)
    return (printable(process.phase or "running"), PLAIN)


def _waiting_for(process: Process) -> Span:
    if process.waits_for is None:
        return ("-", DIM)
    return (process.waits_for, GOOD if process.waits_for == "nothing" else WARN)
