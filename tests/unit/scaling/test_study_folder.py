from __future__ import annotations

import dataclasses
import os

import pytest

from tf_ipu_dp import cli
from tf_ipu_dp.scaling import study_folder
from tf_ipu_dp.scaling.records import Cell, Measurement, Study
from tf_ipu_dp.scaling.study_folder import StudyFolder

CELL = Cell("tf_ipu_dp-1", "tf_ipu_dp", 1, 1, 1, 1, 32, 1, 32, ("--ipus=1",))
STUDY = Study(
    "weak", "instances", (1,), ("tf_ipu_dp",), 2, 1, 8.0, ("--model=mlp",), (CELL,),
    facts={"processor": "a", "cores": "2", "load": "1"}, version="1",
)  # fmt: skip
DONE = Measurement("tf_ipu_dp-1", 0, Measurement.DONE, samples=640, updates=20, seconds=2.0)


@pytest.fixture
def open_study(tmp_path):
    """Opens a study in a folder that is the same in every call of a test, and closes it."""

    def open_and_close(study=STUDY, resume=True):
        with study_folder.open_folder(tmp_path / "study", study, resume=resume) as folder:
            folder.write_study(study)
            return folder

    return open_and_close


def test_a_study_and_its_measurements_are_read_as_they_were_written(open_study):
    folder = open_study()
    second = dataclasses.replace(DONE, repeat=1, seconds=2.5, reason="é\n")
    folder.append(DONE)
    folder.append(second)
    reader = StudyFolder(folder.path)
    assert reader.read_study() == STUDY and reader.read_measurements() == [DONE, second]


def test_a_repeat_that_failed_and_was_measured_later_counts_once(open_study):
    folder = open_study()
    for each in (dataclasses.replace(DONE, state=Measurement.FAILED), dataclasses.replace(DONE, repeat=1), DONE):
        folder.append(each)
    assert folder.read_measurements() == [dataclasses.replace(DONE, repeat=1), DONE]


def test_a_line_that_a_kill_cut_off_loses_no_other(open_study):
    folder = open_study()
    folder.append(DONE)
    whole = folder.cells_jsonl.read_bytes()
    for end in range(1, len(whole)):
        folder.cells_jsonl.write_bytes(whole + whole[:end])
        second = dataclasses.replace(DONE, repeat=1)
        folder.append(second)
        assert [each for each in folder.read_measurements() if each.cell] == [DONE, second]


def test_a_study_that_does_not_say_what_it_ran_on_is_continued(open_study):
    open_study()
    open_study(dataclasses.replace(STUDY, facts={**STUDY.facts, "sdk": "emulator"}))
    with pytest.raises(cli.UsageError, match="its --sdk is emulator, and not poplar"):
        open_study(dataclasses.replace(STUDY, facts={**STUDY.facts, "sdk": "poplar"}))


def test_the_same_study_is_continued_also_with_more_repeats_and_another_load(open_study):
    open_study().append(DONE)
    again = dataclasses.replace(STUDY, repeats=5, facts={**STUDY.facts, "load": "7"}, command=("--repeats=5",))
    assert open_study(again).read_measurements() == [DONE]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"mode": "strong"}, "its --mode is weak, and not strong."),
        ({"words": ("--model=cnn", "--seed=2")}, "its flags of train are --model=mlp, and not --model=cnn --seed=2."),
        ({"sizes": (1, 2)}, "its --sizes are 1, and not 1,2."),
        ({"seed": 2}, "its --order_seed is 1, and not 2."),
        ({"fabric": "r4"}, "its --fabric is none, and not r4."),
        ({"version": "2"}, "its version of tf_ipu_dp is 1, and not 2."),
        ({"facts": {"processor": "a", "cores": "4"}}, "its number of cores is 2, and not 4."),
        ({"updates": 20}, "its --updates are none, and not 20."),
        ({"epochs": "3"}, "its --epochs are none, and not 3."),
        ({"hosts": ("a", "b")}, "its --hosts are none, and not a,b."),
        ({"cells": ()}, "its cell tf_ipu_dp-1 is not the same."),
    ],
    ids=str,
)
def test_the_folder_of_another_study_is_refused_and_stays_as_it_is(open_study, changes, sentence):
    folder = open_study()
    folder.append(DONE)
    with pytest.raises(cli.UsageError) as error:
        open_study(dataclasses.replace(STUDY, **changes))
    assert str(error.value) == f"--study_dir={folder.path} holds another study: {sentence} Choose another folder."
    assert folder.read_study() == STUDY and folder.read_measurements() == [DONE]


def test_without_resume_what_was_measured_is_set_aside_and_not_lost(open_study):
    folder = open_study()
    folder.append(DONE)
    (folder.clear_run("tf_ipu_dp-1", 0) / "result.json").write_text("{}", encoding="utf-8")
    for number in (1, 2):
        folder = open_study(resume=False)
        assert folder.read_measurements() == [] and not folder.runs.exists()
        assert (folder.path / f"cells-{number}.jsonl").exists()
        folder.append(DONE)
    assert (folder.path / "runs-1" / "tf_ipu_dp-1-repeat0" / "result.json").exists()


def test_a_folder_of_other_files_is_refused(tmp_path, open_study):
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "thesis.tex").write_text("", encoding="utf-8")
    with pytest.raises(cli.UsageError, match="is a folder of other files"):
        open_study()
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(cli.UsageError, match=r"cannot be used \(File exists\)"):
        study_folder.open_folder(tmp_path / "file", STUDY, resume=True)


def test_a_study_that_is_running_is_refused_with_who_runs_it(tmp_path):
    path = tmp_path / "study"
    running = study_folder.open_folder(path, STUDY, resume=True)
    with pytest.raises(cli.UsageError, match=r"is in use by process \d+ on "):
        study_folder.open_folder(path, STUDY, resume=True)
    running.close()
    study_folder.open_folder(path, STUDY, resume=True).close()


def test_what_is_no_study_is_said(tmp_path):
    with pytest.raises(cli.UsageError, match=r"is not the folder of a study: it has no study\.json"):
        StudyFolder(tmp_path).read_study()
    (tmp_path / "study.json").write_text("[]", encoding="utf-8")
    with pytest.raises(cli.UsageError, match=r"is not the folder of a study: its study\.json cannot be read"):
        StudyFolder(tmp_path).read_study()


def test_a_run_that_was_interrupted_begins_with_an_empty_folder(open_study):
    folder = open_study()
    (folder.clear_run("tf_ipu_dp-1", 0) / "metrics.jsonl").write_text("old", encoding="utf-8")
    assert list(folder.clear_run("tf_ipu_dp-1", 0).iterdir()) == []


def _replace(path, kind, outside):
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(outside)


@pytest.mark.parametrize("kind", ["a pipe", "a folder", "a link"])
def test_measurements_that_are_no_file_are_refused_in_a_sentence(open_study, tmp_path, kind):
    folder = open_study()
    _replace(folder.cells_jsonl, kind[2:], tmp_path)
    with pytest.raises(cli.UsageError, match=rf"cells\.jsonl cannot be read: it is {kind} and not a file\. Remove it"):
        folder.read_measurements()


@pytest.mark.parametrize("name", ["study.json", "cells.jsonl", ".lock", "runs"])
@pytest.mark.parametrize("kind", ["a pipe", "a link"])
def test_nothing_in_the_folder_of_a_study_leads_out_of_it(open_study, tmp_path, name, kind):
    folder = open_study()
    outside = tmp_path / "outside"
    outside.mkdir()
    if (folder.path / name).exists():
        (folder.path / name).rename(outside / name)
        outside /= name
    _replace(folder.path / name, kind[2:], outside)
    with pytest.raises(cli.UsageError, match=rf"{name} in it is {kind}, and a study's folder has files and folders"):
        open_study()


def test_a_link_in_place_of_a_run_removes_and_writes_nothing_outside(open_study, tmp_path):
    folder = open_study()
    outside = tmp_path / "outside"
    (outside / "tf_ipu_dp-1-repeat0").mkdir(parents=True)
    (outside / "tf_ipu_dp-1-repeat0" / "precious").touch()
    folder.runs.symlink_to(outside)
    with pytest.raises(cli.UsageError, match="runs in it is a link"):
        folder.clear_run("tf_ipu_dp-1", 0)
    folder.runs.unlink()
    folder.runs.mkdir()
    (folder.runs / "tf_ipu_dp-1-repeat0").symlink_to(outside / "tf_ipu_dp-1-repeat0")
    with pytest.raises(cli.UsageError, match="runs/tf_ipu_dp-1-repeat0 in it is a link"):
        folder.clear_run("tf_ipu_dp-1", 0)
    assert [path.name for path in (outside / "tf_ipu_dp-1-repeat0").iterdir()] == ["precious"]
