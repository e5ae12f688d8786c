"""The arithmetic of a study: intervals of few repeats, speed-up, efficiency, knee, and its factors. Pure.

The interval of a median is the one that order statistics give, whatever the distribution: from the k-th smallest to
the k-th largest of n repeats it holds the true median with probability 1 - 2 P(Binomial(n, 1/2) < k). The largest k
that still gives 95 % is taken. Fewer than six repeats cannot give 95 %: then the interval is their range, and `level`
says how much it gives (75 % of three repeats, 93.8 % of five).
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import Optional, Sequence, Tuple

LEVEL = 0.95
KNEE_SHARE = 0.95
MIN_REPEATS = 6  # for an interval of LEVEL


@dataclasses.dataclass(frozen=True)
class Interval:
    """A median and its interval: of 95 % from six repeats on, otherwise the range of the repeats."""

    median: float
    low: float
    high: float
    level: float = 0.0  # the probability that it holds the true median; 0 for one repeat

    def over(self, base: Interval) -> Interval:
        """Returns the ratio to another interval; its ends are the farthest that the ends of both allow."""
        return Interval(
            self.median / base.median, self.low / base.high, self.high / base.low, min(self.level, base.level)
        )

    def times(self, factor: float) -> Interval:
        return Interval(self.median * factor, self.low * factor, self.high * factor, self.level)


@dataclasses.dataclass(frozen=True)
class Knee:
    """Where a larger batch stops paying: the smallest size with at least `share` of the best rate."""

    size: int
    share: float
    best_size: int
    engine: str = ""


@dataclasses.dataclass(frozen=True)
class Trained:
    """What one size needed to reach an accuracy."""

    replicas: int
    samples_per_s: float
    samples: float  # seen until then: epochs times the samples of one
    seconds: float


@dataclasses.dataclass(frozen=True)
class Factors:
    """Efficiency of the time to an accuracy = hardware x statistical x overhead."""

    efficiency: float
    hardware: float  # of the throughput
    statistical: float  # samples of the baseline over the samples that were needed
    overhead: float  # the rest: first epoch, checkpoints, validations


def median_interval(values: Sequence[float]) -> Interval:
    """Returns the median of some repeats, and its interval as the module says."""
    ordered = sorted(values)
    count = len(ordered)
    place = 0
    while 2 * (place + 1) < count and coverage(count, place + 1) >= LEVEL:
        place += 1
    return Interval(statistics.median(ordered), ordered[place], ordered[count - 1 - place], coverage(count, place))


def coverage(count: int, left_out: int) -> float:
    """Returns how probably the interval holds the true median, if so many values are left out at both of its ends."""
    outside = sum(math.comb(count, number) for number in range(left_out + 1)) / 2.0**count
    return max(0.0, 1 - 2 * outside)


def efficiency(speedup: float, resources: float) -> float:
    """Returns the speed-up over how many times the resources are those of the baseline."""
    return speedup / resources


def find_knee(rates: Sequence[Tuple[int, float]], engine: str = "", share: float = KNEE_SHARE) -> Optional[Knee]:
    """Returns the knee of sizes and their rates; None of fewer than two sizes."""
    if len({size for size, _ in rates}) < 2:
        return None
    best_size, best = max(rates, key=lambda each: (each[1], -each[0]))
    return Knee(min(size for size, rate in rates if rate >= share * best), share, best_size, engine)


def factors(base: Trained, own: Trained) -> Factors:
    """Returns where the efficiency of a time to accuracy comes from."""
    resources = own.replicas / base.replicas
    total = efficiency(base.seconds / own.seconds, resources)
    hardware = efficiency(own.samples_per_s / base.samples_per_s, resources)
    statistical = base.samples / own.samples
    return Factors(total, hardware, statistical, total / (hardware * statistical))
