"""Which trials are outliers, why, and who was last."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf_ipu_dp.collectives import outliers, results


def _series(seconds, **arrays):
    return results.Series(results.SeriesFacts(4, 971_048), np.array(seconds), **arrays)


def _body(trials=200, seed=1):
    return np.random.RandomState(seed).normal(0.014, 0.0003, trials)


def _causes(series):
    return [(each.trial, each.cause, each.rank) for each in outliers.find(series)]


def test_normal_noise_has_no_outlier_and_equal_times_have_none():
    assert outliers.find(_series(_body())) == ()
    assert outliers.find(_series([0.5] * 10)) == ()
    assert outliers.find(_series([0.5])) == ()


def _counted(trial, **counts):
    """Returns the counters of TCP for 200 trials, 0 in all but one."""
    found = {name: np.zeros(200) for name in ("timeouts", "probes", "fast_retransmissions")}
    for name, count in counts.items():
        found[name][trial] = count
    return found


@pytest.mark.parametrize(
    ("excess", "counts", "cause"),
    [
        (0.207, {"timeouts": 1}, outliers.TIMEOUT),
        (0.61, {"timeouts": 2, "probes": 1}, outliers.TIMEOUT),
        (0.19, {"timeouts": 1}, outliers.TIMEOUT),  # about 200 ms: the median scatters too
        (0.028, {"timeouts": 1}, outliers.OTHER),  # a timeout takes 200 ms: this one belongs to the barrier
        (0.028, {"timeouts": 1, "fast_retransmissions": 1}, outliers.FAST),
        (0.028, {"probes": 1}, outliers.PROBE),
        (0.207, {"probes": 1}, outliers.PROBE),  # alone on its way, a packet is probed for after 200 ms
        (0.028, {"fast_retransmissions": 3}, outliers.FAST),
        (0.207, {"fast_retransmissions": 3}, outliers.OTHER),  # a round trip does not take 200 ms
        (0.207, {}, outliers.OTHER),  # timeouts were counted, and there was none
    ],
)
def test_a_cause_needs_both_its_counter_and_a_time_that_it_can_take(excess, counts, cause):
    seconds = _body()
    seconds[10] += excess
    assert _causes(_series(seconds, **_counted(10, **counts))) == [(10, cause, None)]


def test_the_shortest_timeout_is_that_of_the_transport():
    seconds = _body()
    seconds[10] += 0.067
    facts = results.SeriesFacts(4, 971_048, shortest_timeout_s=0.067)
    series = results.Series(facts, seconds, **_counted(10, timeouts=1))
    assert _causes(series) == [(10, outliers.TIMEOUT, None)]


@pytest.mark.parametrize(
    ("excess", "cause"),
    [
        (0.205, outliers.TIMEOUT),
        (0.61, outliers.TIMEOUT),
        (1.45, outliers.TIMEOUT),
        (3.1, outliers.TIMEOUT),
        (0.1, outliers.OTHER),
        (0.95, outliers.OTHER),
    ],
)
def test_where_timeouts_are_not_counted_their_totals_tell(excess, cause):
    seconds = _body()
    seconds[7] += excess
    assert _causes(_series(seconds)) == [(7, cause, None)]


def test_a_late_rank_that_explains_most_of_the_excess_is_named():
    seconds, late = _body(), np.full((200, 4), 1e-5)
    seconds[[3, 9]] += 0.2
    late[3, 2] = 0.19
    late[9, 1] = 0.05
    assert _causes(_series(seconds, late_s=late)) == [(3, outliers.LATE, 2), (9, outliers.TIMEOUT, None)]
    counted = _series(seconds, late_s=late, timeouts=np.zeros(200))
    assert _causes(counted) == [(3, outliers.LATE, 2), (9, outliers.OTHER, None)]


def test_many_timeouts_do_not_hide_each_other():
    seconds = _body()
    seconds[::3] += 0.2
    assert len(outliers.find(_series(seconds))) == 67


@given(st.lists(st.floats(1e-6, 10.0), min_size=1, max_size=300))
def test_fewer_than_half_of_the_trials_are_outliers_and_all_others_are_faster(times):
    series = _series(times)
    found = {each.trial for each in outliers.find(series)}
    assert len(found) <= len(times) / 2
    rest = [time for trial, time in enumerate(times) if trial not in found]
    assert all(times[trial] > max(rest) for trial in found)


def test_the_last_rank_is_the_one_later_than_all_others_and_than_the_limit():
    late = [[0, 1, 2, 0], [0, 0, 0, 0], [3, 3, 0, 0], [5, 0, 1, 4]]
    assert outliers.last_rank(np.array(late, dtype=float), 0.0).tolist() == [2, -1, -1, 0]
    assert outliers.last_rank(np.array(late, dtype=float), 2.0).tolist() == [-1, -1, -1, 0]


def test_nobody_is_late_who_only_leaves_the_barrier_after_the_others():
    # As measured on four hosts: a barrier lets its ranks go one after the other, always in the same order.
    late = np.array([0, 190e-6, 160e-6, 20e-6]) + np.random.RandomState(1).normal(0, 2e-5, (200, 4))
    late -= late.min(axis=1, keepdims=True)
    found = outliers.last_shares(_series(_body(), late_s=late), 10)
    assert (found.late, found.share.tolist()) == (0, [0, 0, 0, 0]) and not found.by_group.any()
    late[40:60, 3] += 3e-3
    found = outliers.last_shares(_series(_body(), late_s=late), 10)
    assert found.late == 20 and found.share.tolist() == [0, 0, 0, 0.1]
    assert found.by_group[3].tolist() == [0, 0, 1, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_that_is_always_late_does_not_hide_itself(ranks):
    late = np.abs(np.random.RandomState(1).normal(0, 2e-5, (200, ranks)))
    late[:, 1] += 5e-3
    late -= late.min(axis=1, keepdims=True)
    series = results.Series(results.SeriesFacts(ranks, 971_048), _body(), late_s=late)
    assert outliers.last_shares(series, 1).share[1] == 1.0


def test_a_small_trial_has_no_late_rank_within_the_noise_of_waking_up():
    late = np.abs(np.random.RandomState(2).normal(0, 2e-4, (500, 2)))
    late -= late.min(axis=1, keepdims=True)
    series = results.Series(results.SeriesFacts(2, 4096), np.full(500, 1e-3), late_s=late)
    assert outliers.last_shares(series, 1).late < 25


@given(st.lists(st.integers(-1, 3), min_size=1, max_size=100), st.integers(1, 20))
def test_shares_count_every_trial_with_a_last_rank_once(last, groups):
    late = np.zeros((len(last), 4))
    for trial, rank in enumerate(last):
        if rank >= 0:
            late[trial, rank] = 1e6
    found = outliers.last_shares(_series(np.ones(len(last)), late_s=late), groups)
    limit = outliers.late_limit_s(_series(np.ones(len(last)), late_s=late))
    known = [rank for rank in last if rank >= 0 and limit < 1e6]
    assert (found.trials, found.late) == (len(last), len(known))
    assert found.share == pytest.approx([known.count(rank) / len(last) for rank in range(4)])
    sizes = np.diff(found.edges)
    assert found.by_group @ sizes == pytest.approx(found.share * len(last))


def test_who_was_last_is_unknown_without_the_times_of_the_ranks():
    assert outliers.last_shares(_series([1.0]), 10) is None
