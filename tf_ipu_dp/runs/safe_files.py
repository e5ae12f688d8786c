"""Files that other people may have prepared: no links are followed, no pipes and devices opened, sizes have limits.

A run's folder may come from somebody else, and the temporary directory belongs to everybody. What is written replaces
the old file by a rename, so that after a crash there is the old content or the new one, never a part. Standard library
only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import stat
import uuid
from pathlib import Path
from typing import Iterator, List, Optional, TextIO, Union

# No text of a run is longer, except metrics.jsonl, which is read line by line.
MAX_TEXT_BYTES = 1 << 20
# No line of metrics.jsonl is longer.
MAX_LINE_BYTES = 1 << 20
# A name may have 255 bytes, and a character 4 of them.
_MAX_NAME_PART = 40
# Releases up to 0.7 had no random part.
_TEMPORARY = re.compile(r"\..+\.[0-9]+(-[0-9a-f]{32})?\.tmp", re.DOTALL)


def open_regular(path: Path, flags: int, mode: int = 0o666, *, follow_links: bool = False) -> int:
    """Returns the descriptor of a regular file; OSError for links and for all that is not a file.

    The entry is looked at before it is opened: opening a pipe may block, and opening a device may do something.
    """
    try:
        found = path.stat() if follow_links else path.lstat()
    except FileNotFoundError:
        pass
    else:
        _require_regular(path, found)
    flags |= os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow_links else os.O_NOFOLLOW)
    handle = os.open(path, flags, mode)
    try:
        _require_regular(path, os.fstat(handle))
    except OSError:
        os.close(handle)
        raise
    return handle


def describe_irregular(found: os.stat_result) -> Optional[str]:
    """Returns what an entry is that is neither a file nor a folder; None for those."""
    if stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode):
        return None
    kinds = {stat.S_IFLNK: "a link", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(found.st_mode), "a device")


def read_bytes(path: Path, max_bytes: int = MAX_TEXT_BYTES, *, follow_links: bool = False) -> bytes:
    """Returns the content of a regular file; OSError if it is longer than `max_bytes`."""
    with os.fdopen(open_regular(path, os.O_RDONLY, follow_links=follow_links), "rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"it is longer than {max_bytes:,} bytes", str(path))
    return content


def read_lines(path: Path, *, follow_links: bool = False) -> Iterator[bytes]:
    """Returns the lines of a regular file, without their ends; lines beyond MAX_LINE_BYTES are left out."""
    with os.fdopen(open_regular(path, os.O_RDONLY, follow_links=follow_links), "rb") as file:
        is_rest = False
        while True:
            line = file.readline(MAX_LINE_BYTES)
            if not line:
                return
            is_whole = line.endswith(b"\n") or len(line) < MAX_LINE_BYTES
            if is_whole and not is_rest:
                yield line.rstrip(b"\n")
            is_rest = not is_whole


def list_folder(path: Path) -> List[Path]:
    """Returns what is in a folder, sorted; nothing for a link to a folder, or if there is none."""
    try:
        return sorted(path.iterdir()) if stat.S_ISDIR(path.lstat().st_mode) else []
    except OSError:
        return []


def write_durably(path: Path, content: Union[str, bytes]) -> None:
    """Replaces a file atomically: after a crash it is the old one or the new one, never a part."""
    data = content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content
    _write_and_rename(path, data, durable=True)
    sync(path.parent)


def replace(path: Path, content: str) -> None:
    """Replaces a file atomically, but not durably: a power cut may undo it."""
    _write_and_rename(path, content.encode("utf-8", "surrogateescape"), durable=False)


def sync_tree(path: Path) -> None:
    """Forces a folder and all that is below it to the disk."""
    for entry in (*path.rglob("*"), path):
        sync(entry)


def sync(path: Path) -> None:
    """Forces a file, or a folder's names, to the disk: without it a power cut may undo a rename."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(path: Path) -> None:
    """Removes a file, a folder with all that is in it, or a link itself, as far as that is possible."""
    with contextlib.suppress(OSError):
        if stat.S_ISDIR(path.lstat().st_mode):
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def remove_unfinished(folder: Path) -> None:
    """Removes the files that writers left who were killed. Other files and folders are not touched."""
    for path in list_folder(folder):
        if _TEMPORARY.fullmatch(path.name) and not stat.S_ISDIR(path.lstat().st_mode):
            remove(path)


def lock_file(path: Path, *, wait: bool) -> Optional[TextIO]:
    """Returns a lock, held until it is closed or the process dies; None on a file system without locks.

    Raises BlockingIOError when another process holds it and `wait` is false.
    """
    descriptor = open_regular(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    if os.fstat(descriptor).st_nlink > 1:  # its content is replaced in place
        os.close(descriptor)
        raise OSError(errno.EMLINK, f"{path.name} is a hard link to another file")
    handle = os.fdopen(descriptor, "a+", encoding="utf-8", errors="replace")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BaseException as error:
        handle.close()
        if isinstance(error, OSError) and error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
            return None
        raise
    return handle


def make_private_folder(path: Path) -> None:
    """Makes a folder that only this user can use, or checks that it is one: OSError for anybody else's."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    require_private_folder(path)


def require_private_folder(path: Path) -> None:
    """Raises OSError if a folder is a link, or if another user could have put something into it."""
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(errno.EACCES, f"{path} is not a private directory of this user (mode 0700)")


def _require_regular(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = describe_irregular(found) or "a folder"
        raise OSError(errno.EINVAL, f"it is {kind} and not a file", str(path))


def _write_and_rename(path: Path, data: bytes, *, durable: bool) -> None:
    # The name cannot be guessed, and must not exist: in a shared folder somebody could have made a link of that name.
    temporary = path.with_name(f".{path.name[:_MAX_NAME_PART]}.{os.getpid()}-{uuid.uuid4().hex}.tmp")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
