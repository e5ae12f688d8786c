"""Writes the newest releases that setup.cfg allows into a constraints file: update_pins.py setup.cfg default.txt.

Run it with the oldest Python that the file is for: pip then resolves releases that every later one takes as well.
Lines from the first comment below the pins on are fixed: they stay as they are, and the others must go with them. A pin
that pip does not mention stays too: another Python or machine may need it.
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

from tf_ipu_dp.environment import versions

EXTRAS = versions.TARGETS["test"]


class UpdateError(Exception):
    """The pins cannot be resolved. The text is shown as is."""


@dataclasses.dataclass(frozen=True)
class Pins:
    """A constraints file: comments on top, exact versions by name, and the lines that are fixed below them."""

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
        """Returns the file with these versions; what is fixed is left out of them."""
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


def read_report(text: str) -> Dict[str, str]:
    """Returns the version of each release that pip would install."""
    metadata = [entry["metadata"] for entry in json.loads(text)["install"]]
    return {normalise(each["name"]): each["version"] for each in metadata}


def resolve(python: Path, requirements: Sequence[str], constraints: Sequence[str]) -> Dict[str, str]:
    """Returns the newest releases that go together and that a Python takes; it needs pip 22.2 or later."""
    with tempfile.TemporaryDirectory() as folder:
        report, limits = Path(folder, "report.json"), Path(folder, "constraints.txt")
        limits.write_text("\n".join(constraints), encoding="utf-8")
        words = ["install", "--dry-run", "--ignore-installed", "--report", str(report), "--constraint", str(limits)]
        _pip(python, [*words, *requirements], "resolve the requirements")
        return read_report(report.read_text(encoding="utf-8"))


def _pip(python: Path, words: Sequence[str], purpose: str) -> None:
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise UpdateError(f"pip cannot {purpose}: {(errors or ['it gave no reason'])[-1]}")


def _make_pip(folder: str) -> Path:
    """Returns a Python of this version with the newest pip, in an environment of its own."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = Path(folder, "bin", "python")
    _pip(python, ["install", "--quiet", "--upgrade", "pip"], "update itself")
    return python


def main(words: Sequence[str]) -> int:
    """Rewrites the constraints file and prints what has changed."""
    setup_cfg, path = map(Path, words)
    pins = Pins.parse(path.read_text(encoding="utf-8"))
    # Horovod is built against the TensorFlow that is there, by tf_ipu_dp.environment, which pins it.
    together, alone = versions.split_requirements(versions.requirements(setup_cfg, EXTRAS))
    try:
        with tempfile.TemporaryDirectory() as folder:
            updated = pins.updated(resolve(_make_pip(folder), [*together, *alone], pins.fixed_requirements))
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
