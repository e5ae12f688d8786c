"""What a path of --dataset is, by names alone."""

from __future__ import annotations

import os

import pytest

from tf_ipu_dp import cli
from tf_ipu_dp.datasets import own_paths


@pytest.fixture
def folder(tmp_path):
    """Two classes with an image each, and a folder and links below them that lead nowhere."""
    for name in ("cat", "dog"):
        (tmp_path / name / "closed").mkdir(parents=True)
        (tmp_path / name / "closed").chmod(0)
        (tmp_path / name / "a.JPG").write_bytes(b"1")
        (tmp_path / name / "gone.png").symlink_to("/nowhere")
        (tmp_path / name / "loop").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "cat" / "pipe.png")
    return tmp_path


def test_a_class_without_images_is_refused_before_everything_is_looked_at(folder):
    own_paths.require_known(folder, "x")
    (folder / "eel").mkdir()
    (folder / "eel" / "notes.txt").write_text("x")
    with pytest.raises(cli.UsageError, match=f"--dataset=x has no images of the class 'eel': {folder}/eel has none."):
        own_paths.require_known(folder, "x")


def test_a_folder_of_prepared_sets_is_told_from_a_folder_of_classes(tmp_path):
    for name in ("downloads", "fruit/1.0.0"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("dataset_info.json", "features.json"):
        (tmp_path / "fruit" / "1.0.0" / name).write_text("{}")
    with pytest.raises(cli.UsageError, match=r"tensorflow-datasets has prepared. Name one: --dataset=sets/fruit\.$"):
        own_paths.require_known(tmp_path, "sets")


def test_what_cannot_be_looked_at_is_left_out(folder):
    assert own_paths.image_files(folder) == [folder / "cat" / "a.JPG", folder / "dog" / "a.JPG"]
    before = own_paths.content_key(folder)
    (folder / "dog" / "a.JPG").write_bytes(b"22")
    assert own_paths.content_key(folder) != before
