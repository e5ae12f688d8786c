"""How busy the IPUs of this process were between two moments, measured through gcipuinfo in a thread."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from typing import Callable, Dict, Iterator, Mapping, Optional, Tuple

from tf_ipu_dp import sdk_types
from tf_ipu_dp.monitoring import devices
from tf_ipu_dp.monitoring.devices import Ipu

_MAX_WAIT_S = 2.0


@dataclasses.dataclass(frozen=True)
class Usage:
    """How busy the IPUs of one process were between two marks."""

    seconds: float
    utilisation_pct: Optional[float]  # mean over the IPUs, weighted by time
    per_ipu_pct: Mapping[int, Optional[float]]
    ipus: Tuple[Ipu, ...]  # at the end
    problem: Optional[str] = None  # why values are not reported


class Sampler:
    """Measures the utilisation of the IPUs that a process has attached.

    gcipuinfo reports how busy an IPU was since the last query. So each answer counts for the time since the previous
    one, whether it was queried by the thread or by a mark. The first answer covers an unknown time and is not counted.
    """

    def __init__(
        self,
        library: sdk_types.GcipuinfoModule,
        *,
        pid: int,
        period_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if period_s < devices.MIN_PERIOD_S:
            raise ValueError(f"a period of {period_s} s is too short: gcipuinfo is queried once per second at most.")
        self._library, self._pid, self._period_s, self._clock = library, pid, period_s, clock
        self._inventory: Optional[sdk_types.DeviceInventory] = None
        self._unusable = False
        self._lock = threading.Lock()  # the library is not documented as thread-safe
        self._last_query: Optional[float] = None
        self._ipus: Tuple[Ipu, ...] = ()
        self._busy: Dict[int, Tuple[float, float]] = {}  # percent x seconds, and seconds
        self._problem: Optional[str] = None
        self._last_mark: Optional[float] = None
        self._stopped = threading.Event()
        self._thread: Optional[threading.Thread] = None

    def start(self) -> None:
        """Makes the first mark and starts the thread."""
        self.mark()
        self._thread = threading.Thread(target=self._run, name="ipu-sampler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread, without waiting long for a library that does not answer."""
        self._stopped.set()
        if self._thread:
            self._thread.join(_MAX_WAIT_S)
            self._thread = None

    def sample(self) -> None:
        """Queries the library once, as the thread does."""
        with self._acquire() as acquired:
            if acquired:
                self._query()

    def latest(self) -> Tuple[Ipu, ...]:
        """Returns the IPUs of the process as of the last query."""
        return self._ipus

    def mark(self, now: Optional[float] = None) -> Usage:
        """Returns the usage since the previous mark; `now` is a time of the sampler's clock."""
        busy: Dict[int, Tuple[float, float]] = {}
        with self._acquire() as acquired:
            if acquired:
                self._query()
                busy, self._busy = self._busy, busy
        now = self._clock() if now is None else now
        seconds, self._last_mark = now - (now if self._last_mark is None else self._last_mark), now
        per_ipu: Dict[int, Optional[float]] = {ipu.id: None for ipu in self._ipus if ipu.id is not None}
        per_ipu.update((number, weighted / span) for number, (weighted, span) in busy.items())
        total = sum(span for _, span in busy.values())
        mean = sum(weighted for weighted, _ in busy.values()) / total if total else None
        return Usage(seconds, mean, per_ipu, self._ipus, self._problem)

    @contextlib.contextmanager
    def _acquire(self) -> Iterator[bool]:
        """Waits for a query in the other thread; if the library hangs, only the first wait takes time."""
        acquired = self._lock.acquire(timeout=0 if self._problem == devices.NO_ANSWER else _MAX_WAIT_S)
        if not acquired:
            self._problem = devices.NO_ANSWER
        try:
            yield acquired
        finally:
            if acquired:
                self._lock.release()

    def _run(self) -> None:
        while not self._stopped.wait(self._period_s):
            if self._last_query is None or self._clock() - self._last_query >= self._period_s / 2:
                self.sample()

    def _query(self) -> None:
        if self._unusable:
            return
        try:
            ipus = self._read_attached_ipus()
        except Exception as error:
            self._unusable = self._inventory is None
            self._problem = f"gcipuinfo failed ({type(error).__name__}: {error})"
            return
        now = self._clock()
        span = now - self._last_query if self._last_query is not None else 0.0
        self._last_query = now
        self._ipus = ipus
        self._problem = None if ipus else f"gcipuinfo shows no IPU of process {self._pid}"
        for ipu in ipus:
            if span > 0 and ipu.id is not None and ipu.utilisation_pct is not None:
                weighted, seconds = self._busy.get(ipu.id, (0.0, 0.0))
                self._busy[ipu.id] = (weighted + ipu.utilisation_pct * span, seconds + span)

    def _read_attached_ipus(self) -> Tuple[Ipu, ...]:
        if self._inventory is None:
            inventory = self._library.gcipuinfo()
            inventory.setUpdateMode(True)
            self._inventory = inventory
        attached = [device for device in self._inventory.getDevices() if devices.read_pid(device) == self._pid]
        return tuple(map(devices.parse_device, attached))
