"""The few packages that help, refusals and plans need, in a folder that all clones share.

An environment with TensorFlow takes minutes to make, these take seconds.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import tempfile
from pathlib import Path

from tf_ipu_dp.environment import versions
from tf_ipu_dp.environment.commands import pip, run
from tf_ipu_dp.environment.locks import cache_dir, lock, sibling
from tf_ipu_dp.environment.status import Status
from tf_ipu_dp.environment.venvs import is_made_by_launch

_NAMES = ("absl-py", "rich")


def get(status: Status) -> Path:
    """Returns the folder that has them; gets them if nobody has done so before."""
    if is_made_by_launch(Path(sys.prefix)):  # it is about to be updated, and has them
        return next(Path(sys.prefix, "lib").glob("python3*/site-packages"))
    lines = versions.requirements(versions.ROOT / "setup.cfg", ())
    wanted = [line for line in lines if versions.name_of(line) in _NAMES]
    # Other pins are no reason to get them again: a plan then needs no network.
    digest = hashlib.sha256("\n".join(wanted).encode()).hexdigest()
    folder = cache_dir() / "packages" / f"python{versions.python_version()}-{digest[:16]}"
    if folder.exists():
        return folder
    with lock(sibling(folder, "lock"), status):
        if not folder.exists():
            status.info(f"getting {' and '.join(_NAMES)} for help and plans (1 MB, once).")
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix="making-") as scratch:
                limits = ["-c", str(versions.of_python().constraints)]
                words = ["install", "--target", f"{scratch}/packages", *limits, *wanted]
                pip(_python_with_pip(Path(scratch), status), words, folder.parent, status, "Installing them")
                Path(scratch, "packages").replace(folder)
    return folder


def _python_with_pip(scratch: Path, status: Status) -> Path:
    """Returns this Python, or one in an environment of its own where this one comes without pip."""
    if importlib.util.find_spec("pip"):
        return Path(sys.executable)
    run([sys.executable, "-m", "venv", f"{scratch}/venv"], scratch, status, "Making a virtual environment")
    return scratch / "venv" / "bin" / "python"
