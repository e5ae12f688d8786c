"""The table of processes: a row for each instance of a run, wherever it runs, and for each other process. Pure."""

from __future__ import annotations

import re
from typing import Callable, List, Optional, Sequence

from tf_ipu_dp.monitoring.ipu_table import number, text
from tf_ipu_dp.monitoring.snapshots import GONE, STALE, Process
from tf_ipu_dp.monitoring.text_layout import (
    BAD,
    DIM,
    GOOD,
    PLAIN,
    WARN,
    Column,
    DisplayOptions,
    Span,
    duration,
    id_ranges,
    printable,
    truncate,
)

_INTERPRETER_FOLDER = re.compile(r"^\S*/(?=(python|pypy)[\w.]*( |$))")
_MIN_NAME_WIDTH = 10


def make_columns(processes: Sequence[Process], options: DisplayOptions) -> List[Column]:
    """Returns all columns of the table, also those without a value; a host only where there are several."""

    def column(title: str, read: Callable[[Process], Span], *, rank: int, right: bool = True) -> Column:
        return Column(title, [[read(each)] for each in processes], right, rank)

    def name(value: Optional[str]) -> Span:
        # A long name must not take the place of the other columns.
        limit = None if options.width is None else max(_MIN_NAME_WIDTH, options.width // 4)
        span = text(value)
        return span if limit is None else ("".join(part for part, _ in truncate([span], limit)), span[1])

    several_hosts = len({each.host for each in processes if each.host}) > 1
    # A run is known by its name; what is not one of ours is known by its command alone.
    command_rank = 1 if any(each.run is None for each in processes) else 9
    return [
        column("PID", lambda each: text(each.pid), rank=0),
        *([column("Host", lambda each: name(each.host), rank=1, right=False)] if several_hosts else []),
        column("User", lambda each: name(each.user), rank=7, right=False),
        column("Time", lambda each: text(each.elapsed_s, duration), rank=6),
        column("IPUs", lambda each: text(id_ranges(each.ipus) or None), rank=0, right=False),
        column("State", _state, rank=0, right=False),
        column("Run", lambda each: name(each.run), rank=0, right=False),
        column("Instance", lambda each: _fraction(each.instance, each.instances, " of "), rank=4),
        column("Step", lambda each: _fraction(each.step, each.planned_steps, "/"), rank=1),
        column("Done %", lambda each: number(each.done_pct, 1), rank=5),
        column("ETA", lambda each: text(each.eta_s, duration), rank=2),
        column("Loss", lambda each: number(each.loss, 4), rank=3),
        column("Samples/s", lambda each: number(each.samples_per_s, 0), rank=2),
        column("CPU %", lambda each: number(each.cpu_pct, 0), rank=6),
        column("Mem GiB", lambda each: number(each.memory_gib, 2), rank=6),
        column("Waiting for", _waiting_for, rank=3, right=False),
        column("Command", lambda each: text(each.command, shorten_command), rank=command_rank, right=False),
    ]


def shorten_command(command: str) -> str:
    """Returns a command line without the folder of the interpreter."""
    return _INTERPRETER_FOLDER.sub("", command)


def _fraction(value: Optional[int], total: Optional[int], separator: str) -> Span:
    if value is None:
        return ("-", DIM)
    return (str(value) if total is None else f"{value}{separator}{total}", PLAIN)


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
