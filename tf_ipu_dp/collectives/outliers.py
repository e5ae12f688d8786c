"""Which trials took much longer than the others and why, and which rank was last. Pure: arrays in, records out.

A trial is an outlier if it took longer than p50 + max(5 sigma, 20 % of p50), where sigma is 1.4826 times the median
absolute deviation: the standard deviation of normal noise, which outliers themselves do not move. Its cause is
- a retransmission timeout, if TCP counted one and the excess is about its shortest timeout (200 ms) or more;
- a late rank, if one rank began the trial so late that this explains at least half of the excess;
- a tail-loss probe, if TCP counted one. A packet that is alone on its way is probed for when the shortest timeout is
  over: Linux counts that apart, although the wait is the same;
- a fast retransmission, if TCP counted one and the excess is less than the shortest timeout: it takes a round trip;
- a retransmission timeout also where nothing was counted and the excess over p50 is within 10 % + 20 ms of 0.2, 0.6,
  1.4, 3.0 or 6.2 s, the totals of a timeout that doubles, or of 0.4 s, two timeouts after each other;
- another one otherwise.

A rank was late if it began a trial later than the first one by more than the scatter of leaving a barrier, and by a
tenth of p50 or more: less could not explain an outlier.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Optional, Tuple

import numpy as np

from tf_ipu_dp.collectives.results import Series
from tf_ipu_dp.collectives.statistics import median

Array = Any

TIMEOUT, PROBE, FAST = "retransmission timeout", "tail-loss probe", "fast retransmission"
LATE, OTHER = "late rank", "other"
CAUSES = (TIMEOUT, PROBE, FAST, LATE, OTHER)
_SIGMAS = 5
_SIGMA_OF_MAD = 1.4826
_MIN_SHARE = 0.2
_EXPLAINS = 0.5
DOUBLING_TIMEOUTS_S = (0.2, 0.6, 1.4, 3.0, 6.2)  # TCP's shortest timeout of 0.2 s, doubled: the totals
_TIMEOUT_TOTALS_S = np.array([*DOUBLING_TIMEOUTS_S, 0.4])  # 0.4: two timeouts after each other
_NEAR_SHARE, _NEAR_S = 0.1, 0.02
_ABOUT = 0.9  # of the shortest timeout: the median that an excess is counted from scatters too
_LEAST_LATE_S = 1e-4  # below it, a rank was woken up later than others, not late


@dataclasses.dataclass(frozen=True)
class Outlier:
    """A trial that took much longer than the others."""

    trial: int
    seconds: float
    excess_s: float  # over the median
    cause: str
    rank: Optional[int] = None  # the late one


@dataclasses.dataclass(frozen=True, eq=False)
class LastShares:
    """How often each rank was the last to begin, in all and by groups of consecutive trials."""

    trials: int
    late: int  # trials in which a rank was late
    limit_s: float  # later than the first rank by more than this is late
    share: Array  # of all trials, by rank
    edges: Array  # first trial of each group, and the number of trials
    by_group: Array  # share of the group's trials, a row for each rank


def find(series: Series) -> Tuple[Outlier, ...]:
    """Returns the outliers of a series, in the order of trials."""
    seconds: Array = np.asarray(series.seconds, dtype=float)
    middle = median(seconds)
    found = []
    for trial in np.nonzero(seconds > limit_s(seconds))[0]:
        excess = float(seconds[trial]) - middle
        cause, rank = _cause(series, int(trial), excess)
        found.append(Outlier(int(trial), float(seconds[trial]), excess, cause, rank))
    return tuple(found)


def limit_s(seconds: Array) -> float:
    """Returns the time above which a trial is an outlier."""
    middle = median(seconds)
    sigma = _SIGMA_OF_MAD * median(np.abs(np.asarray(seconds, dtype=float) - middle))
    return middle + max(_SIGMAS * sigma, _MIN_SHARE * middle)


def late_limit_s(series: Series) -> float:
    """Returns by how much later than the first a rank must begin a trial to be late.

    That is more than the scatter with which ranks leave a barrier, and enough to explain an outlier. A barrier lets
    ranks go one after the other: the spread of all but the last rank is the usual one, and what each rank deviates from
    its own usual place is noise. So a rank that is always late does not hide itself.
    """
    late: Array = np.asarray(series.late_s, dtype=float)
    places = late - late.mean(axis=1, keepdims=True)
    sigma = _SIGMA_OF_MAD * median(np.abs(places - np.median(places, axis=0)).ravel())
    usual = median(np.sort(late, axis=1)[:, -2])
    return max(_LEAST_LATE_S, _EXPLAINS * _MIN_SHARE * median(series.seconds), usual + _SIGMAS * sigma)


def last_rank(late_s: Array, limit_s: float) -> Array:
    """Returns which rank was the last to begin each trial; -1 where several were, or nobody was late."""
    late: Array = np.asarray(late_s, dtype=float)
    largest = late.max(axis=1)
    alone = (late == largest[:, None]).sum(axis=1) == 1
    return np.where(alone & (largest > limit_s), late.argmax(axis=1), -1)


def last_shares(series: Series, max_groups: int) -> Optional[LastShares]:
    """Returns how often each rank was last; None where it is not known."""
    if series.late_s is None or series.facts.ranks < 2:
        return None
    limit_s = late_limit_s(series)
    last = last_rank(series.late_s, limit_s)
    groups = min(max_groups, len(last))
    edges: Array = np.linspace(0, len(last), groups + 1).round().astype(int)
    group = np.searchsorted(edges, np.arange(len(last)), side="right") - 1
    counts = np.zeros((series.facts.ranks, groups))
    chosen = last >= 0
    np.add.at(counts, (last[chosen], group[chosen]), 1)
    shares = counts.sum(axis=1) / len(last)
    return LastShares(len(last), int(chosen.sum()), limit_s, shares, edges, counts / np.diff(edges))


def _cause(series: Series, trial: int, excess_s: float) -> Tuple[str, Optional[int]]:
    shortest_s = series.facts.shortest_timeout_s
    timeouts, probes, fast = (
        None if counts is None else bool(counts[trial] > 0)
        for counts in (series.timeouts, series.probes, series.fast_retransmissions)
    )
    if timeouts and excess_s >= _ABOUT * shortest_s:
        return TIMEOUT, None
    if series.late_s is not None and np.max(series.late_s[trial]) >= _EXPLAINS * excess_s:
        return LATE, int(np.argmax(series.late_s[trial]))
    if probes:
        return PROBE, None
    if fast and excess_s < _ABOUT * shortest_s:
        return FAST, None
    near = np.abs(excess_s - _TIMEOUT_TOTALS_S) <= _NEAR_SHARE * _TIMEOUT_TOTALS_S + _NEAR_S
    return (TIMEOUT if timeouts is None and near.any() else OTHER), None
