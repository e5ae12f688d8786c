"""The output of a job's instances as poprun shows it: whole lines, each tagged with its instance, byte for byte."""

from __future__ import annotations

import collections
import contextlib
import threading
from typing import BinaryIO, Callable, Deque, Dict, List, Mapping, Optional, Sequence, Tuple

_LAST_LINES = 20


class TaggedOutput:
    """Receives bytes from any thread and shows them line by line.

    In a file, a line is shown when it is complete. On a terminal, a progress bar that returns to the beginning of its
    line is shown with every change, and the instance `untagged` has no tags. When our own output is closed, `on_closed`
    is called and the rest is dropped.
    """

    def __init__(
        self,
        streams: Mapping[str, BinaryIO],
        only: Optional[int],
        on_closed: Callable[[], None] = lambda: None,
        untagged: Optional[int] = None,
    ) -> None:
        self._streams = dict(streams)  # "stdout" and "stderr"
        self._only, self._untagged = only, untagged
        self._on_closed = on_closed
        self._live = {name: stream.isatty() for name, stream in streams.items()}
        self._lock = threading.Lock()
        self._pending: Dict[Tuple[int, str], List[bytes]] = collections.defaultdict(list)
        self._last: Dict[int, Deque[bytes]] = collections.defaultdict(lambda: collections.deque(maxlen=_LAST_LINES))
        self._active_bar: Optional[Tuple[int, str]] = None  # the progress bar that the cursor is in

    def write(self, index: int, name: str, data: bytes) -> None:
        """Adds to what an instance has printed to a stream."""
        with self._lock:
            pending = self._pending[index, name]
            lines, newline, rest = data.rpartition(b"\n")
            if newline:
                self._show(index, name, b"".join([*pending, lines]).split(b"\n"))
                pending.clear()
            if rest:
                pending.append(rest)
                if self._live[name] and b"\r" in data:
                    self._show_bar(index, name)

    def finish(self, index: int, name: str) -> None:
        """Shows what an instance has printed without ending the line."""
        with self._lock:
            rest = b"".join(self._pending.pop((index, name), []))
            if rest:
                self._show(index, name, [rest])

    def last_lines(self, index: int) -> Sequence[str]:
        """Returns the last lines of an instance, of both streams."""
        with self._lock:
            return [line.decode("utf-8", "backslashreplace") for line in self._last[index]]

    def show_last_lines(self, index: int) -> None:
        """Shows the last lines of an instance that `only` has hidden."""
        if self._only in (None, index):
            return
        with self._lock:
            tag = self._tag(index, "stderr")
            self._put("stderr", b"".join(b"%s%s\n" % (tag, line) for line in self._last[index]))

    def _show(self, index: int, name: str, lines: Sequence[bytes]) -> None:
        self._last[index].extend(line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines[-_LAST_LINES:])
        if self._only in (None, index):
            tag = self._tag(index, name)
            before = b"\n" if self._active_bar not in (None, (index, name)) else b""
            self._active_bar = None
            self._put(name, before + b"".join(b"%s%s\n" % (tag, line) for line in lines))

    def _show_bar(self, index: int, name: str) -> None:
        text = b"".join(self._pending[index, name])
        # A carriage return at the end may be the first half of a line break.
        shown, found, _ = text[:-1].rpartition(b"\r")
        if found and self._only in (None, index):
            self._pending[index, name] = [text[len(shown) + 1 :]]
            before = b"\n" if self._active_bar not in (None, (index, name)) else b""
            self._active_bar = (index, name)
            self._put(name, before + self._tag(index, name) + shown.rpartition(b"\r")[2] + b"\r")

    def _put(self, name: str, data: bytes) -> None:
        stream = self._streams.get(name)
        if stream is None:
            return
        try:
            stream.write(data)
            stream.flush()
        except (OSError, ValueError):
            del self._streams[name]
            with contextlib.suppress(OSError, ValueError):
                stream.close()
            if name == "stdout":
                self._on_closed()

    def _tag(self, index: int, name: str) -> bytes:
        if index == self._untagged and self._live[name]:
            return b""
        return b"[1,%d]<%s>:" % (index, name.encode())
