from __future__ import annotations

import json
from pathlib import Path

import pytest

from tf_ipu_dp import cli
from tf_ipu_dp import list as list_command
from tf_ipu_dp.datasets import info
from tf_ipu_dp.planning import architectures

ROOT = Path(__file__).resolve().parents[2]


def test_everything_that_a_run_can_be_made_of_is_listed(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    assert list_command.main([f"--data_dir={tmp_path}", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in listed["models"]] == list(architectures.MODELS)
    assert [each["name"] for each in listed["datasets"]] == list(info.DATASETS)
    assert [each["path"] for each in listed["flags"]] == sorted(map(str, Path("flags").glob("*.flags")))
    assert all(each["about"] for each in listed["flags"])


def test_one_kind_is_listed_alone(capsys, tmp_path):
    assert list_command.main(["datasets", f"--data_dir={tmp_path}"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("--dataset ") and "--model" not in text
    assert "fashion_mini          8,192       2,048  28 x 28 x 1         10  shipped\n" in text
    assert "imagenet2012      1,281,167      50,000  224 x 224 x 3    1,000  to be prepared by hand\n" in text


def test_a_set_that_is_prepared_is_shown_as_such(capsys, tmp_path):
    (tmp_path / "cifar10" / "3.0.2").mkdir(parents=True)
    for name in ("dataset_info.json", "features.json"):
        (tmp_path / "cifar10" / "3.0.2" / name).touch()
    list_command.main(["datasets", f"--data_dir={tmp_path}", "--json"])
    samples = {each["name"]: each["samples"] for each in json.loads(capsys.readouterr().out)["datasets"]}
    assert (samples["cifar10"], samples["cifar100"]) == ("prepared", "downloaded by the first run")


def test_a_directory_without_flag_files_is_said(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert list_command.main(["flags"]) == 0
    assert capsys.readouterr().out == "no flag files: there is no flags/*.flags in this directory\n"


@pytest.mark.parametrize(
    ("word", "advice"), [("model", "Did you mean models?"), ("xyz", "Use models, datasets or flags.")]
)
def test_another_word_is_refused(word, advice):
    with pytest.raises(cli.UsageError, match=f"^{word} cannot be listed. {advice.replace('?', '.')}"):
        list_command.main([word])
