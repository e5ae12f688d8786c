"""What the monitor shows: a snapshot as tables, or as a screen of a given size. Pure: lines of text out.

Texts from outside are shown with their control characters escaped. A dash is what is not known; the reason is below.
"""

from __future__ import annotations

import dataclasses
import unicodedata
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple

from tf_ipu_dp import cli
from tf_ipu_dp.monitoring.devices import Ipu
from tf_ipu_dp.monitoring.snapshots import GONE, RUNNING, STALE, Process, Snapshot

Span = Tuple[str, str]  # a text and its style
Line = List[Span]
History = Mapping[int, Sequence[Optional[float]]]

PLAIN, BOLD, DIM, GOOD, WARN, BAD = "", "1", "2", "32", "33", "31"
_GAP = 2
_BAR = 8
_BLOCKS, _ASCII_BLOCKS = "▁▂▃▄▅▆▇█", ".:-=+*%#"
_SPARK = 20
_MOST_REASONS = 3
_LEAST_WIDTH, _LEAST_HEIGHT = 20, 4
_TOO_SMALL = ("The terminal is too small for so many IPUs; --json has them all.", "Too small; --json.")
_OF_BOARD = ("board_type", "board_temp_c", "board_power_w")


@dataclasses.dataclass(frozen=True)
class Look:
    """How to draw: in how many columns (None: as many as it takes), with bars, with colours, beyond ASCII."""

    width: Optional[int] = None
    bars: bool = False
    colour: bool = False
    unicode: bool = True


@dataclasses.dataclass
class _Column:
    """One column. Where the width does not suffice, those that tell nothing are left out first, then by rank."""

    title: str
    cells: List[Line]
    right: bool = True
    rank: int = 0

    @property
    def unknown(self) -> bool:
        return all(text in ("-", "") for cell in self.cells for text, _ in cell)

    @property
    def width(self) -> int:
        return max([cell_width(self.title), *(line_width(cell) for cell in self.cells)])


def render(snapshot: Snapshot, look: Look, verdicts: Optional[Mapping[str, str]] = None) -> str:
    """Returns all there is to show, one table below the other; `verdicts` are sentences about runs, by their names."""
    snapshot = _completed(snapshot)
    blocks = [
        [[(_headline(snapshot), BOLD)]],
        _ipu_table(snapshot.ipus, look, {}),
        _process_table(snapshot.processes, look),
        [line for each in [*_sentences(verdicts or {}), *_notes(snapshot)] for line in _wrapped(each, look.width)],
    ]
    return "\n".join(_painted(block, look) for block in blocks if block)


def render_screen(
    snapshot: Snapshot, look: Look, height: int, history: History, footer: str, verdicts: Mapping[str, str]
) -> List[str]:
    """Returns at most `height` lines of at most the look's width: as much detail as there is room for."""
    snapshot = _completed(snapshot)
    width = max(look.width or 80, _LEAST_WIDTH)
    look = dataclasses.replace(look, width=width)
    height = max(height, _LEAST_HEIGHT)
    told = [line for each in _sentences(verdicts) for line in _wrapped(each, width)]
    notes = [line for each in _notes(snapshot) for line in _wrapped(each, width)]
    processes = _process_table(snapshot.processes, look)
    below: List[List[Line]] = [[[], *processes, [], *told, *notes], [[], *processes, [], *told]]
    head: List[Line] = [[(_headline(snapshot), BOLD)], []]
    room = height - len(head) - 1
    layouts = _layouts(snapshot.ipus, look, history, below)
    fitting = ([*drawn, *rest] for drawn, rest in layouts if len(drawn) + len(rest) <= room)
    shown = next(fitting, None) or _squeezed(snapshot.ipus, processes, look, history, room)
    lines = [*head[: height - 1 - len(shown)], *shown]
    lines += [[] for _ in range(height - 1 - len(lines))]
    return _painted([*lines, [(footer, DIM)]], look).split("\n")[:-1]


def render_health(
    faults: Sequence[str], event: Mapping[str, str], path: Optional[str], checked: int, emulated: bool
) -> str:
    """Returns the faults, or that there are none, and the last event of an application."""
    lines = [f"wrong  {printable(fault)}" for fault in faults]
    if not faults:
        lines.append(f"{cli.count(checked, 'IPU')} checked, nothing is wrong.")
    if event:
        width = max(map(cell_width, event))
        lines += ["", "Last application event"]
        lines += [f"  {printable(key):<{width}}  {printable(value)}" for key, value in event.items()]
    elif path:
        lines.append(f"No application has left an event in {printable(path)}.")
    else:
        lines.append("Events of applications are kept where IPU_APP_EVENT_RECORD_PATH says; it is not set here.")
    if emulated:
        lines.append("Emulated: these IPUs are this host's CPU.")
    return "\n".join(lines) + "\n"


def printable(text: str) -> str:
    """Returns a text in which nothing moves the cursor, changes colours or hides."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape", "backslashreplace").decode() for each in text
    )


def id_ranges(ids: Iterable[int]) -> str:
    """Returns `0-3,8` for 0, 1, 2, 3 and 8."""
    ranges: List[List[int]] = []
    for number in sorted(set(ids)):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def duration(seconds: float) -> str:
    """Returns `00:00:42`, `13:05:00` or `2d 03:00`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days}d {hours:02d}:{minutes:02d}" if days else f"{hours:02d}:{minutes:02d}:{rest:02d}"


def sparkline(values: Sequence[Optional[float]], unicode: bool = True) -> str:
    """Returns one character per percentage, the newest last; a blank where it is not known."""
    blocks = _BLOCKS if unicode else _ASCII_BLOCKS
    return "".join(
        " " if value is None else blocks[min(7, max(0, int(value * 8 / 100)))] for value in values[-_SPARK:]
    ).rjust(_SPARK)


def cell_width(text: str) -> int:
    """Returns how many columns of a terminal a text takes."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(each) else 2 if unicodedata.east_asian_width(each) in "WF" else 1 for each in text
    )


def line_width(line: Line) -> int:
    """Returns how many columns a line takes."""
    return sum(cell_width(text) for text, _ in line)


def _headline(snapshot: Snapshot) -> str:
    ipus = snapshot.ipus
    title = {"poplar": "Poplar SDK", "emulator": "emulated"}.get(snapshot.sdk, snapshot.sdk)
    silent = sum(ipu.problem is not None for ipu in ipus)
    used = len(ipus) - len(snapshot.free) - silent
    parts = [f"{cli.count(len(ipus), 'IPU')} ({title})", f"{used} in use", f"{len(snapshot.free)} free"]
    parts += [f"{silent} without an answer"] if silent else []
    known = [ipu.utilisation_pct for ipu in ipus if ipu.pid and ipu.utilisation_pct is not None]
    parts += [f"those in use {sum(known) / len(known):.0f} % busy"] if known else []
    return ", ".join(parts)


def _ipu_table(ipus: Sequence[Ipu], look: Look, history: History) -> List[Line]:
    if not ipus:
        return []
    first = _first_of_boards(ipus)
    blocks = look.unicode

    def once(values: Sequence[Line]) -> List[Line]:
        return [value if own else [("", PLAIN)] for value, own in zip(values, first)]

    columns = [
        _Column("IPU", [[_text(ipu.id)] for ipu in ipus]),
        _Column("Board", once([[_text(ipu.board_serial)] for ipu in ipus]), right=False, rank=3),
        _Column("Type", once([[_text(ipu.board_type)] for ipu in ipus]), right=False, rank=7),
        _Column("Clock MHz", [[_number(ipu.clock_mhz, 0)] for ipu in ipus], rank=6),
        _Column("Util %", [[_utilisation(ipu.utilisation_pct)] for ipu in ipus]),
    ]
    if look.bars:
        columns.append(_Column("", [[_bar(ipu.utilisation_pct, blocks)] for ipu in ipus], right=False, rank=5))
    if history:
        sparks = [[(sparkline(history.get(-1 if ipu.id is None else ipu.id, ()), blocks), GOOD)] for ipu in ipus]
        columns.append(_Column("Util so far", sparks, right=False, rank=1))
    columns.append(_Column("Session %", [[_number(ipu.session_utilisation_pct, 1)] for ipu in ipus], rank=2))
    if any(ipu.input_wait_pct is not None for ipu in ipus):
        waits = [[_number(ipu.input_wait_pct, 1) if ipu.pid else ("", PLAIN)] for ipu in ipus]
        columns.append(_Column("Input %", waits, rank=2))
    columns += [
        _Column("Die C", [[_number(ipu.die_temp_c, 1)] for ipu in ipus], rank=4),
        _Column("Power W", [[_number(ipu.power_w, 1)] for ipu in ipus], rank=4),
        _Column("Board C", once([[_number(ipu.board_temp_c, 1)] for ipu in ipus]), rank=4),
        _Column("Board W", once([[_number(ipu.board_power_w, 1)] for ipu in ipus]), rank=4),
        _Column("Errors", [[_errors(ipu)] for ipu in ipus], right=False, rank=1),
        _Column("Owner", [[_owner(ipu)] for ipu in ipus], right=False),
    ]
    return _table(columns, look)


def _process_table(processes: Sequence[Process], look: Look) -> List[Line]:
    if not processes:
        return []
    columns = [
        _Column("PID", [[_text(each.pid)] for each in processes]),
        _Column("User", [[_text(each.user)] for each in processes], right=False, rank=3),
        _Column("Time", [[_text(each.elapsed_s, duration)] for each in processes], rank=2),
        _Column("IPUs", [[_text(id_ranges(each.ipus) or None)] for each in processes], right=False),
        _Column("State", [[_state(each)] for each in processes], right=False),
        _Column("Run", [[_text(each.run)] for each in processes], right=False, rank=1),
        _Column("Instance", [[_share(each.instance, each.instances, "of")] for each in processes], rank=4),
        _Column("Step", [[_share(each.step, each.planned_steps, "/")] for each in processes]),
        _Column("Samples/s", [[_number(each.samples_per_s, 0)] for each in processes]),
        _Column("Waits for", [[_waits(each)] for each in processes], right=False),
        _Column("Command", [[_text(each.command)] for each in processes], right=False),
    ]
    return _table(columns, look)


def _layouts(
    ipus: Sequence[Ipu], look: Look, history: History, below: Sequence[List[Line]]
) -> Iterator[Tuple[List[Line], List[Line]]]:
    """Returns ways to show the IPUs and all below them, the best first: a row for each is worth more than notes."""
    yield _rows(ipus, look, history, free=True), below[0]
    busy = _rows(ipus, look, history, free=False)
    yield from ((busy, rest) for rest in below)
    yield from ((_cells(ipus, look, history, spark), rest) for rest in below for spark in (_SPARK, 8, 0))


def _squeezed(ipus: Sequence[Ipu], processes: Sequence[Line], look: Look, history: History, room: int) -> List[Line]:
    """Returns a cell for each IPU, or why not, and as many processes as fit; one line more than the room at most."""
    grids = [_cells(ipus, look, history, spark) for spark in (_SPARK, 8, 0)]
    drawn = [grid for grid in grids if len(grid) + min(len(processes), max(room // 4, 2)) <= room]
    drawn += [
        lines
        for lines in [*grids, *(_wrapped([(each, WARN)], look.width) for each in _TOO_SMALL)]
        if len(lines) <= room
    ]
    left = room - len(drawn[0])
    return [*drawn[0], *_first_processes(processes, left if len(processes) <= left else left + 1)]


def _first_processes(table: Sequence[Line], room: int) -> List[Line]:
    """Returns as many rows of the processes as there is room for, and how many are left out."""
    if len(table) <= room:
        return [[], *table] if table and len(table) < room else list(table)
    kept = max(room - 2, 0)
    word = "more process" if kept else "process"
    more = cli.count(len(table) - 1 - kept, word, f"{word}es")
    above = table[: kept + 1] if kept else [[]] * (room - 1)
    return [*above, [(f"and {more}", WARN)]]


def _rows(ipus: Sequence[Ipu], look: Look, history: History, free: bool) -> List[Line]:
    """Returns a row for each IPU, or for each that is not free."""
    busy = [ipu for ipu in ipus if free or not ipu.free]
    return [*_ipu_table(busy, look, history), *([] if free else _free_line(ipus))]


def _cells(ipus: Sequence[Ipu], look: Look, history: History, spark: int) -> List[Line]:
    """Returns a cell for each IPU that is not free."""
    return [*_grid([ipu for ipu in ipus if not ipu.free], look, history, spark), *_free_line(ipus)]


def _free_line(ipus: Sequence[Ipu]) -> List[Line]:
    free = [ipu.id for ipu in ipus if ipu.free and ipu.id is not None]
    return [[(f"free: IPU {id_ranges(free)}", DIM)]] if free else []


def _grid(ipus: Sequence[Ipu], look: Look, history: History, spark: int) -> List[Line]:
    """Returns the IPUs as cells of id, utilisation and sparkline, in columns from top to bottom."""
    cells: List[Line] = []
    digits = max((len(str(ipu.id)) for ipu in ipus), default=1)
    for ipu in ipus:
        values = history.get(-1 if ipu.id is None else ipu.id, ())
        percent, style = ("fails", BAD) if ipu.problem else _utilisation(ipu.utilisation_pct)
        line = [(f"{'-' if ipu.id is None else ipu.id:>{digits}}", PLAIN), (f" {percent:>5}", style)]
        cells.append([*line, (" " + sparkline(values, look.unicode)[-spark:], GOOD)] if spark else line)
    size = max(map(line_width, cells), default=1) + _GAP
    across = max(((look.width or 80) + _GAP) // size, 1)
    down = -(-len(cells) // across)
    lines: List[Line] = []
    for row in range(down):
        line = []
        for cell in cells[row::down]:
            line += [*cell, (" " * (size - line_width(cell)), PLAIN)]
        lines.append(line)
    return lines


def _table(columns: Sequence[_Column], look: Look) -> List[Line]:
    """Returns the header and the rows. What is too wide loses columns, then the end of the last one."""
    shown = list(columns)
    if look.width is not None:
        while len(shown) > 1 and _needed(shown) > look.width:
            dropped = max(shown, key=lambda column: (column.rank > 0 and column.unknown, column.rank))
            if not dropped.rank:
                break
            shown.remove(dropped)
    widths = [column.width for column in shown]
    lines: List[Line] = [_row([[(column.title, BOLD)] for column in shown], shown, widths)]
    lines += [_row([column.cells[row] for column in shown], shown, widths) for row in range(len(columns[0].cells))]
    return lines


def _needed(columns: Sequence[_Column]) -> int:
    """Returns the least width: the last column may lose its end, but not its title."""
    return sum(column.width + _GAP for column in columns[:-1]) + min(columns[-1].width, 16)


def _row(cells: Sequence[Line], columns: Sequence[_Column], widths: Sequence[int]) -> Line:
    line: Line = []
    for cell, column, width in zip(cells, columns, widths):
        blank = (" " * (width - line_width(cell)), PLAIN)
        line += [blank, *cell] if column.right else [*cell, blank]
        line.append((" " * _GAP, PLAIN))
    return line


def _sentences(verdicts: Mapping[str, str]) -> List[Line]:
    """Returns what holds the runs back."""
    return [[(f"{printable(name)}: {printable(sentence)}", BOLD)] for name, sentence in verdicts.items()]


def _notes(snapshot: Snapshot) -> List[Line]:
    """Returns why some things are not known: every dash has its reason here, or in its own row."""
    return [[note] for note in [*_ipu_notes(snapshot), *_process_notes(snapshot.processes)]]


def _ipu_notes(snapshot: Snapshot) -> List[Span]:
    ipus = snapshot.ipus
    answering = [ipu for ipu in ipus if ipu.problem is None]
    measured = [ipu for ipu in answering if not ipu.emulated]
    unmeasured = [ipu for ipu in measured if None in (ipu.power_w, ipu.board_power_w, ipu.board_temp_c, ipu.die_temp_c)]
    stale = {ipu for each in snapshot.processes if each.state == STALE for ipu in each.ipus}
    notes = []
    if snapshot.problem:
        notes.append((f"No device answers: {printable(snapshot.problem)}.", BAD))
    else:
        silent = [ipu for ipu in ipus if ipu.problem is not None]
        notes += [
            (f"IPU {'-' if ipu.id is None else ipu.id} does not answer: {printable(ipu.problem or '')}.", BAD)
            for ipu in silent[:_MOST_REASONS]
        ]
    if snapshot.sdk == "emulator":
        why = f"; {printable(snapshot.note)}" if snapshot.note else ""
        notes.append((f"Emulated: these IPUs are this host's CPU{why}.", PLAIN))
    if any(ipu.emulated for ipu in ipus):
        notes.append(("Clock is nominal, and temperature and power are not there to be measured.", PLAIN))
    if any(ipu.pid for ipu in unmeasured):
        notes.append(("Power and temperature need GCDA_MONITOR=1 in the environment of the application.", PLAIN))
    if any(not ipu.pid for ipu in unmeasured):
        notes.append(("Power and temperature are reported only while an application runs.", PLAIN))
    telling = [ipu for ipu in answering if ipu.id not in stale]
    new = {ipu.id for ipu in telling if ipu.emulated and ipu.pid and ipu.input_wait_pct is None}
    silent_about = _unreported([ipu for ipu in telling if ipu.id not in new])
    if silent_about:
        notes.append((f"Where there is a dash, the driver does not report it: {', '.join(silent_about)}.", PLAIN))
    if new:
        notes.append(("How busy an IPU is, is known a second after its process has attached.", PLAIN))
    return notes


def _process_notes(processes: Sequence[Process]) -> List[Span]:
    states = {each.state for each in processes}
    running = [each for each in processes if each.state == RUNNING and each.run is not None]
    notes = []
    if STALE in states:
        notes.append(("Stale: the process has told nothing for so long; it is stopped, or its host is.", WARN))
    if GONE in states:
        notes.append(("Gone: the process has ended, and holds nothing any more.", WARN))
    if any(each.run is None and each.state != GONE for each in processes):
        notes.append(("Run, step and speed are known of this user's runs of tf_ipu_dp on this host.", PLAIN))
    if any(each.samples_per_s is None for each in running):
        notes.append(("Samples/s is known while steps are made, after the first of them.", PLAIN))
    if any(each.waits_for is None for each in running):
        notes.append(("What a run waits for is known on the emulator alone; the Poplar SDK does not tell.", PLAIN))
    if any(None in (each.user, each.command, each.elapsed_s) for each in processes):
        notes.append(("Of a process that holds no IPU, or that this host does not show, less is known.", PLAIN))
    return notes


def _unreported(ipus: Sequence[Ipu]) -> List[str]:
    """Returns the columns, other than power and temperature, that are not known of some IPU."""
    cells: Mapping[str, Callable[[Ipu], Any]] = {
        "IPU": lambda ipu: ipu.id,
        "Board": lambda ipu: ipu.board_serial,
        "Type": lambda ipu: ipu.board_type,
        "Clock": lambda ipu: ipu.clock_mhz,
        "Util": lambda ipu: ipu.utilisation_pct,
        "Session": lambda ipu: ipu.session_utilisation_pct,
        "Errors": lambda ipu: None if _errors(ipu)[0] == "-" else True,
        "Owner": lambda ipu: ipu.free or ((ipu.user and ipu.pid) or None),
    }
    return [title for title, read in cells.items() if any(read(ipu) is None for ipu in ipus)]


def _completed(snapshot: Snapshot) -> Snapshot:
    """Returns it with what one IPU of a board tells of the board told by all of them: it is shown once."""
    known: Dict[str, Dict[str, Any]] = {}
    for ipu in snapshot.ipus:
        if ipu.board_serial is not None:
            board = known.setdefault(ipu.board_serial, {})
            for name in _OF_BOARD:
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
    """Returns which rows are the first of their board; IPUs whose board is not known stand for themselves."""
    boards = [ipu.board_serial for ipu in ipus]
    first = {board: row for row, board in reversed(list(enumerate(boards)))}
    return [board is None or first[board] == row for row, board in enumerate(boards)]


def _text(value: object, form: object = None) -> Span:
    if value is None:
        return ("-", DIM)
    return (printable(str(form(value) if callable(form) else value)), PLAIN)


def _number(value: Optional[float], digits: int) -> Span:
    return ("-", DIM) if value is None else (f"{value:,.{digits}f}", PLAIN)


def _share(value: Optional[int], total: Optional[int], word: str) -> Span:
    if value is None:
        return ("-", DIM)
    blank = "" if word == "/" else " "
    return (str(value) if total is None else f"{value}{blank}{word}{blank}{total}", PLAIN)


def _utilisation(percent: Optional[float]) -> Span:
    if percent is None:
        return ("-", DIM)
    return (f"{percent:.1f}", DIM if percent == 0 else GOOD if percent >= 80 else WARN)


def _bar(percent: Optional[float], unicode: bool) -> Span:
    full, empty = ("█", "·") if unicode else ("#", ".")
    filled = 0 if percent is None else round(min(100.0, max(0.0, percent)) * _BAR / 100)
    return (full * filled + empty * (_BAR - filled), DIM if not filled else GOOD if filled >= 0.8 * _BAR else WARN)


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


def _waits(process: Process) -> Span:
    if process.waits_for is None:
        return ("-", DIM)
    return (process.waits_for, GOOD if process.waits_for == "nothing" else WARN)


def _wrapped(line: Line, width: Optional[int]) -> List[Line]:
    """Breaks a note between words."""
    text, style = line[0]
    if width is None:
        return [line]
    lines, current = [], ""
    for word in text.split(" "):
        if current and len(current) + 1 + len(word) > width:
            lines.append(current)
            current = word
        else:
            current = f"{current} {word}" if current else word
    return [[(each, style)] for each in [*lines, current]]


def _painted(lines: Sequence[Line], look: Look) -> str:
    """Returns the lines as text, with colour codes if asked for; a line that is too long loses its end."""
    text = []
    for line in lines:
        spans = line
        while spans and not spans[-1][0].strip():
            spans = spans[:-1]
        spans = spans if look.width is None else _cut(spans, look.width)
        if look.colour:
            text.append("".join(f"\x1b[{style}m{part}\x1b[0m" if style and part else part for part, style in spans))
        else:
            text.append("".join(part for part, _ in spans).rstrip())
    joined = "\n".join(text) + "\n"
    return joined if look.unicode else joined.encode("ascii", "backslashreplace").decode()


def _cut(line: Line, width: int) -> Line:
    if line_width(line) <= width:
        return line
    kept: Line = []
    left = width - 1
    for text, style in line:
        part = ""
        for each in text:
            left -= cell_width(each)
            if left < 0:
                return [*kept, (part, style), ("~", DIM)]
            part += each
        kept.append((part, style))
    return kept
