"""Which versions an environment gets: one row for each range of Pythons, and what setup.cfg and the pins say."""

from __future__ import annotations

import configparser
import dataclasses
import hashlib
import platform
import re
import sys
from pathlib import Path
from typing import Dict, List, Sequence, Tuple

ROOT = Path(__file__).resolve().parents[2]
TARGETS: Dict[str, Sequence[str]] = {
    "run": ("host", "plots"),
    "distributed": ("host", "plots", "distributed"),
    "test": ("host", "distributed", "plots", "test", "lint"),
}
ADDED = ("distributed", "ddp")  # what can be added to an environment that launch/ has not made


@dataclasses.dataclass(frozen=True)
class Versions:
    """One environment: its name is that of its constraints file."""

    name: str
    pythons: Tuple[Tuple[int, int], ...]
    tensorflow: str
    needs_legacy_keras: bool = False  # TensorFlow's own Keras is Keras 3; Keras 2 is the package tf_keras

    @property
    def constraints(self) -> Path:
        return ROOT / "launch" / "constraints" / f"{self.name}.txt"


# launch/environment.sh names the same Pythons, from the best to the last; a test compares them.
ALL = (
    Versions("default", ((3, 11), (3, 10), (3, 9)), "2.15.1"),
    Versions("modern", ((3, 12), (3, 13)), "2.20.0", needs_legacy_keras=True),
    Versions("sdk_age", ((3, 8),), "2.6.5"),
)


def of_python(python: Tuple[int, ...] = sys.version_info[:2]) -> Versions:
    """Returns the environment of a Python; of one that no environment has, the modern one's, which is the nearest."""
    return next((each for each in ALL if tuple(python[:2]) in each.pythons), ALL[1])


def python_version() -> str:
    """Returns the version of this Python as far as environments tell Pythons apart: 3.12."""
    return ".".join(platform.python_version_tuple()[:2])


def requirements(setup_cfg: Path, extras: Sequence[str]) -> List[str]:
    """Returns the project's requirements and those of some extras from setup.cfg."""
    parser = configparser.ConfigParser()
    parser.read(setup_cfg, encoding="utf-8")
    blocks = [parser["options"]["install_requires"], *(parser["options.extras_require"][extra] for extra in extras)]
    return [line.strip() for block in blocks for line in block.splitlines() if line.strip()]


def split_requirements(lines: Sequence[str]) -> Tuple[List[str], List[str]]:
    """Returns what pip installs together, and what it installs afterwards without its own requirements.

    tf-keras asks for `tensorflow`. On Linux on x86-64 that is 620 MB with code for GPUs; `tensorflow-cpu` is the same
    release without, but pip would put both into one folder. Horovod is built, by `horovod`.
    """
    lines = [line for line in lines if name_of(line) != "horovod"]
    if not (sys.platform == "linux" and platform.machine() == "x86_64"):
        return lines, []
    alone = [line for line in lines if name_of(line) == "tf-keras"]
    on_cpu = [re.sub("^tensorflow==", "tensorflow-cpu==", line) for line in lines if line not in alone]
    return on_cpu, (alone if of_python().needs_legacy_keras else [])


def name_of(requirement: str) -> str:
    """Returns the name of the project that a requirement asks for."""
    return re.split(r"[<>=!~;\[ ]", requirement, maxsplit=1)[0]


def fingerprint() -> str:
    """Returns a hash of all files that decide what is installed."""
    digest = hashlib.sha256()
    pins = sorted((ROOT / "launch" / "constraints").glob("*.txt"))
    for path in (ROOT / "setup.cfg", *pins, *sorted(Path(__file__).parent.glob("*.py"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()
