"""Files that installations share: the cache, its locks, and writes that are never half done."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import sys
from pathlib import Path
from typing import Iterator

from tf_ipu_dp.environment.status import SetupError, Status


def cache_dir() -> Path:
    """Returns the cache for built wheels, which all clones share."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("TF_IPU_DP_CACHE") or Path(base) / "tf_ipu_dp")


@contextlib.contextmanager
def lock(path: Path, status: Status) -> Iterator[None]:
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
            status.info("another process is installing the same; waiting for it.")
            fcntl.flock(handle, fcntl.LOCK_EX)
        os.set_inheritable(handle, True)
        yield
    finally:
        os.close(handle)


def shared_lock() -> Path:
    """Returns the lock for the environment of this Python, which this module did not make."""
    return cache_dir() / f"{hashlib.sha256(sys.prefix.encode()).hexdigest()[:16]}.lock"


def sibling(venv: Path, what: str) -> Path:
    """Returns a file beside an environment, which stays when the environment is removed."""
    return venv.with_name(f"{venv.name}.{what}")


def write(path: Path, text: str) -> None:
    """Writes a file atomically."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
