"""Notices instances that do not connect: all of them have called Horovod's init, and it does not return.

Under heavy load Horovod's Gloo controller may hang while it connects the instances. It cannot be interrupted: after its
own timeout it aborts the process. So poprun ends the instances and starts them again. Instances that have not called
init yet are waited for: they may be loading data.
"""

from __future__ import annotations

import threading
from typing import Callable, Mapping, Optional, Set

TIMEOUT_VARIABLE = "IPU_EMULATOR_CONNECT_TIMEOUT"
_DEFAULT_TIMEOUT_S = 60.0
# Horovod's names of the first and the last group of instances that its init connects.
_FIRST_GROUP, _LAST_GROUPS = "global", "cross_"


def read_timeout_s(environ: Mapping[str, str]) -> float:
    """Returns the user's timeout, or the default. Raises ValueError with a sentence."""
    text = environ.get(TIMEOUT_VARIABLE, "").strip() or f"{_DEFAULT_TIMEOUT_S:g}"
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < threading.TIMEOUT_MAX:
        raise ValueError(f"{TIMEOUT_VARIABLE}={text} is not a number of seconds above 0. The default is 60.")
    return seconds


class ConnectionWatch:
    """Follows what instances write to and delete from the rendezvous server. Can be called from any thread."""

    def __init__(self, instances: int, timeout_s: float, on_timeout: Callable[[bool], None]) -> None:
        """`on_timeout` is called after the timeout, with whether the instances had been connected before."""
        self._instances, self._timeout_s, self._on_timeout = instances, timeout_s, on_timeout
        self._lock = threading.Lock()
        self._arrived: Set[str] = set()
        self._connected = 0
        self._was_connected = False
        self._timer: Optional[threading.Timer] = None

    def written(self, group: str, key: str) -> None:
        """An instance has written its address in a group."""
        with self._lock:
            if group != _FIRST_GROUP or not key.isdigit() or self._timer is not None:
                return
            self._arrived.add(key)
            if len(self._arrived) == self._instances:
                self._connected = 0
                self._timer = threading.Timer(self._timeout_s, self._time_out)
                self._timer.daemon = True
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
