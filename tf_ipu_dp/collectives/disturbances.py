"""What keeps a collective from its ideal time: jitter, late starts, slow ranks, slow links, lost packets. Pure."""

from __future__ import annotations

import dataclasses
from typing import Callable, Tuple

from tf_ipu_dp import cli
from tf_ipu_dp.collectives import noise, quantities
from tf_ipu_dp.collectives.loss import Loss

NO_JITTER = noise.Law()
NO_LATENESS = noise.StartLaw()
NO_LOSS = Loss()


@dataclasses.dataclass(frozen=True)
class Disturbances:
    """All of them; the defaults are none."""

    jitter: noise.Law = NO_JITTER  # of each step of each rank
    trial_jitter: noise.Law = NO_JITTER  # of the whole trial, the same on all ranks
    start: noise.StartLaw = NO_LATENESS
    slow_ranks: int = 0
    slow_factor: float = 1.0  # how many times as long their steps take
    slow_links: int = 0
    slow_link_bytes_per_s: float = 0.0
    loss: Loss = NO_LOSS

    def check(self, ranks: int) -> None:
        """Raises UsageError if there are more slow ranks or links than ranks."""
        for what, count in (("--stragglers", self.slow_ranks), ("--slow_links", self.slow_links)):
            if count > ranks:
                raise cli.UsageError(f"{what}={count} is more than the {cli.count(ranks, 'replica')} there are.")

    @property
    def are_none(self) -> bool:
        """Whether every trial takes the same time."""
        laws = self.jitter.is_none and self.trial_jitter.is_none and self.start.is_none
        return laws and self.loss.is_none and not self.slow_ranks and not self.slow_links


def parse_stragglers(text: str) -> Tuple[int, float]:
    """Returns the ranks and the factor of a text like 3:2.0."""
    count, factor = _pair(text, "COUNT:FACTOR, for example 3:2.0", float)
    if not 1 <= factor <= 1e6:
        raise ValueError(f"{text!r} has a factor that is not from 1 to 1,000,000.")
    return count, factor


def parse_slow_links(text: str) -> Tuple[int, float]:
    """Returns the links and the rate of a text like 1:25Mbit."""
    return _pair(text, "COUNT:RATE, for example 1:25Mbit", quantities.parse_rate)


def _pair(text: str, form: str, convert: Callable[[str], float]) -> Tuple[int, float]:
    first, colon, second = text.strip().partition(":")
    if not colon or not first.isdigit() or len(first) > 9:
        raise ValueError(f"{text!r} is not {form}.")
    try:
        return int(first), convert(second)
    except ValueError as error:
        reason = str(error) if convert is not float else f"{second!r} is not a number."
        raise ValueError(f"{text!r} is not {form}: {reason}") from None
