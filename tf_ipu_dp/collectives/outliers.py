"""Which trials took much longer than the others and why, and which rank was last. Pure: arrays in, records out.

A trial is an outlier if it took longer than p50 + max(5 sigma, 20 % of p50), where sigma is 1.4826 times the median
absolute deviation: the standard deviation of normal noise, which outliers themselves do not move. Its cause is
- a retransmission timeout, if TCP counted one during the trial;
- a late rank, if one rank began the trial so late that this explains at least half of the excess;
- a retransmission timeout also where timeouts were not counted and the excess over p50 is within 10 % + 20 ms of 0.2,
  0.6, 1.4, 3.0 or 6.2 s, the totals of a timeout that doubles, or of 0.4 s, two timeouts after each other;
- another one otherwise.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Optional, Tuple

import numpy as np

from tf_ipu_dp.collectives.results import Series
from tf_ipu_dp.collectives.statistics import median

Array = Any

TIMEOUT, LATE, OTHER = "retransmission timeout", "late rank", "other"
CAUSES = (TIMEOUT, LATE, OTHER)
_SIGMAS = 5
_SIGMA_OF_MAD = 1.4826
_MIN_SHARE = 0.2
_EXPLAINS = 0.5
DOUBLING_TIMEOUTS_S = (0.2, 0.6, 1.4, 3.0, 6.2)  # TCP's shortest timeout of 0.2 s, doubled: the totals
_TIMEOUT_TOTALS_S = np.array([*DOUBLING_TIMEOUTS_S, 0.4])  # 0.4: two timeouts after each other
_NEAR_SHARE, _NEAR_S = 0.1, 0.02


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

    trials: int  # in which one rank was later than all others
    share: Array  # of these trials, by rank
    edges: Array  # first trial of each group, and the number of trials
    by_group: Array  # share of the group's trials, a row for each rank; NaN where nobody was last


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


def last_rank(late_s: Array) -> Array:
    """Returns which rank was the last to begin each trial; -1 where several were, or all began together."""
    late: Array = np.asarray(late_s, dtype=float)
    largest = late.max(axis=1)
    alone = (late == largest[:, None]).sum(axis=1) == 1
    return np.where(alone & (largest > 0), late.argmax(axis=1), -1)


def last_shares(series: Series, max_groups: int) -> Optional[LastShares]:
    """Returns how often each rank was last; None where it is not known, or nobody ever was."""
    if series.late_s is None or series.facts.ranks < 2:
        return None
    last = last_rank(series.late_s)
    ranks = series.facts.ranks
    known = int((last >= 0).sum())
    if not known:
        return None
    groups = min(max_groups, len(last))
    edges: Array = np.linspace(0, len(last), groups + 1).round().astype(int)
    group = np.searchsorted(edges, np.arange(len(last)), side="right") - 1
    counts = np.zeros((ranks, groups))
    chosen = last >= 0
    np.add.at(counts, (last[chosen], group[chosen]), 1)
    totals = counts.sum(axis=0)
    by_group = np.where(totals > 0, counts / np.maximum(totals, 1), np.nan)
    return LastShares(known, counts.sum(axis=1) / known, edges, by_group)


def _cause(series: Series, trial: int, excess_s: float) -> Tuple[str, Optional[int]]:
    counted = np.nan if series.timeouts is None else float(series.timeouts[trial])
    if counted > 0:
        return TIMEOUT, None
    if series.late_s is not None and np.max(series.late_s[trial]) >= _EXPLAINS * excess_s:
        return LATE, int(np.argmax(series.late_s[trial]))
    near = np.abs(excess_s - _TIMEOUT_TOTALS_S) <= _NEAR_SHARE * _TIMEOUT_TOTALS_S + _NEAR_S
    return (TIMEOUT if np.isnan(counted) and near.any() else OTHER), None
