import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf_ipu_dp.collectives import quantities


@pytest.mark.parametrize(
    ("text", "size"), [("971048", 971048), ("4KiB", 4096), ("64 MiB", 64 << 20), ("1.5KB", 1500), ("2e3", 2000)]
)
def test_sizes_are_read_as_written(text, size):
    assert quantities.parse_bytes(text) == size


def test_a_range_doubles_and_ends_where_it_says():
    assert quantities.parse_byte_list("4KiB..20KiB,1MiB,4096") == (4096, 8192, 16384, 20480, 1 << 20)


@pytest.mark.parametrize(
    ("text", "rate"), [("1Gbit", 1.25e8), ("100Mbit/s", 1.25e7), ("25GB/s", 2.5e10), ("10Gb/s", 1.25e9), ("8bit", 1.0)]
)
def test_rates_are_bytes_per_second(text, rate):
    assert quantities.parse_rate(text) == rate


@pytest.mark.parametrize(("text", "seconds"), [("5us", 5e-6), ("2 ms", 2e-3), ("0", 0.0), ("1.5s", 1.5), ("0ms", 0.0)])
def test_times_are_seconds(text, seconds):
    assert quantities.parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("parse", "text", "words"),
    [
        (quantities.parse_bytes, "abc", "'abc' is not a size like 971048, 4KiB or 64MB"),
        (quantities.parse_bytes, "4kib", "Write 4KiB"),
        (quantities.parse_bytes, "-4", "is not a size"),
        (quantities.parse_bytes, "0", "from 1 to"),
        (quantities.parse_bytes, "1e999", "from 1 to"),
        (quantities.parse_byte_list, "4MiB..4KiB", "is an empty range"),
        (quantities.parse_rate, "-1Gbit", "is not a rate"),
        (quantities.parse_rate, "0Gbit", "more than 0"),
        (quantities.parse_rate, "100", "has no unit"),
        (quantities.parse_seconds, "5", "has no unit"),
        (quantities.parse_seconds, "5 fortnights", "which is not known"),
    ],
)
def test_what_cannot_be_read_is_told_in_a_sentence(parse, text, words):
    with pytest.raises(ValueError, match=words):
        parse(text)


@given(st.integers(1, 2**50))
def test_every_size_that_is_shown_has_three_digits_that_are_right(size):
    number, unit = quantities.render_bytes(size).replace(",", "").split()
    assert float(number) * quantities.parse_bytes(f"1{unit}") == pytest.approx(size, rel=0.006, abs=0.5)


@given(st.floats(1e-9, 1e6))
def test_every_time_that_is_shown_has_three_digits_that_are_right(seconds):
    number, unit = quantities.render_seconds(seconds).replace(",", "").split()
    assert quantities.parse_seconds(f"{number}{unit}") == pytest.approx(seconds, rel=0.006)
