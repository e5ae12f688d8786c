"""Where the time of one update goes, from the records of a run: the mean of all instances. Pure.

Measured are, on every instance: the time between two records without that between epochs, in executions, waiting for
input, in the collectives of executions, and in the optimizer. Measured is also how long the exchanges of gradients took
once the last instance had arrived. From these:

    overhead    between executions, by the larger of what two clocks say, and between epochs
    input wait  as measured
    collective  the exchanges from when the last instance had arrived
    waiting     the rest of the collectives, and what an instance was faster than the slowest one
    optimizer   as measured
    compute     what is left of the executions

What is between executions is timed by the records and by the clock of the whole run, which know nothing of each other:
the parts sum to the time on the wall if both are right. They sum to more where the second one has more, or where
measured parts of executions exceed the executions.
"""

from __future__ import annotations

import dataclasses
from typing import Dict, List, Optional, Sequence

from tf_ipu_dp.runs.exchange_times import ExchangeTimes
from tf_ipu_dp.runs.records import InstanceTimes, TrainingRecord
from tf_ipu_dp.scaling.records import UpdateParts


@dataclasses.dataclass(frozen=True)
class _Sums:
    """The seconds of one instance."""

    seconds: float
    executing_s: float
    input_wait_s: float
    collective_s: float
    optimizer_s: float


@dataclasses.dataclass(frozen=True)
class Clocks:
    """What other clocks than those of the records say: that the parts add up is then no matter of course."""

    wall_s: float  # of all timed updates, by the clock on the wall
    between_s: float  # of one update, between executions of an epoch, by the clock of the whole run


def decompose(
    records: Sequence[TrainingRecord],
    exchanges: Optional[ExchangeTimes],
    updates: int,
    clocks: Optional[Clocks] = None,
) -> Optional[UpdateParts]:
    """Returns the parts of one update; None if the device does not report them, or nothing was timed.

    `records` are those after the warm-up, and have so many updates. Without `exchanges` all collectives count as such.
    """
    if updates < 1:
        return None
    by_instance: Dict[int, List[InstanceTimes]] = {}
    for record in records:
        for times in record.instances:
            by_instance.setdefault(times.instance, []).append(times)
    sums = [_sum(times) for times in by_instance.values()]
    found = [each for each in sums if each is not None and each.seconds > 0]
    if not found or len(found) < len(sums):
        return None
    exchange_s = _exchange_seconds(exchanges)
    slowest_s = max(each.seconds for each in found)
    parts = [_parts(each, slowest_s, updates, exchange_s, clocks) for each in found]
    names = [field.name for field in dataclasses.fields(UpdateParts)]
    return UpdateParts(**{name: sum(getattr(each, name) for each in parts) / len(parts) for name in names})


def _sum(times: Sequence[InstanceTimes]) -> Optional[_Sums]:
    rows = [
        (each.seconds, each.executing_s, each.input_wait_s, each.program_collective_s, each.optimizer_s)
        for each in times
    ]
    reported = [[number for number in row if number is not None] for row in rows]
    if any(len(row) < len(dataclasses.fields(_Sums)) for row in reported):
        return None
    return _Sums(*(sum(column) for column in zip(*reported)))


def _parts(
    sums: _Sums, slowest_s: float, updates: int, exchange_s: Optional[float], clocks: Optional[Clocks]
) -> UpdateParts:
    in_collectives = sums.collective_s / updates
    collective = in_collectives if exchange_s is None else min(exchange_s, in_collectives)
    compute = sums.executing_s - sums.input_wait_s - sums.collective_s - sums.optimizer_s
    overhead = max(sums.seconds - sums.executing_s, 0.0) / updates
    if clocks is not None:
        # The records' own clock also counts what is written between executions.
        overhead = max(overhead, clocks.between_s) + max(clocks.wall_s - slowest_s, 0.0) / updates
    return UpdateParts(
        compute_s=max(compute, 0.0) / updates,
        input_wait_s=sums.input_wait_s / updates,
        collective_s=collective,
        waiting_s=in_collectives - collective + (slowest_s - sums.seconds) / updates,
        optimizer_s=sums.optimizer_s / updates,
        overhead_s=overhead,
    )


def _exchange_seconds(exchanges: Optional[ExchangeTimes]) -> Optional[float]:
    """Returns the mean time of an exchange from when the last instance had arrived; None if none was compared."""
    if exchanges is None or not exchanges.compared:
        return None
    return exchanges.seconds.total_s / exchanges.compared
