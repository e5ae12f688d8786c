"""Functions of users, by reference: `FILE.py:function` or `package.module:function`. Standard library only.

Code is loaded only for a reference that a flag on the command line, or an argument of a call from Python, names: the
folder of a run records the text of a reference, and never leads here by itself. A mistake is a UsageError of one
sentence that names the user's own line, not a line of this package.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Tuple

from tf_ipu_dp import cli, user_sources

_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_FUNCTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
# Files in which an error may be raised that are not the user's own.
_GENERATED = re.compile(r"site-packages|__autograph_generated_file")
# Functions that were given as objects from Python, by the reference that stands for them in this process.
_given: Dict[str, Callable[..., Any]] = {}
_loading: List[str] = []  # files whose code is being run


def is_reference(text: str) -> bool:
    """Whether a flag's value names a function: FILE.py:function or package.module:function."""
    place, colon, function = text.rpartition(":")
    if not colon or not _FUNCTION.fullmatch(function):
        return False
    return place.endswith(".py") or bool(_MODULE.fullmatch(place))


def load_function(reference: str) -> Callable[..., Any]:
    """Returns the function that a reference names; UsageError if its code cannot be imported or has no such function.

    The folder of a file, or the current one for a module, is importable while the code is loaded and afterwards, as it
    is for a script.
    """
    if reference in _given:
        return _given[reference]
    place, _, name = reference.rpartition(":")
    module = _load_file(place, reference) if place.endswith(".py") else _load_module(place, reference)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise cli.UsageError(f"{reference}: {place} has no function {name!r}. {_suggest(module, name)}")
        found = getattr(found, part)
    if not callable(found):
        raise cli.UsageError(f"{reference} is a {type(found).__name__}, not a function. {_suggest(module, name)}")
    function: Callable[..., Any] = found
    return function


def require_files(references: Mapping[str, str]) -> None:
    """Raises a UsageError if the file of a reference, by the name of its flag, is missing. No code is loaded."""
    for flag, reference in references.items():
        place = reference.rpartition(":")[0]
        if place.endswith(".py") and reference not in _given:
            _require_file(place, f"--{flag}={reference}")


def register(function: Callable[..., Any], fallback: str) -> str:
    """Returns a reference for a function that was given as an object; in this process it stands for that object.

    A function that other processes can load, too, has the reference of its file; any other (of a notebook, a lambda)
    has `__main__:NAME`, with `fallback` for one without a name.
    """
    name = getattr(function, "__qualname__", "") or fallback
    if not _FUNCTION.fullmatch(name):  # a lambda, or a function within another one
        name = fallback
    file = _file_of(function)
    if file and getattr(function, "__qualname__", None) == name:
        with contextlib.suppress(ValueError):
            file = file.relative_to(Path.cwd())
        reference = f"{file}:{name}"
    else:
        reference = f"__main__:{name}"
    _given[reference] = function
    return reference


def refer_to(given: Any, name: str) -> str:
    """Returns a reference for what a caller from Python gives: text is one already, a function or data gets one."""
    if isinstance(given, str):
        return given
    if callable(given) and not hasattr(given, "layers"):
        return register(given, name)
    if name == "model":
        raise cli.UsageError(
            "model is an object, and each replica, instance and resumption makes its own: give the function that "
            "returns it, like model=build."
        )
    return register(lambda: given, name)


def is_only_in_this_process(reference: str) -> bool:
    """Whether a reference stands for an object that no other process can load."""
    return reference.startswith("__main__:")


def is_of_this_program(reference: str) -> bool:
    """Whether a reference stands for a function of the running program: loading its file would run all of it again."""
    module = getattr(_given.get(reference), "__module__", "")
    return is_only_in_this_process(reference) or module == "__main__"


def require_not_loading() -> None:
    """Raises a UsageError for a file that trains while it is loaded for one of its functions: it would never end."""
    if _loading:
        raise cli.UsageError(
            f"{_loading[-1]} trains when it is loaded for one of its functions. Put that under "
            'if __name__ == "__main__":'
        )


def call_by_name(function: Callable[..., Any], offered: Mapping[str, Any], reference: str) -> Any:
    """Calls a function with those of the offered values that it asks for by name.

    UsageError if it asks for another, or fails; the sentence then has the last line and place of its own traceback.
    """
    arguments = {}
    for name, parameter in _parameters(function).items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise cli.UsageError(f"{reference} takes {name!r} by position only. Arguments are given by name.")
        if name in offered:
            arguments[name] = offered[name]
        elif parameter.default is parameter.empty:
            near = get_close_matches(name, offered, n=1)
            guess = f" Did you mean {near[0]}?" if near else ""
            raise cli.UsageError(
                f"{reference} asks for {name!r}, which is not known.{guess} It can ask for "
                f"{cli.alternatives(sorted(offered))}, or give {name!r} a default."
            )
    with _errors_of_users(reference, "failed"):
        return function(**arguments)


def code_digest(reference: str) -> str:
    """Returns a short hash of the code of a function, without loading it; empty where it is in no file.

    It changes with the file, and with those that it imports from its folder or, of a module, from the current one.
    """
    path = source_file(reference)
    if path is None:
        return ""
    is_module = reference not in _given and not reference.rpartition(":")[0].endswith(".py")
    return user_sources.digest(path, [Path.cwd()] if is_module else [])


def source_file(reference: str) -> Optional[Path]:
    """Returns the file that a reference's code is in, without loading it; None if that is not known."""
    place = reference.rpartition(":")[0]
    if reference in _given:
        return _file_of(_given[reference])
    if place.endswith(".py"):
        path = cli.expand_path(place)
        return path if path.is_file() else None
    with contextlib.suppress(ImportError, ValueError, AttributeError), _importable(Path.cwd()):
        # find_spec imports the packages above a module, so only a module without any is looked up.
        spec = importlib.util.find_spec(place) if "." not in place else None
        if spec and spec.origin and Path(spec.origin).is_file():
            return Path(spec.origin)
    candidate = Path.cwd().joinpath(*place.split(".")).with_suffix(".py")
    return candidate if candidate.is_file() else None


def _load_file(place: str, reference: str) -> ModuleType:
    _require_file(place, reference)
    path = cli.expand_path(place).resolve()
    loaded = sys.modules.get("__main__")
    if loaded is not None and getattr(loaded, "__file__", None) and Path(str(loaded.__file__)).resolve() == path:
        return loaded  # the script that is running: its functions are there already
    name = f"tf_ipu_dp_user_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    known = sys.modules.get(name)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if known is not None and getattr(known, "_tf_ipu_dp_digest", None) == digest:
        return known
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # so that its classes can be found by name, for instance by pickle and dataclasses
    _loading.append(str(path))
    try:
        with _importable(path.parent), _errors_of_users(reference, "cannot be imported"):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        _loading.pop()
    module._tf_ipu_dp_digest = digest  # type: ignore[attr-defined]
    return module


def _require_file(place: str, name: str) -> None:
    path = cli.expand_path(place)
    if not path.is_file():
        near = get_close_matches(path.name, _python_files(path.parent), n=1)
        guess = f" Did you mean {path.parent / near[0]}?" if near else ""
        raise cli.UsageError(
            f"{name}: there is no file {path} on this host.{guess} Each host of a job needs the file at this path."
        )


def _load_module(place: str, reference: str) -> ModuleType:
    try:
        with _importable(Path.cwd()), _errors_of_users(reference, "cannot be imported", place):
            return importlib.import_module(place)
    except ModuleNotFoundError as error:  # of the module itself: what it imports is an error of the user's code
        raise cli.UsageError(
            f"{reference}: there is no module {error.name!r} in {Path.cwd()} or in this Python's packages. Give a "
            "file, like FILE.py:function, or start in the folder that has the module."
        ) from error


@contextlib.contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Puts a folder first on the path for imports, where it stays: user code may import when it is called."""
    text = str(folder)
    if text not in sys.path:
        sys.path.insert(0, text)
    yield


@contextlib.contextmanager
def _errors_of_users(reference: str, what: str, module: str = "") -> Iterator[None]:
    """Turns what user code raises into a sentence with its own place."""
    try:
        yield
    except cli.UsageError:
        raise
    except SystemExit as error:
        raise cli.UsageError(f"{reference} {what}: its code left Python (SystemExit: {error.code}).") from error
    except Exception as error:  # any: it is the user's code that raises
        if isinstance(error, ModuleNotFoundError) and module and error.name and _is_part(error.name, module):
            raise
        raise cli.UsageError(f"{reference} {what}: {describe_error(error, reference)}") from error


def describe_error(error: BaseException, reference: str = "") -> str:
    """Returns the last line of an error of user code, and the line of the user's file that it comes from."""
    words = f"{type(error).__name__}: {_reason(str(error))}".rstrip(": ").rstrip(".")
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__}: {error.msg} ({error.filename}, line {error.lineno})."
    own = _own_frames(error, reference)
    return f"{words} ({own[-1][0]}, line {own[-1][1]})." if own else f"{words}."


def _reason(text: str) -> str:
    """Returns the line of a message that says what is wrong: Keras and TensorFlow put others around it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if lines and lines[0].startswith("in user code"):
        raised = [place for place, line in enumerate(lines) if re.match(r"\w+Error: ", line)]
        if raised:
            lines = [lines[raised[-1]].partition(": ")[2], *lines[raised[-1] + 1 :]]
    if len(lines) > 1 and lines[0].startswith("Exception encountered when calling layer"):
        lines = lines[1:]
    first = lines[0] if lines else ""
    return re.sub(r"\{\{.*?\}\} ?| ?\[Op:\w+\].*", "", first)


def _own_frames(error: BaseException, reference: str) -> List[Tuple[str, int]]:
    """Returns the places in the user's code: in its file and those beside it, else outside this package and Python."""
    path = source_file(reference) if reference else None
    frames = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    libraries = (str(Path(__file__).parent), str(Path(os.__file__).parent), "<")
    others = [frame for frame in frames if not frame[0].startswith(libraries) and not _GENERATED.search(frame[0])]
    inside = [
        frame
        for frame in frames
        if path is not None and (_is_file(frame[0], path) or (frame in others and _is_beside(frame[0], path)))
    ]
    return inside or others


def _is_file(name: str, path: Path) -> bool:
    with contextlib.suppress(OSError):
        return Path(name).resolve() == path.resolve()
    return False


def _is_beside(name: str, path: Path) -> bool:
    """Whether a file is in the folder of another one, or below it: what a user's file imports from there."""
    with contextlib.suppress(OSError):
        return path.resolve().parent in Path(name).resolve().parents
    return False


def _suggest(module: ModuleType, name: str) -> str:
    functions = [
        each
        for each, value in vars(module).items()
        if callable(value) and not each.startswith("_") and getattr(value, "__module__", "") == module.__name__
    ]
    near = get_close_matches(name, functions, n=1)
    if near:
        return f"Did you mean {near[0]}?"
    return f"It has {cli.alternatives(functions)}." if functions else "It defines no function."


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # of some built-in functions
        return {}


def _file_of(function: Callable[..., Any]) -> Optional[Path]:
    module = sys.modules.get(getattr(function, "__module__", "") or "")
    name = getattr(module, "__file__", None)
    code = getattr(getattr(function, "__code__", None), "co_filename", name)
    if not name or code != name or not Path(name).is_file():
        return None
    return Path(name).resolve()


def _python_files(folder: Path) -> List[str]:
    with contextlib.suppress(OSError):
        return [path.name for path in folder.iterdir() if path.suffix == ".py"]
    return []


def _is_part(name: str, of: str) -> bool:
    return of == name or of.startswith(f"{name}.")
