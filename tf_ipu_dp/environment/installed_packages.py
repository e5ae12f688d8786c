"""What is installed in an environment, what an interrupted pip damaged, and who uses it. Standard library only."""

from __future__ import annotations

import csv
import os
import re
import shutil
from pathlib import Path
from typing import Dict, List, Optional, Sequence, Tuple


def remove_damaged(venv: Path) -> List[str]:
    """Makes pip forget the packages whose files are incomplete, so that it installs them again. Returns their names."""
    names = []
    for site in _site_packages(venv):
        for info in sorted(site.glob("*.dist-info")):
            if not _is_whole(site, info):
                names.append(_name_and_version(info)[0])
                shutil.rmtree(info)
        for left in site.glob("~*"):  # pip renames what it is about to replace
            shutil.rmtree(left) if left.is_dir() else left.unlink()
    return names


def find_replaced(venv: Path, constraints: Path) -> List[str]:
    """Returns the installed packages that the constraints would replace by another version."""
    pins: Dict[str, str] = {}
    for line in constraints.read_text(encoding="utf-8").splitlines():
        match = re.fullmatch(r"([\w.-]+)==([^;\s]+)", line.strip())  # without a marker, which only pip can evaluate
        if match:
            pins[_normalise(match[1])] = match[2]
    return sorted(name for name, version in _installed(venv).items() if pins.get(name, version) != version)


def find_versions(venv: Path, names: Sequence[str]) -> Dict[str, str]:
    """Returns the versions of those of the packages that are installed, by their names."""
    return {name: version for name, version in _installed(venv).items() if name in names}


def find_user(venv: Path, proc: Path = Path("/proc")) -> Optional[int]:
    """Returns a process that has loaded files of an environment, or was started with its Python; None if none does."""
    for folder in proc.glob("[0-9]*"):
        if int(folder.name) not in (os.getpid(), os.getppid()) and _uses(folder, venv):
            return int(folder.name)
    return None


def _installed(venv: Path) -> Dict[str, str]:
    return dict(_name_and_version(info) for site in _site_packages(venv) for info in site.glob("*.dist-info"))


def _uses(process: Path, venv: Path) -> bool:
    inside = f"{venv}{os.sep}".encode()
    try:
        # The Python of an environment is a link, so the program's own path does not tell.
        return (process / "cmdline").read_bytes().startswith(inside) or b" " + inside in (process / "maps").read_bytes()
    except OSError:  # it has ended, or is another user's
        return False


def _is_whole(site: Path, info: Path) -> bool:
    """Whether every file that a package lists is there, with its size. pip writes the list last."""
    try:
        with (info / "RECORD").open(encoding="utf-8", newline="") as record:
            rows = list(csv.reader(record))
        return bool(rows) and all(
            _has_size(site / row[0], row[2]) for row in rows if row and "__pycache__" not in row[0]
        )
    except (OSError, IndexError, ValueError):
        return False


def _has_size(path: Path, size: str) -> bool:
    return not size or path.stat().st_size == int(size)


def _name_and_version(info: Path) -> Tuple[str, str]:
    name, _, version = info.name[: -len(".dist-info")].partition("-")
    return _normalise(name), version


def _normalise(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _site_packages(venv: Path) -> List[Path]:
    return list((venv / "lib").glob("python3*/site-packages"))
