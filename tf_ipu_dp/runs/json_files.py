"""JSON objects in files: what a crash or another program left there never raises. Standard library only."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Dict, Mapping, Optional


def read_object(path: Path) -> Optional[Dict[str, Any]]:
    """Returns the JSON object in a file; None where there is no such file or no object in it."""
    try:
        return parse_object(path.read_bytes())
    except OSError:
        return None


def parse_object(text: bytes) -> Optional[Dict[str, Any]]:
    """Returns a JSON object; None where the text is anything else."""
    try:
        value = json.loads(text.decode())
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def plain(value: Any) -> Any:
    """Returns what JSON can carry: null for NaN and infinities, numbers for scalars of numpy, text for the rest."""
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return plain(value.item()) if hasattr(value, "item") else str(value)
