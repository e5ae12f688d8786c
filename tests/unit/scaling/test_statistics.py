"""Intervals of few repeats, efficiency, knee, and the factors of a time to accuracy, by their properties."""

from __future__ import annotations

import random
import statistics as python_statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf_ipu_dp.scaling import statistics

RATES = st.floats(0.01, 1e7)
REPEATS = st.lists(RATES, min_size=1, max_size=40)
COUNTS = st.integers(1, 4096)


@given(REPEATS)
def test_an_interval_holds_its_median_and_ends_at_repeats(values):
    found = statistics.median_interval(values)
    assert found.low <= found.median <= found.high
    assert found.median == python_statistics.median(values)
    assert found.low in values and found.high in values


@given(REPEATS)
def test_an_interval_of_fewer_than_six_repeats_is_their_range_and_says_how_much_it_gives(values):
    found = statistics.median_interval(values)
    if len(values) < statistics.MIN_REPEATS:
        assert (found.low, found.high) == (min(values), max(values))
        assert found.level == 1 - 2 ** (1 - len(values)) < statistics.LEVEL
    else:
        assert found.level >= statistics.LEVEL


@pytest.mark.parametrize(
    ("repeats", "left_out", "level"),
    [(1, 0, 0), (2, 0, 0.5), (3, 0, 0.75), (5, 0, 0.9375), (6, 0, 0.96875), (9, 1, 0.9609375), (20, 5, 0.9586105)],
)
def test_the_levels_are_those_of_the_tables_of_order_statistics(repeats, left_out, level):
    found = statistics.median_interval(list(range(1, repeats + 1)))
    assert (found.low, found.high) == (1 + left_out, repeats - left_out)
    assert found.level == pytest.approx(level, abs=1e-6)


def test_an_interval_holds_the_true_median_as_often_as_it_says():
    draw = random.Random(1)
    for repeats in (3, 7, 12):
        held = 0
        for _ in range(4000):
            found = statistics.median_interval([draw.expovariate(1) for _ in range(repeats)])
            held += found.low <= 0.6931471805599453 <= found.high
        assert held / 4000 == pytest.approx(found.level, abs=0.02)


@given(REPEATS, st.floats(0.001, 1000))
def test_an_interval_scales_with_its_values(values, factor):
    scaled = statistics.median_interval([factor * each for each in values])
    expected = statistics.median_interval(values).times(factor)
    assert (scaled.median, scaled.low, scaled.high) == pytest.approx((expected.median, expected.low, expected.high))


@given(REPEATS, REPEATS)
def test_a_ratio_of_intervals_holds_the_ratio_of_any_two_values_in_them(own, base):
    found = statistics.median_interval(own).over(statistics.median_interval(base))
    assert found.low <= found.median <= found.high
    one, two = statistics.median_interval(own), statistics.median_interval(base)
    assert found.low <= one.low / two.low * (1 + 1e-12) and one.high / two.high <= found.high * (1 + 1e-12)


@given(RATES, COUNTS, COUNTS)
def test_linear_scaling_has_an_efficiency_of_one_whatever_the_sizes(rate, base, replicas):
    speedup = (rate * replicas) / (rate * base)
    assert statistics.efficiency(speedup, replicas / base) == pytest.approx(1)


SWEEP = st.dictionaries(st.integers(1, 10_000), RATES, min_size=2, max_size=12)


@given(SWEEP)
def test_the_knee_is_the_smallest_size_that_has_its_share_of_the_best_rate(rates):
    knee = statistics.find_knee(list(rates.items()))
    best = max(rates.values())
    assert rates[knee.best_size] == best and rates[knee.size] >= knee.share * best
    assert all(rates[size] < knee.share * best for size in rates if size < knee.size)
    assert knee.size <= knee.best_size


@given(SWEEP, st.floats(0.01, 100), st.randoms(use_true_random=False))
def test_the_knee_does_not_depend_on_the_unit_or_on_the_order(rates, factor, draw):
    shuffled = [(size, factor * rate) for size, rate in rates.items()]
    draw.shuffle(shuffled)
    one, other = statistics.find_knee(list(rates.items())), statistics.find_knee(shuffled)
    limit = one.share * max(rates.values())
    if all(abs(rate / limit - 1) > 1e-9 for rate in rates.values()) and len(set(rates.values())) == len(rates):
        assert one.size == other.size


def test_one_size_has_no_knee():
    assert statistics.find_knee([(8, 100.0)]) is None
    assert statistics.find_knee([(8, 100.0), (8, 90.0)]) is None


@given(COUNTS, COUNTS, st.tuples(RATES, RATES, RATES, RATES, RATES, RATES))
def test_hardware_statistical_and_overhead_multiply_to_the_efficiency(base, own, numbers):
    rate, base_rate, samples, base_samples, seconds, base_seconds = numbers
    found = statistics.factors(
        statistics.Trained(base, base_rate, base_samples, base_seconds),
        statistics.Trained(own, rate, samples, seconds),
    )
    assert found.hardware * found.statistical * found.overhead == pytest.approx(found.efficiency)
    assert found.efficiency == pytest.approx(base_seconds / seconds * base / own)


@given(COUNTS, RATES, st.floats(1, 1e9), st.integers(1, 64))
def test_a_run_without_overhead_has_none(replicas, rate, samples, times):
    base = statistics.Trained(replicas, rate, samples, samples / rate)
    own = statistics.Trained(
        times * replicas, 0.8 * times * rate, 1.25 * samples, 1.25 * samples / (0.8 * times * rate)
    )
    found = statistics.factors(base, own)
    assert (found.hardware, found.statistical, found.overhead) == pytest.approx((0.8, 0.8, 1))
