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


def test_a_counted_timeout_is_the_cause():
    seconds, timeouts = _body(), np.zeros(200)
    seconds[[10, 60]] += 0.207
    timeouts[10] = 1
    assert _causes(_series(seconds, timeouts=timeouts)) == [
        (10, outliers.TIMEOUT, None),
        (60, outliers.OTHER, None),
    ], "timeouts were counted, and trial 60 had none"


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


def test_the_last_rank_is_the_one_later_than_all_others():
    late = [[0, 1, 2, 0], [0, 0, 0, 0], [3, 3, 0, 0], [5, 0, 1, 4]]
    assert outliers.last_rank(np.array(late, dtype=float)).tolist() == [2, -1, -1, 0]


@given(st.lists(st.integers(-1, 3), min_size=1, max_size=100), st.integers(1, 20))
def test_shares_count_every_trial_with_a_last_rank_once(last, groups):
    late = np.zeros((len(last), 4))
    for trial, rank in enumerate(last):
        if rank >= 0:
            late[trial, rank] = 1.0
    found = outliers.last_shares(_series(np.ones(len(last)), late_s=late), groups)
    known = [rank for rank in last if rank >= 0]
    if not known:
        assert found is None
        return
    assert found.trials == len(known)
    assert found.share == pytest.approx([known.count(rank) / len(known) for rank in range(4)])
    for group in range(len(found.edges) - 1):
        part = [rank for rank in last[found.edges[group] : found.edges[group + 1]] if rank >= 0]
        column = found.by_group[:, group]
        assert np.isnan(column).all() if not part else column.sum() == pytest.approx(1.0)


def test_who_was_last_is_unknown_without_the_times_of_the_ranks():
    assert outliers.last_shares(_series([1.0]), 10) is None
