"""Makes and repairs the Python environment that the wrappers in launch/ run in.

Standard library only: when this runs, nothing is installed yet.

Three targets: `run` (one instance), `distributed` (with Horovod), `test` (with test and lint tools). A fourth one,
`ddp`, adds PyTorch without CUDA, which the scaling study compares with.

    launch/train                                  makes .venv in the clone for `run`
    python -m tf_ipu_dp.environment distributed   adds Horovod to the environment of the Python that runs it
    python -m tf_ipu_dp.environment ddp           adds PyTorch to it

An environment is used only when it is complete. A marker file stands beside it during an installation: a start that
finds the marker of an interrupted one finishes it, and a start during an installation waits for it. What a running job
uses is never replaced. In the environment of an enabled Poplar SDK no installed package is ever changed: only missing
ones are added.
"""

from __future__ import annotations

import argparse
import configparser
import contextlib
import fcntl
import hashlib
import importlib
import importlib.util
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Sequence, TextIO

from tf_ipu_dp import installed_packages

HOROVOD = "horovod==0.28.1"
# cmake 4 rejects Horovod's CMakeLists; setuptools 70 breaks its setup.py. With ninja no make has to be installed.
_HOROVOD_BUILD_TOOLS = ("cmake==3.31.6", "ninja==1.11.1.4", "packaging", "setuptools==69.5.1", "wheel==0.45.1")
TARGETS: Dict[str, Sequence[str]] = {
    "run": ("host", "plots"),
    "distributed": ("host", "plots", "distributed"),
    "test": ("host", "distributed", "plots", "test", "lint"),
}
# What help, refusals and plans need.
_SMALL = ("absl-py", "rich")
ADDED = ("distributed", "ddp")  # what can be added to an environment that launch/ has not made
TORCH = "torch==2.13.0" if sys.version_info >= (3, 10) else "torch==2.8.0"
# What PyTorch imports. Its own list has a setuptools too that TensorBoard 2.15 and Horovod cannot use, for extensions.
_TORCH_NEEDS = ("filelock", "fsspec", "jinja2", "networkx", "sympy", "typing-extensions")
# Horovod's setup.py passes make's VERBOSE=1 to every build tool; ninja would take it for a target.
_CMAKE_FOR_NINJA = """#!/bin/sh
for word; do shift; [ "$word" = VERBOSE=1 ] || set -- "$@" "$word"; done
exec cmake "$@"
"""
_STATE = "tf_ipu_dp.json"
_ROOT = Path(__file__).resolve().parent.parent
_LOG = "install.log"
_NO_NETWORK = re.compile(
    r"(NewConnectionError|ConnectTimeoutError|NameResolutionError|ProxyError|ReadTimeoutError|Connection refused|"
    r"Temporary failure in name resolution|Name or service not known|Network is unreachable|timed out|SSLError)"
)


class SetupError(Exception):
    """The environment cannot be made. The text is one sentence for the user, with what to do."""


class KilledError(SetupError):
    """A command was killed, and may have left a partial installation."""


class Status:
    """Shows progress: one line that changes on a terminal, plain lines elsewhere."""

    def __init__(self, program: str, stream: TextIO) -> None:
        self._program, self._stream, self._started = program, stream, time.monotonic()
        self._live = stream.isatty()

    def info(self, text: str) -> None:
        """Writes a line that stays on the screen."""
        self._clear()
        self._stream.write(f"{self._program}: {text}\n")
        self._stream.flush()

    def progress(self, text: str, keep: bool = False) -> None:
        """Shows the current activity; without a terminal only if `keep` is set."""
        if self._live:
            elapsed = f"  {time.monotonic() - self._started:.0f} s  "
            width = shutil.get_terminal_size().columns - 1
            self._stream.write(f"\r\x1b[K{(elapsed + text)[:width]}")
            self._stream.flush()
        elif keep:
            self._stream.write(f"  {text}\n")
            self._stream.flush()

    def _clear(self) -> None:
        if self._live:
            self._stream.write("\r\x1b[K")


def main(words: Sequence[str]) -> int:
    """Makes the environment and prints the path of its Python."""
    parser = argparse.ArgumentParser(
        prog="python -m tf_ipu_dp.environment",
        description=__doc__.split("\n", maxsplit=1)[0],
        epilog="Examples\n  python -m tf_ipu_dp.environment distributed",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("target", choices=sorted({*TARGETS, *ADDED}), help="what the environment is for")
    parser.add_argument("--venv", type=Path, help="environment to make; default: the one this Python belongs to")
    parser.add_argument("--program", default="environment", help="name in front of messages")
    parser.add_argument("--key", default="", help="what launch/environment.sh compares before it skips this program")
    args = parser.parse_args(words)
    status = Status(args.program, sys.stderr)
    try:
        python = make(args.target, args.venv, args.key, status)
    except SetupError as problem:
        status.info(str(problem))
        return 1
    except OSError as error:
        reason = f"{error.strerror or error}{f' ({error.filename})' if error.filename else ''}"
        status.info(f"the environment cannot be made: {reason}. Fix that, or set TF_IPU_DP_VENV to another directory.")
        return 1
    except KeyboardInterrupt:
        status.info("interrupted; the next start finishes the installation.")
        return 130
    print(python)
    return 0


def make(target: str, venv: Optional[Path], key: str, status: Status) -> Path:
    """Returns a Python that has what the target needs; installs what is missing."""
    if target == "ddp":
        if venv is not None:
            raise SetupError("PyTorch is added to the environment of the Python that runs this. Leave --venv out.")
        with _lock(_shared_lock(), status):
            _install_torch(Path(sys.executable), cache_dir(), status)
        return Path(sys.executable)
    if has_poplar_tensorflow():
        if _missing_in_sdk(target):
            with _lock(_shared_lock(), status):
                _add_to_sdk(target, status)
        return Path(sys.executable)
    if venv is None:
        if target != "distributed":
            raise SetupError(
                f"environments for {target!r} are made by launch/; "
                f"only {' and '.join(map(repr, ADDED))} can be added to this one."
            )
        with _lock(_shared_lock(), status):
            _install_horovod(Path(sys.executable), cache_dir(), status)
        return Path(sys.executable)
    venv = venv.absolute()
    if not _is_complete(venv, target):
        with _lock(_sibling(venv, "lock"), status):
            if not _is_complete(venv, target):
                _make_venv(target, venv, status)
    # The clone may have moved, or share its environment with another. Without write access the files are not needed.
    with contextlib.suppress(OSError):
        _point_to_clone(venv)
        for name in TARGETS:
            if key and _is_complete(venv, name):
                _write(venv / f"ready-{name}", key)
    return venv / "bin" / "python"


def make_small(status: Status) -> Path:
    """Returns a folder with the few packages that help, refusals and plans need, which all clones share.

    An environment with TensorFlow takes minutes to make, these take seconds.
    """
    if is_made_by_launch(Path(sys.prefix)):  # it is about to be updated, and has them
        return next(Path(sys.prefix, "lib").glob("python3*/site-packages"))
    constraints = _constraints()
    wanted = [line for line in requirements(_ROOT / "setup.cfg", ()) if _name(line) in _SMALL]
    # Other pins are no reason to get them again: a plan then needs no network.
    digest = hashlib.sha256("\n".join(wanted).encode()).hexdigest()
    folder = cache_dir() / "packages" / f"python{_python_version()}-{digest[:16]}"
    if folder.exists():
        return folder
    with _lock(_sibling(folder, "lock"), status):
        if not folder.exists():
            status.info(f"getting {' and '.join(_SMALL)} for help and plans (1 MB, once).")
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix="making-") as scratch:
                words = ["install", "--target", f"{scratch}/packages", "-c", str(constraints), *wanted]
                _pip(_python_with_pip(Path(scratch), status), words, folder.parent, status, "Installing them")
                Path(scratch, "packages").replace(folder)
    return folder


def has_poplar_tensorflow() -> bool:
    """Whether this Python has the Poplar SDK's TensorFlow. Looks for its files: an import would take seconds."""
    spec = importlib.util.find_spec("tensorflow")
    places = spec.submodule_search_locations if spec else None
    return any(Path(place, "python", "ipu").is_dir() for place in places or ())


def is_made_by_launch(venv: Path) -> bool:
    """Whether an environment was made completely by this module."""
    return bool(_read_state(venv)) and not _sibling(venv, "installing").exists()


def require_horovod(instances: int, status: Status) -> None:
    """Installs Horovod if it is missing and launch/ made this environment; elsewhere SetupError says how to do it."""
    if importlib.util.find_spec("horovod") or importlib.util.find_spec("popdist"):
        return
    venv = Path(sys.prefix)
    if not is_made_by_launch(venv):
        raise SetupError(
            f"--instances={instances} needs Horovod, and {sys.executable} has none. "
            "Build it with: python -m tf_ipu_dp.environment distributed"
        )
    make("distributed", venv, "", status)
    importlib.invalidate_caches()


def requirements(setup_cfg: Path, extras: Sequence[str]) -> List[str]:
    """Returns the project's requirements and those of some extras from setup.cfg."""
    parser = configparser.ConfigParser()
    parser.read(setup_cfg, encoding="utf-8")
    blocks = [parser["options"]["install_requires"], *(parser["options.extras_require"][extra] for extra in extras)]
    return [line.strip() for block in blocks for line in block.splitlines() if line.strip()]


def cache_dir() -> Path:
    """Returns the cache for built wheels, which all clones share."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("TF_IPU_DP_CACHE") or Path(base) / "tf_ipu_dp")


def _is_complete(venv: Path, target: str) -> bool:
    """Whether an environment was made by this module, is up to date, and has all that the target needs."""
    state = _read_state(venv)
    return (
        is_made_by_launch(venv)
        and (venv / "bin" / "python").exists()
        and state.get("fingerprint") == _fingerprint()
        and state.get("python") == _python_version()
        and set(TARGETS[target]) <= set(state.get("extras", ()))
    )


def _make_venv(target: str, venv: Path, status: Status) -> None:
    """Makes the environment, or adds to it. While the marker exists, the environment counts as incomplete."""
    marker = _sibling(venv, "installing")
    state = _read_state(venv)
    if not state and not marker.exists() and venv.exists() and any(venv.iterdir()):
        raise SetupError(
            f"{venv} exists but was not made by launch/. Remove it, or set TF_IPU_DP_VENV to another directory."
        )
    if not (venv / "bin" / "python").exists() and state:
        status.info(f"the Python that {venv.name} was made with no longer exists; making it again.")
        state = {}
    elif state and state.get("python") != _python_version():
        change = f"{venv.name} was made with Python {state.get('python')}"
        _refuse_if_used(venv, f"{change} and would be made again with {_python_version()}")
        status.info(f"{change}; making it again with {_python_version()}.")
        state = {}
    elif state:
        replaced = installed_packages.find_replaced(venv, _constraints())
        if replaced:
            _refuse_if_used(venv, f"the pinned versions changed, and {', '.join(replaced)} would be replaced")
    was_interrupted = marker.exists()
    if was_interrupted and state:
        # Only an environment that was complete once has a state.
        damaged = installed_packages.remove_damaged(venv)
        what = f"repairing {', '.join(damaged)}" if damaged else "finishing it"
        status.info(f"the last addition to {venv.name} was interrupted; {what}.")
    elif was_interrupted:
        status.info(f"the last installation into {venv.name} did not finish; starting it again.")
    extras = sorted({*state.get("extras", ()), *TARGETS[target]})
    marker.touch()
    try:
        _install(venv, extras, state.get("extras"), status)
    except KilledError:
        raise
    except SetupError:
        if state and not was_interrupted:
            marker.unlink()  # pip failed before it changed anything: the environment is still complete
        raise
    _write(venv / _STATE, json.dumps({"fingerprint": _fingerprint(), "extras": extras, "python": _python_version()}))
    marker.unlink()


def _refuse_if_used(venv: Path, change: str) -> None:
    user = installed_packages.find_user(venv)
    if user is not None:
        raise SetupError(
            f"{change}, but process {user} is using {venv}. Start again when it has ended, or set TF_IPU_DP_VENV to "
            "another directory."
        )


def _install(venv: Path, extras: Sequence[str], present: Optional[Sequence[str]], status: Status) -> None:
    """Installs the extras; `present` are those of a complete environment that is extended, None for a new one."""
    python = venv / "bin" / "python"
    if "distributed" in extras and not (present and "distributed" in present) and not _cached_horovod_wheels("*"):
        _require_compiler()
    started = time.monotonic()
    for ready in venv.glob("ready-*"):
        ready.unlink()
    if present is None:
        # This may be the Python of the old environment, a link that is about to be removed.
        base = Path(sys.executable).resolve() if sys.prefix != sys.base_prefix else Path(sys.executable)
        status.info(f"making {venv} with Python {platform.python_version()}.")
        shutil.rmtree(venv, ignore_errors=True)
        venv.mkdir(parents=True, exist_ok=True)
        _run([str(base), "-m", "venv", str(venv)], venv, status, "Making the virtual environment")
        _point_to_clone(venv)
        status.info("installing TensorFlow and its dependencies (about 250 MB; 1 to 3 minutes).")
    else:
        status.info(f"adding the missing packages to {venv.name}.")
    wanted = [line for line in requirements(_ROOT / "setup.cfg", extras) if not line.startswith("horovod")]
    _pip(python, ["install", "-c", str(_constraints()), *wanted], venv, status, "Installing the packages")
    status.progress("testing TensorFlow")
    _run([str(python), "-c", "import tensorflow"], venv, status, "Importing TensorFlow")
    if "distributed" in extras:
        _install_horovod(python, venv, status)
    compiling = [str(python), "-m", "compileall", "-q", str(_ROOT / "tf_ipu_dp")]
    subprocess.run(compiling, check=False, stdout=subprocess.DEVNULL)
    status.info(f"{venv} is ready after {time.monotonic() - started:.0f} s.")


def _constraints() -> Path:
    return _ROOT / "launch" / "constraints" / ("default.txt" if sys.version_info >= (3, 9) else "sdk_age.txt")


def _python_with_pip(scratch: Path, status: Status) -> Path:
    """Returns this Python, or one in an environment of its own where this one comes without pip."""
    if importlib.util.find_spec("pip"):
        return Path(sys.executable)
    _run([sys.executable, "-m", "venv", f"{scratch}/venv"], scratch, status, "Making a virtual environment")
    return scratch / "venv" / "bin" / "python"


def _point_to_clone(venv: Path) -> None:
    """Makes the package in this clone importable in the environment, from any directory."""
    path = next((venv / "lib").glob("python3*/site-packages")) / "tf_ipu_dp.pth"
    line = f"{_ROOT}\n"
    if not path.exists() or path.read_text(encoding="utf-8") != line:
        _write(path, line)


def _missing_in_sdk(target: str) -> List[str]:
    # Training on the SDK does not need a drawing library: it must neither wait for one nor fail without.
    extras = [extra for extra in TARGETS[target] if extra in ("plots", "test", "lint") and target == "test"]
    wanted = [line for line in requirements(_ROOT / "setup.cfg", extras) if not _is_for_other_python(line)]
    return [line for line in wanted if not _is_installed(_name(line))]


def _add_to_sdk(target: str, status: Status) -> None:
    """Adds missing packages to a Poplar SDK environment; every installed version is pinned."""
    importlib.invalidate_caches()
    missing = _missing_in_sdk(target)
    if not missing:
        return
    names = ", ".join(map(_name, missing))
    status.info(f"the Poplar SDK's environment lacks {names}; adding them without changing installed packages.")
    with tempfile.TemporaryDirectory() as scratch:
        listing = [sys.executable, "-m", "pip", "list", "--format=freeze"]
        installed = subprocess.run(listing, check=False, capture_output=True, text=True).stdout.splitlines()
        pins = Path(scratch, "pins.txt")
        # Versions of the SDK's wheels that pip cannot parse (2.6.3+gc3.3.0+251582) are left out; nothing requires them.
        _write(pins, "\n".join(line for line in installed if re.fullmatch(r"[\w.-]+==[\w.!]+(\+[\w.]+)?", line)))
        words = ["install", "-c", str(pins), *missing]
        _pip(Path(sys.executable), words, cache_dir(), status, "Adding to the SDK's environment")


def _name(requirement: str) -> str:
    return re.split(r"[<>=!~;\[ ]", requirement, maxsplit=1)[0]


def _is_for_other_python(requirement: str) -> bool:
    return 'python_version >= "3.9"' in requirement and sys.version_info < (3, 9)


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _install_horovod(python: Path, log_dir: Path, status: Status) -> None:
    wheel = _horovod_wheel(python, log_dir, status)
    _pip(python, ["install", str(wheel)], log_dir, status, "Installing Horovod")
    status.progress("testing Horovod")
    _run([str(python), "-c", "import horovod.tensorflow"], log_dir, status, "Importing Horovod")


def _install_torch(python: Path, log_dir: Path, status: Status) -> None:
    """Installs the CPU build of PyTorch. Installed packages stay as they are."""
    if sys.version_info < (3, 9):
        raise SetupError(
            f"PyTorch cannot be added to Python {_python_version()}: it needs newer typing-extensions than TensorFlow "
            "2.6 takes. Use Python 3.9 or later."
        )
    # On Linux, the build for x86-64 without this label brings several GB of CUDA along.
    with_cuda = sys.platform == "linux" and platform.machine() == "x86_64"
    wanted = f"{TORCH}+cpu" if with_cuda else TORCH
    status.info(f"installing {wanted} (about 190 MB; 850 MB on disk).")
    limits = ["-c", str(_constraints())] if _constraints().exists() else []  # a wheel of this package has none
    try:
        _pip(python, ["install", "--no-deps", wanted], log_dir, status, "Installing PyTorch")
    except SetupError as problem:
        if "No matching distribution" not in str(problem):
            raise
        raise SetupError(
            f"pip finds no {wanted}, PyTorch's build without CUDA. PyTorch's installation page names the package index "
            "for CPU: set PIP_EXTRA_INDEX_URL to it and repeat this, or install any torch from 2.4 on yourself."
        ) from problem
    _pip(python, ["install", *limits, *_TORCH_NEEDS], log_dir, status, "Installing what PyTorch needs")
    status.progress("testing PyTorch")
    _run([str(python), "-c", "import torch.distributed"], log_dir, status, "Importing PyTorch")


def _cached_horovod_wheels(tensorflow: str) -> List[Path]:
    """Returns the cached wheels for this Python, Horovod and MPI, and for one TensorFlow or any (*)."""
    pattern = f"{_cache_key(tensorflow)}/horovod-*.whl"
    return sorted((cache_dir() / "wheels").glob(pattern))


def _cache_key(tensorflow: str) -> str:
    python, horovod = f"python{platform.python_version()}", HOROVOD.replace("==", "")
    return "-".join([python, f"tensorflow{tensorflow}", horovod, _mpi_version(), platform.machine()])


def _horovod_wheel(python: Path, log_dir: Path, status: Status) -> Path:
    """Returns the wheel for this Python, TensorFlow, Horovod and MPI; builds it if it is not in the cache."""
    tensorflow = _tensorflow_version(python)
    mpi = _mpi_version()
    folder = cache_dir() / "wheels" / _cache_key(tensorflow)
    found = _cached_horovod_wheels(tensorflow)
    if found:
        status.info(f"using the Horovod wheel in {folder}.")
        return found[0]

    _require_compiler()
    cores = os.cpu_count() or 1
    minutes = math.ceil(4 / cores) + 1
    with_mpi = "Gloo" if mpi == "nompi" else f"Gloo and {mpi}"
    status.info(
        f"building Horovod {HOROVOD.split('==')[1]} against TensorFlow {tensorflow} with {with_mpi}: about {minutes} "
        f"minutes on {cores} cores. The wheel is cached in {folder}, so this happens once."
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SetupError(
            f"the wheel cache {folder} cannot be written ({error.strerror}). "
            "Set TF_IPU_DP_CACHE to a writable directory."
        ) from error
    with tempfile.TemporaryDirectory(dir=folder, prefix="building-") as scratch:
        tools = Path(scratch, "tools")
        _pip(
            python,
            ["install", "--target", str(tools), *_HOROVOD_BUILD_TOOLS],
            log_dir,
            status,
            "Installing the build tools",
        )
        cmake = Path(scratch, "cmake")
        _write(cmake, _CMAKE_FOR_NINJA)
        cmake.chmod(0o755)
        settings = {
            "PATH": f"{tools / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
            "PYTHONPATH": str(tools),
            "CMAKE_GENERATOR": "Ninja",
            "CMAKE_BUILD_PARALLEL_LEVEL": str(cores),
            "MAKEFLAGS": f"-j{cores}",
            "HOROVOD_CMAKE": str(cmake),
            "HOROVOD_WITH_TENSORFLOW": "1",
            "HOROVOD_WITH_GLOO": "1",
            "HOROVOD_WITHOUT_PYTORCH": "1",
            "HOROVOD_WITHOUT_MXNET": "1",
            "HOROVOD_WITHOUT_MPI" if mpi == "nompi" else "HOROVOD_WITH_MPI": "1",
        }
        out = Path(scratch, "out")
        # pip's own cache ignores which TensorFlow and MPI a wheel was built against.
        words = ["wheel", "-v", "--no-cache-dir", "--no-deps", "--no-build-isolation", "--wheel-dir", str(out), HOROVOD]
        _pip(python, words, log_dir, status, "Building Horovod", settings)
        built = next(out.glob("horovod-*.whl"))
        return built.replace(folder / built.name)


def _tensorflow_version(python: Path) -> str:
    names = ("tensorflow", "tensorflow-cpu", "tensorflow_cpu")
    code = (
        "from importlib.metadata import distributions\n"
        f"print(*[found.version for found in distributions() if found.metadata['Name'] in {names}])"
    )
    found = subprocess.run([str(python), "-c", code], check=False, capture_output=True, text=True).stdout.split()
    if not found:
        raise SetupError(f"Horovod needs TensorFlow, and {python} has none. Install tf_ipu_dp[host] first.")
    return found[0]


def _mpi_version() -> str:
    """Returns a short name of the MPI that Horovod would be compiled against, or `nompi`."""
    if not shutil.which("mpicxx") or not shutil.which("mpirun"):
        return "nompi"
    # The wrapper may be installed without the headers, which are a package of their own.
    probe = ["mpicxx", "-fsyntax-only", "-x", "c++", "-"]
    done = subprocess.run(probe, check=False, capture_output=True, input="#include <mpi.h>\n", text=True, timeout=60)
    if done.returncode:
        return "nompi"
    done = subprocess.run(["mpirun", "--version"], check=False, capture_output=True, text=True, timeout=20)
    version = re.search(r"\d+(\.\d+)+", done.stdout)
    kind = "openmpi" if "Open MPI" in done.stdout else "mpi"
    return f"{kind}{version[0] if version else ''}"


def _require_compiler() -> None:
    names = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    if not any(name and shutil.which(name.split()[0]) for name in names):
        raise SetupError(
            "Horovod must be compiled, and there is no C++ compiler (CXX, c++, g++ and clang++ were tried). "
            "Install one, for example with apt-get install g++."
        )


def _fingerprint() -> str:
    """Returns a hash of all files that decide what is installed."""
    digest = hashlib.sha256()
    for path in (_ROOT / "setup.cfg", *sorted((_ROOT / "launch" / "constraints").glob("*.txt")), Path(__file__)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _python_version() -> str:
    return ".".join(platform.python_version_tuple()[:2])


def _sibling(venv: Path, what: str) -> Path:
    """Returns a file beside an environment, which stays when the environment is removed."""
    return venv.with_name(f"{venv.name}.{what}")


def _shared_lock() -> Path:
    """Returns the lock for the environment of this Python, which this module did not make."""
    return cache_dir() / f"{hashlib.sha256(sys.prefix.encode()).hexdigest()[:16]}.lock"


def _read_state(venv: Path) -> Dict[str, Any]:
    try:
        state = json.loads((venv / _STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def _write(path: Path, text: str) -> None:
    """Writes a file atomically."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


@contextlib.contextmanager
def _lock(path: Path, status: Status) -> Iterator[None]:
    """Allows one installation at a time. pip inherits the lock, so that it is held even if this process is killed."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise SetupError(
            f"{path.parent} cannot be written ({error.strerror}). Set TF_IPU_DP_VENV and TF_IPU_DP_CACHE to "
            "writable directories of your own, for example TF_IPU_DP_VENV=$(mktemp -d)/venv."
        ) from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            status.info("another process is installing into this environment; waiting for it.")
            fcntl.flock(handle, fcntl.LOCK_EX)
        os.set_inheritable(handle, True)
        yield
    finally:
        os.close(handle)


def _pip(
    python: Path,
    words: Sequence[str],
    log_dir: Path,
    status: Status,
    what: str,
    settings: Optional[Dict[str, str]] = None,
) -> None:
    common = ["--disable-pip-version-check", "--no-input", "--progress-bar", "off", "--retries", "2"]
    _run([str(python), "-m", "pip", words[0], *common, *words[1:]], log_dir, status, what, settings)


def _run(
    command: Sequence[str], log_dir: Path, status: Status, what: str, settings: Optional[Dict[str, str]] = None
) -> None:
    """Runs a command, shows its progress, logs all its output, and turns a failure into a sentence."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    environment.update(settings or {}, PYTHONUNBUFFERED="1")
    log_path = log_dir / _LOG
    lines: List[str] = []
    with log_path.open("a", encoding="utf-8") as log:
        log.write(f"$ {' '.join(command)}\n")
        # close_fds=False passes the lock on.
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment,
            text=True, errors="replace", close_fds=False,
        ) as process:  # fmt: skip
            assert process.stdout
            for line in process.stdout:
                log.write(line)
                lines.append(line.strip())
                _show_progress(line.strip(), status)
    if process.returncode == 0:
        return
    reason = _NO_NETWORK.search("\n".join(lines))
    if reason:
        raise SetupError(
            f"the package index cannot be reached ({reason[0]}). Check the network, the proxy "
            f"(https_proxy) or pip's index settings and start again; details are in {log_path}."
        )
    if process.returncode < 0:
        raise KilledError(f"{what} was killed by signal {-process.returncode}; details: {log_path}. Start again.")
    errors = [line for line in lines if re.match(r"(\w*Error\b|ERROR:|error:)", line)]
    detail = (errors or [line for line in lines if line] or ["no output"])[-1]
    raise SetupError(f"{what} failed: {detail.rstrip('.')}. The whole output is in {log_path}.")


def _show_progress(line: str, status: Status) -> None:
    compiled = re.match(r"\[(\d+)/(\d+)\]", line)
    download = re.match(r"Downloading (\S+).*?\(([\d.]+) (kB|MB)\)", line)
    if compiled:
        status.progress(f"compiling {compiled[1]} of {compiled[2]}", keep=int(compiled[1]) % 20 == 0)
    elif download:
        large = download[3] == "MB" and float(download[2]) > 10
        status.progress(f"downloading {download[1].rsplit('/', 1)[-1]} ({download[2]} {download[3]})", keep=large)
    elif line.startswith("Collecting "):
        status.progress(f"collecting {line.split()[1]}")
    elif line.startswith("Installing collected packages"):
        status.progress(f"installing {line.count(',') + 1} packages", keep=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
