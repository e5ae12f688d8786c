"""The table of IPUs: a row for each, or one for all IPUs of a process. Pure."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Dict, Hashable, List, Mapping, Optional, Sequence, Tuple

from tf_ipu_dp import cli
from tf_ipu_dp.monitoring.devices import Ipu
from tf_ipu_dp.monitoring.snapshots import Snapshot
from tf_ipu_dp.monitoring.text_layout import (
    BAD,
    DIM,
    GOOD,
    PLAIN,
    WARN,
    Column,
    DisplayOptions,
    Line,
    Span,
    bar,
    id_ranges,
    printable,
    sparkline,
)

History = Mapping[int, Sequence[Optional[float]]]  # the last utilisations of each IPU

_BOARD_FIELDS = ("board_type", "board_temp_c", "board_power_w")


@dataclasses.dataclass(frozen=True)
class IpuRow:
    """One IPU, or the IPUs that one process holds, or those that do not answer for one reason."""

    ipus: Tuple[Ipu, ...]

    @property
    def first(self) -> Ipu:
        return self.ipus[0]

    @property
    def ids(self) -> Optional[str]:
        return id_ranges(ipu.id for ipu in self.ipus if ipu.id is not None) or None

    @property
    def boards(self) -> Optional[str]:
        serials = sorted({ipu.board_serial for ipu in self.ipus if ipu.board_serial is not None})
        return serials[0] if len(serials) == 1 else cli.count(len(serials), "board") if serials else None

    def mean(self, name: str) -> Optional[float]:
        """Returns the mean of an attribute over the IPUs that report it."""
        known = self._known(name)
        return sum(known) / len(known) if known else None

    def highest(self, name: str) -> Optional[float]:
        """Returns the largest value of an attribute."""
        return max(self._known(name), default=None)

    def total(self, name: str) -> Optional[float]:
        """Returns the sum of an attribute over the IPUs."""
        known = self._known(name)
        return sum(known) if known else None

    def total_of_boards(self, name: str) -> Optional[float]:
        """Returns the sum of an attribute of the boards that the IPUs are on, each counted once."""
        boards = {ipu.board_serial or ipu.id: getattr(ipu, name) for ipu in self.ipus}
        known = [value for value in boards.values() if value is not None]
        return sum(known) if known else None

    def _known(self, name: str) -> List[float]:
        return [value for value in (getattr(ipu, name) for ipu in self.ipus) if value is not None]


def rows_of_processes(snapshot: Snapshot) -> List[IpuRow]:
    """Returns a row for each process that holds IPUs, in the order of the processes; free IPUs have none."""
    groups: Dict[Hashable, List[Ipu]] = {process.pid: [] for process in snapshot.processes if process.ipus}
    for place, ipu in enumerate(snapshot.ipus):
        if not ipu.free:
            key: Hashable = ("unknown", place) if ipu.id is None or not ipu.pid else ipu.pid
            groups.setdefault(("problem", ipu.problem) if ipu.problem else key, []).append(ipu)
    return [IpuRow(tuple(ipus)) for ipus in groups.values() if ipus]


def rows_of_ipus(ipus: Sequence[Ipu]) -> List[IpuRow]:
    """Returns a row for each IPU."""
    return [IpuRow((ipu,)) for ipu in ipus]


def make_columns(rows: Sequence[IpuRow], options: DisplayOptions, history: History) -> List[Column]:
    """Returns all columns of the table, also those without a value. Values of a board are shown once per board."""
    once = _first_of_boards(rows)

    def column(title: str, read: Callable[[IpuRow], Span], *, rank: int, right: bool = True) -> Column:
        return Column(title, [[read(row)] for row in rows], right, rank)

    def of_board(title: str, read: Callable[[IpuRow], Span], *, rank: int, right: bool = True) -> Column:
        cells: List[Line] = [[read(row) if is_first else ("", PLAIN)] for row, is_first in zip(rows, once)]
        return Column(title, cells, right, rank)

    columns = [
        column("IPU", lambda row: text(row.ids), rank=0),
        of_board("Board", lambda row: text(row.boards), rank=3, right=False),
        of_board("Type", lambda row: text(row.first.board_type), rank=7, right=False),
        column("Clock MHz", lambda row: number(row.mean("clock_mhz"), 0), rank=6),
        column("Util %", lambda row: utilisation(row.mean("utilisation_pct")), rank=0),
    ]
    if options.bars:
        columns.append(column("", lambda row: bar(row.mean("utilisation_pct"), options.unicode), rank=5, right=False))
    if history:
        lines = [[(sparkline(history_of(row.first, history), options.unicode), GOOD)] for row in rows]
        columns.append(Column("Util history", lines, right=False, rank=1))
    return [
        *columns,
        column("Session %", lambda row: number(row.mean("session_utilisation_pct"), 1), rank=2),
        column("Input %", _input_wait, rank=2),
        column("Die C", lambda row: number(row.highest("die_temp_c"), 1), rank=4),
        column("Power W", lambda row: number(row.total("power_w"), 1), rank=4),
        of_board("Board C", lambda row: number(row.highest("board_temp_c"), 1), rank=4),
        of_board("Board W", lambda row: number(row.total_of_boards("board_power_w"), 1), rank=4),
        column("Errors", errors, rank=1, right=False),
        column("Owner", _owner, rank=0, right=False),
    ]


def unreported(rows: Sequence[IpuRow]) -> List[str]:
    """Returns the columns, other than power and temperature, that some IPU does not report."""
    values: Mapping[str, Callable[[IpuRow], Any]] = {
        "IPU": lambda row: row.ids,
        "Board": lambda row: row.boards,
        "Type": lambda row: row.first.board_type,
        "Clock MHz": lambda row: row.mean("clock_mhz"),
        "Util %": lambda row: row.mean("utilisation_pct"),
        "Session %": lambda row: row.mean("session_utilisation_pct"),
        "Errors": lambda row: None if errors(row)[0] == "-" else True,
        "Owner": lambda row: row.first.free or ((row.first.user and row.first.pid) or None),
    }
    return [title for title, read in values.items() if any(read(row) is None for row in rows)]


def share_board_values(snapshot: Snapshot) -> Snapshot:
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


def history_of(ipu: Ipu, history: History) -> Sequence[Optional[float]]:
    """Returns the last utilisations of an IPU."""
    return () if ipu.id is None else history.get(ipu.id, ())


def text(value: object, form: Callable[[Any], str] = str) -> Span:
    """Returns a cell; a dash for what is not known."""
    return ("-", DIM) if value is None else (printable(form(value)), PLAIN)


def number(value: Optional[float], digits: int) -> Span:
    """Returns a cell with so many digits after the point."""
    return ("-", DIM) if value is None else (f"{value:,.{digits}f}", PLAIN)


def utilisation(percent: Optional[float]) -> Span:
    """Returns a cell whose colour shows how busy something is."""
    if percent is None:
        return ("-", DIM)
    return (f"{percent:.1f}", DIM if percent == 0 else GOOD if percent >= 80 else WARN)


def errors(row: IpuRow) -> Span:
    """Returns the error state of the first IPU that has one, or how many errors were corrected."""
    states = [ipu.error_state for ipu in row.ipus if ipu.error_state is not None]
    bad = [state for state in states if state != "no errors"]
    if bad:
        return (printable(bad[0]), BAD)
    counts = [count for ipu in row.ipus for count in (ipu.host_link_errors, ipu.link_errors) if count is not None]
    if any(counts):
        return (f"{sum(counts)} corrected", WARN)
    return ("none", DIM) if states or counts else ("-", DIM)


def _input_wait(row: IpuRow) -> Span:
    return number(row.mean("input_wait_pct"), 1) if row.first.pid else ("", PLAIN)


def _owner(row: IpuRow) -> Span:
    ipu = row.first
    if ipu.problem is not None:
        return (f"no answer: {printable(ipu.problem)}", BAD)
    if ipu.free:
        return ("free", DIM)
    words = [printable(ipu.user) if ipu.user else "-", str(ipu.pid) if ipu.pid else "-"]
    return (" ".join(words), PLAIN)


def _first_of_boards(rows: Sequence[IpuRow]) -> List[bool]:
    """Returns which rows are the first of their boards; an IPU without a known board counts as one."""
    boards = [frozenset(ipu.board_serial for ipu in row.ipus) for row in rows]
    first = {board: place for place, board in reversed(list(enumerate(boards)))}
    return [None in board or first[board] == place for place, board in enumerate(boards)]
