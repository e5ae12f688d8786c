"""Histograms of exchanges against brute force."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf_ipu_dp.runs.exchange_times import MAX_BUCKETS, Arrivals, Bucket, ExchangeTimes, Histogram

SECONDS = st.floats(0.0, 1e5)
TIMES = st.lists(SECONDS, max_size=60)
JOBS = st.integers(1, 5).flatmap(lambda instances: st.lists(st.tuples(*[SECONDS] * instances), max_size=30))


def by_instance(exchanges):
    return list(zip(*exchanges))


def same(one, other):
    assert (one.buckets, one.min_s, one.max_s) == (other.buckets, other.min_s, other.max_s)
    assert one.total_s == pytest.approx(other.total_s)


@given(TIMES)
def test_every_time_is_counted_in_the_bucket_that_it_lies_in(times):
    histogram = Histogram.of(times)
    assert histogram.count == len(times)
    assert len(histogram.buckets) <= MAX_BUCKETS
    assert histogram.total_s == pytest.approx(sum(times))
    assert (histogram.min_s, histogram.max_s) == (min(times, default=None), max(times, default=None))
    for bucket in histogram.buckets:
        assert bucket.below_s == 2 * bucket.least_s
        least = 0.0 if bucket.least_s == 2.0**-20 else bucket.least_s
        below = math.inf if bucket.below_s == 2.0**12 else bucket.below_s
        assert bucket.count == sum(least <= time < below for time in times) > 0


@given(st.lists(st.floats(1e-6, 4000.0), min_size=1, max_size=60), st.floats(0, 100), st.floats(0, 100))
def test_a_percentile_is_within_a_factor_of_two_of_the_exact_one_and_never_falls(times, one, other):
    histogram = Histogram.of(times)
    exact = sorted(times)[max(math.ceil(one / 100 * len(times)) - 1, 0)]
    found = histogram.percentile(one)
    assert exact / 2 <= found <= exact * 2
    assert min(times) <= found <= max(times)
    if one <= other:
        assert found <= histogram.percentile(other) * (1 + 1e-12)
    assert histogram.percentile(100) == pytest.approx(max(times))
    assert histogram.percentile(0) == pytest.approx(min(times))


def test_percentiles_are_interpolated_within_a_bucket():
    histogram = Histogram.of([1.0, 1.2, 1.4, 1.9, 2.0, 3.0, 3.5, 5.0])
    assert histogram.buckets == (Bucket(1.0, 2.0, 4), Bucket(2.0, 4.0, 3), Bucket(4.0, 8.0, 1))
    assert histogram.percentile(25) == 1.5
    assert histogram.p50_s == 2.0
    assert histogram.percentile(100) == 5.0


def test_nothing_counted_has_no_percentiles():
    assert (Histogram().count, Histogram().p50_s, Histogram().p99_s, Histogram().max_s) == (0, None, None, None)
    assert Histogram.of([]) == Histogram()


def test_empty_buckets_of_a_damaged_file_do_not_count():
    assert Histogram((Bucket(0.0, 0.0, 0),), 0.0, 0.0, 0.0).p50_s is None
    assert Histogram((Bucket(1.0, 2.0, 0), Bucket(2.0, 4.0, 1)), 3.0, 3.0, 3.0).percentile(0) == 3.0


def test_a_clock_that_was_set_back_counts_as_zero():
    assert Histogram.of([-3.0, 1.0]).min_s == 0.0


@given(TIMES, TIMES)
def test_merging_histograms_counts_the_times_of_both(one, other):
    same(Histogram.of(one).merged(Histogram.of(other)), Histogram.of([*one, *other]))


@given(JOBS)
def test_who_was_last_is_who_measured_the_shortest_time(exchanges):
    times = ExchangeTimes.of(by_instance(exchanges))
    assert times.exchanges == times.compared == len(exchanges)
    same(times.seconds, Histogram.of([min(each) for each in exchanges]))
    assert sum(each.last for each in times.arrivals) == len(exchanges)
    for each in times.arrivals:
        mine = [row for row in exchanges if row.index(min(row)) == each.instance]
        others = [[time for place, time in enumerate(row) if place != each.instance] for row in mine]
        late = [sum(rest) / len(rest) - min(row) if rest else 0.0 for row, rest in zip(mine, others)]
        assert each.last == len(mine)
        assert each.late.max_s == pytest.approx(max(late, default=None), abs=1e-9)
        if exchanges:
            assert times.last_pct(each.instance) == pytest.approx(100 * len(mine) / len(exchanges))
    assert times.waiting.count == len(exchanges)


@given(JOBS, JOBS)
def test_merging_exchanges_is_the_same_as_adding_them_at_once(one, other):
    first, second = ExchangeTimes.of(by_instance(one)), ExchangeTimes.of(by_instance(other), exchanges=1000)
    both = first.merged(second)
    assert both.exchanges == len(one) + 1000
    same(both.seconds, Histogram.of([min(each) for each in (*one, *other)]))
    for each in both.arrivals:
        parts = [part.late for times in (first, second) for part in times.arrivals if part.instance == each.instance]
        same(each.late, parts[0] if len(parts) == 1 else parts[0].merged(parts[1]))
    assert first.merged(ExchangeTimes()) == first


def test_the_instance_that_was_last_most_often_is_named():
    times = ExchangeTimes.of([[3.0, 3.0, 1.0], [1.0, 1.0, 5.0], [2.0, 4.0, 5.0]])
    late = times.most_often_last
    assert (late.instance, late.last, late.late.max_s) == (1, 2, 2.5)
    assert times.last_pct(1) == pytest.approx(200 / 3)
    assert times.last_pct(2) == 0
    assert ExchangeTimes().most_often_last is None
    assert ExchangeTimes().last_pct(0) is None


@given(JOBS)
def test_the_summary_has_the_numbers_of_the_record(exchanges):
    times = ExchangeTimes.of(by_instance(exchanges), exchanges=1000)
    summary = times.summary()
    assert (summary is None) is (not exchanges)
    if summary:
        assert (summary.exchanges, summary.compared) == (1000, len(exchanges))
        seconds = times.seconds
        assert (summary.p50_s, summary.p99_s, summary.max_s) == (seconds.p50_s, seconds.p99_s, seconds.max_s)
        # From Python 3.12 on, sum() carries the rounding errors of floats along.
        assert summary.waited_s == pytest.approx(sum(each.late.total_s for each in times.arrivals), rel=1e-12)
        assert summary.last_pct == max(times.last_pct(each.instance) for each in times.arrivals)
        assert summary.last_pct == times.last_pct(summary.last_instance)


@given(JOBS)
def test_the_record_survives_its_file(exchanges):
    times = ExchangeTimes.of(by_instance(exchanges))
    assert ExchangeTimes.from_json(json.loads(json.dumps(times.to_json()))) == times


def test_the_file_has_what_readers_need_without_computing():
    times = ExchangeTimes.of([[0.25, 0.25], [0.5, 0.75]])
    assert times.to_json() == {
        "schema": 1,
        "exchanges": 2,
        "seconds": {
            "count": 2,
            "p50_s": 0.25,
            "p99_s": 0.25,
            "buckets": [{"least_s": 0.25, "below_s": 0.5, "count": 2}],
            "total_s": 0.5,
            "min_s": 0.25,
            "max_s": 0.25,
        },
        "arrivals": [
            {
                "instance": 0,
                "last": 2,
                "late": {
                    "count": 2,
                    "p50_s": 0.5,
                    "p99_s": 0.5,
                    "buckets": [
                        {"least_s": 0.25, "below_s": 0.5, "count": 1},
                        {"least_s": 0.5, "below_s": 1.0, "count": 1},
                    ],
                    "total_s": 0.75,
                    "min_s": 0.25,
                    "max_s": 0.5,
                },
            },
            Arrivals(1)._fields_to_json(),
        ],
    }
