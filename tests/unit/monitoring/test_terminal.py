"""What a terminal can show."""

from __future__ import annotations

import io

import pytest

from tf_ipu_dp.monitoring import terminal


class Terminal(io.TextIOWrapper):
    """A stream that says that it is a terminal."""

    def isatty(self):
        return True


@pytest.mark.parametrize(("term", "able"), [("xterm", True), ("dumb", False), ("", False), (None, False)])
def test_a_terminal_of_an_unknown_type_gets_plain_text(monkeypatch, term, able):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("TERM", raising=False)
    if term is not None:
        monkeypatch.setenv("TERM", term)
    stream = Terminal(io.BytesIO(), encoding="utf-8")
    assert (terminal.moves_cursor(stream), terminal.detect_options(stream).colour) == (able, able)
