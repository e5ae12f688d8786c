"""Notices instances that do not connect.

Two times are watched, and poprun ends the instances and starts them again when one is over:

- All instances have called Horovod's init, and it does not return. Under heavy load Horovod's Gloo controller may hang
  while it connects the instances. It cannot be interrupted: after its own timeout it aborts the process.
- Some instances never call it, because they are stopped or hang. A program may load data before, so this time has no
  limit unless the program that starts poprun sets one (`STALL_VARIABLE`).
"""

from __future__ import annotations

import threading
from typing import Callable, List, Mapping, Optional, Set

TIMEOUT_VARIABLE = "IPU_EMULATOR_CONNECT_TIMEOUT"
STALL_VARIABLE = "IPU_EMULATOR_STALL_TIMEOUT"
_DEFAULT_TIMEOUT_S = 60.0
# Horovod's names of the first and the last group of instances that its init connects.
_FIRST_GROUP, _LAST_GROUPS = "global", "cross_"


def read_timeout_s(environ: Mapping[str, str]) -> float:
    """Returns the user's timeout for Horovod's init, or the default. Raises ValueError with a sentence."""
    seconds = _read_seconds(environ, TIMEOUT_VARIABLE, f"{_DEFAULT_TIMEOUT_S:g}", " The default is 60.")
    return min(seconds, read_stall_timeout_s(environ) or seconds)


def read_stall_timeout_s(environ: Mapping[str, str]) -> float:
    """Returns how long an instance may be stopped, or not have called Horovod's init; 0 for no limit."""
    if not environ.get(STALL_VARIABLE, "").strip():
        return 0.0
    return _read_seconds(environ, STALL_VARIABLE, "", "")


def _read_seconds(environ: Mapping[str, str], name: str, default: str, advice: str) -> float:
    text = environ.get(name, "").strip() or default
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < threading.TIMEOUT_MAX:
        raise ValueError(f"{name}={text} is not a number of seconds above 0.{advice}")
    return seconds


class ConnectionWatch:
    """Follows what instances write to and delete from the rendezvous server. Can be called from any thread."""

    def __init__(
        self,
        instances: int,
        timeout_s: float,
        on_timeout: Callable[[bool], None],
        on_missing: Callable[[List[int]], None] = lambda missing: None,
    ) -> None:
        """`on_timeout` is called after the timeout, with whether the instances had been connected before.

        `on_missing` is called with the instances that have not arrived in the time given to `expect_all`.
        """
        self._instances, self._timeout_s, self._on_timeout = instances, timeout_s, on_timeout
        self._lock = threading.Lock()
        self._arrived: Set[str] = set()
        self._connected = 0
        self._was_connected = False
        self._timer: Optional[threading.Timer] = None
        self._on_missing, self._arrival_timer = on_missing, _make_timer(0.0, lambda: None)

    @property
    def was_connected(self) -> bool:
        """Whether all instances have been connected to each other."""
        return self._was_connected

    def expect_all(self, within_s: float) -> None:
        """Expects that all instances arrive within a time from now, in which they are started. 0: no limit."""
        if within_s:
            self._arrival_timer = _make_timer(within_s, self._find_missing)
            self._arrival_timer.start()

    def written(self, group: str, key: str) -> None:
        """An instance has written its address in a group."""
        with self._lock:
            if group != _FIRST_GROUP or not key.isdigit() or self._timer is not None:
                return
            self._arrived.add(key)
            if len(self._arrived) == self._instances:
                self._connected = 0
                self._arrival_timer.cancel()
                self._timer = _make_timer(self._timeout_s, self._time_out)
                self._timer.start()

    def deleted(self, group: str) -> None:
        """An instance has connected to a group."""
        with self._lock:
            if not group.startswith(_LAST_GROUPS) or self._timer is None:
                return
            self._connected += 1
            if self._connected == self._instances:
                self._was_connected = True
                self._stop()

    def is_connecting(self) -> bool:
        """Whether instances wait in Horovod's init for the others."""
        with self._lock:
            return bool(self._arrived)

    def close(self) -> None:
        """Ends the watch."""
        with self._lock:
            self._arrival_timer.cancel()
            self._stop()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        self._arrived.clear()

    def _time_out(self) -> None:
        with self._lock:
            if self._timer is None:  # it was stopped just now
                return
            self._stop()
        self._on_timeout(self._was_connected)

    def _find_missing(self) -> None:
        with self._lock:
            missing = [index for index in range(self._instances) if str(index) not in self._arrived]
        if not self._was_connected and self._timer is None:
            self._on_missing(missing)


def _make_timer(seconds: float, action: Callable[[], None]) -> threading.Timer:
    timer = threading.Timer(seconds, action)
    timer.daemon = True
    return timer
