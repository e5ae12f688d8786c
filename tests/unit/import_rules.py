"""Which module of the package may refer to which: the references are read from the syntax tree, never by importing.

Counted are `import`, `from ... import`, relative imports, `importlib.import_module` and `__import__` with a literal,
strings that are a module's dotted name, strings of code that import one, and f-strings or prefixes that begin with one.
A string may name a command: that starts a process and imports nothing. Only the emulator may not even do that.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path
from typing import Dict, Iterator, List, Optional, Set, Tuple

PACKAGE = "tf_ipu_dp"
EMULATOR = "tf_ipu_dp.emulator"
SEAM = "tf_ipu_dp.sdk"
_IMPORTING_ON_DEMAND = {EMULATOR, f"{EMULATOR}.sdk_api.ipu"}

_COMMAND_ROOMS = (
    "tf_ipu_dp.compare",
    "tf_ipu_dp.doctor",
    "tf_ipu_dp.launch",
    "tf_ipu_dp.list",
    "tf_ipu_dp.monitor",
    "tf_ipu_dp.predict",
    "tf_ipu_dp.runs.__main__",
    "tf_ipu_dp.train",
)
# They run or ask the command that a word names.
_ANY_COMMAND = ("tf_ipu_dp.__main__", "tf_ipu_dp.completion")

# From the bottom up. A module belongs to the longest name here that it begins with, and may refer to its own room and
# to lower rows. A new room gets its row here.
LAYERS = (
    ("tf_ipu_dp.early_signals", "tf_ipu_dp.missing_packages", "tf_ipu_dp.usage_error", "tf_ipu_dp.user_sources"),
    ("tf_ipu_dp.flag_files",),
    ("tf_ipu_dp",),
    ("tf_ipu_dp.flag_help", "tf_ipu_dp.terminal_text"),
    ("tf_ipu_dp.flag_mistakes",),
    ("tf_ipu_dp.cli", "tf_ipu_dp.sdk_types", "tf_ipu_dp.planning.layers", "tf_ipu_dp.task"),
    (
        "tf_ipu_dp.environment",
        "tf_ipu_dp.sdk",
        "tf_ipu_dp.sdk_calls",
        "tf_ipu_dp.user_code",
        "tf_ipu_dp.planning.architectures",
    ),
    ("tf_ipu_dp.datasets.info",),
    ("tf_ipu_dp.config",),
    ("tf_ipu_dp.planning",),
    ("tf_ipu_dp.datasets",),
    ("tf_ipu_dp.runs",),
    ("tf_ipu_dp.distributed",),
    ("tf_ipu_dp.monitoring",),
    ("tf_ipu_dp.collectives",),
    ("tf_ipu_dp.run_catalogue",),
    ("tf_ipu_dp.training",),
    ("tf_ipu_dp.prediction",),
    ("tf_ipu_dp.opened_run",),
    ("tf_ipu_dp.scaling", "tf_ipu_dp.python_calls"),
    _COMMAND_ROOMS,
    ("tf_ipu_dp.__main__",),
    ("tf_ipu_dp.completion",),
)
_ROW_OF = {room: row for row, rooms in enumerate(LAYERS) for room in rooms}
# What is started by name: python -m NAME.
COMMANDS = {
    *_COMMAND_ROOMS,
    *_ANY_COMMAND,
    "tf_ipu_dp.environment",
    "tf_ipu_dp.collectives",
    "tf_ipu_dp.runs",
    "tf_ipu_dp.scaling",
    "tf_ipu_dp.training.learn",
    EMULATOR,
    f"{EMULATOR}.poprun",
    f"{EMULATOR}.coverage",
}

# Pure modules compute; whatever reads the machine, the clock or a file is handed to them.
PURE = (
    "tf_ipu_dp.config",
    "tf_ipu_dp.planning",
    "tf_ipu_dp.datasets.info",
    "tf_ipu_dp.monitoring.bottleneck",
    "tf_ipu_dp.collectives.fabric",
    "tf_ipu_dp.collectives.shaping",
)
_OUTSIDE = {"os", "sys", "time", "datetime", "socket", "subprocess", "random", "tempfile", "importlib", "shutil"}
_OUTSIDE_CALLS = {"print", "open", "input", "__import__"}

UNKNOWN = "\0"  # stands for the part of a string that is only known when the program runs
_DOTTED = re.compile(rf"{PACKAGE}(\.\w+)+")
_PREFIX = re.compile(rf"{PACKAGE}(\.\w+)*\.")
_CODE_IMPORT = re.compile(rf"\bimport\s+({PACKAGE}(?:\.\w+)*)")
_CODE_FROM = re.compile(rf"\bfrom\s+({PACKAGE}(?:\.\w+)*)\s+import\s+([\w, ]+)")
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclasses.dataclass(frozen=True)
class Reference:
    """One module that refers to another."""

    source: str
    target: str  # ends in .* where only the beginning of the name is known
    line: int
    by_name: bool  # a string, which imports nothing by itself


def find_modules(folder: Path) -> Dict[str, Path]:
    """Returns the modules of the package in a folder, by dotted name. Files that are no part of it are left out."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        if not all((parent / "__init__.py").exists() for parent in path.parents if folder in (parent, *parent.parents)):
            continue  # emulator/start is a directory for PYTHONPATH
        parts = path.relative_to(folder.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def find_references(folder: Path) -> List[Reference]:
    """Returns every reference of a module of the package in a folder to another one."""
    modules = find_modules(folder)
    found: Set[Reference] = set()
    for name, path in modules.items():
        found.update(_Reader(name, path, set(modules)).read())
    return sorted((each for each in found if each.source != each.target), key=dataclasses.astuple)


def layer_violations(folder: Path) -> List[str]:
    """Returns a sentence for each reference that does not point downwards, or that passes the seam to the emulator."""
    sentences = []
    for each in find_references(folder):
        reason = _why_forbidden(each)
        if reason:
            sentences.append(f"{each.source}:{each.line} refers to {each.target}: {reason}")
    return sentences


def modules_without_a_layer(folder: Path) -> List[str]:
    """Returns the modules whose room has no row in LAYERS."""
    ours = [name for name in find_modules(folder) if not _within(name, EMULATOR) and name != PACKAGE]
    return [name for name in ours if _room(name) == PACKAGE]


def import_cycles(folder: Path) -> List[List[str]]:
    """Returns the groups of modules that import each other, in functions or at the top.

    An import also runs the packages that the target is in, unless the importing module is in them as well. What
    packages import on demand, when a program asks for a module by name, is left out.
    """
    graph: Dict[str, Set[str]] = {name: set() for name in find_modules(folder)}
    for each in find_references(folder):
        if not each.by_name and each.target in graph and each.source not in _IMPORTING_ON_DEMAND:
            packages = (each.target[:end] for end, letter in enumerate(each.target) if letter == ".")
            graph[each.source].add(each.target)
            graph[each.source].update(package for package in packages if not _within(each.source, package))
    return [sorted(group) for group in _strongly_connected(graph) if len(group) > 1]


def outside_uses(folder: Path) -> List[str]:
    """Returns a sentence for each pure module that reaches for the machine, the clock, a file or the terminal."""
    sentences = []
    for name, path in find_modules(folder).items():
        if name.endswith(".__main__") or not any(_within(name, pure) for pure in PURE):
            continue
        for node in ast.walk(_parse(path)):
            imported = []
            if isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                imported = [node.module or ""]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _OUTSIDE_CALLS:
                sentences.append(f"{name}:{node.lineno} calls {node.func.id}")
            sentences.extend(
                f"{name}:{node.lineno} imports {each}" for each in imported if each.split(".")[0] in _OUTSIDE
            )
    return sentences


def _why_forbidden(each: Reference) -> Optional[str]:
    source, target = _room(each.source), _room(each.target)
    if _within(each.source, EMULATOR):
        allowed = _within(each.target, EMULATOR) or (each.target == PACKAGE and not each.by_name)
        reason = "the emulator refers to nothing else of the package, not by name either"
    elif each.by_name and each.target in COMMANDS:
        allowed, reason = True, ""
    elif each.by_name and each.source == PACKAGE:
        allowed, reason = True, ""  # the package imports its public names when they are asked for
    elif _within(each.target, EMULATOR):
        allowed, reason = each.source == SEAM, f"only {SEAM} imports the emulator"
    elif each.target == f"{PACKAGE}.*":
        allowed, reason = source in _ANY_COMMAND, "the name is put together, so it could be any module"
    else:
        own_room = source == target and source not in _COMMAND_ROOMS
        allowed, reason = own_room or _ROW_OF[target] < _ROW_OF[source], f"{target} is not below {source}"
    return None if allowed else reason


def _room(name: str) -> str:
    return max((room for room in _ROW_OF if _within(name, room)), key=len)


def _within(name: str, room: str) -> bool:
    return name == room or name.startswith(f"{room}.")


def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


class _Reader:
    """Reads the references of one module."""

    def __init__(self, name: str, path: Path, modules: Set[str]):
        self._name = name
        self._tree = _parse(path)
        self._modules = modules
        self._parent = name if path.name == "__init__.py" else name.rpartition(".")[0]

    def read(self) -> Iterator[Reference]:
        skipped = {id(node) for node in self._docstrings()}
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield from self._import(alias.name, node.lineno)
            elif isinstance(node, ast.ImportFrom):
                base = self._resolve(node.module or "", node.level)
                for alias in node.names:
                    yield from self._import_from(base, alias.name, node.lineno, by_name=False)
            elif isinstance(node, ast.Call) and _is_import_call(node):
                names = [self._literal(word) for word in node.args[:2]]
                skipped.update(id(part) for word in node.args for part in ast.walk(word))
                yield from self._import_call(names, node.lineno)
            elif isinstance(node, (ast.JoinedStr, ast.BinOp)) and id(node) not in skipped and self._literal(node):
                skipped.update(id(part) for part in ast.walk(node))
                yield from self._string(self._literal(node) or "", node.lineno)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
                yield from self._string(node.value, node.lineno)

    def _docstrings(self) -> Iterator[ast.AST]:
        for node in ast.walk(self._tree):
            if isinstance(node, _WITH_DOCSTRING) and node.body and isinstance(node.body[0], ast.Expr):
                yield node.body[0].value

    def _resolve(self, module: str, level: int) -> str:
        if not level:
            return module
        parts = self._parent.split(".")
        return ".".join([*parts[: len(parts) - level + 1], *([module] if module else [])])

    def _import(self, name: str, line: int, by_name: bool = False) -> Iterator[Reference]:
        if _within(name, PACKAGE):
            yield Reference(self._name, self._nearest(name), line, by_name)

    def _import_from(self, base: str, name: str, line: int, by_name: bool) -> Iterator[Reference]:
        whole = f"{base}.{name}"
        yield from self._import(whole if whole in self._modules else base, line, by_name)

    def _import_call(self, names: List[Optional[str]], line: int) -> Iterator[Reference]:
        name = (names or [None])[0]
        if name is None:
            return
        if name.startswith("."):
            level = len(name) - len(name.lstrip("."))
            base = (names[1] if len(names) > 1 else None) or self._parent
            parts = base.split(".")
            name = ".".join([*parts[: len(parts) - level + 1], name.lstrip(".")])
        yield from self._import(self._with_star(name), line)

    def _string(self, text: str, line: int) -> Iterator[Reference]:
        if _DOTTED.fullmatch(text) and text in self._modules:
            yield from self._import(text, line, by_name=True)
        elif _PREFIX.fullmatch(text) or text.endswith(UNKNOWN):
            yield from self._import(self._with_star(text), line, by_name=True)
        for match in _CODE_IMPORT.finditer(text):
            yield from self._import(match[1], line, by_name=True)
        for match in _CODE_FROM.finditer(text):
            for word in match[2].split(","):
                yield from self._import_from(match[1], word.split()[0] if word.split() else "", line, by_name=True)

    def _literal(self, node: ast.AST) -> Optional[str]:
        """Returns a string as far as it is written down; a part that is not ends it, which UNKNOWN marks."""
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, str) else None
        if isinstance(node, ast.Name) and node.id in ("__name__", "__package__"):
            return self._name if node.id == "__name__" else self._parent
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            left, right = self._literal(node.left), self._literal(node.right)
            return None if left is None else left + (right if right is not None else UNKNOWN)
        if isinstance(node, ast.JoinedStr):
            text = ""
            for part in node.values:
                inner = self._literal(part.value) if isinstance(part, ast.FormattedValue) else self._literal(part)
                if inner is None:
                    # An unknown part in a sentence is no module; only a name that stops here is one.
                    return text + UNKNOWN if _DOTTED.fullmatch(text.rstrip(".")) or _PREFIX.fullmatch(text) else text
                text += inner
            return text
        return None

    def _with_star(self, name: str) -> str:
        """Returns a name with .* in place of what is not known of it."""
        return f"{name.rstrip(UNKNOWN).rpartition('.')[0]}.*" if name.endswith((UNKNOWN, ".")) else name

    def _nearest(self, name: str) -> str:
        """Returns the module that a dotted name lies in: tf_ipu_dp.cli for tf_ipu_dp.cli.UsageError."""
        while name not in self._modules and "." in name and not name.endswith(".*"):
            name = name.rpartition(".")[0]
        return name


def _is_import_call(node: ast.Call) -> bool:
    if isinstance(node.func, ast.Attribute):
        return node.func.attr == "import_module"
    return isinstance(node.func, ast.Name) and node.func.id in ("import_module", "__import__")


def _strongly_connected(graph: Dict[str, Set[str]]) -> List[Set[str]]:
    """Returns the groups of nodes that reach each other."""
    reached = {node: _reachable(graph, node) for node in graph}
    groups: List[Set[str]] = []
    seen: Set[str] = set()
    for node in graph:
        if node not in seen:
            group = {node} | {other for other in reached[node] if node in reached[other]}
            seen |= group
            groups.append(group)
    return groups


def _reachable(graph: Dict[str, Set[str]], start: str) -> Set[str]:
    found: Set[str] = set()
    waiting: Tuple[str, ...] = (start,)
    while waiting:
        following = {target for node in waiting for target in graph[node]} - found
        found |= following
        waiting = tuple(following)
    return found
