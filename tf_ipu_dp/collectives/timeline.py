"""Horovod's timeline: how long the engine itself took for each all-reduce, apart from cycle and negotiation. Pure."""

from __future__ import annotations

import json
from typing import Any, Dict, List, Sequence, Tuple

_ENGINES = ("GLOO_ALLREDUCE", "MPI_ALLREDUCE")


def engine_seconds(text: str, tensors: Sequence[str]) -> List[float]:
    """Returns the engine's time of each all-reduce of these tensors, which are reduced together again and again.

    Tensors that were fused into one buffer have almost the same interval; several buffers follow one another.
    """
    intervals = _intervals(text)
    found = [intervals.get(name, []) for name in tensors]
    trials = min(map(len, found), default=0)
    return [_covered([each[trial] for each in found]) / 1e6 for trial in range(trials)]


def _covered(intervals: Sequence[Tuple[int, int]]) -> int:
    """Returns the time that intervals cover together."""
    total, reached = 0, 0
    for begin, end in sorted(intervals):
        total += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def _intervals(text: str) -> Dict[str, List[Tuple[int, int]]]:
    """Returns begin and end of the engine's part of every all-reduce by tensor, in microseconds."""
    names: Dict[int, str] = {}
    open_events: Dict[int, List[Tuple[str, int]]] = {}
    found: Dict[str, List[Tuple[int, int]]] = {}
    for event in _events(text):
        process: Any = event.get("pid")
        if event.get("ph") == "M" and event.get("name") == "process_name":
            names[process] = event["args"].get("name", "")
        elif event.get("ph") == "B":
            open_events.setdefault(process, []).append((event["name"], event["ts"]))
        elif event.get("ph") == "E" and open_events.get(process):
            name, begin = open_events[process].pop()
            if name in _ENGINES:
                found.setdefault(names.get(process, ""), []).append((begin, event["ts"]))
    return found


def _events(text: str) -> List[Dict[str, Any]]:
    """Returns the events of a timeline, which ends anywhere if its writer was stopped."""
    body = text.strip().lstrip("[").rstrip("]").rstrip().rstrip(",")
    try:
        events: List[Dict[str, Any]] = json.loads(f"[{body}]")
        return events
    except ValueError:
        last = body.rfind("},")
        return _events(body[: last + 1]) if last > 0 else []
