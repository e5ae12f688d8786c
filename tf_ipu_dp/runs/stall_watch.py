"""Watches the heartbeats of a run, and reports a stall once. Costs 2 (N - 1) reads a second for N instances.

Only the leader reads all heartbeats and decides which instance has stalled. The others watch what the leader cannot:
the heartbeat of the leader, and whether their own input has stopped.
"""

from __future__ import annotations

import collections
import threading
import time
from pathlib import Path
from typing import Callable, Deque, List, Optional

from tf_ipu_dp.runs import heartbeat
from tf_ipu_dp.runs.heartbeat import INPUT, PERIOD_S, StatusReporter
from tf_ipu_dp.runs.stall import Stall, StallDetector

_LEADER = 0
# The leader reports first; its exit ends the others before they report the same.
_FOLLOWER_DELAY_S = 0.5
_MAX_FOLLOWER_DELAY_S = 5.0
_RECENT_STEPS = 20


class StallWatch:
    """Calls `on_stall` once, from a separate thread, after `limit_s` without progress (0: never)."""

    def __init__(
        self,
        folder: Path,
        reporter: StatusReporter,
        *,
        limit_s: float,
        on_stall: Callable[[Stall], None],
    ) -> None:
        self._folder, self._reporter, self._limit_s, self._on_stall = folder, reporter, limit_s, on_stall
        own = reporter.status()
        self._instance = own.instance
        everyone = range(own.instances) if own.instance == _LEADER else (_LEADER,)
        self._others = [instance for instance in everyone if instance != own.instance]
        self._detector = StallDetector()
        self._step_times: Deque[float] = collections.deque(maxlen=_RECENT_STEPS)
        self._checked_at = self._no_input_since = time.monotonic()
        self._stopped = threading.Event()
        self._threads: List[threading.Thread] = []

    def start(self) -> None:
        """Starts watching, where there is a limit."""
        # Reads hang if the network to a shared folder is down; the check must continue meanwhile.
        for action in (self.read_others, self._check_and_report) if self._limit_s else ():
            thread = threading.Thread(target=self._repeat, args=(action,), name="stall watch", daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """Stops watching."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(2 * PERIOD_S)

    def expect_step_time(self, seconds: float) -> None:
        """Records how long an execution took: the limit is at least a multiple of recent ones."""
        self._step_times.append(seconds)

    def read_others(self) -> None:
        """Reads the heartbeats that this instance watches, once."""
        for instance in self._others:
            path = heartbeat.path_of(self._folder, instance)
            found = heartbeat.read(path)
            if found is not None:
                self._detector.observe(found, time.monotonic())
            elif not path.exists():
                self._detector.remove(instance)

    def check(self) -> Optional[Stall]:
        """Returns the stall that this instance has to report, if there is one."""
        own, now = self._reporter.status(), time.monotonic()
        pause, self._checked_at = now - self._checked_at, now
        if pause > 3 * PERIOD_S:
            # This process was stopped, or the machine slept: heartbeats that it did not receive are not missing.
            self._detector.discount_pause(pause)
            self._reporter.discount_pause(pause)
            return None
        # Waiting for input too long is a stall in any phase.
        if own.waits_for != INPUT:
            self._no_input_since = now
        without_input = now - self._no_input_since > self._limit_s
        watched = self._reporter.watched or without_input
        limit_s = max(self._limit_s, 3 * max(tuple(self._step_times), default=0.0))
        leader_decides = self._instance != _LEADER and self._detector.knows(_LEADER) and not without_input
        if leader_decides and watched:
            # Only the leader knows which instance the others wait for; this one watches the leader's heartbeat.
            watched = False
            limit_s = self._limit_s if own.still_s <= limit_s else min(self._limit_s, 5 * PERIOD_S)
        return self._detector.find_stall(own, now, limit_s, watched)

    def _check_and_report(self) -> None:
        found = self.check()
        if found and not self._stopped.wait(min(_FOLLOWER_DELAY_S * self._instance, _MAX_FOLLOWER_DELAY_S)):
            self._stopped.set()
            self._on_stall(found)

    def _repeat(self, action: Callable[[], None]) -> None:
        while not self._stopped.wait(PERIOD_S):
            action()
