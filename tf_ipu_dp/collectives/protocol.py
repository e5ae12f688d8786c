"""What `measure` asks of the ranks that it starts, and the lines in which rank 0 answers. Pure.

The order goes to every rank as one JSON word of its command line. Answers go to the standard output of rank 0, behind a
mark, because launchers tag lines and libraries write lines of their own.
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any, Dict, Mapping, Optional, Tuple

from tf_ipu_dp.runs.records import Record

MARK = "@collectives "
_TAG = re.compile(r"\[\d+,\d+\]<stdout>:")  # mpirun puts one into a long line every 4 KiB


@dataclasses.dataclass(frozen=True)
class Order(Record):
    """The series to measure. Each is a tuple of tensors, in bytes, that are all-reduced together."""

    series: Tuple[Tuple[int, ...], ...]
    trials: int
    warmup: int
    hosts: int = 1
    placement: str = "block"
    count_timeouts: bool = False  # of TCP, by host
    real_time: bool = True  # whether the ranks run at real-time priority, where the user may
    timeline: Optional[str] = None  # file for Horovod's timeline, on the host of rank 0
    emulator_pid: Optional[int] = None  # of the process that forwards the frames of emulated hosts


def rank_of(instance: int, instances: int, hosts: int, placement: str) -> int:
    """Returns the rank of an instance. Launchers put consecutive instances on a host; round-robin deals ranks out."""
    per_host = instances // hosts
    if placement == "block" or hosts == 1:
        return instance
    host, place = divmod(instance, per_host)
    return place * hosts + host


def render_order(order: Order) -> str:
    """Returns an order as a word of a command line."""
    return json.dumps(order.to_json(), separators=(",", ":"))


def parse_order(word: str) -> Order:
    """Returns the order in a word of a command line."""
    return Order.from_json(json.loads(word))


def render_answer(kind: str, **values: Any) -> str:
    """Returns a line for the standard output of rank 0."""
    return f"{MARK}{json.dumps({'kind': kind, **values})}"


def parse_answer(line: str) -> Optional[Mapping[str, Any]]:
    """Returns the answer in a line; None for any other line."""
    _, mark, text = _TAG.sub("", line).partition(MARK)
    if not mark:
        return None
    try:
        value: Dict[str, Any] = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) and "kind" in value else None
