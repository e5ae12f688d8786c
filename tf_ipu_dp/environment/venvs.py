"""Virtual environments in a clone: made, extended, repaired, and never changed under a running job."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict, Optional, Sequence

from tf_ipu_dp.environment import horovod, installed_packages, versions
from tf_ipu_dp.environment.commands import pip, run
from tf_ipu_dp.environment.locks import sibling, write
from tf_ipu_dp.environment.status import KilledError, SetupError, Status

_STATE = "tf_ipu_dp.json"


def is_complete(venv: Path, target: str) -> bool:
    """Whether an environment was made by this module, is up to date, and has all that the target needs."""
    state = _read_state(venv)
    return (
        is_made_by_launch(venv)
        and (venv / "bin" / "python").exists()
        and state.get("fingerprint") == versions.fingerprint()
        and state.get("python") == versions.python_version()
        and set(versions.TARGETS[target]) <= set(state.get("extras", ()))
    )


def is_made_by_launch(venv: Path) -> bool:
    """Whether an environment was made completely by this module."""
    return bool(_read_state(venv)) and not sibling(venv, "installing").exists()


def make(target: str, venv: Path, status: Status) -> None:
    """Makes the environment, or adds to it. While the marker exists, the environment counts as incomplete."""
    marker = sibling(venv, "installing")
    state = _read_state(venv)
    if not state and not marker.exists() and venv.exists() and any(venv.iterdir()):
        raise SetupError(
            f"{venv} exists but was not made by launch/. Remove it, or set TF_IPU_DP_VENV to another directory."
        )
    if not (venv / "bin" / "python").exists() and state:
        status.info(f"the Python that {venv.name} was made with no longer exists; making it again.")
        state = {}
    elif state and state.get("python") != versions.python_version():
        change = f"{venv.name} was made with Python {state.get('python')}"
        _refuse_if_used(venv, f"{change} and would be made again with {versions.python_version()}")
        status.info(f"{change}; making it again with {versions.python_version()}.")
        state = {}
    elif state:
        replaced = installed_packages.find_replaced(venv, versions.of_python().constraints)
        if replaced:
            _refuse_if_used(venv, f"the pinned versions changed, and {', '.join(replaced)} would be replaced")
    was_interrupted = marker.exists()
    if was_interrupted and state:
        # Only an environment that had all but Horovod once has a state.
        damaged = installed_packages.remove_damaged(venv)
        what = f"repairing {', '.join(damaged)}" if damaged else "finishing it"
        status.info(f"the last addition to {venv.name} was interrupted; {what}.")
    elif was_interrupted:
        status.info(f"the last installation into {venv.name} did not finish; starting it again.")
    extras = sorted({*state.get("extras", ()), *versions.TARGETS[target]})
    if "distributed" in extras and "distributed" not in state.get("extras", ()):
        horovod.require_compiler_or_wheel()
    marker.touch()
    try:
        _install(venv, extras, state.get("extras"), status)
    except KilledError:
        raise
    except SetupError:
        if state and not was_interrupted:
            marker.unlink()  # pip failed before it changed anything: the environment is still complete
        raise
    _write_state(venv, extras)
    marker.unlink()


def point_to_clone(venv: Path) -> None:
    """Makes the package in this clone importable in the environment, from any directory."""
    path = next((venv / "lib").glob("python3*/site-packages")) / "tf_ipu_dp.pth"
    text = f"{versions.ROOT}\n"
    if versions.of_python().needs_legacy_keras:
        # Read when TensorFlow is imported, by whichever program imports it first.
        text += 'import os; os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")\n'
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        write(path, text)


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
    has_horovod = "distributed" in (present or ())
    former = installed_packages.find_versions(venv, horovod.PACKAGES) if has_horovod else {}
    started = time.monotonic()
    for ready in venv.glob("ready-*"):
        ready.unlink()
    if present is None:
        # This may be the Python of the old environment, a link that is about to be removed.
        base = Path(sys.executable).resolve() if sys.prefix != sys.base_prefix else Path(sys.executable)
        status.info(f"making {venv} with Python {platform.python_version()}.")
        shutil.rmtree(venv, ignore_errors=True)
        venv.mkdir(parents=True, exist_ok=True)
        run([str(base), "-m", "venv", str(venv)], venv, status, "Making the virtual environment")
        point_to_clone(venv)
        status.info("installing TensorFlow and its dependencies (about 250 MB; 1 to 3 minutes).")
    else:
        status.info(f"adding the missing packages to {venv.name}.")
    pins = ["-c", str(versions.of_python().constraints)]
    together, alone = versions.split_requirements(versions.requirements(versions.ROOT / "setup.cfg", extras))
    try:
        pip(python, ["install", *pins, *together], venv, status, "Installing the packages")
    except SetupError as problem:
        if "No matching distribution found for tensorflow" not in str(problem):
            raise
        raise SetupError(
            f"TensorFlow {versions.of_python().tensorflow} has no wheel for Python {versions.python_version()} on "
            f"{platform.system()} {platform.machine()}, or the package index does not have it. "
            "docs/platforms.md says which Pythons have one; TF_IPU_DP_PYTHON chooses another."
        ) from problem
    if alone:
        pip(python, ["install", "--no-deps", *pins, *alone], venv, status, "Installing Keras 2")
    status.progress("testing TensorFlow")
    run([str(python), "-c", "import tensorflow"], venv, status, "Importing TensorFlow")
    if "distributed" in extras:
        if present is None:  # an end during the build of minutes is then an addition to finish
            _write_state(venv, [each for each in extras if each != "distributed"])
        # One that works is kept: a new MPI or a lost cache is no reason to build for minutes before a training.
        is_kept = "horovod" in former and former == installed_packages.find_versions(venv, horovod.PACKAGES)
        if not (is_kept and horovod.works(python)):
            horovod.install(python, venv, status)
    compiling = [str(python), "-m", "compileall", "-q", str(versions.ROOT / "tf_ipu_dp")]
    subprocess.run(compiling, check=False, stdout=subprocess.DEVNULL)
    status.info(f"{venv} is ready after {time.monotonic() - started:.0f} s.")


def _write_state(venv: Path, extras: Sequence[str]) -> None:
    state = {"fingerprint": versions.fingerprint(), "extras": extras, "python": versions.python_version()}
    write(venv / _STATE, json.dumps(state))


def _read_state(venv: Path) -> Dict[str, Any]:
    try:
        state = json.loads((venv / _STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}
