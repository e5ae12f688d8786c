"""Network namespaces of emulated hosts: whose they are, calls inside them, and their removal, also after a crash.

The namespaces of one network have a common prefix, and the network has a folder of that name whose lock its owner
holds while it lives. A network whose lock is free has lost its owner; the next start removes it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import itertools
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Callable, List, Optional, Sequence, TypeVar

from tf_ipu_dp import cli

T = TypeVar("T")

_MOUNTS = Path("/run/netns")  # where the command ip keeps the names
_FOLDER = Path("/run/tf_ipu_dp/networks")
_PREFIX = re.compile(r"tfipu-[0-9]+-[0-9]+")
_LOCK = "lock"
_CLONE_NEWNET = 0x40000000
_LAST_WORDS_S = 5.0  # for processes that were killed to be gone
_NUMBERS = itertools.count()  # of the networks of this process: no name is used twice
_PACKAGES = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux"}


class Claim:
    """A prefix for the namespaces of one network, and a folder for its files, until `release`."""

    def __init__(self, folder: Path, lock: int):
        self.folder = folder
        self.prefix = folder.name
        self._lock = lock

    def add(self, name: str) -> str:
        """Makes a namespace and returns its full name."""
        whole = f"{self.prefix}-{name}"
        run("ip", "netns", "add", whole)
        return whole

    def release(self) -> List[str]:
        """Removes the namespaces and the folder; returns a sentence for each that cannot be removed."""
        problems = _remove(self.folder)
        os.close(self._lock)
        return problems


def claim() -> Claim:
    """Returns a prefix that no other network has."""
    _make_private(_FOLDER)
    while True:
        folder = _FOLDER / f"tfipu-{os.getpid()}-{next(_NUMBERS)}"
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            continue
        lock = _take_lock(folder)  # another start may remove what looks abandoned before it is locked
        if lock is not None:
            return Claim(folder, lock)


def remove_leftovers() -> List[str]:
    """Removes the networks whose owners are gone; returns a sentence for each that cannot be removed."""
    problems: List[str] = []
    for folder in sorted(_FOLDER.glob("tfipu-*")) if _FOLDER.is_dir() else []:
        if not _PREFIX.fullmatch(folder.name):
            continue
        lock = _take_lock(folder)
        if lock is not None:
            problems += _remove(folder)
            os.close(lock)
    return problems


def why_not() -> Optional[str]:
    """Returns why this process cannot make namespaces, in a sentence, or None."""
    works = "Without --fabric, measure runs on this host, and size, simulate and report need no root."
    if os.geteuid() != 0:
        return f"Emulated hosts are network namespaces, which need root. {works}"
    for name, package in _PACKAGES.items():
        if shutil.which(name) is None:
            return f"Emulated hosts need the command {name}, from the package {package}. {works}"
    done = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = cli.first_line(done.stderr)
        return f"This machine does not let root make network namespaces: {reason}. {works}"
    return None


def command_inside(namespace: str, words: Sequence[str]) -> List[str]:
    """Returns the command that runs another one in a namespace."""
    # Not nsenter: /sys would show the machine's devices, not the host's.
    return ["ip", "netns", "exec", namespace, *words]


def call_inside(namespace: str, function: Callable[[], T]) -> T:
    """Returns what a function returns inside a namespace. Sockets that it makes stay there."""
    results: List[T] = []
    errors: List[BaseException] = []

    def call() -> None:
        try:
            enter(namespace)
            results.append(function())
        except BaseException as error:  # noqa: BLE001 - it is raised again in the caller's thread
            errors.append(error)

    # A namespace belongs to a thread; the thread ends, so that no other code runs in it.
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def enter(namespace: str) -> None:
    """Moves the calling thread into a namespace, for good."""
    file = os.open(str(_MOUNTS / namespace), os.O_RDONLY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(file, _CLONE_NEWNET) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
    finally:
        os.close(file)


def read_pids(namespace: str) -> List[int]:
    """Lists the processes that run in a namespace."""
    done = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
    return [int(word) for word in done.stdout.split()]


def run(*words: str, lines: Sequence[str] = ()) -> str:
    """Runs a command, with lines on its standard input, and returns its output; UsageError if it fails."""
    text = "".join(f"{line}\n" for line in lines)
    done = subprocess.run(words, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = " ".join(done.stderr.split())
        raise cli.UsageError(f"The emulated network cannot be made: {' '.join(words)}: {reason or done.returncode}.")
    return done.stdout


def _remove(folder: Path) -> List[str]:
    """Ends the processes of a network, and removes its namespaces and its folder. The caller holds its lock."""
    problems = []
    names = sorted(path.name for path in _MOUNTS.glob(f"{folder.name}-*"))
    deadline = time.monotonic() + _LAST_WORDS_S
    for name in names:
        pids = read_pids(name)
        while pids and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
            pids = read_pids(name)
        done = subprocess.run(["ip", "netns", "delete", name], capture_output=True, text=True, check=False)
        if done.returncode and (_MOUNTS / name).exists():
            problems.append(
                f"The network namespace {name} is left over and cannot be removed ({cli.first_line(done.stderr)}). "
                f"Try ip netns delete {name}."
            )
    if not problems:
        shutil.rmtree(folder, ignore_errors=True)
    return problems


def _take_lock(folder: Path) -> Optional[int]:
    """Returns the file of a network's lock if this process has got it; None if another has it, or it is gone."""
    path = folder / _LOCK
    try:
        lock = os.open(str(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The file may have been removed, and the name taken again, before it was locked.
        if os.path.samestat(os.fstat(lock), path.stat()):
            return lock
    os.close(lock)
    return None


def _make_private(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for each in (folder.parent, folder):
        found = each.lstat()
        if each.is_symlink() or found.st_uid != os.geteuid():
            raise cli.UsageError(f"{each} belongs to another user. Remove it, for emulated hosts to be made.")
        each.chmod(0o700)
