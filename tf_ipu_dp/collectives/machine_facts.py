"""The facts of a machine that its calibration depends on, and in which of them another machine differs."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Dict, List, Mapping

_PACKAGES = {"TensorFlow": ("tensorflow", "tensorflow-cpu"), "Horovod": ("horovod",)}


def read() -> Dict[str, str]:
    """Returns host, cores, kernel, and the versions of what all-reduces, of those that are installed."""
    facts = {"host": platform.node(), "cores": str(os.cpu_count() or 0), "kernel": platform.release()}
    for name, packages in _PACKAGES.items():
        versions = [version for version in map(_read_version, packages) if version]
        facts.update({name: versions[0]} if versions else {})
    return facts


def differences(then: Mapping[str, str], here: Mapping[str, str]) -> List[str]:
    """Returns in words what is different here; facts that only one side knows are left out."""
    names = [name for name in here if name in then and then[name] != here[name]]
    return [f"{name} {then[name]}, and here {here[name]}" for name in names]


def _read_version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
