"""What gcipuinfo says about the IPUs, as typed records, and how busy those of one process were. Standard library only.

None means that a value is not reported. Nothing that the library does wrong reaches the caller: it is a reason in the
result.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import math
import re
import threading
import time
from typing import Any, Callable, Dict, Iterator, Mapping, Optional, Tuple

_SHORTEST_PERIOD_S = 1.0
_LONGEST_WAIT_S = 2.0
_PID = "user process id"
_SILENT = "gcipuinfo does not answer"
_NUMBER = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)\s*[a-z%°µ/]*\s*", re.ASCII | re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Ipu:
    """One IPU at one moment."""

    id: Optional[int] = None
    board_type: Optional[str] = None
    board_serial: Optional[str] = None
    board_ipu_index: Optional[int] = None
    architecture: Optional[str] = None
    clock_mhz: Optional[float] = None
    utilisation_pct: Optional[float] = None  # since the last query
    session_utilisation_pct: Optional[float] = None  # since the process attached
    power_w: Optional[float] = None
    board_power_w: Optional[float] = None
    board_temp_c: Optional[float] = None
    die_temp_c: Optional[float] = None
    error_state: Optional[str] = None
    host_link_errors: Optional[int] = None
    link_errors: Optional[int] = None
    user: Optional[str] = None
    pid: Optional[int] = None
    executable: Optional[str] = None
    start_time: Optional[str] = None  # ISO 8601, UTC
    replicas: Optional[int] = None
    partition: Optional[str] = None
    host: Optional[str] = None
    driver_version: Optional[str] = None
    firmware_version: Optional[str] = None


@dataclasses.dataclass(frozen=True)
class Usage:
    """How busy the IPUs of one process were between two marks."""

    seconds: float
    utilisation_pct: Optional[float]  # mean over the IPUs, weighted by time
    per_ipu_pct: Mapping[int, Optional[float]]
    ipus: Tuple[Ipu, ...]  # at the end
    problem: Optional[str] = None  # why something is not reported


def parse_number(text: Any) -> Optional[float]:
    """Returns the number of a text like `1330MHz`, `40.9 W` or `99.96%`; None where it is no such text."""
    match = _NUMBER.fullmatch(text) if isinstance(text, str) else None
    value = float(match.group(1)) if match else math.nan
    return value if math.isfinite(value) else None


def parse_device(mapping: Mapping[str, str]) -> Ipu:
    """Returns the record of one of gcipuinfo's mappings. Keys may be missing and values may be anything."""
    return Ipu(
        id=_whole(mapping, "id"),
        board_type=_text(mapping, "board type"),
        board_serial=_text(mapping, "board serial number"),
        board_ipu_index=_whole(mapping, "board ipu index"),
        architecture=_text(mapping, "ipu architecture"),
        clock_mhz=_number(mapping, "clock"),
        utilisation_pct=_number(mapping, "ipu utilisation"),
        session_utilisation_pct=_number(mapping, "ipu utilisation (session)"),
        power_w=_number(mapping, "ipu power"),
        board_power_w=_number(mapping, "total board power"),
        board_temp_c=_number(mapping, "average board temp"),
        die_temp_c=_number(mapping, "average die temp"),
        error_state=_text(mapping, "ipu error state"),
        host_link_errors=_whole(mapping, "host link correctable error count"),
        link_errors=_whole(mapping, "link correctable error count"),
        user=_text(mapping, "user name"),
        pid=_whole(mapping, _PID),
        executable=_text(mapping, "user executable"),
        start_time=_moment(mapping, "process start time"),
        replicas=_whole(mapping, "number of replicas"),
        partition=_text(mapping, "ipuof partition id"),
        host=_text(mapping, "ipuof host"),
        driver_version=_text(mapping, "driver version"),
        firmware_version=_text(mapping, "firmware version"),
    )


class Sampler:
    """Follows the IPUs that a process has attached.

    gcipuinfo tells how busy an IPU was since it was last asked. So every answer counts for the time since the one
    before, whoever asked: the thread, which asks now and then, or a mark. The first answer has no such time, and only
    begins it.
    """

    def __init__(
        self, library: Any, *, pid: int, period_s: float = 1.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if period_s < _SHORTEST_PERIOD_S:
            raise ValueError(f"a period of {period_s} s is too short: gcipuinfo is asked once per second at most.")
        self._library, self._pid, self._period_s, self._clock = library, pid, period_s, clock
        self._inventory: Any = None
        self._unusable = False
        self._guard = threading.Lock()  # nobody says that the library may be used by two threads at once
        self._looked: Optional[float] = None
        self._ipus: Tuple[Ipu, ...] = ()
        self._busy: Dict[int, Tuple[float, float]] = {}  # percent x seconds, and seconds
        self._problem: Optional[str] = None
        self._marked: Optional[float] = None
        self._stopped = threading.Event()
        self._thread: Optional[threading.Thread] = None

    def start(self) -> None:
        """Makes the first mark and starts the thread."""
        self.mark()
        self._thread = threading.Thread(target=self._run, name="ipu-telemetry", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread. A library that does not answer is not waited for."""
        self._stopped.set()
        if self._thread:
            self._thread.join(_LONGEST_WAIT_S)
            self._thread = None

    def look(self) -> None:
        """Asks the library once, as the thread does."""
        with self._turn() as granted:
            if granted:
                self._look()

    def latest(self) -> Tuple[Ipu, ...]:
        """Returns the IPUs of the process as the library told them last."""
        return self._ipus

    def mark(self, now: Optional[float] = None) -> Usage:
        """Returns the usage since the previous mark; `now` is a time of the sampler's own clock."""
        busy: Dict[int, Tuple[float, float]] = {}
        with self._turn() as granted:
            if granted:
                self._look()
                busy, self._busy = self._busy, busy
        now = self._clock() if now is None else now
        seconds, self._marked = now - (now if self._marked is None else self._marked), now
        per_ipu: Dict[int, Optional[float]] = {ipu.id: None for ipu in self._ipus if ipu.id is not None}
        per_ipu.update((number, weighted / span) for number, (weighted, span) in busy.items())
        total = sum(span for _, span in busy.values())
        mean = sum(weighted for weighted, _ in busy.values()) / total if total else None
        return Usage(seconds, mean, per_ipu, self._ipus, self._problem)

    @contextlib.contextmanager
    def _turn(self) -> Iterator[bool]:
        """Waits until the library is free, but only once for one that hangs."""
        granted = self._guard.acquire(timeout=0 if self._problem == _SILENT else _LONGEST_WAIT_S)
        if not granted:
            self._problem = _SILENT
        try:
            yield granted
        finally:
            if granted:
                self._guard.release()

    def _run(self) -> None:
        while not self._stopped.wait(self._period_s):
            if self._looked is None or self._clock() - self._looked >= self._period_s / 2:
                self.look()

    def _look(self) -> None:
        if self._unusable:
            return
        try:
            found = self._read()
        except Exception as error:
            self._unusable = self._inventory is None
            self._problem = f"gcipuinfo failed ({type(error).__name__}: {error})"
            return
        now = self._clock()
        span = now - self._looked if self._looked is not None else 0.0
        self._looked = now
        self._ipus = found
        self._problem = None if self._ipus else f"gcipuinfo shows no IPU of process {self._pid}"
        for ipu in self._ipus:
            if span > 0 and ipu.id is not None and ipu.utilisation_pct is not None:
                weighted, seconds = self._busy.get(ipu.id, (0.0, 0.0))
                self._busy[ipu.id] = (weighted + ipu.utilisation_pct * span, seconds + span)

    def _read(self) -> Tuple[Ipu, ...]:
        if self._inventory is None:
            inventory = self._library.gcipuinfo()
            inventory.setUpdateMode(True)
            self._inventory = inventory
        own = [device for device in self._inventory.getDevices() if _whole(device, _PID) == self._pid]
        return tuple(map(parse_device, own))


def _value(mapping: Mapping[str, str], key: str) -> Any:
    return mapping[key] if key in mapping else None  # noqa: SIM401 a map of C++ may have no get


def _text(mapping: Mapping[str, str], key: str) -> Optional[str]:
    value = _value(mapping, key)
    text = value.strip() if isinstance(value, str) else ""
    return text if text and text != "N/A" else None


def _number(mapping: Mapping[str, str], key: str) -> Optional[float]:
    return parse_number(_value(mapping, key))


def _whole(mapping: Mapping[str, str], key: str) -> Optional[int]:
    number = _number(mapping, key)
    return int(number) if number is not None and number.is_integer() else None


def _moment(mapping: Mapping[str, str], key: str) -> Optional[str]:
    with contextlib.suppress(ValueError):
        return datetime.datetime.strptime(_text(mapping, key) or "", "%Y%m%dT%H%M%SZ").isoformat() + "Z"
    return None
