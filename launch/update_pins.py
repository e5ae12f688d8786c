"""Writes the newest releases that setup.cfg allows into a constraints file: update_pins.py setup.cfg default.txt.

pip resolves them for the Python that runs this, as a dry run. A release that refuses the oldest Python of the
environment is skipped. Lines from the first comment below the pins on are fixed: they are not updated, and the other
pins must be compatible with them. A pin that pip does not mention is kept: another Python or machine may need it.
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Dict, List, Sequence, Tuple

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from tf_ipu_dp import environment

# The oldest Python that a constraints file is for.
OLDEST_PYTHON = {"default.txt": "3.9", "sdk_age.txt": "3.8"}
EXTRAS = environment.TARGETS["test"]
MAX_ATTEMPTS = 5


class UpdateError(Exception):
    """The pins cannot be resolved. The text is shown as is."""


@dataclasses.dataclass(frozen=True)
class Pins:
    """A constraints file: comments on top, exact versions by name, and the fixed lines below them."""

    header: Tuple[str, ...]
    versions: Dict[str, str]
    fixed: Tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Pins:
        """Reads a file. Comments above the first pin are its header; from the next comment on, lines are fixed."""
        header: List[str] = []
        versions: Dict[str, str] = {}
        fixed: List[str] = []
        for line in filter(None, map(str.strip, text.splitlines())):
            if line.startswith("#") and not versions:
                header.append(line)
            elif line.startswith("#") or fixed:
                fixed.append(line)
            else:
                name, _, version = line.partition("==")
                versions[normalise(name)] = version
        return cls(tuple(header), versions, tuple(fixed))

    @property
    def fixed_requirements(self) -> List[str]:
        return [line for line in self.fixed if not line.startswith("#")]

    def updated(self, newest: Dict[str, str]) -> Pins:
        """Returns the file with these versions, except those of fixed projects."""
        fixed = {normalise(line.partition("==")[0]) for line in self.fixed_requirements}
        versions = {**self.versions, **newest}
        return dataclasses.replace(self, versions={name: versions[name] for name in versions if name not in fixed})

    def render(self) -> str:
        """Returns the text of the file, sorted by name."""
        pins = [f"{name}=={version}" for name, version in sorted(self.versions.items())]
        return "\n".join([*self.header, *pins, *self.fixed, ""])


def normalise(name: str) -> str:
    """Returns a project's name as pip compares it."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def read_report(text: str) -> Dict[str, Tuple[str, str]]:
    """Returns version and required Python of each release that pip would install."""
    metadata = [entry["metadata"] for entry in json.loads(text)["install"]]
    return {normalise(each["name"]): (each["version"], each.get("requires_python") or "") for each in metadata}


def resolve(requirements: Sequence[str], fixed: Sequence[str], oldest_python: str) -> Dict[str, str]:
    """Returns the newest releases that are compatible with each other and with the oldest Python."""
    limits: Dict[str, str] = {}
    for _ in range(MAX_ATTEMPTS):
        found = _resolve_with_pip(requirements, [*fixed, *limits.values()])
        too_new = {
            name: version
            for name, (version, python) in found.items()
            if not SpecifierSet(python).contains(f"{oldest_python}.99")
        }
        if not too_new:
            return {name: version for name, (version, _) in found.items()}
        for name, version in too_new.items():
            newest = _newest_for(name, oldest_python)
            # An index may not report which Python a release supports; then the next older one is tried.
            limits[name] = f"{name}<={newest}" if Version(newest) < Version(version) else f"{name}<{version}"
    raise UpdateError(f"Python {oldest_python} refuses releases of {', '.join(limits)} after {MAX_ATTEMPTS} attempts.")


def _resolve_with_pip(requirements: Sequence[str], constraints: Sequence[str]) -> Dict[str, Tuple[str, str]]:
    """Returns what pip would install: version and required Python by name."""
    with tempfile.TemporaryDirectory() as folder:
        report, limits = Path(folder, "report.json"), Path(folder, "constraints.txt")
        limits.write_text("\n".join(constraints), encoding="utf-8")
        words = ["install", "--dry-run", "--ignore-installed", "--report", str(report), "--constraint", str(limits)]
        _pip([*words, *requirements], "resolve the requirements")
        return read_report(report.read_text(encoding="utf-8"))


def _newest_for(name: str, python: str) -> str:
    """Returns the newest release that supports a Python, which need not be the one that runs this."""
    words = ["index", "versions", name, "--python-version", python, "--only-binary", ":all:"]
    found = re.search(r"^Available versions: ([^,\s]+)", _pip(words, f"list the releases of {name}"), re.MULTILINE)
    if not found:
        raise UpdateError(f"pip lists no releases of {name} for Python {python}.")
    return found[1]


def _pip(words: Sequence[str], purpose: str) -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise UpdateError(f"pip cannot {purpose}: {(errors or ['it gave no reason'])[-1]}")
    return done.stdout


def main(words: Sequence[str]) -> int:
    """Rewrites the constraints file and prints what has changed."""
    setup_cfg, path = map(Path, words)
    pins = Pins.parse(path.read_text(encoding="utf-8"))
    # tf_ipu_dp.environment builds Horovod against the installed TensorFlow, and pins it.
    wanted = [line for line in environment.requirements(setup_cfg, EXTRAS) if not line.startswith("horovod")]
    try:
        updated = pins.updated(resolve(wanted, pins.fixed_requirements, OLDEST_PYTHON[path.name]))
    except UpdateError as error:
        print(f"update-pins: {error}", file=sys.stderr)
        return 1
    path.write_text(updated.render(), encoding="utf-8")
    for name, version in sorted(updated.versions.items()):
        if pins.versions.get(name) != version:
            print(f"{path.name}: {name} {pins.versions.get(name, 'new')} -> {version}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
