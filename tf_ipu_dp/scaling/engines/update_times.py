"""The times of single updates in a program of another engine, which a calibration asks for. Pure."""

from __future__ import annotations

from typing import List

from tf_ipu_dp.scaling.engines.protocol import Order

LEAST = 3  # timed updates, however slow they are


class UpdateTimes:
    """Collects the times of the timed updates, if the order wants them."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._began = self._last = 0.0
        self.seconds: List[float] = []

    def begin(self, now: float) -> None:
        """The first timed update begins."""
        self._began = self._last = now

    def end_update(self, now: float) -> bool:
        """A timed update has ended; returns whether it is the last one because the time is over."""
        self.seconds.append(now - self._last)
        self._last = now
        most_s = self._order.most_s
        return most_s is not None and now - self._began >= most_s and len(self.seconds) >= LEAST
