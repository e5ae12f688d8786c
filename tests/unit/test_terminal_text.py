"""Text as wide as a terminal: words are not broken, commands can be copied, files get whole lines."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import struct
import termios

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf_ipu_dp import terminal_text

ROWS = [
    ("Updates", "1,600", "of 1,600"),
    ("Start-up", "14.3", "s, imports, IPUs, data and model"),
    ("IPU utilisation", "93.1", "%"),
]


@given(st.lists(st.text("abc.,-", min_size=1, max_size=15), min_size=1, max_size=30), st.integers(20, 120))
def test_lines_fit_and_no_word_is_broken_or_lost(words, width):
    lines = terminal_text.wrap(" ".join(words), width).split("\n")
    assert " ".join(line.strip() for line in lines).split() == words
    assert all(len(line) <= width for line in lines)


def test_a_file_gets_whole_lines():
    assert terminal_text.wrap("word " * 100, None) == "word " * 100


def test_two_blanks_stay_between_words_and_colours_take_no_room():
    assert terminal_text.wrap("one  two  three", 12) == "one  two\n  three"
    assert terminal_text.wrap("\033[32mone two\033[0m", 12) == "\033[32mone two\033[0m"


@pytest.mark.parametrize(
    "command",
    [
        "tensorboard --logdir=runs/a/very/long/name/of/a/run/tensorboard",
        "launch/train --run_dir=runs/a-very-long-name-of-a-run",
        "../clone/launch/launch --max_restarts=3 -- --run_dir=runs/a",
        "/usr/bin/python3.11 -m tf_ipu_dp.train --run_dir=runs/a --ipus=8",
        "tf-ipu-dp list flags",
    ],
)
def test_a_command_is_never_broken(command):
    lines = terminal_text.wrap(f"The run was stopped after 12 s. Resume with: {command}", 40).split("\n")
    assert lines[-1].strip() == command or command in lines[-1]


def test_code_stays_as_it_is():
    code = "  model = tf.keras.models.load_model('runs/a/export', compile=False)"
    assert terminal_text.wrap(f"To use them:\n{code}", 40) == f"To use them:\n{code}"


@pytest.mark.parametrize("width", [40, 50, 60, None])
def test_a_table_fits_and_its_numbers_are_whole(width):
    lines = terminal_text.render_table(("", "", ""), ROWS, width, right=(1,)).splitlines()
    assert lines[0] == "Updates          1,600  of 1,600" and lines[-1] == "IPU utilisation   93.1  %"
    start = "Start-up          14.3"
    words = "s, imports, IPUs, data and model"
    expected = {40: [start, f"    {words}"], 50: [f"{start}  s, imports, IPUs, data and", f"{' ' * 24}model"]}
    assert lines[1:-1] == expected.get(width, [f"{start}  {words}"])


def test_a_table_with_titles_that_does_not_fit_is_a_list():
    header, rows = ("Layer", "Weights", "Difference"), [("dense_1", "1,000", "1e-7"), ("dense_2", "10", "0")]
    assert terminal_text.render_table(header, rows, 80, right=(1, 2)) == (
        "Layer    Weights  Difference\ndense_1    1,000        1e-7\ndense_2       10           0\n"
    )
    assert terminal_text.render_table(header, rows, 24, right=(1, 2)) == (
        "Layer       dense_1\nWeights     1,000\nDifference  1e-7\n\n"
        "Layer       dense_2\nWeights     10\nDifference  0\n"
    )


def test_the_width_is_that_of_the_terminal_and_a_file_has_none(tmp_path):
    leader, follower = pty.openpty()
    with os.fdopen(follower, "w") as stream, os.fdopen(leader):
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("4H", 24, 40, 0, 0))
        assert terminal_text.width_of(stream) == 40
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("4H", 0, 0, 0, 0))
        assert terminal_text.width_of(stream) is None
    with (tmp_path / "file").open("w") as stream:
        assert terminal_text.width_of(stream) is None
    assert terminal_text.width_of(io.StringIO()) is None


@pytest.mark.parametrize(
    ("environ", "shown"),
    [
        ({}, True),  # as in containers
        ({"LANG": "C.UTF-8"}, True),
        ({"LANG": "C", "LC_CTYPE": "en_US.UTF-8"}, True),
        ({"LANG": "C", "LC_ALL": "en_US.UTF-8"}, True),
        ({"LANG": "C"}, False),
        ({"LANG": "C", "LC_CTYPE": "C.UTF-8"}, False),  # what Python makes of it
        ({"LANG": "en_US.UTF-8", "LC_ALL": "POSIX"}, False),
    ],
    ids=str,
)
def test_box_drawing_characters_are_not_written_where_the_user_chose_the_c_locale(environ, shown):
    with io.TextIOWrapper(io.BytesIO(), encoding="utf-8") as stream:
        assert terminal_text.supports_unicode(stream, environ) == shown
    with io.TextIOWrapper(io.BytesIO(), encoding="ascii") as stream:
        assert not terminal_text.supports_unicode(stream, environ)
