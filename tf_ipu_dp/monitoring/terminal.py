"""The monitor's live screen: signals and keys as events, and a full-screen display that redraws only what changes."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import select
import shutil
import signal
import sys
import time
from typing import Any, Deque, Dict, List, Optional, TextIO

from tf_ipu_dp import cli
from tf_ipu_dp.monitoring import selection, tables
from tf_ipu_dp.monitoring.snapshots import Snapshot
from tf_ipu_dp.monitoring.text_layout import DisplayOptions

_HISTORY_LENGTH = 120
_ENTER_SCREEN = "\x1b[?1049h\x1b[?25l\x1b[2J"
_LEAVE_SCREEN = "\x1b[2J\x1b[H\x1b[?25h\x1b[?1049l"  # cleared first: a terminal that has grown may keep its content


class Signals:
    """Turns the signals that stop the monitor or resize its terminal into events that can be waited for."""

    def __init__(self) -> None:
        self.stopped = False
        self.resized = False

    def __enter__(self) -> Signals:
        self._pipe = os.pipe()
        for end in self._pipe:
            os.set_blocking(end, False)
        self._previous_wakeup = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        stopping = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        self._previous = {number: signal.signal(number, self._stop) for number in stopping}
        self._previous[signal.SIGWINCH] = signal.signal(signal.SIGWINCH, self._resize)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_wakeup)
        for end in self._pipe:
            os.close(end)

    def wait(self, seconds: float, keys: Optional[int]) -> None:
        """Returns after the timeout, or earlier at a signal or a key press; `keys` is the keyboard's descriptor."""
        watched = [self._pipe[0], *([] if keys is None else [keys])]
        ready, _, _ = select.select(watched, [], [], max(seconds, 0.0))
        if self._pipe[0] in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._pipe[0], 1024)

    def _stop(self, *_: object) -> None:
        self.stopped = True

    def _resize(self, *_: object) -> None:
        self.resized = True


class Screen:
    """Draws snapshots on the terminal's alternate screen, and restores the terminal on exit."""

    def __init__(self, signals: Signals, view: selection.View) -> None:
        self.keys = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
        self._signals, self._view = signals, view
        self._paused = self._shows_help = False
        self._drawn: List[str] = []
        self._snapshot: Optional[Snapshot] = None
        self._history: Dict[int, Deque[Optional[float]]] = {}
        self._terminal_settings: Any = None

    def __enter__(self) -> Screen:
        self._previous_suspend = signal.signal(signal.SIGTSTP, self._suspend)
        self._enter_screen()
        return self

    def __exit__(self, *_: object) -> None:
        self._leave_screen()
        signal.signal(signal.SIGTSTP, self._previous_suspend)

    def show(self, snapshot: Snapshot) -> None:
        """Adds a snapshot to the history and draws it, unless the screen is paused."""
        for ipu in snapshot.ipus:
            if ipu.id is not None:
                history = self._history.setdefault(ipu.id, collections.deque(maxlen=_HISTORY_LENGTH))
                history.append(ipu.utilisation_pct)
        if not self._paused:
            self._snapshot = snapshot
            self._draw()

    def handle_events(self) -> bool:
        """Reacts to key presses and to a new size of the terminal; returns whether to quit."""
        if self.keys is not None and select.select([self.keys], [], [], 0)[0]:
            pressed = os.read(self.keys, 1024)
            if not pressed:  # the terminal is gone
                return True
            if b"q" in pressed or b"Q" in pressed or b"\x04" in pressed:
                return True
            self._react(pressed)
        if self._signals.resized:
            self._signals.resized = False
            self._drawn = []
            self._draw()
        return False

    def _react(self, pressed: bytes) -> None:
        """Pauses, sorts or helps, and redraws at once; other keys do nothing."""
        keys = pressed.lower()
        if keys.count(b"p") % 2:
            self._paused = not self._paused
        for _ in range(keys.count(b"s")):
            self._view = dataclasses.replace(self._view, sort=selection.next_order(self._view.sort))
        if (keys.count(b"h") + keys.count(b"?")) % 2:
            self._shows_help = not self._shows_help
        self._draw()

    def _draw(self) -> None:
        if self._snapshot is None:
            return
        # shutil prefers COLUMNS and LINES of the environment, which do not follow a terminal that is resized.
        try:
            size = os.get_terminal_size(sys.stdout.fileno())
        except OSError:
            size = shutil.get_terminal_size()
        options = dataclasses.replace(detect_options(sys.stdout), width=size.columns)
        moment = time.strftime("%H:%M:%S", time.localtime(self._snapshot.time))
        pause = "resume (paused)" if self._paused else "pause"
        footer = f"{moment}  q quit  p {pause}  h help  s sort: {self._view.sort}"
        if len(footer) > size.columns:
            footer = f"q quit  p {pause}  h help"
        if self._shows_help:
            lines = tables.render_help_screen(options, size.lines)
        else:
            history = {number: list(values) for number, values in self._history.items()}
            lines = tables.render_screen(self._snapshot, options, size.lines, history, footer, self._view)
        text = "" if self._drawn else "\x1b[2J"
        for number, line in enumerate(lines):
            if number >= len(self._drawn) or self._drawn[number] != line:
                text += f"\x1b[{number + 1};1H{line}\x1b[K"
        if len(lines) < len(self._drawn):
            text += f"\x1b[{len(lines) + 1};1H\x1b[J"
        self._drawn = lines
        write(text)

    def _enter_screen(self) -> None:
        if self.keys is not None:
            import termios
            import tty

            self._terminal_settings = termios.tcgetattr(self.keys)
            tty.setcbreak(self.keys)
        write(_ENTER_SCREEN)
        self._drawn = []

    def _leave_screen(self) -> None:
        write(_LEAVE_SCREEN)
        if self._terminal_settings is not None and self.keys is not None:
            import termios

            with contextlib.suppress(termios.error):  # the terminal is gone
                termios.tcsetattr(self.keys, termios.TCSADRAIN, self._terminal_settings)

    def _suspend(self, *_: object) -> None:
        """Gives the terminal back to the shell while Control-Z suspends the monitor, and redraws afterwards."""
        self._leave_screen()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self._suspend)
        self._enter_screen()
        self._draw()


def detect_options(stream: TextIO) -> DisplayOptions:
    """Returns what a stream can show: a pipe gets whole lines of plain text."""
    terminal = stream.isatty()
    return DisplayOptions(
        width=shutil.get_terminal_size().columns if terminal else None,
        bars=terminal,
        colour=cli.shows_colour(stream, os.environ),
        unicode=cli.supports_unicode(stream, os.environ),
    )


def moves_cursor(stream: TextIO) -> bool:
    """Whether a stream is a terminal on which a screen can be redrawn in place."""
    return stream.isatty() and not _is_dumb()


def write(text: str) -> None:
    """Writes to stdout and flushes it."""
    sys.stdout.write(text)
    sys.stdout.flush()


def _is_dumb() -> bool:
    return os.environ.get("TERM", "") in ("", "dumb")
