"""The emulated partition: which IPUs there are, and which process holds them. Standard library only.

A directory in the user's runtime directory stands for the partition. Every attachment is a file that its owner keeps
locked; the kernel drops the lock when the owner ends, however it ends, so a dead owner's IPUs are free at once. Changes
are made under one lock of the whole partition, so that askers see each other's attachments whole or not at all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import getpass
import itertools
import json
import os
import stat
import sys
import tempfile
import time
from pathlib import Path
from typing import Callable, Dict, Iterator, List, Mapping, Optional, Tuple

DEFAULT_IPUS = 64
_LOCK = "partition.lock"
_MOST_OWNER_BYTES = 1 << 23
_LOCK_LIMIT_S = 10.0
_LOCK_POLL_S = 0.002


class RegistryError(Exception):
    """The registry itself cannot be used: its directory is not ours, not private, or holds what we did not write."""


class NoSuchDeviceError(Exception):
    """The partition has no such device, busy or not."""


class DeviceBusyError(Exception):
    """The partition has such devices, and all of them are held."""


@dataclasses.dataclass(frozen=True)
class Device:
    """What `select_ipus` and `auto_select_ipus` choose from: a single IPU or an aligned group of them."""

    id: int
    ipus: Tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Owner:
    """A process that holds IPUs, as the others see it."""

    pid: int
    user: str
    executable: str
    started: float
    ipus: Tuple[int, ...]
    replicas: int


@dataclasses.dataclass(frozen=True)
class Meter:
    """How long an owner's IPUs have been at work. Times are those of the machine's monotonic clock, in seconds."""

    attached: float
    busy: float = 0.0
    executing_since: float = 0.0  # 0 between executions

    def busy_until(self, now: float) -> float:
        """Returns the seconds of work up to now, those of a running execution included."""
        return self.busy + (max(0.0, now - self.executing_since) if self.executing_since else 0.0)

    def to_line(self) -> bytes:
        """Returns a line of always the same length, so that it can be overwritten in place."""
        return f"{self.attached:020.6f} {self.busy:020.6f} {self.executing_since:020.6f}\n".encode()

    @classmethod
    def from_line(cls, line: bytes) -> Meter:
        """Reads such a line."""
        attached, busy, since = (float(word) for word in line.split())
        return cls(attached, busy, since)


class Attachment:
    """IPUs held by this process, until `release` or the end of the process."""

    def __init__(self, partition: Partition, device: Device, path: Path, handle: int) -> None:
        self.device = device
        self._partition, self._path, self._handle = partition, path, handle

    def begin_execution(self, waited: Callable[[], float] = float) -> None:
        """Says that the IPUs start to work. While they do, `waited` tells for how long they have waited."""
        _WAITED[self._path] = waited
        self._write(dataclasses.replace(_METERS[self._path], executing_since=time.monotonic()))

    def end_execution(self, waited: float) -> None:
        """Says that the IPUs have worked, but for some seconds of waiting."""
        meter, now = _METERS[self._path], time.monotonic()
        spent = max(0.0, now - meter.executing_since - waited)
        self._write(dataclasses.replace(meter, busy=meter.busy + spent, executing_since=0.0))

    def _write(self, meter: Meter) -> None:
        if self._handle >= 0:
            _METERS[self._path] = meter
            os.pwrite(self._handle, meter.to_line(), 0)

    def release(self) -> None:
        """Gives the IPUs back. Doing it twice is harmless."""
        if self._handle < 0:
            return
        with self._partition.locked():
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()
            _HELD.pop(self._path, None)
            _METERS.pop(self._path, None)
            _WAITED.pop(self._path, None)
            os.close(self._handle)
            self._handle = -1


# What this process holds. A POSIX lock is dropped when its owner closes any handle of the file, so own files are never
# opened again; and unlike flock it is not inherited by forked workers, which may outlive the owner.
_HELD: Dict[Path, Owner] = {}
_METERS: Dict[Path, Meter] = {}
_WAITED: Dict[Path, Callable[[], float]] = {}
_NUMBERS = itertools.count()


class Partition:
    """The emulated IPUs of this user on this machine."""

    def __init__(self, size: int, folder: Path) -> None:
        self.size, self.folder = size, folder

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Partition:
        """Returns the partition of IPU_EMULATOR_IPUS chips, kept in IPU_EMULATOR_DIR or the runtime directory."""
        text = environ.get("IPU_EMULATOR_IPUS", str(DEFAULT_IPUS)).strip()
        if not (text.isascii() and text.isdigit() and len(text) < 7 and _is_power_of_two(int(text))):
            raise RegistryError(
                f"IPU_EMULATOR_IPUS={text!r} is not possible: a partition has a power of two of IPUs, like 64."
            )
        explicit = environ.get("IPU_EMULATOR_DIR")
        base = environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
        return cls(int(text), Path(explicit) if explicit else Path(base) / f"ipu_emulator-{os.getuid()}")

    def devices(self) -> List[Device]:
        """Returns all devices in the order of their ids: single IPUs first, then pairs, fours and so on."""
        found: List[Device] = []
        width = 1
        while width <= self.size:
            for first in range(0, self.size, width):
                found.append(Device(len(found), tuple(range(first, first + width))))
            width *= 2
        return found

    def find(self, *, count: Optional[int] = None, device_id: Optional[int] = None) -> List[Device]:
        """Returns the devices of so many IPUs, or the one with an id, free or not."""
        found = [device for device in self.devices() if device.id == device_id or len(device.ipus) == count]
        if not found:
            sizes = ", ".join(str(1 << e) for e in range(self.size.bit_length()))
            asked = f"device {device_id}" if count is None else f"device of {count} IPUs"
            raise NoSuchDeviceError(f"there is no {asked}: the partition has {self.size} IPUs, in devices of {sizes}")
        return found

    def attach(self, *, count: Optional[int] = None, device_id: Optional[int] = None) -> Attachment:
        """Takes the first free device of so many IPUs, or the one with an id."""
        wanted = self.find(count=count, device_id=device_id)
        with self.locked():
            held = {ipu for owner, _ in self._read() for ipu in owner.ipus}
            free = [device for device in wanted if held.isdisjoint(device.ipus)]
            if not free:
                raise DeviceBusyError(
                    f"{len(held)} of the partition's {self.size} IPUs are held by other devices or processes"
                )
            return self._hold(free[0], replicas=len(free[0].ipus))

    def owners(self) -> List[Owner]:
        """Returns who holds IPUs now. The files of owners that have ended are removed."""
        return [owner for owner, _ in self.meters()]

    def meters(self) -> List[Tuple[Owner, Meter]]:
        """Returns the owners, and how long their IPUs have worked."""
        if not self.folder.exists():
            return []
        with self.locked():
            return self._read()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps all other processes from changing the partition."""
        self._make_folder()
        path = self.folder / _LOCK
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise RegistryError(f"{path} is not a file of the emulator ({error.strerror}); remove it") from error
        try:
            _lock_in_time(handle, path)
            yield
        finally:
            os.close(handle)

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = self.folder.lstat()
        except OSError as error:
            raise RegistryError(f"{self.folder} cannot be used ({error.strerror}); set IPU_EMULATOR_DIR") from error
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise RegistryError(
                f"{self.folder} is not a private directory of this user (mode 0700); remove it or set IPU_EMULATOR_DIR"
            )

    def _hold(self, device: Device, replicas: int) -> Attachment:
        program = Path(sys.argv[0] if sys.argv and sys.argv[0] else sys.executable).name
        owner = Owner(os.getpid(), _user_name(), program, time.time(), device.ipus, replicas)
        path = self.folder / f"owner-{owner.pid}-{next(_NUMBERS)}.json"
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        meter = Meter(time.monotonic())
        os.write(handle, meter.to_line() + json.dumps(dataclasses.asdict(owner)).encode())
        _HELD[path], _METERS[path] = owner, meter
        return Attachment(self, device, path, handle)

    def _read(self) -> List[Tuple[Owner, Meter]]:
        found = []
        for path in sorted(self.folder.glob("owner-*.json")):
            own = _HELD.get(path)
            one = (own, _own_meter(path)) if own and own.pid == os.getpid() else self._read_foreign(path)
            if one:
                found.append(one)
        return found

    def _read_foreign(self, path: Path) -> Optional[Tuple[Owner, Meter]]:
        """Reads another process's attachment, or clears it away when that process has ended."""
        try:
            handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            raise RegistryError(f"{path} is not a file of the emulator ({error.strerror}); remove it") from error
        try:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
                raise RegistryError(f"{path} is not a file of this user; remove it")
            try:
                fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return _parse(path, os.read(handle, _MOST_OWNER_BYTES))
            content = os.read(handle, _MOST_OWNER_BYTES)
            if content:  # else its owner ended before it wrote
                _parse(path, content)  # reports what is not ours instead of deleting it
            path.unlink()
            return None
        finally:
            os.close(handle)


def _own_meter(path: Path) -> Meter:
    """Returns the meter without the waiting of a running execution, which other processes learn when it ends."""
    meter = _METERS[path]
    return dataclasses.replace(meter, busy=meter.busy - _WAITED[path]()) if meter.executing_since else meter


def _lock_in_time(handle: int, path: Path) -> None:
    """Locks the partition. Others need it for milliseconds, so that waiting long means that something is wrong."""
    deadline = time.monotonic() + _LOCK_LIMIT_S
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if time.monotonic() >= deadline:
                raise RegistryError(f"{path} has been locked for {_LOCK_LIMIT_S:.0f} s; end who holds it") from error
            time.sleep(_LOCK_POLL_S)


def _parse(path: Path, content: bytes) -> Tuple[Owner, Meter]:
    try:
        line, _, record = content.partition(b"\n")
        meter = Meter.from_line(line)
        value = json.loads(record)
        owner = Owner(**{**value, "ipus": tuple(value["ipus"])})
        numbers = (owner.pid, owner.replicas, *owner.ipus)
        if not all(type(number) is int and number >= 0 for number in numbers) or not isinstance(owner.user, str):
            raise ValueError("wrong types")
    except (ValueError, TypeError, KeyError) as error:
        raise RegistryError(f"{path} is not a record of the emulator; end its owner and remove it") from error
    return owner, meter


def _user_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return str(os.getuid())


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0
