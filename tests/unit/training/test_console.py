from __future__ import annotations

import fcntl
import importlib.util
import io
import os
import pty
import select
import struct
import termios

import pytest

from tf_ipu_dp.training.console import Console, make_console, render_duration


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (60, "1m 00s"), (3599.6, "1h 00m"), (5100, "1h 25m")], ids=str
)
def test_durations_read_like_this(seconds, text):
    assert render_duration(seconds) == text


def test_in_a_file_there_are_plain_lines_and_no_bar():
    stream = io.StringIO()
    console = Console(stream)
    with console.waiting("compiling"):
        pass
    console.begin_epoch(1, 4, 0)
    console.advance(1, 1.5, 0.25)
    console.log("step 1/4  loss 1.5000")
    console.end_epoch()
    assert stream.getvalue() == "compiling...\ncompiling... 0 s\nstep 1/4  loss 1.5000\n"


def test_on_a_terminal_there_is_a_bar_per_epoch_and_no_lines_of_the_log():
    stream = Terminal()
    console = Console(stream)
    console.begin_epoch(3, 64, 1)
    console.advance(63, 1.4712, 0.4841)
    console.log("step 64/64")
    console.end_epoch()
    last = stream.getvalue().rstrip("\n").split("\r")[-1]
    assert last.startswith("Epoch 3 100%|") and "| 64/64 [" in last and last.endswith("loss 1.47, accuracy 48.4 %]")
    assert "step 64/64" not in stream.getvalue()


def test_a_line_that_is_said_during_an_epoch_stands_above_the_bar():
    stream = Terminal()
    console = Console(stream)
    console.begin_epoch(1, 2, 0)
    console.info("SIGTERM: finishing")
    console.end_epoch()
    assert "SIGTERM: finishing\n" in stream.getvalue()
    assert "Epoch 1" in stream.getvalue().split("SIGTERM: finishing\n")[1]


def test_a_quiet_console_only_warns():
    stream = io.StringIO()
    console = Console(stream, quiet=True)
    console.info("plan")
    console.log("step 1")
    with console.waiting("compiling"):
        pass
    console.warning("damaged")
    assert stream.getvalue() == "damaged\n"


@pytest.mark.parametrize("locale", ["C", "en_US.UTF-8"])
def test_the_bar_is_of_plain_characters_in_the_c_locale(locale, terminal, monkeypatch):
    monkeypatch.setenv("LC_ALL", locale)
    stream, shown = terminal
    console = Console(stream)
    console.begin_epoch(1, 4, 2)
    console.end_epoch()
    text = shown()
    assert "2/4" in text and text.isascii() == (locale == "C")


@pytest.mark.parametrize("columns", [40, 60, 80, 120, 200])
def test_the_bar_is_as_wide_as_the_terminal_also_after_a_resize(columns):
    reader, writer = pty.openpty()
    try:
        with os.fdopen(writer, "w", encoding="utf-8") as stream:
            for width in (100, columns):
                fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
                console = Console(stream)
                console.begin_epoch(1, 10_000, 0)
                console.advance(5_000, 0.5, 0.75)
                console.advance(0, 0.5, 0.75)
                console.end_epoch()
            stream.flush()
            shown = b""
            while select.select([reader], [], [], 0)[0]:
                shown += os.read(reader, 4096)
    finally:
        os.close(reader)
    bars = [bar for bar in shown.decode().replace("\n", "\r").split("\r") if "5000/10000" in bar]
    assert len(bars[-1]) <= columns and (columns < 80 or len(bars[-1]) >= columns - 1)
    # The values are never cut: a narrow terminal has no rate, then no bar, then the loss alone.
    assert bars[-1].rstrip().endswith("loss 0.5, accuracy 75.0 %]" if columns >= 60 else "loss 0.5]")


@pytest.fixture
def terminal():
    """A terminal of 80 columns: what is written to it, and a function that returns what it has shown."""
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))

    def shown():
        text = b""
        while select.select([reader], [], [], 0)[0]:
            text += os.read(reader, 4096)
        return text.decode()

    with os.fdopen(writer, "w", encoding="utf-8") as stream:
        yield stream, shown
    os.close(reader)


def test_behind_a_launcher_the_leader_has_a_bar_as_wide_as_the_launchers_terminal(terminal):
    stream = io.StringIO()
    environ = {"TF_IPU_DP_TERMINAL": os.ttyname(terminal[0].fileno())}
    leader, other, fallback = (
        make_console(stream, 0, environ),
        make_console(stream, 1, environ),
        make_console(stream, 0, {"TF_IPU_DP_TERMINAL": "/dev/no-such-terminal"}),
    )
    assert (leader.width, other.width, fallback.width) == (80, None, None)
    for console in (leader, other, fallback):
        console.begin_epoch(1, 10_000, 0)
        console.advance(5_000, 0.5, 0.75)
        console.end_epoch()
    bars = [bar for bar in stream.getvalue().replace("\n", "\r").split("\r") if "5000/10000" in bar]
    assert bars and all(len(bar) <= 80 for bar in bars)


@pytest.mark.parametrize(
    ("environ", "coloured"), [({"TERM": "xterm"}, True), ({"TERM": "xterm", "NO_COLOR": "1"}, False), ({}, False)]
)
def test_warnings_are_coloured_on_a_terminal_that_shows_colours(terminal, environ, coloured, monkeypatch):
    for name in ("TERM", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    stream, shown = terminal
    console = Console(stream)
    console.warning("step-00000256 is damaged")
    console.info("Resuming from step 128")
    console.info("\033[1mvalidation after step 32", "green")
    damaged = "\033[33mstep-00000256 is damaged\033[0m" if coloured else "step-00000256 is damaged"
    best = r"\x1b[1mvalidation after step 32"
    best = f"\033[32m{best}\033[0m" if coloured else best
    assert shown() == f"{damaged}\r\nResuming from step 128\r\n{best}\r\n"


def test_long_lines_are_broken_between_words_on_a_terminal(terminal):
    stream, shown = terminal
    text = "160 updates, " + "32 per epoch, " * 8
    Console(stream).info(text)
    lines = shown().split("\r\n")
    assert " ".join(line.strip() for line in lines).strip() == text.strip() and max(map(len, lines)) <= 80
    written = io.StringIO()
    Console(written).info(text)
    assert written.getvalue() == f"{text}\n"


class NotebookCell(io.StringIO):
    """A stream as Jupyter's kernel has it."""

    __module__ = "ipykernel.iostream"


def test_in_a_notebook_a_bar_is_written_over_and_takes_the_place_of_the_log(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # without ipywidgets
    cell = NotebookCell()
    shown = Console(cell)
    shown.begin_epoch(1, 1000, 0)
    for _ in range(1000):
        shown.advance(1, 0.5, 0.9)
        shown.log("step 1/1000")
    shown.end_epoch()
    text = cell.getvalue()
    assert "step 1/1000" not in text and text.count("\n") == 1
    assert "Epoch 1 100%" in text and "loss 0.5, accuracy 90.0 %" in text
    assert max(map(len, text.split("\r"))) <= 101
