"""What a target gets: an environment in the clone, or additions to the one that this Python belongs to."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Optional

from tf_ipu_dp.environment import horovod, poplar, pytorch, venvs, versions
from tf_ipu_dp.environment.locks import cache_dir, lock, shared_lock, sibling, write
from tf_ipu_dp.environment.status import SetupError, Status


def make(target: str, venv: Optional[Path], key: str, status: Status) -> Path:
    """Returns a Python that has what the target needs; installs what is missing."""
    if target == "ddp":
        if venv is not None:
            raise SetupError("PyTorch is added to the environment of the Python that runs this. Leave --venv out.")
        with lock(shared_lock(), status):
            pytorch.install(Path(sys.executable), cache_dir(), status)
        return Path(sys.executable)
    if poplar.has_poplar_tensorflow():
        if poplar.missing_packages(target):
            with lock(shared_lock(), status):
                poplar.add_packages(target, status)
        return Path(sys.executable)
    if venv is None:
        if target != "distributed":
            raise SetupError(
                f"environments for {target!r} are made by launch/; "
                f"only {' and '.join(map(repr, versions.ADDED))} can be added to this one."
            )
        with lock(shared_lock(), status):
            horovod.install(Path(sys.executable), cache_dir(), status, again=True)
        return Path(sys.executable)
    venv = venv.absolute()
    if not venvs.is_complete(venv, target):
        with lock(sibling(venv, "lock"), status):
            if not venvs.is_complete(venv, target):
                venvs.make(target, venv, status)
    # The clone may have moved, or share its environment with another. Without write access the files are not needed.
    with contextlib.suppress(OSError):
        venvs.point_to_clone(venv)
        for name in versions.TARGETS:
            if key and venvs.is_complete(venv, name):
                write(venv / f"ready-{name}", key)
    return venv / "bin" / "python"


def require_horovod(instances: int, status: Status) -> None:
    """Installs Horovod if it is missing and launch/ made this environment; elsewhere SetupError says how to do it."""
    if importlib.util.find_spec("horovod") or importlib.util.find_spec("popdist"):
        return
    venv = Path(sys.prefix)
    if not venvs.is_made_by_launch(venv):
        raise SetupError(
            f"--instances={instances} needs Horovod, and {sys.executable} has none. "
            "Build it with: python -m tf_ipu_dp.environment distributed"
        )
    make("distributed", venv, "", status)
    importlib.invalidate_caches()
