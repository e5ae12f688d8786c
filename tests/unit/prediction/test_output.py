from __future__ import annotations

import csv
import io
import json

import numpy as np
import pytest

from tf_ipu_dp import cli
from tf_ipu_dp.prediction import output
from tf_ipu_dp.prediction.output import Predictions

NAMES = ["a.png", 'b,"\n.png']
SHARES = np.array([[0.1, 0.6, 0.3], [0.5, 0.25, 0.25]], np.float32)
CLASSES = Predictions("runs/a", "runs/a/checkpoints/step-1", NAMES, {"probabilities": SHARES}, ("cat", "dog"))
NUMBERS = Predictions("runs/a", "export", NAMES, {"price": np.array([[1.5], [2.5]]), "code": np.zeros((2, 2))}, ())


def rows(content):
    return list(csv.reader(io.StringIO(content.decode())))


def test_a_csv_has_the_best_classes_of_each_input_with_their_names():
    assert rows(output.render(CLASSES, ".csv", 1)) == [
        ["input", "class", "name", "probability"],
        ["a.png", "1", "dog", "0.6"],
        [NAMES[1], "0", "cat", "0.5"],
    ]
    header, first, second = rows(output.render(CLASSES, ".csv", 5))
    assert header[4:] == ["class_2", "name_2", "probability_2", "class_3", "name_3", "probability_3"]
    assert first[4:6] == ["2", "2"] and second[4:6] == ["1", "dog"]  # a class without a name has its number


def test_other_outputs_have_a_column_for_each_number():
    assert rows(output.render(NUMBERS, ".csv", 1)) == [
        ["input", "price", "code_0", "code_1"],
        ["a.png", "1.5", "0", "0"],
        [NAMES[1], "2.5", "0", "0"],
    ]
    many = Predictions("r", "w", ["a"], {"mask": np.zeros((1, 64, 64))}, ())
    with pytest.raises(cli.UsageError, match=r"4,096 numbers, too many for a CSV\. Use --out=FILE\.npz\."):
        output.render(many, ".csv", 1)


def test_json_is_typed_and_has_no_nan():
    found = json.loads(output.render(CLASSES, ".json", 2))
    assert found["predictions"][0]["name"] == "dog" and len(found["predictions"][0]["top"]) == 2
    broken = Predictions("r", "w", ["a"], {"price": np.array([[np.nan]])}, ())
    assert json.loads(output.render(broken, ".json", 1))["predictions"] == [{"input": "a", "price": [None]}]


def test_arrays_have_all_numbers_and_need_no_pickle(tmp_path):
    for kind in output.FILES:
        output.write(CLASSES, tmp_path / f"p{kind}", 1)
    np.testing.assert_array_equal(np.load(tmp_path / "p.npy", allow_pickle=False), SHARES)
    with np.load(tmp_path / "p.npz", allow_pickle=False) as found:
        assert found["inputs"].tolist() == NAMES and found["class_names"].tolist() == ["cat", "dog"]
        np.testing.assert_array_equal(found["probabilities"], SHARES)
    with pytest.raises(cli.UsageError, match=r"has the outputs price, code, and a \.npy file has one array"):
        output.render(NUMBERS, ".npy", 1)


@pytest.mark.parametrize(("name", "sentence"), [("p.xls", "unknown file type"), ("none/p.csv", "there is no folder")])
def test_a_file_that_cannot_be_written_is_refused_first(tmp_path, name, sentence):
    with pytest.raises(cli.UsageError, match=sentence):
        output.check_file(tmp_path / name)
