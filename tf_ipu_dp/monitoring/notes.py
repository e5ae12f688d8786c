"""What stands below the tables: verdicts, and why some values are not known. Pure.

Every dash has its reason here or in its row, and every column that is left out is named.
"""

from __future__ import annotations

from typing import List, Optional, Sequence

from tf_ipu_dp.monitoring import ipu_table, run_verdicts
from tf_ipu_dp.monitoring.snapshots import GONE, RUNNING, STALE, Process, Snapshot
from tf_ipu_dp.monitoring.text_layout import BAD, BOLD, PLAIN, WARN, Column, Line, Span, fit_columns, printable

_MAX_REASONS = 3


def verdict_lines(snapshot: Snapshot) -> List[Line]:
    """Returns a sentence about the bottleneck of each run."""
    names = run_verdicts.name_runs(snapshot)
    return [
        [(f"{printable(names[run.run_dir])}: {printable(run.verdict.sentence)}", BOLD)]
        for run in snapshot.runs
        if run.verdict is not None
    ]


def note_lines(snapshot: Snapshot, left_out: Sequence[str]) -> List[Line]:
    """Returns why some values are not known; `left_out` are the columns that no IPU or process has a value for."""
    notes = [*_ipu_notes(snapshot, left_out), *_process_notes(snapshot.processes)]
    if left_out:
        notes.insert(0, (f"Left out, because there is no value: {', '.join(left_out)}.", PLAIN))
    return [[note] for note in notes]


def hidden_titles(columns: Sequence[Column], width: Optional[int]) -> List[str]:
    """Returns the titles of the columns that do not fit a width."""
    shown = fit_columns(columns, width)
    return [column.title for column in columns if column.title and column not in shown]


def too_narrow(hidden: Sequence[str], width: Optional[int]) -> List[Line]:
    """Returns where to find the columns that do not fit."""
    if not hidden:
        return []
    return [[(f"Not shown at {width} columns: {', '.join(hidden)}. A pipe and --json have all.", PLAIN)]]


def _ipu_notes(snapshot: Snapshot, left_out: Sequence[str]) -> List[Span]:
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
    rows = ipu_table.rows_of_ipus([ipu for ipu in current if ipu.id not in new])
    unreported = [title for title in ipu_table.unreported(rows) if title not in left_out]
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
        notes.append(("Run, step and speed are known only for this user's tf_ipu_dp runs.", PLAIN))
    if any(each.samples_per_s is None for each in running):
        notes.append(("Samples/s is known only during training, after the first step.", PLAIN))
    elif any(None in (each.loss, each.eta_s) for each in running):
        notes.append(("Loss is known after the first log line of a run, ETA after the second.", PLAIN))
    if any(each.waits_for is None for each in running):
        notes.append(("What a run is waiting for is reported by the emulator, but not by the Poplar SDK.", PLAIN))
    hosts = [each.host for each in processes if each.host]
    if len(set(hosts)) > 1:
        notes.append(("IPUs, CPU and memory are known only for processes on this host.", PLAIN))
    elif any(None in (each.user, each.command, each.elapsed_s) for each in processes):
        notes.append(("Less is known about a process that holds no IPU or is not visible on this host.", PLAIN))
    return notes
