"""What a run prints while it works: bars on a terminal and in a notebook, plain lines in a file. No TensorFlow."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import threading
import time
from typing import Any, Dict, Iterator, Mapping, Optional, TextIO, Union

from tf_ipu_dp import cli, terminal_text

_TICK_S = 1.0
# The forms of the bar, the widest first: where the end would be cut, what matters least is left out.
_BARS = (
    "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]",
    "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{remaining}, {rate_fmt}{postfix}]",
    "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{remaining}{postfix}]",
    "{desc} {n_fmt}/{total_fmt} [{remaining}{postfix}]",
)
_LEAST_BAR = "###"
_NOTEBOOK_S = 0.5  # between two states of a bar in a notebook, each of which is a message to the browser


def make_result_console(stdout: TextIO, instance: int, environ: Mapping[str, str]) -> Console:
    """Returns the console of what a command prints as its result."""
    return make_console(stdout, instance, environ, terminal_text.RESULT_TERMINAL_VARIABLE)


def render_duration(seconds: float) -> str:
    """Returns `42 s`, `3m 05s` or `1h 25m`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}m {rest:02d}s" if minutes < 60 else f"{minutes // 60}h {minutes % 60:02d}m"


def _reports_size(stream: Union[TextIO, _LaunchersTerminal]) -> bool:
    """Whether a terminal reports its size; tqdm prints nothing if the width is 0."""
    try:
        return all(os.get_terminal_size(stream.fileno()))
    except (OSError, ValueError):
        return True


def _is_of_notebook(stream: Any) -> bool:
    """Whether what is written to a stream is shown below the cell of a notebook."""
    return type(stream).__module__.partition(".")[0] == "ipykernel"


class _LaunchersTerminal:
    """The stream of an instance whose launcher shows it on a terminal, which is asked for its size."""

    def __init__(self, stream: TextIO, terminal: int) -> None:
        self.write, self.flush, self.encoding = stream.write, stream.flush, stream.encoding
        self._terminal = terminal

    def fileno(self) -> int:
        return self._terminal

    def isatty(self) -> bool:
        return True


class _SafeStream:
    """A stream whose reader may close it: later output is dropped, and the run continues."""

    def __init__(self, stream: Union[TextIO, _LaunchersTerminal]) -> None:
        self._stream: Union[TextIO, _LaunchersTerminal, None] = stream
        self.encoding = getattr(stream, "encoding", None)
        self.fileno = stream.fileno  # by which tqdm asks for the terminal's size

    def write(self, text: str) -> None:
        try:
            if self._stream:
                self._stream.write(text)
        except (OSError, ValueError):
            self._stream = None

    def flush(self) -> None:
        try:
            if self._stream:
                self._stream.flush()
        except (OSError, ValueError):
            self._stream = None


def make_console(
    stream: TextIO, instance: int, environ: Mapping[str, str], variable: str = terminal_text.TERMINAL_VARIABLE
) -> Console:
    """Returns the console of an instance: the leader prints everything, the others warnings only.

    The leader behind a launcher has a progress bar too, if the launcher names the terminal that shows the stream, in a
    variable of the environment.
    """
    path = environ.get(variable)
    if instance == 0 and path and not stream.isatty():
        with contextlib.suppress(OSError):
            return Console(_LaunchersTerminal(stream, os.open(path, os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)))
    return Console(stream, quiet=instance > 0)


class Console:
    """Prints for one instance. A quiet one prints warnings only."""

    def __init__(self, stream: Union[TextIO, _LaunchersTerminal], *, quiet: bool = False) -> None:
        self._stream, self._shown = _SafeStream(stream), stream
        self._terminal = stream.isatty() and _reports_size(stream)
        self._notebook = not self._terminal and _is_of_notebook(stream)
        self._quiet = quiet
        self.colour = self._terminal and cli.shows_colour(stream, os.environ)
        self._bar: Optional[Any] = None

    def info(self, text: str, hue: str = "") -> None:
        """Prints lines, above the bar if there is one; in a colour of `terminal_text.COLOURS` where it is shown."""
        if not self._quiet:
            self._print(cli.paint(cli.printable_lines(text), hue, self.colour and bool(hue)))

    @property
    def width(self) -> Optional[int]:
        """Returns the columns of the terminal, which may change; None for a file."""
        return cli.width_of(self._shown) if self._terminal else None

    def warning(self, text: str) -> None:
        """Prints a line even if this console is quiet, in colour on a terminal."""
        self._print(cli.paint(cli.printable_lines(text.rstrip("\n")), "yellow", self.colour))

    def _print(self, text: str) -> None:
        if self._bar is not None:
            self._bar.clear()
        self._stream.write(cli.wrap(text.rstrip("\n"), self.width) + "\n")
        self._stream.flush()
        if self._bar is not None:
            self._bar.refresh()

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Shows the elapsed time of a slow operation, and finally how long it took."""
        if self._quiet:
            yield
            return
        what = cli.printable(what)
        started = time.monotonic()
        done = threading.Event()
        clock = threading.Thread(target=self._tick, args=(what, started, done), daemon=True)
        self._stream.write(f"{what}..." + ("" if self._terminal else "\n"))
        self._stream.flush()
        if self._terminal:
            clock.start()
        try:
            yield
        finally:
            done.set()
            if self._terminal:
                clock.join()
            start = "\r" if self._terminal else ""
            self._stream.write(f"{start}{what}... {render_duration(time.monotonic() - started)}\n")
            self._stream.flush()

    def begin_epoch(self, number: int, updates: int, done: int) -> None:
        """Starts the bar of an epoch (counted from 1), of which some updates may already be done."""
        if self._quiet or not (self._terminal or self._notebook):
            return
        bar: Dict[str, Any] = {"desc": f"Epoch {number}", "total": updates, "initial": done}
        if self._notebook and importlib.util.find_spec("ipywidgets"):
            from tqdm.notebook import tqdm as widget

            self._bar = widget(**bar, mininterval=_NOTEBOOK_S)
            return
        from tqdm import tqdm

        if self._notebook:  # a line that is written over, as wide as most browsers show
            self._bar = tqdm(**bar, file=self._stream, ncols=100, mininterval=_NOTEBOOK_S, bar_format=_BARS[0])
        else:
            plain = not cli.supports_unicode(self._stream, os.environ)
            self._bar = tqdm(
                **bar, file=self._stream, dynamic_ncols=True, mininterval=0.1, bar_format=_BARS[0], ascii=plain
            )

    def advance(self, updates: int, loss: float, accuracy: float, others: Optional[Mapping[str, float]] = None) -> None:
        """Moves the bar by some updates. An accuracy that is NaN is that of a task without one."""
        if self._bar is not None:
            words = [f"loss {loss:.3g}"] + ([] if math.isnan(accuracy) else [f"accuracy {100 * accuracy:.1f} %"])
            words += [f"{name} {value:.3g}" for name, value in (others or {}).items()]
            self._bar.set_postfix_str(", ".join(words), refresh=False)
            if not self._fit_bar(self._bar):
                self._bar.set_postfix_str(words[0], refresh=False)
            self._bar.update(updates)

    def _fit_bar(self, bar: Any) -> bool:
        """Gives the bar the widest form that fits the terminal as it is now. Returns whether one does."""
        width = self.width
        for form in _BARS:
            bar.bar_format = form
            drawn = {**bar.format_dict, "ncols": None, "bar_format": form.replace("{bar}", _LEAST_BAR)}
            if width is None or len(bar.format_meter(**drawn)) < width:  # tqdm keeps the last column free
                return True
        return False

    def end_epoch(self) -> None:
        """Ends the epoch's bar, which stays on the screen."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def log(self, text: str) -> None:
        """Prints a line of the log where there is no bar."""
        if not self._quiet and not self._terminal and not self._notebook:
            self._print(cli.printable_lines(text))

    def _tick(self, what: str, started: float, done: threading.Event) -> None:
        while not done.wait(_TICK_S):
            self._stream.write(f"\r{what}... {render_duration(time.monotonic() - started)}")
            self._stream.flush()
