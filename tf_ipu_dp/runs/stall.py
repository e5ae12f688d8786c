"""Finds the instance that keeps a job from making progress. Pure: takes heartbeats and times, returns a sentence."""

from __future__ import annotations

import dataclasses
from typing import Dict, Optional, Tuple

from tf_ipu_dp.runs.heartbeat import INPUT, OTHERS, PERIOD_S, Status

# During a stall, an instance without a heartbeat for this long is the cause.
_NO_HEARTBEAT_DURING_STALL_S = 5 * PERIOD_S


@dataclasses.dataclass(frozen=True)
class Stall:
    """The instance that blocks the others, and a sentence that names it."""

    culprit: Status
    sentence: str


class StallDetector:
    """The last heartbeat of each other instance and when it was received, by this instance's clock."""

    def __init__(self) -> None:
        self._received: Dict[int, Tuple[Status, float]] = {}

    def observe(self, status: Status, now: float) -> None:
        """Adds a heartbeat. One with the same time as before is not new; the clocks of hosts may differ."""
        before = self._received.get(status.instance)
        if before is None or before[0].time != status.time:
            self._received[status.instance] = (status, now)

    def remove(self, instance: int) -> None:
        """Forgets an instance that has ended."""
        self._received.pop(instance, None)

    def knows(self, instance: int) -> bool:
        """Whether another instance has a heartbeat and has not ended."""
        return instance in self._received

    def discount_pause(self, seconds: float) -> None:
        """Excludes seconds in which this process was stopped from the time since all heartbeats."""
        self._received = {number: (status, at + seconds) for number, (status, at) in list(self._received.items())}

    def find_stall(self, own: Status, now: float, limit_s: float, watched: bool) -> Optional[Stall]:
        """Returns the stall and the instance that causes it; None while there was progress within the limit.

        `watched` is false in phases of unknown length, in which only a missing heartbeat counts. If the culprit is not
        known, this instance is named.
        """
        others = list(self._received.values())  # a copy: another thread adds to it
        stalled = watched and own.still_s > limit_s
        max_age_s = min(limit_s, _NO_HEARTBEAT_DURING_STALL_S) if stalled else limit_s
        missing = [(status, now - at) for status, at in others if now - at > max_age_s]
        if missing:
            status, seconds = max(missing, key=lambda each: each[1])
            return Stall(
                status,
                f"No heartbeat for {seconds:.0f} s from {status.name()}: it is stopped, or its host or the network to "
                f"it is down. It was {status.place()}.",
            )
        if not stalled:
            return None
        known = [own, *(status for status, _ in others)]
        suspects = [status for status in known if status.waits_for == INPUT]
        suspects = suspects or [status for status in known if status.waits_for != OTHERS and len(known) > 1]
        if not suspects:
            subject = "this instance is" if len(known) <= 1 else f"all {len(known)} instances are"
            return Stall(
                own,
                f"No progress for {own.still_s:.0f} s: {subject} {own.place()}. The device, its input or the network "
                "between the hosts does not respond.",
            )
        status = max(suspects, key=lambda each: each.still_s)
        seconds = max(status.still_s, own.still_s)
        return Stall(status, f"{status.name()} has made no progress for {seconds:.0f} s: it is {status.place()}.")
