"""The emulator's modules import each other without cycles, and nothing else of the package."""

from __future__ import annotations

import ast
from pathlib import Path

import tf_ipu_dp.emulator

ROOT = Path(tf_ipu_dp.emulator.__file__).parents[2]
PACKAGE = "tf_ipu_dp.emulator"


def read_modules(folder=ROOT):
    """Returns the source of every module of the emulator by its name."""
    modules = {}
    for path in (folder / "tf_ipu_dp" / "emulator").rglob("*.py"):
        parts = path.relative_to(folder).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text(encoding="utf-8")
    return modules


def names_in(source):
    """Returns all names that a source imports at any level, or writes down as text."""
    imported, written = set(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not used here"
            imported |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            written.add(node.value)
    return imported, written


def graph_of(modules):
    """Returns which modules each module imports, in functions too.

    An import also runs the packages that the imported module is in, unless the importing module is in them as well.
    """
    graph = {}
    for name, source in modules.items():
        found = set()
        for imported in names_in(source)[0]:
            target = imported if imported in modules else imported.rpartition(".")[0]
            if target in modules:
                parts = target.split(".")
                packages = {".".join(parts[:length]) for length in range(1, len(parts))}
                found |= {target} | {package for package in packages & set(modules) if not in_package(name, package)}
        graph[name] = found - {name}
    return graph


def in_package(name, package):
    return name == package or name.startswith(f"{package}.")


def find_cycle(graph):
    """Returns the modules of a cycle in order, or nothing."""
    done = set()

    def visit(name, path):
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for other in sorted(graph[name]):
            cycle = visit(other, [*path, name])
            if cycle:
                return cycle
        done.add(name)
        return []

    return next((cycle for cycle in (visit(name, []) for name in sorted(graph)) if cycle), [])


def test_no_module_imports_itself_by_way_of_others():
    graph = graph_of(read_modules())
    assert len(graph) > 100 and f"{PACKAGE}.runtime.instances" in graph[f"{PACKAGE}.runtime.gradient_reduction"]
    assert find_cycle(graph) == []


def test_a_cycle_is_found_although_a_function_hides_it():
    modules = read_modules()
    lowest = f"{PACKAGE}.runtime.replicas"
    modules[lowest] += f"\ndef late():\n    from {PACKAGE}.keras import models\n"
    cycle = find_cycle(graph_of(modules))
    assert lowest in cycle and f"{PACKAGE}.keras.models" in cycle


def test_a_cycle_through_a_package_is_found():
    modules = {"a": "", "a.b": "from c import d", "c": "from a import e", "c.d": "", "a.e": ""}
    modules["a"] = "import c.d"
    assert find_cycle(graph_of(modules)) == ["a", "c", "a"]


def test_the_emulator_knows_nothing_else_of_the_package_not_by_name_either():
    for name, source in read_modules().items():
        imported, written = names_in(source)
        for other in imported - {"tf_ipu_dp"}:  # the package itself has the version
            assert not other.startswith("tf_ipu_dp") or in_package(other, PACKAGE), f"{name} imports {other}"
        for text in written:
            # As in importlib.import_module("tf_ipu_dp.training.loop"); sentences that mention commands are no modules.
            is_module = " " not in text and text.startswith("tf_ipu_dp.")
            assert not is_module or in_package(text, PACKAGE), f"{name} names {text}"
