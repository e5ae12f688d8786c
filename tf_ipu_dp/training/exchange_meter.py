"""How long the exchanges of gradients take, and which instance is last, by comparing the times of all. No TensorFlow.

The times travel with the metrics that instances exchange anyway, so that measuring adds no collective.
"""

from __future__ import annotations

from typing import Dict, List, Optional, Sequence

from tf_ipu_dp.runs.exchange_times import ExchangeTimes
from tf_ipu_dp.sdk import Sdk

# Seconds that an instance sends at a time. Metrics are exchanged about four times a second, or once per execution, so
# that only an execution with more updates than this has exchanges that are counted and not compared.
_COMPARED = 256


class ExchangeMeter:
    """The exchanges of gradients of one run. `times` is None where they are not reported, or nothing is exchanged."""

    def __init__(self, sdk: Sdk, instances: int) -> None:
        self._sdk, self._instances = sdk, instances
        self._seen = 0
        self._last: Dict[int, int] = {}  # since the last record: exchanges in which an instance was last
        self.times: Optional[ExchangeTimes] = None

    def take(self) -> List[float]:
        """Returns what `add` needs of this instance: always as many numbers, so that they can be gathered."""
        reported = self._sdk.exchange_times() if self._instances > 1 else None
        if reported is None:
            return []
        total, recent = reported
        made, self._seen = total - self._seen, total
        seconds = recent[-min(made, _COMPARED) :] if made else []
        return [float(made), *seconds, *[0.0] * (_COMPARED - len(seconds))]

    def add(self, everyone: Sequence[Sequence[float]]) -> None:
        """Adds the exchanges since the last call, from what `take` returned on every instance."""
        made = min((int(numbers[0]) for numbers in everyone if numbers), default=0)
        if made:
            new = ExchangeTimes.of([numbers[1 : 1 + min(made, _COMPARED)] for numbers in everyone], exchanges=made)
            self.times = self.times.merged(new) if self.times else new
            for each in new.arrivals:
                self._last[each.instance] = self._last.get(each.instance, 0) + each.last

    def take_last(self) -> Dict[int, int]:
        """Returns, by instance, in how many exchanges since the last call it was the last; empty if not known."""
        last, self._last = self._last, {}
        return last
