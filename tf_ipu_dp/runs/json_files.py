"""JSON in a run's files: reading never fails on bad content; numbers that are not finite are written as null."""

from __future__ import annotations

import json
import math
import os
import stat
from pathlib import Path
from typing import Any, Dict, Iterator, Mapping, Optional

# No JSON object of a run is longer, except metrics.jsonl, which is read line by line.
_MAX_BYTES = 1 << 26


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
        value = json.loads(text.decode())
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_object(path: Path, max_bytes: int = _MAX_BYTES) -> Optional[Dict[str, Any]]:
    """Returns the JSON object in a file; None if the file is missing or has no object."""
    try:
        return parse_object(read_bytes(path, max_bytes))
    except OSError:
        return None


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """Returns the beginning of a regular file; OSError for anything else."""
    with open(path, "rb", opener=_open_regular_file) as file:
        return file.read(max_bytes)


def read_lines(path: Path, max_bytes: int, max_line_bytes: int) -> Iterator[bytes]:
    """Yields the complete lines of a file without reading it whole; longer lines, and those after a limit, are skipped.

    OSError if it cannot be opened or is not a regular file.
    """
    with open(path, "rb", opener=_open_regular_file) as file:
        is_rest = False  # of a line that is too long
        while file.tell() < max_bytes:
            line = file.readline(max_line_bytes)
            if not line:
                return
            ends = line.endswith(b"\n")
            if ends and not is_rest:
                yield line[:-1]
            is_rest = not ends


def _open_regular_file(path: str, flags: int) -> int:
    """Opens a regular file only: opening a pipe without a writer would block."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a regular file")
    return descriptor
