"""Predictions of a run that was really trained: on any layout, from checkpoint and export, as command and in Python."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import tf_ipu_dp
from tf_ipu_dp.datasets import built_in

SAMPLES = 333  # fills no part on any number of replicas


@pytest.fixture(scope="module")
def trained(train, tmp_path_factory):
    """A run with checkpoint and export, and the images and labels that it is tried on."""
    folder = tmp_path_factory.mktemp("predict")
    done = train("--model=mlp", "--ipus=2", "--epochs=2", f"--run_dir={folder / 'run'}", "--export", "--deterministic")
    assert done.returncode == 0, done.stderr
    arrays = np.load(Path(built_in.__file__).with_name("fashion_mini.npz"))
    np.save(folder / "images.npy", arrays["test_images"][:SAMPLES])
    np.save(folder / "labels.npy", arrays["test_labels"][:SAMPLES])
    return folder


def probabilities(run_command, folder, run, *words):
    done = run_command("predict", folder / run, folder / "images.npy", f"--out={folder / 'p.npy'}", *words)
    assert done.returncode == 0, done.stderr
    return np.load(folder / "p.npy"), done.stderr


def test_layouts_checkpoint_export_and_python_predict_the_same_in_the_order_of_the_inputs(trained, run_command):
    one, said = probabilities(run_command, trained, "run", "--ipus=1")
    assert f"{SAMPLES} samples with {trained / 'run' / 'checkpoints'}" in said
    four, _ = probabilities(run_command, trained, "run", "--ipus=4", "--micro_batch_size=16")
    np.testing.assert_allclose(four, one, atol=1e-6)
    model = tf_ipu_dp.open_run(trained / "run").model()
    images = np.load(trained / "images.npy")[..., None]
    np.testing.assert_allclose(model.predict(images, verbose=0), one, atol=1e-5)
    shutil.copytree(trained / "run", trained / "exported")
    shutil.rmtree(trained / "exported" / "checkpoints")
    from_export, said = probabilities(run_command, trained, "exported", "--ipus=2")
    assert f"with {trained / 'exported' / 'export'}" in said
    np.testing.assert_allclose(from_export, one, atol=1e-5)
    exported = tf_ipu_dp.open_run(trained / "exported").model().predict(images, verbose=0)
    np.testing.assert_allclose(exported["probabilities"], one, atol=1e-5)
    assert one.shape == (SAMPLES, 10) and (one.argmax(1) == np.load(trained / "labels.npy")).mean() > 0.6


def test_files_folders_and_names(trained, run_command):
    import tensorflow as tf

    folder = trained / "photos"
    folder.mkdir()
    images = np.load(trained / "images.npy")
    for number in range(3):
        pixels = np.repeat(images[number][..., None], 3 if number else 1, axis=2)  # colours are made grey
        tf.io.write_file(str(folder / f"{number}.png"), tf.io.encode_png(np.kron(pixels, np.ones((2, 2, 1), np.uint8))))
    (folder / "9.jpg").write_bytes(b"no image")
    words = (
        trained / "run",
        folder,
        trained / "images.npy",
        f"--out={trained / 'p.csv'}",
        f"--out={trained / 'p.json'}",
    )
    refused = run_command("predict", *words)
    assert refused.returncode == 1 and "9.jpg" in refused.stderr and not (trained / "p.csv").exists()
    assert "1 image cannot be decoded" in refused.stderr and "Traceback" not in refused.stderr
    done = run_command("predict", *words, "--skip_bad_samples", "--top=2")
    assert done.returncode == 0 and "1 image could not be decoded" in done.stderr, done.stderr
    with (trained / "p.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = [str(folder / f"{number}.png") for number in range(3)]
    assert [row["input"] for row in rows] == [*names, *(f"{trained / 'images.npy'}[{row}]" for row in range(SAMPLES))]
    # An image that was enlarged and is made smaller again is the same one.
    assert [row["name"] for row in rows[:3]] == [row["name"] for row in rows[3:6]]
    found = json.loads((trained / "p.json").read_text())
    assert found["class_names"][9] == "ankle boot" and len(found["predictions"]) == SAMPLES + 3
    assert [each["class"] for each in found["predictions"]] == [int(row["class"]) for row in rows]


def test_a_run_of_own_code_is_not_loaded_unless_the_code_is_named(trained, run_command, tmp_path):
    shutil.copytree(trained / "run", tmp_path / "own")
    (tmp_path / "evil.py").write_text("open('loaded', 'w')\ndef build(): pass\n")
    flags = tmp_path / "own" / "run.flags"
    flags.write_text(flags.read_text().replace("--model=mlp", f"--model={tmp_path}/evil.py:build"))
    shutil.rmtree(tmp_path / "own" / "export")
    done = run_command("predict", tmp_path / "own", trained / "images.npy", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"predict: {tmp_path}/own was trained with --model={tmp_path}/evil.py:build, and code is only loaded if you "
        f"name it. Add --model={tmp_path}/evil.py:build, or train with --export: an export needs no code.\n"
    )
    assert not (tmp_path / "loaded").exists()
    with pytest.raises(tf_ipu_dp.UsageError, match="code is only loaded if you name it"):
        tf_ipu_dp.open_run(tmp_path / "own").model()


def test_mistakes_are_one_sentence(trained, run_command, tmp_path):
    run, images = trained / "run", trained / "images.npy"
    for words, sentence in (
        ((run,), "the folder of a run and inputs are needed, for example: runs/first image.png."),
        ((tmp_path, images), f"{tmp_path} is not the folder of a run: its run.flags cannot be read"),
        ((run, tmp_path / "no.png"), f"There is no file {tmp_path}/no.png."),
        ((run, images, "--out=p.xls"), "--out=p.xls has an unknown file type."),
        ((run, images, "--ipus=3"), "--ipus=3"),
    ):
        done = run_command("predict", *words)
        assert done.returncode == 1 and done.stderr.startswith(f"predict: {sentence}"), done.stderr
        assert done.stdout == "" and done.stderr.count("\n") == 1
