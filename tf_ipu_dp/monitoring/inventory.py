"""What the IPUs are: an inventory as a table or JSON, and a view close to that of gc-monitor. Pure."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from tf_ipu_dp.monitoring import devices
from tf_ipu_dp.monitoring.devices import Ipu
from tf_ipu_dp.monitoring.ipu_table import text
from tf_ipu_dp.monitoring.snapshots import GONE, SCHEMA, Process, Snapshot, utc
from tf_ipu_dp.monitoring.text_layout import (
    BOLD,
    PLAIN,
    Column,
    DisplayOptions,
    Line,
    cell_width,
    duration,
    fit_columns,
    id_ranges,
    make_table,
    printable,
    render_lines,
    truncate,
    wrap,
)

Cells = Tuple[str, List[str], int]  # a title, its cells, and the rank by which it is dropped where space is short

_NOT_KNOWN = "N/A"  # as in gc-monitor
_MAX_COMMAND = 26


def to_json(snapshot: Snapshot) -> Dict[str, Any]:
    """Returns the inventory for `--inventory --json`: what does not change while an IPU is used."""
    ipus = [{name: getattr(ipu, name) for name in devices.CONSTANT} for ipu in snapshot.ipus]
    return {"schema": SCHEMA, "time": utc(snapshot.time), "sdk": snapshot.sdk, "ipus": ipus}


def render(snapshot: Snapshot, options: DisplayOptions, *, each_ipu: bool) -> str:
    """Returns a row for each board, or for each IPU; a column without a value is left out and named below."""
    groups = _group(snapshot.ipus, each_ipu)
    if not groups:
        return ""

    def column(title: str, read: Callable[[Ipu], Any], rank: int) -> Column:
        return Column(title, [[text(read(ipus[0]))] for ipus in groups], right=False, rank=rank)

    columns = [
        Column("IPU", [[text(id_ranges(ipu.id for ipu in ipus if ipu.id is not None) or None)] for ipus in groups]),
        column("Partition", lambda ipu: ipu.partition, 4),
        column("Machine", lambda ipu: ipu.host, 1),
        column("Serial", lambda ipu: ipu.board_serial, 0),
        column("Type", lambda ipu: ipu.board_type, 2),
        column("Architecture", lambda ipu: ipu.architecture, 6),
        Column("IPU#", [[text(_board_indices(ipus))] for ipus in groups], right=False, rank=5),
        column("Firmware", lambda ipu: ipu.firmware_version, 2),
        column("Server", lambda ipu: ipu.server_version, 3),
        column("Gateway", lambda ipu: ipu.gateway_version, 6),
        column("Driver", lambda ipu: ipu.driver_version, 6),
        column("Routing", _routing, 3),
    ]
    known = [each for each in columns if not each.unknown]
    shown = fit_columns(known, options.width)
    notes = []
    if len(known) < len(columns):
        notes.append(f"Left out, because it is not reported: {', '.join(e.title for e in columns if e.unknown)}.")
    if len(shown) < len(known):
        hidden = ", ".join(each.title for each in known if each not in shown)
        notes.append(f"Not shown at {options.width} columns: {hidden}. A pipe and --json have all.")
    if snapshot.emulated:
        notes.append("Emulated: these IPUs are this host's CPU, and the server is the emulator.")
    lines = [line for note in notes for line in wrap([(note, PLAIN)], options.width)]
    return render_lines([*make_table(shown, options), *([[], *lines] if lines else [])], options)


def render_like_gc_monitor(snapshot: Snapshot, options: DisplayOptions) -> str:
    """Returns the cards and the attached processes in boxes, as gc-monitor does; without columns that do not fit."""
    partitions = sorted({ipu.partition for ipu in snapshot.ipus if ipu.partition}) or [_NOT_KNOWN]
    name = ", ".join(map(printable, partitions))
    count = len(snapshot.ipus)
    heading = f"gc-monitor view: partition {name} has {count} {'IPU' if count == 1 else 'IPUs'}"
    lines, hidden = _box(heading, _cards(snapshot.ipus), _machine_changes(snapshot.ipus), options.width)
    holding = [process for process in snapshot.processes if process.state != GONE and process.ipus]
    rows = [(process, ipu) for process in holding for ipu in snapshot.ipus if ipu.pid == process.pid]
    if rows:
        starts = [place > 0 and row[0] is not rows[place - 1][0] for place, row in enumerate(rows)]
        box, hidden_too = _box(f"Attached processes in partition {name}", _attached(rows), starts, options.width)
        lines += [[], *box]
        hidden += hidden_too
    else:
        lines += [[], [(f"No attached processes in partition {name}.", PLAIN)]]
    notes = []
    if hidden:
        notes.append(f"Not shown at {options.width} columns: {', '.join(hidden)}. A pipe has all.")
    if snapshot.emulated:
        notes.append("Emulated: these IPUs are this host's CPU; what needs hardware is N/A.")
    below = [line for note in notes for line in wrap([(note, PLAIN)], options.width)]
    return render_lines([*lines, *([[], *below] if below else [])], options)


def _group(ipus: Sequence[Ipu], each_ipu: bool) -> List[List[Ipu]]:
    """Returns the IPUs that differ only in their ids and their places on the board."""
    groups: Dict[Any, List[Ipu]] = {}
    for place, ipu in enumerate(ipus):
        own = [getattr(ipu, name) for name in devices.CONSTANT if name not in ("id", "board_ipu_index")]
        key = (place,) if each_ipu or ipu.board_serial is None else tuple(own)
        groups.setdefault(key, []).append(ipu)
    return list(groups.values())


def _board_indices(ipus: Sequence[Ipu]) -> Optional[str]:
    return id_ranges(ipu.board_ipu_index for ipu in ipus if ipu.board_ipu_index is not None) or None


def _routing(ipu: Ipu) -> Optional[str]:
    """Returns the type and the number of the routing, as far as they are known."""
    return " ".join(filter(None, (ipu.routing_type, ipu.routing_id))) or None


def _cards(ipus: Sequence[Ipu]) -> List[Cells]:
    def cells(title: str, read: Callable[[Ipu], Any], rank: int) -> Cells:
        return (title, [_cell(read(ipu)) for ipu in ipus], rank)

    return [
        cells("IPU-M", lambda ipu: ipu.host, 2),
        cells("Serial", lambda ipu: ipu.board_serial, 0),
        cells("IPU-M SW", lambda ipu: ipu.gateway_version, 6),
        cells("Server version", lambda ipu: ipu.server_version, 4),
        cells("ICU FW", lambda ipu: ipu.firmware_version, 3),
        cells("Type", lambda ipu: ipu.board_type, 1),
        cells("ID", lambda ipu: ipu.id, 0),
        cells("IPU#", lambda ipu: ipu.board_ipu_index, 1),
        cells("Routing", lambda ipu: ipu.routing_type or ipu.routing_id, 5),
    ]


def _attached(rows: Sequence[Tuple[Process, Ipu]]) -> List[Cells]:
    def of_process(title: str, read: Callable[[Process], Any], rank: int) -> Cells:
        return (title, [_cell(read(process)) for process, _ in rows], rank)

    def of_ipu(title: str, read: Callable[[Ipu], Any], rank: int) -> Cells:
        return (title, [_cell(read(ipu)) for _, ipu in rows], rank)

    return [
        of_process("PID", lambda each: each.pid, 0),
        of_process("Command", lambda each: _program(each.command), 3),
        of_process("Time", lambda each: None if each.elapsed_s is None else duration(each.elapsed_s), 2),
        of_process("User", lambda each: each.user, 1),
        of_ipu("ID", lambda ipu: ipu.id, 0),
        of_ipu("Clock", lambda ipu: _unit(ipu.clock_mhz, "MHz", 0), 4),
        of_ipu("Temp", lambda ipu: _unit(ipu.die_temp_c, " C", 1), 5),
        of_ipu("Board temp", lambda ipu: _unit(ipu.board_temp_c, " C", 1), 6),
        of_ipu("Board power", lambda ipu: _unit(ipu.board_power_w, " W", 1), 6),
    ]


def _machine_changes(ipus: Sequence[Ipu]) -> List[bool]:
    """Returns before which IPUs a line separates them from those of another board."""
    return [place > 0 and ipu.board_serial != ipus[place - 1].board_serial for place, ipu in enumerate(ipus)]


def _box(
    heading: str, columns: Sequence[Cells], separated: Sequence[bool], width: Optional[int]
) -> Tuple[List[Line], List[str]]:
    """Returns a table with borders, and the columns that do not fit; `separated`: before which rows there is a line."""
    shown = list(columns)
    while width is not None and len(shown) > 1 and _box_width(shown) > width:
        dropped = max(shown, key=lambda each: each[2])
        if not dropped[2]:
            break
        shown.remove(dropped)
    widths = [max(map(cell_width, (title, *cells))) for title, cells, _ in shown]
    border = "+" + "+".join("-" * (each + 2) for each in widths) + "+"
    inside = len(border) - 4
    titles = ("".join(part for part, _ in truncate(line, inside)) for line in wrap([(heading, PLAIN)], inside))
    lines: List[Line] = [
        [("+" + "-" * (inside + 2) + "+", PLAIN)],
        *([("| ", PLAIN), (_centre(title, inside), BOLD), (" |", PLAIN)] for title in titles),
        [(border, PLAIN)],
        [("|" + "|".join(f" {_centre(title, each)} " for (title, *_), each in zip(shown, widths)) + "|", PLAIN)],
        [(border, PLAIN)],
    ]
    for row, is_separated in enumerate(separated):
        if is_separated:
            lines.append([(border, PLAIN)])
        cells = (f" {_centre(column[1][row], each)} " for column, each in zip(shown, widths))
        lines.append([("|" + "|".join(cells) + "|", PLAIN)])
    return [*lines, [(border, PLAIN)]], [title for title, *_ in (each for each in columns if each not in shown)]


def _box_width(columns: Sequence[Cells]) -> int:
    return 1 + sum(3 + max(map(cell_width, (title, *cells))) for title, cells, _ in columns)


def _centre(content: str, width: int) -> str:
    left = (width - cell_width(content)) // 2
    return " " * left + content + " " * (width - cell_width(content) - left)


def _cell(value: object) -> str:
    return _NOT_KNOWN if value is None else printable(str(value))


def _unit(value: Optional[float], unit: str, digits: int) -> Optional[str]:
    return None if value is None else f"{value:.{digits}f}{unit}"


def _program(command: Optional[str]) -> Optional[str]:
    """Returns the program of a command line without its folder, as far as there is room for it."""
    if not command:
        return None
    name = command.split(" ", 1)[0].rpartition("/")[2] or command
    return "".join(part for part, _ in truncate([(name, PLAIN)], _MAX_COMMAND))
