"""The emulated partition: which IPUs it has, and which process holds them. Standard library only.

The partition is a directory in the user's runtime directory. Every attachment is a file that its owner keeps locked;
the kernel drops the lock when the owner ends, however it ends, so a dead owner's IPUs are free at once. Changes are
made under one lock of the whole partition, so that no process sees an attachment half written. Once a second an owner
writes a heartbeat into its file, and how busy its IPUs have been. poprun reserves a block of IPUs for its instances in
the same way, so that jobs that run at the same time get different ones.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import errno
import fcntl
import getpass
import itertools
import json
import math
import os
import re
import stat
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

DEFAULT_IPUS = 64
HEARTBEAT_S = 1.0
BLOCK = "IPU_EMULATOR_BLOCK"
_LOCK = "partition.lock"
_MAX_OWNER_BYTES = 1 << 23
_LOCK_LIMIT_S = 10.0
_OWNER_NAME = re.compile(r"owner-[0-9]+-[0-9]+\.json")
# What the file of a reserved block begins with: a file without it is not the emulator's, whatever its name is.
_BLOCK_MARK = "ipu_emulator block "
_MAX_BLOCK_BYTES = _HOLDER_BYTES = 64
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


class RegistryError(Exception):
    """The registry itself cannot be used: its directory is not ours or not private, or has files that are not ours."""


class NoSuchDeviceError(Exception):
    """The partition has no such device, free or not."""


class DeviceBusyError(Exception):
    """The partition has such devices, and all of them are held."""


@dataclasses.dataclass(frozen=True)
class Device:
    """What `select_ipus` and `auto_select_ipus` choose from: a single IPU or an aligned group of IPUs."""

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
    """How busy an owner's IPUs have been up to its last heartbeat, in seconds of the machine's monotonic clock."""

    attached: float
    heartbeat: float
    busy: float = 0.0
    waiting: float = 0.0  # for input, inside executions

    def to_words(self) -> str:
        """Returns the numbers as text, which is always of the same length."""
        return f"{self.attached:020.6f} {self.heartbeat:020.6f} {self.busy:020.6f} {self.waiting:020.6f}"


@dataclasses.dataclass(frozen=True)
class Holding:
    """An owner, how busy its IPUs have been, and how busy they had been a heartbeat or two earlier."""

    owner: Owner
    meter: Meter
    earlier: Meter

    def to_line(self) -> bytes:
        """Returns the meters; the line is always of the same length, so that it can be overwritten in place."""
        return f"{self.meter.to_words()} {self.earlier.to_words()}\n".encode()

    def to_bytes(self) -> bytes:
        """Returns the file's content: the meters, then the owner."""
        return self.to_line() + json.dumps(dataclasses.asdict(self.owner)).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> Holding:
        """Reads it back; raises ValueError, TypeError or KeyError for other content."""
        line, _, record = content.partition(b"\n")
        numbers = [float(word) for word in line.split()]
        if len(numbers) == 3:  # from an earlier release: when it was attached, and how long it was busy
            numbers = 2 * [numbers[0], numbers[0], numbers[1], 0.0]
        if len(numbers) != 8 or not all(map(math.isfinite, numbers)):
            raise ValueError("no meters")
        value = json.loads(record)
        owner = Owner(**{**value, "ipus": tuple(value["ipus"])})
        counts = (owner.pid, owner.replicas, *owner.ipus)
        if not all(type(count) is int and count >= 0 for count in counts):
            raise ValueError("wrong types")
        if not isinstance(owner.user, str) or not isinstance(owner.executable, str):
            raise ValueError("wrong types")
        if type(owner.started) not in (int, float) or not math.isfinite(owner.started):
            raise ValueError("wrong types")
        return cls(owner, Meter(*numbers[:4]), Meter(*numbers[4:]))


class Attachment:
    """IPUs held by this process, until `release` or the end of the process; other processes see how busy they are."""

    def __init__(self, partition: Partition, device: Device, owner: Owner, path: Path, handle: int) -> None:
        self.device = device
        self._partition, self._owner, self._path, self._handle = partition, owner, path, handle
        now = time.monotonic()
        self._finished = Meter(now, now)  # without the running execution
        self._earlier = self._last = self._finished
        self._executing_since = 0.0  # 0 between executions
        self._waited: Callable[[], float] = float
        self._guard = threading.Lock()
        _write_whole(handle, Holding(owner, self._finished, self._finished).to_bytes())

    def begin_execution(self, waited: Callable[[], float] = float) -> None:
        """Records that an execution starts. While it runs, `waited` returns the seconds it has waited for input."""
        with self._guard:
            self._waited, self._executing_since = waited, time.monotonic()
            self._write(self._including(self._executing_since, 0.0))

    def end_execution(self, waited: float) -> None:
        """Records that the execution has ended, and for how many seconds it waited for input."""
        with self._guard:
            self._finished = self._including(time.monotonic(), waited)
            self._executing_since = 0.0
            self._write(self._finished)

    def read(self) -> Holding:
        """Returns what other processes would see if it were written now."""
        with self._guard:
            return Holding(self._owner, self._now(), self._earlier)

    def write_heartbeat(self) -> None:
        """Records the progress of a long execution, and that this process is alive."""
        with self._guard:
            self._earlier, self._last = self._last, self._now()
            self._write(self._last)

    def release(self) -> None:
        """Releases the IPUs. Harmless when called twice, or in a forked worker, which does not hold them."""
        if self._handle < 0:
            return
        if os.getpid() != self._owner.pid:
            os.close(self._handle)
            self._handle = -1
            return
        # Closing the file is what frees the IPUs. Where the partition cannot be locked, the file stays, and who looks
        # next removes it, as after a kill.
        with contextlib.suppress(RegistryError), self._partition.locked(), self._guard:
            with contextlib.suppress(OSError):
                self._path.unlink()
            self._close()
        with self._guard:
            self._close()

    def _close(self) -> None:
        if self._handle >= 0:
            _ATTACHED.pop(self._path, None)
            os.close(self._handle)
            self._handle = -1

    def _write(self, meter: Meter) -> None:
        if self._handle >= 0:
            with contextlib.suppress(OSError):  # a program does not fail because others cannot see how busy it is
                os.pwrite(self._handle, Holding(self._owner, meter, self._earlier).to_line(), 0)

    def _now(self) -> Meter:
        now = time.monotonic()
        if not self._executing_since:
            return dataclasses.replace(self._finished, heartbeat=now)
        try:
            waited = self._waited()
        except Exception:  # TensorFlow may refuse calls from this thread
            waited = 0.0
        return self._including(now, waited)

    def _including(self, now: float, waited: float) -> Meter:
        """Returns the meter with the running execution up to now."""
        before, spent = self._finished, max(0.0, now - self._executing_since)
        waited = min(max(0.0, waited), spent)
        return Meter(before.attached, now, before.busy + spent - waited, before.waiting + waited)


class _HeartbeatThread:
    """A thread that writes the heartbeats of all attachments of this process, while there are any."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._stopped = threading.Event()
        self._thread: Optional[threading.Thread] = None

    def start(self) -> None:
        with self._guard:
            if self._thread is None and not self._stopped.is_set():
                self._thread = threading.Thread(target=self._run, name="emulator-heartbeat", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Ends the thread before the interpreter unloads TensorFlow, which it uses."""
        self._stopped.set()
        if self._thread:
            self._thread.join(HEARTBEAT_S)

    def reset_in_child(self) -> None:
        """Resets a forked process: the thread and the attachments are its parent's."""
        self.__init__()  # type: ignore[misc]
        _ATTACHED.clear()
        _RESERVED.clear()

    def _run(self) -> None:
        while not self._stopped.wait(HEARTBEAT_S):
            with self._guard:
                held = list(_ATTACHED.values())
                if not held:
                    self._thread = None
                    return
            for attachment in held:
                with contextlib.suppress(OSError):
                    attachment.write_heartbeat()


# What this process holds. A POSIX lock is dropped when its owner closes any handle of the file, so own files are never
# opened again; and unlike flock it is not inherited by forked workers, which may outlive the owner.
_ATTACHED: Dict[Path, Attachment] = {}
_RESERVED: Dict[Path, Tuple[range, int]] = {}  # blocks of IPUs, with the handles of their files
_NUMBERS = itertools.count()
_HEARTBEAT = _HeartbeatThread()
atexit.register(_HEARTBEAT.stop)
os.register_at_fork(after_in_child=_HEARTBEAT.reset_in_child)


class Partition:
    """The emulated IPUs of this user on this machine."""

    def __init__(self, size: int, folder: Path, block: range = range(0)) -> None:
        self.size, self.folder = size, folder
        self.block = block  # that poprun has reserved for the job of this process

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
        folder = Path(explicit) if explicit else Path(base) / f"ipu_emulator-{os.getuid()}"
        return cls(int(text), folder, _parse_block(environ.get(BLOCK, "")))

    def devices(self) -> List[Device]:
        """Returns all devices in the order of their ids: single IPUs first, then groups of 2, 4 and so on."""
        found: List[Device] = []
        width = 1
        while width <= self.size:
            for first in range(0, self.size, width):
                found.append(Device(len(found), tuple(range(first, first + width))))
            width *= 2
        return found

    def find(self, *, count: Optional[int] = None, device_id: Optional[int] = None) -> List[Device]:
        """Returns the devices of `count` IPUs, or the one with an id, free or not."""
        found = [device for device in self.devices() if device.id == device_id or len(device.ipus) == count]
        if not found:
            sizes = ", ".join(str(1 << e) for e in range(self.size.bit_length()))
            asked = f"device {device_id}" if count is None else f"device of {count} IPUs"
            more = ""
            if count is not None and count > self.size and _is_power_of_two(count):
                more = f"; set IPU_EMULATOR_IPUS={count} for a larger one"
            raise NoSuchDeviceError(
                f"there is no {asked}: the partition has {self.size} IPUs, in devices of {sizes}{more}"
            )
        return found

    def attach(self, *, count: Optional[int] = None, device_id: Optional[int] = None) -> Attachment:
        """Attaches the first free device of `count` IPUs, or the one with an id."""
        wanted = self.find(count=count, device_id=device_id)
        with self.locked():
            free = self._free(wanted, reserved_too=device_id is None)
            free.sort(key=lambda device: device.ipus[0] not in self.block)  # devices in this job's block first
            return self._create_attachment(free[0], replicas=len(free[0].ipus))

    def check_free(self, *, count: int, devices: int) -> None:
        """Raises the error of `attach` if so many devices of `count` IPUs could not be attached now."""
        wanted = self.find(count=count)
        if devices * count > self.size:
            self.find(count=devices * count)
        if self.folder.is_dir():
            with self.locked():
                self._free(wanted, devices=devices)

    def _free(self, wanted: Sequence[Device], *, devices: int = 1, reserved_too: bool = True) -> List[Device]:
        """Returns those of the devices that can be attached, or raises DeviceBusyError if they are too few."""
        held = {ipu for holding in self._read() for ipu in holding.owner.ipus}
        reserved = set(self._read_blocks()) - set(self.block) if reserved_too else set()
        free = [device for device in wanted if (held | reserved).isdisjoint(device.ipus)]
        if len(free) < devices:
            others = f", {len(reserved - held)} reserved for other jobs" if reserved - held else ""
            raise DeviceBusyError(
                f"{len(held)} of the partition's {self.size} IPUs are held by other devices or processes{others}; "
                f"set IPU_EMULATOR_IPUS={2 * self.size} for a larger partition"
            )
        return free

    def reserve(self, count: int, job: str) -> Optional[range]:
        """Reserves the first free block of `count` IPUs for a job until this process ends; None if none is free.

        A job that is started within a job uses that job's block. A second call for the same job, as when two hosts
        are names of one machine, returns the same block.
        """
        if len(self.block) >= count:
            return self.block[:count]
        path = self.folder / f"job-{job}"
        with self.locked():
            if path in _RESERVED:
                return _RESERVED[path][0]
            if path.exists():
                found = self._read_block(path)
                if found:
                    return found
            taken = {ipu for holding in self._read() for ipu in holding.owner.ipus} | set(self._read_blocks())
            blocks = (range(first, first + count) for first in range(0, self.size - count + 1, count))
            block = next((block for block in blocks if taken.isdisjoint(block)), None)
            if block is None:
                return None
            content = f"{_BLOCK_MARK}{render_block(block)}\n".encode()
            with self._new_file(path) as handle:
                _write_whole(handle, content)
            _RESERVED[path] = (block, handle)
            return block

    def owners(self) -> List[Owner]:
        """Returns the processes that hold IPUs now. The files of owners that have ended are removed."""
        return [holding.owner for holding in self.holdings()]

    def holdings(self) -> List[Holding]:
        """Returns the owners, and how busy their IPUs have been."""
        if not self.folder.exists():
            return []
        with self.locked():
            return self._read()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Inside, no other process changes the partition."""
        self._make_folder()
        path = self.folder / _LOCK
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise self._describe(path, error) from error
        try:
            _lock_fairly(handle, path)
            yield
        finally:
            with contextlib.suppress(OSError):
                # A process that was forked meanwhile has the file open too, and closing this copy would not unlock it.
                fcntl.flock(handle, fcntl.LOCK_UN)
            os.close(handle)

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = self.folder.lstat()
        except OSError as error:
            raise RegistryError(f"{self.folder} cannot be used ({error.strerror}); set IPU_EMULATOR_DIR") from error
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise RegistryError(
                f"{self.folder} is not a private directory of this user (mode 0700); set IPU_EMULATOR_DIR to one that "
                f"does not exist yet, like {self.folder / 'ipu_emulator'}"
            )

    def _create_attachment(self, device: Device, replicas: int) -> Attachment:
        program = Path(sys.argv[0] if sys.argv and sys.argv[0] else sys.executable).name
        owner = Owner(os.getpid(), _user_name(), program, time.time(), device.ipus, replicas)
        names = (self.folder / f"owner-{owner.pid}-{number}.json" for number in _NUMBERS)
        path = next(path for path in names if not os.path.lexists(path))
        with self._new_file(path) as handle:
            attachment = _ATTACHED[path] = Attachment(self, device, owner, path, handle)
        _HEARTBEAT.start()
        return attachment

    @contextlib.contextmanager
    def _new_file(self, path: Path) -> Iterator[int]:
        """Makes a file, locked for this process, and yields its handle; if writing fails, nothing of it stays."""
        handle = -1
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield handle
        except OSError as error:
            if handle >= 0:
                with contextlib.suppress(OSError):
                    path.unlink()
                os.close(handle)
            raise self._describe(path, error) from error

    def _describe(self, path: Path, error: OSError) -> RegistryError:
        if error.errno in _NO_ROOM:
            return RegistryError(
                f"{self.folder} cannot be written ({error.strerror}); free some space there, or set IPU_EMULATOR_DIR "
                "to a directory on another disk"
            )
        return RegistryError(f"{path} is not a file of the emulator ({error.strerror}); remove it")

    def _read(self) -> List[Holding]:
        found = []
        for path in sorted(path for path in self.folder.iterdir() if _OWNER_NAME.fullmatch(path.name)):
            own = _ATTACHED.get(path)
            holding = own.read() if own else self._read_foreign(path)
            if holding:
                found.append(holding)
        return found

    def _read_blocks(self) -> Iterator[int]:
        for path in sorted(self.folder.glob("job-*")):
            yield from _RESERVED[path][0] if path in _RESERVED else self._read_block(path)

    def _read_block(self, path: Path) -> range:
        """Returns the block in a file, of a live process; none for a file without the mark, which is left alone."""
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return range(0)
        try:
            is_file = stat.S_ISREG(os.fstat(handle).st_mode)
            text = os.read(handle, _MAX_BLOCK_BYTES).decode("ascii", "replace") if is_file else ""
        finally:
            os.close(handle)
        if not _parse_marked_block(text):
            return range(0)
        content = self._read_locked(path) or b""
        return _parse_marked_block(content.decode("ascii", "replace"))

    def _read_foreign(self, path: Path) -> Optional[Holding]:
        content = self._read_locked(path, lambda found: _parse(path, found))
        return None if content is None else _parse(path, content)

    def _read_locked(self, path: Path, check: Callable[[bytes], Any] = bytes) -> Optional[bytes]:
        """Returns the content of another process's file; removes it and returns None if that process has ended.

        Before that, `check` gets the content and raises if the file is not the emulator's.
        """
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
                return os.read(handle, _MAX_OWNER_BYTES)
            content = os.read(handle, _MAX_OWNER_BYTES)
            if content:  # empty if its owner ended before it wrote: then nothing shows that it is the emulator's
                check(content)  # raises instead of deleting a file that is not the emulator's
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()
            return None
        finally:
            os.close(handle)


def _lock_fairly(handle: int, path: Path) -> None:
    """Locks the partition. Others lock it for milliseconds, so a long wait for the same one means that it hangs.

    Only a blocking wait has a place in the kernel's queue: among hundreds of processes, one that tries again and again
    may never be lucky. A blocking wait has no timeout, so that it is done in a thread, which a timeout leaves behind.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        locked = threading.Event()

        def wait() -> None:
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_EX)
                locked.set()

        # If this process gives up, it closes the file, and the lock goes with the thread's wait.
        threading.Thread(target=wait, name="emulator-lock", daemon=True).start()
        before = _read_holder(handle)
        while not locked.wait(_LOCK_LIMIT_S):
            holder = _read_holder(handle)
            if holder == before:
                raise RegistryError(
                    f"{path} has been locked for {_LOCK_LIMIT_S:.0f} s by process {holder.split(' ')[0] or 'unknown'}; "
                    "end that process"
                ) from None
            before = holder
    with contextlib.suppress(OSError):  # a full disk: then nobody is named
        os.pwrite(handle, f"{os.getpid()} {time.monotonic_ns()}".ljust(_HOLDER_BYTES).encode(), 0)


def _read_holder(handle: int) -> str:
    """Returns which process locked the partition last, and when."""
    return os.pread(handle, _HOLDER_BYTES, 0).decode("ascii", "replace").strip()


def _write_whole(handle: int, content: bytes) -> None:
    if os.pwrite(handle, content, 0) < len(content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def render_block(block: range) -> str:
    """Returns a block of IPUs as the text of the variable BLOCK."""
    return f"{block.start}-{block.stop - 1}"


def _parse_block(text: str) -> range:
    first, dash, last = text.partition("-")
    return range(int(first), int(last) + 1) if dash and first.isdecimal() and last.isdecimal() else range(0)


def _parse_marked_block(text: str) -> range:
    return _parse_block(text[len(_BLOCK_MARK) :].strip()) if text.startswith(_BLOCK_MARK) else range(0)


def _parse(path: Path, content: bytes) -> Holding:
    try:
        return Holding.from_bytes(content)
    except (ValueError, TypeError, KeyError) as error:
        raise RegistryError(f"{path} is not a record of the emulator; end its owner and remove it") from error


def _user_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return str(os.getuid())


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0
