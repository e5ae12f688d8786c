"""What gcipuinfo says about the IPUs, as typed records, and how busy those of one process were. Standard library only.

None means that a value is not reported. Nothing that the library does wrong reaches the caller: it is a reason in the
result. A `Reader` looks at all IPUs from outside; the Poplar SDK's library, which may crash or hang, is then kept in a
process of its own. A `Sampler` follows the IPUs of the process that it runs in.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.machinery
import importlib.util
import json
import math
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from tf_ipu_dp import emulator

_SHORTEST_PERIOD_S = 1.0
_LONGEST_WAIT_S = 2.0
_PID = "user process id"
_SILENT = "gcipuinfo does not answer"
_NO_IPU = "gcipuinfo finds no IPU"
_FIRST_ANSWER_S = 10.0
_NEXT_ANSWER_S = 5.0
_PAUSE_S = 10.0  # before a library that has failed as a whole is started again
_MOST_REASON = 300
_PR_SET_PDEATHSIG = 1
_NUMBER = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)\s*[a-z%°µ/]*\s*", re.ASCII | re.IGNORECASE)


class TelemetryError(Exception):
    """The devices cannot be read. The text is the reason, without a full stop."""


@dataclasses.dataclass(frozen=True)
class Ipu:
    """One IPU at one moment."""

    id: Optional[int] = None
    board_type: Optional[str] = None
    board_variant: Optional[str] = None
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
    input_wait_pct: Optional[float] = None  # of the time since the last query; told by the emulator alone
    heartbeat_age_s: Optional[float] = None  # since the process last told; by the emulator alone
    problem: Optional[str] = None  # why this IPU does not answer
    other: Mapping[str, str] = dataclasses.field(default_factory=dict)  # what has no field here, as it was told

    @property
    def emulated(self) -> bool:
        return self.board_variant == "emulated"

    @property
    def free(self) -> bool:
        """Whether it is known that no process holds it."""
        return self.id is not None and self.problem is None and not self.pid and self.user is None


@dataclasses.dataclass(frozen=True)
class Look:
    """All IPUs at one moment."""

    time: float  # seconds since the epoch
    ipus: Tuple[Ipu, ...]
    problem: Optional[str] = None  # why none of them answers


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
    values = {name: read(mapping, key) for name, (key, read) in _FIELDS.items()}
    other = {str(key): str(mapping[key]) for key in mapping if key not in _KEYS}
    return Ipu(**values, other=other)


class Reader:
    """Looks at all IPUs, and never fails: what goes wrong is a reason in the look."""

    def __init__(
        self,
        name: str,
        library: Any,
        note: Optional[str] = None,
        period_s: float = 0.0,
        failure: Optional[str] = None,
    ) -> None:
        self.name, self.note = name, note  # poplar or emulator; why it is not the other
        self.failure = failure  # why the Poplar SDK, which is there, cannot be read; these are the emulator's IPUs then
        self._library, self._period_s = library, period_s
        self._known: Tuple[Ipu, ...] = ()
        self._last: Optional[Tuple[float, Look]] = None

    def look(self) -> Look:
        """Returns the IPUs. Those that were seen before and do not answer now are there with the reason.

        Who looks again before the period is over gets the same.
        """
        now = time.monotonic()
        if self._last is None or now - self._last[0] >= self._period_s:
            self._last = (now, self._look())
        return self._last[1]

    def read_faults(self) -> List[str]:
        """Returns the faults of gcipuinfo's health check, in words. TelemetryError where it cannot be made."""
        return parse_health(self._library.ask("health"))

    def read_event(self, path: str) -> Dict[str, str]:
        """Returns the last event that an application has left there; nothing, if none. TelemetryError as above."""
        found = self._library.ask("event", path)
        return {str(key): str(found[key]) for key in found} if isinstance(found, dict) else {}

    def close(self) -> None:
        """Ends the library's process, if it has one."""
        self._library.close()

    def _look(self) -> Look:
        now = time.time()
        try:
            answers = self._library.ask("devices")
            told = [parse_device(answer) if isinstance(answer, dict) else None for answer in answers]
            ipus = tuple(
                ipu or self._parse_failure(index, answer, told)
                for index, (ipu, answer) in enumerate(zip(told, answers))
            )
        except TelemetryError as error:
            return Look(now, tuple(_silenced(ipu, str(error)) for ipu in self._known), str(error))
        self._known = ipus
        return Look(now, ipus, None if ipus else _NO_IPU)

    def _parse_failure(self, index: int, answer: Any, told: Sequence[Optional[Ipu]]) -> Ipu:
        """Returns the row of a device that fails, of which the id is not made up."""
        number, reason = answer if isinstance(answer, list) and len(answer) == 2 else (None, answer)
        number = _whole({"id": str(number)}, "id")
        if number is not None:
            known = next((ipu for ipu in self._known if ipu.id == number), Ipu(id=number))
        elif len(self._known) == len(told):
            known = self._known[index]
        else:
            # At the first look the others tell whether ids count the devices.
            counted = not self._known and all(ipu is None or ipu.id == place for place, ipu in enumerate(told))
            known = Ipu(id=index if counted else None)
        return _silenced(known, _reason(reason))


def open_reader(choice: str = "auto") -> Reader:
    """Returns a reader of the Poplar SDK's devices or of the emulator's. TelemetryError: why --sdk=poplar cannot be."""
    missing = failure = None
    if choice != "emulator":
        try:
            found = importlib.util.find_spec("gcipuinfo")
        except (ImportError, ValueError):
            found = None
        if emulator.is_installed() or _is_emulated(found):
            missing = "the emulator stands in for the Poplar SDK in this process"
        elif found is None:
            missing = "the Poplar SDK is not enabled here (no module gcipuinfo)"
        else:
            reader = Reader("poplar", _Apart(), period_s=0.9 * _SHORTEST_PERIOD_S)
            first = reader.look()
            if first.problem is None:
                return reader
            reader.close()
            missing = first.problem
            failure = None if missing == _NO_IPU else missing
        if choice == "poplar":
            raise TelemetryError(missing)
    from tf_ipu_dp.emulator.sdk_api import gcipuinfo

    return Reader("emulator", _Here(gcipuinfo), missing, failure=failure)


def parse_health(text: Any) -> List[str]:
    """Returns one sentence per fault of what checkHealthOfDevices says; no input breaks it."""
    try:
        value = json.loads(text) if isinstance(text, str) and text.strip() else {}
    except ValueError:
        return [f"the health check's answer is no JSON: {_reason(text)}"]
    hosts = value.get("hosts") if isinstance(value, dict) else None
    if not value:
        return []
    if not isinstance(hosts, dict):
        return [f"the health check reports {_reason(json.dumps(value))}"]
    faults = []
    for host, entries in hosts.items():
        for entry in entries if isinstance(entries, list) else [entries]:
            fault = entry if isinstance(entry, dict) else {"error": entry}
            where = [f"{label} {fault[key]}" for label, key in _HEALTH_PLACES.items() if fault.get(key) is not None]
            faults.append(_reason(f"{fault.get('error', 'unknown')} error: {', '.join([*where, f'host {host}'])}"))
    return faults


def serve(parent: int) -> None:
    """Answers a Reader's questions, one JSON line each, in the process that is kept apart. Ends with its parent."""
    _end_with_parent()
    if os.getppid() != parent:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a key press for the monitor, which ends this process
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the library prints is no answer
    here: Optional[_Here] = None
    for line in sys.stdin:
        try:
            here = here or _Here(importlib.import_module("gcipuinfo"))
            answer = {"answer": here.ask(*json.loads(line))}
        except TelemetryError as error:
            answer = {"problem": str(error)}
        except Exception as error:
            answer = {"problem": f"gcipuinfo cannot be imported ({_reason(error)})"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


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


class _Here:
    """The library in this process."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._inventory: Any = None

    def ask(self, question: str, *words: str) -> Any:
        """Returns the answer as plain values: of devices a list, with the reason in the place of each that fails.

        The id of one that fails is before the reason, where that much can be read.
        """
        try:
            if self._inventory is None:
                inventory = self._library.gcipuinfo()
                inventory.setUpdateMode(True)
                self._inventory = inventory
            if question == "health":
                return str(self._inventory.checkHealthOfDevices())
            if question == "event":
                found = self._inventory.getLastAppEventRecord(*words)
                return {str(key): str(found[key]) for key in found}
            return [_plain(device) for device in self._inventory.getDevices()]
        except Exception as error:
            raise TelemetryError(f"gcipuinfo failed ({_reason(error)})") from error

    def close(self) -> None:
        """Has nothing to end."""


class _Apart:
    """The Poplar SDK's library in a process of its own: it may crash, hang or print what it likes."""

    def __init__(self) -> None:
        self._process: Optional[subprocess.Popen[bytes]] = None
        self._failed: Optional[Tuple[float, str]] = None
        self._rest = b""
        self._guard = threading.Lock()

    def ask(self, *question: str) -> Any:
        """Returns the answer, or a TelemetryError after some seconds at most."""
        with self._guard:
            limit_s = _NEXT_ANSWER_S
            if self._process is None:
                if self._failed and time.monotonic() - self._failed[0] < _PAUSE_S:
                    raise TelemetryError(self._failed[1])
                self._start()
                limit_s = _FIRST_ANSWER_S
            try:
                answer = json.loads(self._exchange(json.dumps(question).encode() + b"\n", limit_s))
            except (OSError, ValueError, EOFError) as error:
                problem = self._why(error, limit_s)
                self._failed = (time.monotonic(), problem)
                self._end()
                raise TelemetryError(problem) from error
            except BaseException:  # an answer that comes later would be taken for that to the next question
                self._end()
                raise
        if "answer" not in answer:
            raise TelemetryError(answer.get("problem", _SILENT))
        return answer["answer"]

    def close(self) -> None:
        with self._guard:
            self._end()

    def _start(self) -> None:
        root = str(Path(__file__).resolve().parents[2])
        serve = f"from tf_ipu_dp.monitoring import devices; devices.serve({os.getpid()})"
        code = f"import sys; sys.path.append({root!r}); {serve}"
        self._rest = b""
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            bufsize=0,
        )  # fmt: skip

    def _exchange(self, question: bytes, limit_s: float) -> bytes:
        assert self._process and self._process.stdin and self._process.stdout
        self._process.stdin.write(question)
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._rest:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                raise TimeoutError
            found = os.read(self._process.stdout.fileno(), 1 << 16)
            if not found:
                raise EOFError
            self._rest += found
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _why(self, error: BaseException, limit_s: float) -> str:
        if isinstance(error, TimeoutError):
            return f"{_SILENT} within {limit_s:.0f} s"
        assert self._process
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(1.0)
            if code < 0:
                return f"gcipuinfo ended its process by signal {-code} ({signal.strsignal(-code)})"
            return f"gcipuinfo ended its process with exit code {code}"
        return f"gcipuinfo's answer makes no sense ({_reason(error)})"

    def _end(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                if stream:
                    with contextlib.suppress(OSError):
                        stream.close()
            self._process = None


def _end_with_parent() -> None:
    """Lets Linux kill this process when the thread that started it ends: a library that hangs notices nothing."""
    if sys.platform == "linux":
        with contextlib.suppress(ImportError, OSError, AttributeError):
            import ctypes

            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))


def _plain(device: Any) -> Any:
    try:
        return {str(key): str(device[key]) for key in device}
    except Exception as error:
        reason = f"gcipuinfo failed ({_reason(error)})"
    with contextlib.suppress(Exception):
        return [str(device["id"]), reason]
    return reason


def _is_emulated(found: Optional[importlib.machinery.ModuleSpec]) -> bool:
    """Whether it is the emulator's module under the SDK's name."""
    origin = found.origin if found else None
    return bool(origin) and Path(str(origin)).resolve().parent == Path(emulator.__file__).resolve().parent


def _silenced(known: Ipu, problem: str) -> Ipu:
    """Returns what does not change of an IPU, and why nothing else is known."""
    return Ipu(
        id=known.id,
        board_type=known.board_type,
        board_variant=known.board_variant,
        board_serial=known.board_serial,
        board_ipu_index=known.board_ipu_index,
        architecture=known.architecture,
        partition=known.partition,
        problem=problem,
    )


def _reason(error: Any) -> str:
    text = f"{type(error).__name__}: {error}" if isinstance(error, BaseException) else str(error)
    text = " ".join(text.split())
    return text if len(text) <= _MOST_REASON else f"{text[: _MOST_REASON - 3]}..."


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


_HEALTH_PLACES = {"IPU": "id", "partition": "partition", "board IPU": "board ipu index"}
_FIELDS: Dict[str, Tuple[str, Callable[[Mapping[str, str], str], Any]]] = {
    "id": ("id", _whole),
    "board_type": ("board type", _text),
    "board_variant": ("board variant", _text),
    "board_serial": ("board serial number", _text),
    "board_ipu_index": ("board ipu index", _whole),
    "architecture": ("ipu architecture", _text),
    "clock_mhz": ("clock", _number),
    "utilisation_pct": ("ipu utilisation", _number),
    "session_utilisation_pct": ("ipu utilisation (session)", _number),
    "power_w": ("ipu power", _number),
    "board_power_w": ("total board power", _number),
    "board_temp_c": ("average board temp", _number),
    "die_temp_c": ("average die temp", _number),
    "error_state": ("ipu error state", _text),
    "host_link_errors": ("host link correctable error count", _whole),
    "link_errors": ("link correctable error count", _whole),
    "user": ("user name", _text),
    "pid": (_PID, _whole),
    "executable": ("user executable", _text),
    "start_time": ("process start time", _moment),
    "replicas": ("number of replicas", _whole),
    "partition": ("ipuof partition id", _text),
    "host": ("ipuof host", _text),
    "driver_version": ("driver version", _text),
    "firmware_version": ("firmware version", _text),
    "input_wait_pct": ("emulated input wait", _number),
    "heartbeat_age_s": ("emulated heartbeat age", _number),
}
_KEYS = frozenset(key for key, _ in _FIELDS.values())
