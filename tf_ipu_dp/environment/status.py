"""What an installation tells the user: errors as sentences, and progress."""

from __future__ import annotations

import shutil
import time
from typing import TextIO

from tf_ipu_dp import terminal_text


class SetupError(Exception):
    """The environment cannot be made. The text is one sentence for the user, with what to do."""


class KilledError(SetupError):
    """A command was killed, and may have left a partial installation."""


class Status:
    """Shows progress: one line that changes on a terminal, plain lines elsewhere."""

    def __init__(self, program: str, stream: TextIO) -> None:
        self._program, self._stream, self._started = program, stream, time.monotonic()
        self._live = stream.isatty()

    def info(self, text: str) -> None:
        """Writes a line that stays on the screen."""
        self._clear()
        self._stream.write(terminal_text.wrap(f"{self._program}: {text}", terminal_text.width_of(self._stream)) + "\n")
        self._stream.flush()

    def progress(self, text: str, keep: bool = False) -> None:
        """Shows the current activity; without a terminal only if `keep` is set."""
        if self._live:
            elapsed = f"  {time.monotonic() - self._started:.0f} s  "
            width = shutil.get_terminal_size().columns - 1
            self._stream.write(f"\r\x1b[K{(elapsed + text)[:width]}")
            self._stream.flush()
        elif keep:
            self._stream.write(f"  {text}\n")
            self._stream.flush()

    def _clear(self) -> None:
        if self._live:
            self._stream.write("\r\x1b[K")
