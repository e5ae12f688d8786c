"""How the micro batches of one weight update are divided into passes. Pure."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Passes:
    """What goes through the graph at once: some accumulation steps of some replicas, one micro batch each."""

    steps: int
    replicas: int

    @property
    def micro_batches(self) -> int:
        return self.steps * self.replicas


SLICED = Passes(steps=1, replicas=1)


def plan_passes(
    *, micro_batch_size: int, replicas: int, accumulation: int, most_samples: int, fewest_passes: int
) -> Passes:
    """Returns the largest passes of equal size that have at most `most_samples` samples, or one micro batch.

    An update has at least `fewest_passes` of them, if it has as many micro batches. A pass has several accumulation
    steps only if it has all replicas: the state of the replicas of one step must be known before their next step.
    """
    most = min(most_samples // micro_batch_size, replicas * accumulation // fewest_passes)
    if replicas > most:
        return Passes(1, _largest_divisor(replicas, max(most, 1)))
    return Passes(_largest_divisor(accumulation, most // replicas), replicas)


def _largest_divisor(number: int, most: int) -> int:
    return next(each for each in range(min(number, most), 0, -1) if number % each == 0)
