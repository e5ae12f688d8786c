"""The environment of an enabled Poplar SDK: no installed package is changed, only missing ones are added."""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import List

from tf_ipu_dp.environment import versions
from tf_ipu_dp.environment.commands import pip
from tf_ipu_dp.environment.locks import cache_dir, write
from tf_ipu_dp.environment.status import Status


def has_poplar_tensorflow() -> bool:
    """Whether this Python has the Poplar SDK's TensorFlow. Looks for its files: an import would take seconds."""
    spec = importlib.util.find_spec("tensorflow")
    places = spec.submodule_search_locations if spec else None
    return any(Path(place, "python", "ipu").is_dir() for place in places or ())


def missing_packages(target: str) -> List[str]:
    """Returns the requirements of a target that the SDK's environment lacks."""
    # Training on the SDK does not need a drawing library: it must neither wait for one nor fail without.
    extras = [extra for extra in versions.TARGETS[target] if extra in ("plots", "test", "lint") and target == "test"]
    lines = versions.requirements(versions.ROOT / "setup.cfg", extras)
    return [
        line for line in lines if not _is_for_other_python(line) and not _is_installed(versions.name_of(line))
    ]  # fmt: skip


def add_packages(target: str, status: Status) -> None:
    """Adds missing packages to a Poplar SDK environment; every installed version is pinned."""
    importlib.invalidate_caches()
    missing = missing_packages(target)
    if not missing:
        return
    names = ", ".join(map(versions.name_of, missing))
    status.info(f"the Poplar SDK's environment lacks {names}; adding them without changing installed packages.")
    with tempfile.TemporaryDirectory() as scratch:
        listing = [sys.executable, "-m", "pip", "list", "--format=freeze"]
        installed = subprocess.run(listing, check=False, capture_output=True, text=True).stdout.splitlines()
        pins = Path(scratch, "pins.txt")
        # Versions of the SDK's wheels that pip cannot parse (2.6.3+gc3.3.0+251582) are left out; nothing requires them.
        write(pins, "\n".join(line for line in installed if re.fullmatch(r"[\w.-]+==[\w.!]+(\+[\w.]+)?", line)))
        words = ["install", "-c", str(pins), *missing]
        pip(Path(sys.executable), words, cache_dir(), status, "Adding to the SDK's environment")


def _is_for_other_python(requirement: str) -> bool:
    return 'python_version >= "3.9"' in requirement and sys.version_info < (3, 9)


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True
