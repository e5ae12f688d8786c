"""Statistics of trials: percentiles of times, bandwidths, share of the ideal. Pure: arrays in, typed records out.

A percentile is the nearest-rank order statistic, as HdrHistogram defines it: p99 is the shortest time that at least
99 % of the trials did not exceed. It is always the time of a trial, never a value between two. A percentile that would
be the slowest trial itself, for want of trials, is None: p90 needs 10 trials, p99 100 and p99.9 1,000. The median is
given for any number.

Bandwidths are those of nccl-tests: algbw is bytes over time, busbw is algbw times a factor that makes it comparable
with the rate of a link, whatever the number of ranks. They are computed for each trial; then the median is taken.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Optional

import numpy as np

from tf_ipu_dp.collectives.results import Series
from tf_ipu_dp.runs.records import Record

Array = Any

ALL_REDUCE = "all-reduce"
COLLECTIVES = (
    ALL_REDUCE,
    "in-network all-reduce",
    "reduce-scatter",
    "all-gather",
    "all-to-all",
    "broadcast",
    "reduce",
)


@dataclasses.dataclass(frozen=True)
class Summary(Record):
    """The trials of a series in numbers. None: not known, or too few trials for the percentile."""

    ranks: int
    bytes: int
    label: str
    trials: int
    min_s: float
    p50_s: float
    p90_s: Optional[float]
    p99_s: Optional[float]
    p99_9_s: Optional[float]
    max_s: float
    mean_s: float
    algbw_bytes_per_s: Optional[float]  # medians over trials
    busbw_bytes_per_s: Optional[float]
    busbw_p1_bytes_per_s: Optional[float]  # 99 % of the trials reached it
    ideal_pct: Optional[float]
    wrong_sums: int
    engine_p50_s: Optional[float] = None
    outside_engine_p50_s: Optional[float] = None  # Horovod's own time: wait for its cycle, negotiation, copies


def summarise(series: Series) -> Summary:
    """Returns the numbers of a series."""
    facts = series.facts
    seconds: Array = np.asarray(series.seconds, dtype=float)
    algbw = algorithm_bandwidth(facts.bytes, seconds)
    busbw = bus_bandwidth(facts.bytes, facts.ranks, seconds)
    ideal = None
    if facts.link_bytes_per_s and facts.ranks > 1:
        ideal = _finite(median(ideal_pct(facts.bytes, facts.ranks, facts.link_bytes_per_s, seconds)))
    engine_p50_s = outside_p50_s = None
    if series.engine_s is not None:
        engine: Array = np.asarray(series.engine_s, dtype=float)
        known = np.isfinite(engine)
        if known.any():
            engine_p50_s = median(engine[known])
            outside_p50_s = median((seconds - engine)[known])
    # The slow end of a bandwidth is at its low percentiles: those of its negative are at the high ones.
    slow = percentile(-busbw, 990)
    return Summary(
        ranks=facts.ranks,
        bytes=facts.bytes,
        label=facts.label,
        trials=len(seconds),
        min_s=float(seconds.min()),
        p50_s=median(seconds),
        p90_s=percentile(seconds, 900),
        p99_s=percentile(seconds, 990),
        p99_9_s=percentile(seconds, 999),
        max_s=float(seconds.max()),
        mean_s=float(seconds.mean()),
        algbw_bytes_per_s=_finite(median(algbw)),
        busbw_bytes_per_s=_finite(median(busbw)) if facts.ranks > 1 else None,
        busbw_p1_bytes_per_s=None if slow is None or facts.ranks < 2 else _finite(-slow),
        ideal_pct=ideal,
        wrong_sums=facts.wrong_sums,
        engine_p50_s=engine_p50_s,
        outside_engine_p50_s=outside_p50_s,
    )


def percentile(values: Array, per_mille: int) -> Optional[float]:
    """Returns a percentile, given in thousandths; None where it would be the maximum for want of values."""
    count = len(values)
    rank = _rank(count, per_mille)
    if rank == count and per_mille < 1000 and per_mille != 500:
        return None
    return float(np.partition(values, rank - 1)[rank - 1])


def median(values: Array) -> float:
    """Returns p50, for any number of values."""
    found = percentile(values, 500)
    assert found is not None
    return found


def bus_factor(collective: str, ranks: int) -> float:
    """Returns busbw over algbw: the bytes that each link must carry, over the bytes of the collective."""
    if collective not in COLLECTIVES:
        raise ValueError(f"{collective!r} is not a collective. Use one of {', '.join(COLLECTIVES)}.")
    if collective == ALL_REDUCE:
        return 2 * (ranks - 1) / ranks
    if collective == "in-network all-reduce":
        return (ranks - 1) / (ranks + 1)
    return 1.0 if collective in ("broadcast", "reduce") else (ranks - 1) / ranks


def algorithm_bandwidth(size: float, seconds: Array) -> Array:
    """Returns bytes per second of each trial; infinite for a simulated one that took no time."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return size / np.asarray(seconds, dtype=float)


def bus_bandwidth(size: int, ranks: int, seconds: Array, collective: str = ALL_REDUCE) -> Array:
    """Returns the bytes per second that each trial needs on a link."""
    return algorithm_bandwidth(size * bus_factor(collective, ranks), seconds)


def ideal_pct(size: int, ranks: int, link_bytes_per_s: float, seconds: Array, collective: str = ALL_REDUCE) -> Array:
    """Returns, for each trial, the time that the link alone would take in percent of the time it took."""
    return 100 * bus_bandwidth(size, ranks, seconds, collective) / link_bytes_per_s


def _finite(value: float) -> Optional[float]:
    return value if np.isfinite(value) else None


def _rank(count: int, per_mille: int) -> int:
    """Returns which of the sorted values a percentile is, from 1; in whole numbers, since 0.999 has no exact float."""
    if not count:
        raise ValueError("There is no percentile of no values.")
    return max(1, -(-per_mille * count // 1000))
