"""The files that code of users consists of: a file, and what it imports from its own folder or package.

Imports are read from the text, and nothing is run. What is imported by a computed name, and installed packages, are not
seen. Standard library only.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
from pathlib import Path
from typing import Iterator, List, Sequence, Set, Tuple

_MAX_FILES = 1000
_THIS_PACKAGE = Path(__file__).parent


def digest(path: Path, folders: Sequence[Path]) -> str:
    """Returns a short hash of a file and of what it imports from some folders; empty if it cannot be read."""
    files = list_files(path, folders)
    try:
        if len(files) == 1:
            return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        parts = [(file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in files]
    except OSError:
        return ""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def list_files(path: Path, folders: Sequence[Path]) -> List[Path]:
    """Returns a file and those that it imports, themselves or by others, from its folder and some more, by path."""
    path = path.resolve()
    roots = list(dict.fromkeys((path.parent, *(folder.resolve() for folder in folders))))
    seen: Set[Path] = {path}
    pending = [path]
    while pending and len(seen) < _MAX_FILES:
        file = pending.pop()
        for name, places in _imports(file, roots):
            for found in _files_of(name, places):
                if found not in seen and _THIS_PACKAGE not in found.parents:
                    seen.add(found)
                    pending.append(found)
    return [path, *sorted(seen - {path})]


def _imports(file: Path, roots: Sequence[Path]) -> Iterator[Tuple[str, Sequence[Path]]]:
    """Returns the names of modules that a file imports, each with the folders that it may be in."""
    tree = ast.Module(body=[], type_ignores=[])
    with contextlib.suppress(OSError, SyntaxError, ValueError):  # who runs it is told
        tree = ast.parse(file.read_bytes())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, roots
        elif isinstance(node, ast.ImportFrom):
            places = [file.parents[node.level - 1]] if 0 < node.level <= len(file.parents) else roots
            module = node.module or ""
            for alias in node.names:  # a name may be a module, too
                yield (f"{module}.{alias.name}" if module else alias.name), places


def _files_of(name: str, folders: Sequence[Path]) -> Iterator[Path]:
    """Returns the files that importing a module runs: its own, and those of the packages that it is in."""
    for folder in folders:
        place = folder
        for part in name.split("."):
            for candidate in (place / f"{part}.py", place / part / "__init__.py"):
                if candidate.is_file():
                    yield candidate.resolve()
            place /= part
