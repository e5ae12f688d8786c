"""How long a calibration must be, and what its time is: windows of half a second, and their median. Pure.

On a machine that others use too, single windows are slow, by a fifth and more. One measurement of fixed length is then
as wrong as its luck is bad; the median of windows is not, as long as most of them were left alone. A calibration ends
as soon as one more window does not move the median.
"""

from __future__ import annotations

import dataclasses
import statistics
from typing import List, Sequence

from tf_ipu_dp.runs.records import TrainingRecord

WINDOW_S = 0.5
LEAST_WINDOWS = 3
MOST_S = 6.0  # of each process, whether medians agree or not
AGREES = 0.03  # of two medians, the second of one window more


def on_the_wall(records: Sequence[TrainingRecord]) -> List[TrainingRecord]:
    """Returns the records of one process with the time between epochs in theirs, as a cell has it; the first has none.

    Such a time passes between two records, and their own clocks leave it out.
    """
    found = list(records[:1])
    for before, record in zip(records, records[1:]):
        times = list(record.instances)
        if times:
            times[0] = dataclasses.replace(times[0], seconds=record.elapsed_s - before.elapsed_s)
        found.append(dataclasses.replace(record, instances=tuple(times)))
    return found


def split(records: Sequence[TrainingRecord], window_s: float = WINDOW_S) -> List[List[TrainingRecord]]:
    """Returns the records of one process as windows of at least so many seconds; a last one that is short is left out.

    If all of them together are short, they are one window.
    """
    windows: List[List[TrainingRecord]] = [[]]
    for record in records:
        if record.instances and record.executions:
            windows[-1].append(record)
            if _seconds(windows[-1]) >= window_s:
                windows.append([])
    return windows[:-1] or [window for window in windows if window]


def median_execution_s(processes: Sequence[Sequence[TrainingRecord]]) -> float:
    """Returns the median over windows of the seconds of an execution, a window being that of all processes."""
    return statistics.median(window_times(processes))


def window_times(processes: Sequence[Sequence[TrainingRecord]]) -> List[float]:
    """Returns the seconds of an execution in each window: those of all processes over all of their executions."""
    by_process = [split(records) for records in processes]
    found = []
    for number in range(max(map(len, by_process), default=0)):
        records = [record for windows in by_process if number < len(windows) for record in windows[number]]
        found.append(_seconds(records) / sum(record.executions or 0 for record in records))
    return found


def is_enough(processes: Sequence[Sequence[TrainingRecord]]) -> bool:
    """Whether every process has windows enough, and one more has not moved their median."""
    counts = [len(split(records)) if _seconds(records) >= WINDOW_S else 0 for records in processes]
    if min(counts, default=0) < LEAST_WINDOWS:
        return False
    times = window_times(processes)
    before, after = statistics.median(times[:-1]), statistics.median(times)
    return abs(after / before - 1) <= AGREES or min(map(_seconds, processes)) >= MOST_S


def _seconds(records: Sequence[TrainingRecord]) -> float:
    """Returns the seconds of the leader's own clock."""
    return sum(record.instances[0].seconds for record in records if record.instances)
