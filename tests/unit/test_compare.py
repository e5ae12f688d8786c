from __future__ import annotations

import math

import pytest

from tf_ipu_dp import cli, compare

np = pytest.importorskip("numpy")


def test_a_layer_differs_as_much_as_its_worst_variable_relative_to_that_variable():
    first = {"a/kernel": np.array([1.0, -100.0]), "a/bias": np.array([0.0, 0.5]), "b/kernel": np.zeros(3)}
    second = {"a/kernel": np.array([1.0, -101.0]), "a/bias": np.array([0.1, 0.5]), "b/kernel": np.zeros(3)}
    assert compare.compare_weights(first, second) == [
        compare.Difference("a", 4, pytest.approx(1.0), pytest.approx(0.2)),
        compare.Difference("b", 3, 0.0, 0.0),
    ]


@pytest.mark.parametrize(
    "second",
    [{}, {"a/kernel": np.ones(3)}, {"a/kernel": np.array([1.0, math.nan])}, {"a/kernel": np.ones(2), "b": np.ones(1)}],
    ids=["missing", "shape", "nan", "more"],
)
def test_weights_that_cannot_be_compared_differ_infinitely(second):
    found = compare.compare_weights({"a/kernel": np.ones(2)}, second)
    assert max(each.relative for each in found) == math.inf


def test_the_table_ends_with_a_conclusion_that_names_the_worst_layer():
    found = [compare.Difference("conv1", 1000, 1e-7, 2e-7), compare.Difference("dense", 10, 1e-4, 3e-5)]
    layouts = ["1 instance x 2 replicas", "2 instances x 1 replica"]
    text = compare.render(found, 1e-5, 8, layouts, None)
    assert text == (
        "Layer  Weights  Difference  Relative\n"
        "conv1    1,000     1.0e-07   2.0e-07\n"
        "dense       10     1.0e-04   3.0e-05\n"
        "\n"
        "1 instance x 2 replicas and 2 instances x 1 replica after 8 updates: different weights. "
        "The largest relative difference is 3.0e-05 of dense (limit 1e-05).\n"
    )
    assert "equal weights" in compare.render(found, 1e-4, 8, layouts, 60).replace("\n", " ")


def test_other_arguments_than_two_runs_are_refused_in_a_sentence(tmp_path):
    with pytest.raises(cli.UsageError, match="two run folders are needed, for example runs/a runs/b, not 1"):
        compare.main([str(tmp_path)])
    with pytest.raises(cli.UsageError, match="has no valid checkpoint"):
        compare.main([str(tmp_path), str(tmp_path)])
