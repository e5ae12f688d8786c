"""The output of instances on a terminal and in a file."""

from __future__ import annotations

import io

import pytest

from tf_ipu_dp.emulator.launcher.tagged_output import TaggedOutput


class Stream(io.BytesIO):
    def __init__(self, terminal):
        super().__init__()
        self._terminal = terminal

    def isatty(self):
        return self._terminal


@pytest.mark.parametrize(
    ("terminal", "untagged", "shown"),
    [
        (True, 0, b"step 1\n[1,1]<stderr>:damaged\n"),
        (True, None, b"[1,0]<stderr>:step 1\n[1,1]<stderr>:damaged\n"),
        (False, 0, b"[1,0]<stderr>:step 1\n[1,1]<stderr>:damaged\n"),
    ],
    ids=["leader on a terminal", "terminal", "file"],
)
def test_only_others_have_tags_where_the_leader_is_shown_on_a_terminal(terminal, untagged, shown):
    stream = Stream(terminal)
    output = TaggedOutput({"stderr": stream}, None, untagged=untagged)
    output.write(0, "stderr", b"step 1\n")
    output.write(1, "stderr", b"damaged\n")
    assert stream.getvalue() == shown


def test_a_bar_without_a_tag_is_redrawn_in_place_and_ended_by_another_instance():
    stream = Stream(True)
    output = TaggedOutput({"stderr": stream}, None, untagged=0)
    output.write(0, "stderr", b"\rEpoch 1  10%")
    output.write(0, "stderr", b"\rEpoch 1  20%")
    output.write(0, "stderr", b"\rEpoch 1  30%")
    output.write(1, "stderr", b"damaged\n")
    assert stream.getvalue() == b"\rEpoch 1  10%\rEpoch 1  20%\r\n[1,1]<stderr>:damaged\n"
