"""Which MPI library a process has loaded, by asking the library itself."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Optional

_MAX_BYTES = 8192  # MPI_MAX_LIBRARY_VERSION_STRING is 256 in Open MPI and 8,192 in MPICH
_MAPS = Path("/proc/self/maps")


def read_loaded() -> Optional[str]:
    """Returns name and version of the loaded library, like `Open MPI 4.1.4`; None if there is none."""
    try:
        found = re.search(r"/\S*/libmpi\w*\.so\S*", _MAPS.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return read_version(found[0]) if found else None


def read_version(path: str) -> Optional[str]:
    """Returns name and version of a library; None if it does not say."""
    text, length = ctypes.create_string_buffer(_MAX_BYTES), ctypes.c_int()
    try:
        ctypes.CDLL(path).MPI_Get_library_version(text, ctypes.byref(length))  # MPI allows it at any time
    except (OSError, AttributeError):
        return None
    return parse_version(text.value.decode("utf-8", "replace"))


def parse_version(text: str) -> Optional[str]:
    """Returns the name and the version in what a library says of itself; its first words if there is no version."""
    first = " ".join(text.split("\n", maxsplit=1)[0].split(",", maxsplit=1)[0].split())
    found = re.match(r"(.*?)(?:\s+Library)?(?:\s+Version:?)?\s+v?(\d[\w.]*)", first)
    return f"{found[1]} {found[2]}" if found else first[:60] or None
