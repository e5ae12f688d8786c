"""Horovod, which is compiled against the TensorFlow that is there; the wheel is kept for the next environment."""

from __future__ import annotations

import math
import os
import platform
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import List

from tf_ipu_dp.environment.commands import pip, run
from tf_ipu_dp.environment.locks import cache_dir, lock, sibling, write
from tf_ipu_dp.environment.status import SetupError, Status

HOROVOD = "horovod==0.28.1"
PACKAGES = ("horovod", "tensorflow", "tensorflow-cpu")  # whose versions must fit each other
_IMPORT = "import horovod.tensorflow"
# cmake 4 rejects Horovod's CMakeLists; setuptools 70 breaks its setup.py. With ninja no make has to be installed.
_BUILD_TOOLS = ("cmake==3.31.6", "ninja==1.11.1.4", "packaging", "setuptools==69.5.1", "wheel==0.45.1")
# What Horovod's setup.py starts in place of cmake. Configuring, the first word is the folder of the sources: g++ 14
# refuses an assignment to a constant in their copy of flatbuffers, in an operator that nothing uses. Building, setup.py
# passes make's VERBOSE=1 to every build tool; ninja would take it for a target.
_CMAKE = """#!/bin/sh
span=$1/third_party/flatbuffers/include/flatbuffers/stl_emulation.h
[ ! -f "$span" ] || sed -i.original 's/const size_type count_;/size_type count_;/' "$span" || exit
for word; do shift; [ "$word" = VERBOSE=1 ] || set -- "$@" "$word"; done
exec cmake "$@"
"""
# Headers that TensorFlow has moved since 2.15. Horovod includes them for code that only builds for GPUs compile, so
# empty files serve. The compiler looks into CPLUS_INCLUDE_PATH last: where TensorFlow has a header, that one is taken.
_MOVED_HEADERS = (
    "client/xla_builder.h", "service/custom_call_target_registry.h", "service/hlo.pb.h", "shape.h", "xla_data.pb.h",
)  # fmt: skip
# Horovod uses std::logic_error without including its header; with g++ 14 no other header brings it along.
_MISSING_INCLUDES = "-include stdexcept"


def install(python: Path, log_dir: Path, status: Status, *, again: bool = False) -> None:
    """Installs Horovod into the environment of a Python, from the cache or built.

    `again`: in place of one that may be there. pip keeps one of the same version, although it was built without MPI.
    """
    wheel = _wheel(python, log_dir, status)
    pip(python, ["install", str(wheel)], log_dir, status, "Installing Horovod")
    if again:
        words = ["install", "--force-reinstall", "--no-deps", str(wheel)]
        pip(python, words, log_dir, status, "Installing Horovod again")
    status.progress("testing Horovod")
    run([str(python), "-c", _IMPORT], log_dir, status, "Importing Horovod")


def works(python: Path) -> bool:
    """Whether the Horovod in the environment of a Python can be imported."""
    return subprocess.run([str(python), "-c", _IMPORT], check=False, capture_output=True).returncode == 0


def require_compiler_or_wheel() -> None:
    """Raises SetupError where Horovod would have to be built and cannot be, before anything large is downloaded."""
    if not _cached_wheels("*"):
        _require_compiler()


def _require_compiler() -> None:
    names = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    if not any(name and shutil.which(name.split()[0]) for name in names):
        raise SetupError(
            "Horovod must be compiled, and there is no C++ compiler (CXX, c++, g++ and clang++ were tried). "
            f"Install one, for example with {_compiler_package()}."
        )


def _compiler_package() -> str:
    if platform.system() == "Darwin":
        return "xcode-select --install"
    return "apt-get install g++"


def _cached_wheels(tensorflow: str) -> List[Path]:
    """Returns the cached wheels for this Python, Horovod and MPI, and for one TensorFlow or any (*)."""
    pattern = f"{_cache_key(tensorflow)}/horovod-*.whl"
    return sorted((cache_dir() / "wheels").glob(pattern))


def _cache_key(tensorflow: str) -> str:
    python, horovod = f"python{platform.python_version()}", HOROVOD.replace("==", "")
    return "-".join([python, f"tensorflow{tensorflow}", horovod, _mpi_version(), platform.machine()])


def _wheel(python: Path, log_dir: Path, status: Status) -> Path:
    """Returns the wheel for this Python, TensorFlow, Horovod and MPI; builds it if it is not in the cache."""
    tensorflow = _tensorflow_version(python)
    folder = cache_dir() / "wheels" / _cache_key(tensorflow)
    found = _cached_wheels(tensorflow)
    if not found:
        _require_compiler()
        with lock(sibling(folder, "lock"), status):  # clones that start together build it once
            found = _cached_wheels(tensorflow)
            if not found:
                folder.mkdir(exist_ok=True)
                _announce_build(tensorflow, folder, status)
                with tempfile.TemporaryDirectory(dir=folder, prefix="building-") as scratch:
                    return _build(python, Path(scratch), log_dir, status)
    status.info(f"using the Horovod wheel in {folder}.")
    return found[0]


def _announce_build(tensorflow: str, folder: Path, status: Status) -> None:
    cores, mpi = os.cpu_count() or 1, _mpi_version()
    minutes = math.ceil(4 / cores) + 1
    with_mpi = "Gloo" if mpi == "nompi" else f"Gloo and {mpi}"
    status.info(
        f"building Horovod {HOROVOD.split('==')[1]} against TensorFlow {tensorflow} with {with_mpi}: about {minutes} "
        f"minutes on {cores} cores. The wheel is cached in {folder}, so this happens once."
    )


def _build(python: Path, scratch: Path, log_dir: Path, status: Status) -> Path:
    """Builds the wheel in a folder inside the one that keeps it, and returns where it is kept."""
    tools, cores = scratch / "tools", os.cpu_count() or 1
    words = ["install", "--target", str(tools), *_BUILD_TOOLS]
    pip(python, words, log_dir, status, "Installing the build tools")
    cmake = scratch / "cmake"
    write(cmake, _CMAKE)
    cmake.chmod(0o755)
    headers = scratch / "headers"
    for name in _MOVED_HEADERS:
        header = headers / "tensorflow" / "compiler" / "xla" / name
        header.parent.mkdir(parents=True, exist_ok=True)
        header.touch()
    include = os.environ.get("CPLUS_INCLUDE_PATH", "")
    settings = {
        "PATH": f"{tools / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONPATH": str(tools),
        "CMAKE_GENERATOR": "Ninja",
        "CMAKE_BUILD_PARALLEL_LEVEL": str(cores),
        "MAKEFLAGS": f"-j{cores}",
        "CPLUS_INCLUDE_PATH": f"{include}{os.pathsep if include else ''}{headers}",
        "CXXFLAGS": f"{os.environ.get('CXXFLAGS', '')} {_MISSING_INCLUDES}".strip(),
        "HOROVOD_CMAKE": str(cmake),
        "HOROVOD_WITH_TENSORFLOW": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITHOUT_PYTORCH": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITHOUT_MPI" if _mpi_version() == "nompi" else "HOROVOD_WITH_MPI": "1",
    }
    out = scratch / "out"
    # pip's own cache ignores which TensorFlow and MPI a wheel was built against.
    words = ["wheel", "-v", "--no-cache-dir", "--no-deps", "--no-build-isolation", "--wheel-dir", str(out), HOROVOD]
    pip(python, words, log_dir, status, "Building Horovod", settings)
    built = next(out.glob("horovod-*.whl"))
    return built.replace(scratch.parent / built.name)


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
