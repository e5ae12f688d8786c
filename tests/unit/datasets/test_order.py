from __future__ import annotations

import subprocess
import sys

import numpy as np

from tf_ipu_dp.datasets import order


def test_the_order_of_samples_is_the_same_on_every_machine():
    assert order.permutation(42, 3, 1000)[:8].tolist() == [13, 597, 176, 497, 226, 730, 90, 196]
    assert order.permutation(2**31 - 1, 7, 60_000)[:4].tolist() == [53592, 19972, 6246, 11896]


def test_the_random_numbers_of_samples_are_the_same_on_every_machine():
    expected = [[0.3076469898223877, 0.9572063684463501], [0.386885404586792, 0.369178831577301]]
    assert order.random_numbers(42, 3, [0, 7], 2).tolist() == expected


def test_random_numbers_are_spread_evenly_and_are_not_correlated():
    numbers = order.random_numbers(1, 2, np.arange(20_000), 5)
    assert numbers.min() >= 0 and numbers.max() < 1
    assert np.abs(numbers.mean(axis=0) - 0.5).max() < 0.01 and np.abs(numbers.std(axis=0) - 12**-0.5).max() < 0.01
    others = [
        order.random_numbers(1, 3, np.arange(20_000), 5),
        order.random_numbers(2, 2, np.arange(20_000), 5),
        np.roll(numbers, 1, axis=0),
    ]
    correlations = np.corrcoef(np.concatenate([numbers, *others], axis=1).T)
    assert np.abs(correlations - np.eye(len(correlations))).max() < 0.04


def test_the_order_of_samples_needs_no_tensorflow():
    code = "import sys, tf_ipu_dp.datasets.order; sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
