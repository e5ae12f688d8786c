"""JSON in a run's files: reading never fails on bad content; numbers that are not finite are written as null."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Dict, Mapping, Optional, Union

from tf_ipu_dp.runs import safe_files

# No JSON object of a run is longer, except metrics.jsonl, which is read line by line.
_MAX_BYTES = 1 << 26
_MAX_DIGITS = 20


def plain(value: Any) -> Any:
    """Returns a value that JSON supports: null for NaN and infinities, numbers for numpy scalars, else text."""
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return plain(value.item()) if hasattr(value, "item") else str(value)


def parse_object(text: bytes) -> Optional[Dict[str, Any]]:
    """Returns the JSON object in a text; None for anything else."""
    try:
        value = json.loads(text.decode(), parse_int=_parse_int)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_object(path: Path, max_bytes: int = _MAX_BYTES, *, follow_links: bool = False) -> Optional[Dict[str, Any]]:
    """Returns the JSON object in a file; None if the file is missing, too long, a link or has no object.

    Links are followed for files that the user names, never inside a run's folder.
    """
    try:
        return parse_object(safe_files.read_bytes(path, max_bytes, follow_links=follow_links))
    except (OSError, ValueError):  # a path may have a NUL
        return None


def _parse_int(digits: str) -> Union[int, float]:
    """Returns a whole number of 64 bits; infinity for longer ones, whose conversion takes the square of their length.

    No record takes an infinity, so that they are refused where they stand.
    """
    value = int(digits) if len(digits) <= _MAX_DIGITS else None
    return value if value is not None and abs(value) < 2**63 else math.inf
