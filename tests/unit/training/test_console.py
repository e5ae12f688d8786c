from __future__ import annotations

import fcntl
import io
import os
import pty
import select
import struct
import termios

import pytest

from tf_ipu_dp.training.console import Console, render_duration


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
    assert "step" not in stream.getvalue()


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


@pytest.mark.parametrize("columns", [60, 80, 120, 200])
def test_the_bar_is_as_wide_as_the_terminal_also_after_a_resize(columns):
    reader, writer = pty.openpty()
    try:
        with os.fdopen(writer, "w", encoding="utf-8") as stream:
            for width in (100, columns):
                fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
                console = Console(stream)
                console.begin_epoch(1, 10_000, 0)
                console.advance(5_000, 0.5, 0.75)
                console.end_epoch()
            stream.flush()
            shown = b""
            while select.select([reader], [], [], 0)[0]:
                shown += os.read(reader, 4096)
    finally:
        os.close(reader)
    bars = [bar for bar in shown.decode().replace("\n", "\r").split("\r") if "5000/10000" in bar]
    assert len(bars[-1]) <= columns and (columns < 90 or len(bars[-1]) >= columns - 1)
