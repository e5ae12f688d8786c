"""What gcipuinfo reports about the IPUs, as typed records. Pure: takes mappings and texts, returns records.

None means that a value is not reported. Parsers accept any text from the library.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import math
import re
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

MIN_PERIOD_S = 1.0  # gcipuinfo may be queried once per second at most
NO_ANSWER = "gcipuinfo does not answer"
# Attributes of an IPU that do not change while it is used: the inventory.
CONSTANT = (
    "id", "board_type", "board_variant", "board_serial", "board_ipu_index", "architecture", "partition", "host",
    "driver_version", "firmware_version", "server_version", "gateway_version", "routing_id", "routing_type",
)  # fmt: skip
_PID = "user process id"
_MAX_REASON = 300
_NUMBER = re.compile(r"([-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:e[-+]?\d+)?)\s*[a-z%°µ/]*", re.ASCII | re.IGNORECASE)
# A longer text is no number, and trying it takes time.
_MAX_NUMBER = 64
# No sensor reports more. Sums of larger numbers would overflow, and tables would be as wide as their digits.
_MAX_VALUE = 1e15


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
    server_version: Optional[str] = None
    gateway_version: Optional[str] = None
    routing_id: Optional[str] = None
    routing_type: Optional[str] = None
    input_wait_pct: Optional[float] = None  # of the time since the last query; emulator only
    heartbeat_age_s: Optional[float] = None  # since the process last reported; emulator only
    problem: Optional[str] = None  # why this IPU does not answer
    other: Mapping[str, str] = dataclasses.field(default_factory=dict)  # attributes without a field here

    @property
    def emulated(self) -> bool:
        return self.board_variant == "emulated"

    @property
    def free(self) -> bool:
        """Whether it is certain that no process holds it."""
        return self.id is not None and self.problem is None and not self.pid and self.user is None


@dataclasses.dataclass(frozen=True)
class DeviceReading:
    """All IPUs at one moment."""

    time: float  # seconds since the epoch
    ipus: Tuple[Ipu, ...]
    problem: Optional[str] = None  # why none of them answers


def parse_number(text: Any) -> Optional[float]:
    """Returns the number of a text like `1330MHz`, `40.9 W` or `99.96%`; None for any other text."""
    short = text.strip() if isinstance(text, str) and len(text) <= _MAX_NUMBER else ""
    match = _NUMBER.fullmatch(short)
    value = float(match.group(1)) if match else math.nan
    return value if abs(value) <= _MAX_VALUE else None


def parse_device(mapping: Mapping[str, str]) -> Ipu:
    """Returns the record of one of gcipuinfo's mappings. Keys may be missing, and values may be any text."""
    values = {name: read(mapping, key) for name, (key, read) in _FIELDS.items()}
    other = {str(key): str(mapping[key]) for key in mapping if key not in _KEYS}
    return Ipu(**values, other=other)


def parse_id(text: Optional[str]) -> Optional[int]:
    """Returns a device's id; None where it is not a whole number."""
    return None if text is None else _whole({"id": text}, "id")


def read_pid(mapping: Mapping[str, str]) -> Optional[int]:
    """Returns the process that holds one of gcipuinfo's devices; None where none does."""
    return _whole(mapping, _PID)


def parse_health(text: Any) -> List[str]:
    """Returns one sentence per fault in the answer of checkHealthOfDevices, which may be any text."""
    try:
        value = json.loads(text) if isinstance(text, str) and text.strip() else {}
    except (ValueError, RecursionError):
        return [f"the health check's answer is not JSON: {shorten(text)}"]
    hosts = value.get("hosts") if isinstance(value, dict) else None
    if not value:
        return []
    if not isinstance(hosts, dict):
        return [f"the health check reports {shorten(json.dumps(value))}"]
    faults = []
    for host, entries in hosts.items():
        for entry in entries if isinstance(entries, list) else [entries]:
            fault = entry if isinstance(entry, dict) else {"error": entry}
            where = [f"{label} {fault[key]}" for label, key in _HEALTH_LOCATIONS.items() if fault.get(key) is not None]
            faults.append(shorten(f"{fault.get('error', 'unknown')} error: {', '.join([*where, f'host {host}'])}"))
    return faults


def shorten(reason: object) -> str:
    """Returns an error or a text as one line of limited length, for use inside a sentence."""
    text = f"{type(reason).__name__}: {reason}" if isinstance(reason, BaseException) else str(reason)
    text = " ".join(text.split())
    return text if len(text) <= _MAX_REASON else f"{text[: _MAX_REASON - 3]}..."


def _value(mapping: Mapping[str, str], key: str) -> Any:
    return mapping[key] if key in mapping else None  # noqa: SIM401 a C++ map may have no get


def _text(mapping: Mapping[str, str], key: str) -> Optional[str]:
    value = _value(mapping, key)
    text = value.strip() if isinstance(value, str) else ""
    return text if text and text != "N/A" else None


def _number(mapping: Mapping[str, str], key: str) -> Optional[float]:
    return parse_number(_value(mapping, key))


def _whole(mapping: Mapping[str, str], key: str) -> Optional[int]:
    number = _number(mapping, key)
    return int(number) if number is not None and number.is_integer() else None


def _timestamp(mapping: Mapping[str, str], key: str) -> Optional[str]:
    with contextlib.suppress(ValueError):
        return datetime.datetime.strptime(_text(mapping, key) or "", "%Y%m%dT%H%M%SZ").isoformat() + "Z"
    return None


_HEALTH_LOCATIONS = {"IPU": "id", "partition": "partition", "board IPU": "board ipu index"}
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
    "start_time": ("process start time", _timestamp),
    "replicas": ("number of replicas", _whole),
    "partition": ("ipuof partition id", _text),
    "host": ("ipuof host", _text),
    "driver_version": ("driver version", _text),
    "firmware_version": ("firmware version", _text),
    "server_version": ("ipuof server version", _text),
    "gateway_version": ("gateway software version", _text),
    "routing_id": ("ipuof routing id", _text),
    "routing_type": ("ipuof routing type", _text),
    "input_wait_pct": ("emulated input wait", _number),
    "heartbeat_age_s": ("emulated heartbeat age", _number),
}
_KEYS = frozenset(key for key, _ in _FIELDS.values())
