"""exchange_times.json: how long a run's exchanges of gradients took, and which instance was the last to arrive.

An exchange is the all-reduce of one weight update. Every instance measures it from its own call to its completion. The
instance with the shortest time was the last to arrive: the others were already waiting for it. No two clocks are
compared. Pure: no TensorFlow, no files.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from typing import Any, Counter, Dict, Iterable, List, Optional, Sequence, Tuple

from tf_ipu_dp.runs.records import ExchangeSummary, Record

# The edges of the buckets are powers of two: from 2^-20 s, about a microsecond, to 2^12 s, more than an hour. The first
# bucket also has what is shorter, and the last one what is longer.
_LEAST_EXPONENT, _LAST_EXPONENT = -20, 11
MAX_BUCKETS = _LAST_EXPONENT - _LEAST_EXPONENT + 1


@dataclasses.dataclass(frozen=True)
class Bucket(Record):
    """How many times were at least `least_s` and below `below_s`, which is twice as long."""

    least_s: float
    below_s: float
    count: int


@dataclasses.dataclass(frozen=True)
class Histogram(Record):
    """How often something took how long. Buckets without a count are left out; there are MAX_BUCKETS at most."""

    buckets: Tuple[Bucket, ...] = ()  # the shortest first
    total_s: float = 0.0
    min_s: Optional[float] = None  # None: nothing was counted
    max_s: Optional[float] = None

    @classmethod
    def of(cls, values_s: Iterable[float]) -> Histogram:
        """Returns the histogram of some times. A negative one, of a clock that was set back, counts as zero."""
        values = [max(value, 0.0) for value in values_s]
        if not values:
            return cls()
        return cls(_buckets(collections.Counter(map(_exponent, values))), math.fsum(values), min(values), max(values))

    @property
    def count(self) -> int:
        return sum(bucket.count for bucket in self.buckets)

    @property
    def p50_s(self) -> Optional[float]:
        return self.percentile(50)

    @property
    def p99_s(self) -> Optional[float]:
        return self.percentile(99)

    def percentile(self, percent: float) -> Optional[float]:
        """Returns the time that this share of all does not exceed; None if nothing was counted.

        Within a bucket it is interpolated, so that it is at most twice or half the exact one. 0 and 100 are exact.
        """
        counted = [bucket for bucket in self.buckets if bucket.count]  # a damaged file may have empty ones
        if self.min_s is None or self.max_s is None or not counted:
            return None
        left = percent / 100 * self.count
        for bucket in counted:
            if left <= bucket.count:
                break
            left -= bucket.count
        # The shortest and the longest narrow the first and the last bucket.
        least = self.min_s if bucket is counted[0] else bucket.least_s
        below = self.max_s if bucket is counted[-1] else bucket.below_s
        return least + (below - least) * min(max(left / bucket.count, 0.0), 1.0)

    def merged(self, other: Histogram) -> Histogram:
        """Returns the histogram of the times of both."""
        counts: Counter[int] = collections.Counter()
        for bucket in (*self.buckets, *other.buckets):
            counts[_exponent(bucket.least_s)] += bucket.count
        shortest = [each.min_s for each in (self, other) if each.min_s is not None]
        longest = [each.max_s for each in (self, other) if each.max_s is not None]
        return Histogram(
            _buckets(counts), self.total_s + other.total_s, min(shortest, default=None), max(longest, default=None)
        )

    def _fields_to_json(self) -> Dict[str, Any]:
        derived = {"count": self.count, "p50_s": self.p50_s, "p99_s": self.p99_s}
        return {**derived, **super()._fields_to_json()}


@dataclasses.dataclass(frozen=True)
class Arrivals(Record):
    """The exchanges in which one instance was the last to arrive."""

    instance: int
    late: Histogram = dataclasses.field(default_factory=Histogram)  # how much later than the mean of the others

    @property
    def last(self) -> int:
        """Returns in how many exchanges it was last."""
        return self.late.count

    def _fields_to_json(self) -> Dict[str, Any]:
        return {"instance": self.instance, "last": self.last, "late": self.late._fields_to_json()}


@dataclasses.dataclass(frozen=True)
class ExchangeTimes(Record):
    """exchange_times.json: the exchanges of gradients since a run was last started, without the one that compiled.

    `exchanges` are all of them. Of an execution with very many, only the last are compared between the instances:
    `seconds` and `arrivals` are of these.
    """

    exchanges: int = 0
    seconds: Histogram = dataclasses.field(default_factory=Histogram)  # from when the last instance had arrived
    arrivals: Tuple[Arrivals, ...] = ()  # of every instance

    @classmethod
    def of(cls, times_s: Sequence[Sequence[float]], exchanges: Optional[int] = None) -> ExchangeTimes:
        """Returns the times of some exchanges: for every instance, the seconds that it measured of each of them."""
        late: Dict[int, List[float]] = {instance: [] for instance in range(len(times_s))}
        shortest = []
        for times in zip(*times_s):
            least = min(times)
            shortest.append(least)
            others = (sum(times) - least) / max(len(times) - 1, 1)
            late[times.index(least)].append(others - least)
        arrivals = tuple(Arrivals(instance, Histogram.of(seconds)) for instance, seconds in late.items())
        return cls(len(shortest) if exchanges is None else exchanges, Histogram.of(shortest), arrivals)

    @property
    def compared(self) -> int:
        """Returns how many exchanges were compared between the instances."""
        return self.seconds.count

    @property
    def waiting(self) -> Histogram:
        """Returns how long the mean of the other instances waited for the last one."""
        return functools.reduce(Histogram.merged, (each.late for each in self.arrivals), Histogram())

    @property
    def most_often_last(self) -> Optional[Arrivals]:
        """Returns the instance that was last in most exchanges; None if none was compared."""
        return max(self.arrivals, key=lambda each: each.last) if self.compared and self.arrivals else None

    def last_pct(self, instance: int) -> Optional[float]:
        """Returns the share of the compared exchanges in which an instance was last; None if none was compared."""
        if not self.compared:
            return None
        return 100 * sum(each.last for each in self.arrivals if each.instance == instance) / self.compared

    def summary(self) -> Optional[ExchangeSummary]:
        """Returns what result.json has of it; None if no exchange was compared."""
        late, seconds = self.most_often_last, self.seconds
        if late is None:
            return None
        return ExchangeSummary(
            exchanges=self.exchanges,
            compared=self.compared,
            p50_s=seconds.p50_s or 0.0,
            p99_s=seconds.p99_s or 0.0,
            max_s=seconds.max_s or 0.0,
            waited_s=self.waiting.total_s,
            last_instance=late.instance,
            last_pct=self.last_pct(late.instance) or 0.0,
        )

    def merged(self, other: ExchangeTimes) -> ExchangeTimes:
        """Returns the exchanges of both."""
        late: Dict[int, Histogram] = {}
        for each in (*self.arrivals, *other.arrivals):
            late[each.instance] = late.get(each.instance, Histogram()).merged(each.late)
        arrivals = tuple(Arrivals(instance, histogram) for instance, histogram in sorted(late.items()))
        return ExchangeTimes(self.exchanges + other.exchanges, self.seconds.merged(other.seconds), arrivals)


def _exponent(seconds: float) -> int:
    """Returns the bucket of a time, as the power of two that it begins with."""
    exponent = math.frexp(seconds)[1] - 1 if seconds > 0 else _LEAST_EXPONENT
    return min(max(exponent, _LEAST_EXPONENT), _LAST_EXPONENT)


def _buckets(counts: Counter[int]) -> Tuple[Bucket, ...]:
    return tuple(
        Bucket(2.0**exponent, 2.0 ** (exponent + 1), count) for exponent, count in sorted(counts.items()) if count
    )
