"""Sparklines, ranges and widths of text."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from tf_ipu_dp.monitoring import text_layout


def test_a_sparkline_has_a_character_per_sample():
    assert text_layout.sparkline([0.0, 50.0, None, 100.0, 130.0]).lstrip() == "▁▅ ██"
    assert len(text_layout.sparkline([1.0] * 500)) == len(text_layout.sparkline([]))


@given(st.sets(st.integers(0, 200)))
def test_ranges_of_ids_can_be_read_back(ids):
    found = set()
    for part in filter(None, text_layout.id_ranges(ids).split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    assert found == ids


def test_numbers_that_no_device_has_are_short():
    assert [text_layout.number(each) for each in (None, math.inf, -math.inf, math.nan, 1e308)] == [*"----", "1e+308"]
