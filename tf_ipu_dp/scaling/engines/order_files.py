"""The files of one start of an engine: its order, the answers of its processes. No TensorFlow, no PyTorch."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import List, Optional

from tf_ipu_dp.runs.json_files import read_object
from tf_ipu_dp.runs.records import RecordError
from tf_ipu_dp.scaling.engines.protocol import Answer, Order

_ORDER = "order.json"
_READY = "ready"
_POLL_S = 0.005


def write_order(order: Order, folder: Path) -> Path:
    """Writes an order into a folder, removes the answers of an earlier one, and returns the order's path."""
    for path in folder.glob("answer-*.json"):
        path.unlink()
    path = folder / _ORDER
    path.write_text(json.dumps(order.to_json(), indent=1), encoding="utf-8")
    return path


def read_order(path: Path) -> Order:
    """Returns the order in a file."""
    return Order.from_json(json.loads(path.read_text(encoding="utf-8")))


def write_answer(answer: Answer, order_path: Path) -> None:
    """Writes the answer of a process beside its order, at once, so that no reader sees half of it."""
    path = _answer_path(order_path.parent, answer.rank)
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(answer.to_json()), encoding="utf-8")
    temporary.replace(path)


def read_answers(folder: Path, processes: int) -> List[Optional[Answer]]:
    """Returns the answers by rank; None for a process that has not answered."""
    return [_read_answer(_answer_path(folder, rank)) for rank in range(processes)]


def wait_for_others(order: Order, order_path: Path) -> None:
    """Returns when all programs that train at once are ready to be timed. Their orders are in neighbouring folders."""
    if order.together == 1:
        return
    (order_path.parent / _READY).touch()
    while len(list(order_path.parent.parent.glob(f"*/{_READY}"))) < order.together:
        time.sleep(_POLL_S)


def _read_answer(path: Path) -> Optional[Answer]:
    found = read_object(path)
    try:
        return None if found is None else Answer.from_json(found)
    except RecordError:
        return None


def _answer_path(folder: Path, rank: int) -> Path:
    return folder / f"answer-{rank}.json"
