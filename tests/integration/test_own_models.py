"""Models and data of users keep what built-in ones have: equal layouts, resumption, exact evaluation, refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

PROGRAMS = Path(__file__).parents[1] / "programs" / "own"
FAST = ("--ipus=4", "--micro_batch_size=16", "--deterministic", "--checkpoint_every=4", "--log_every=4")
TABLE = ("--model=table.py:build", "--dataset=table.py:load", "--ipus=4", "--micro_batch_size=16", "--deterministic")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns a folder with the programs of users in it."""
    path = tmp_path_factory.mktemp("own")
    for program in PROGRAMS.glob("*.py"):
        shutil.copy(program, path)
    return path


def succeed(done):
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def built_in(train, folder):
    """Returns the folder of a run of the built-in CNN, which several tests compare with or start from."""
    succeed(train(*FAST, "--model=cnn", "--epochs=8steps", "--run_dir=built_in", cwd=folder))
    return folder / "built_in"


def result(path):
    return json.loads((path / "result.json").read_text(encoding="utf-8"))


def test_the_built_in_cnn_as_a_file_ends_in_the_same_bits(train, folder, built_in, weights, assert_same_bits):
    succeed(train(*FAST, "--model=cnn.py:build", "--epochs=8steps", "--run_dir=own", cwd=folder))
    assert_same_bits(weights(built_in), weights(folder / "own"))
    assert result(built_in)["validation"] == result(folder / "own")["validation"]
    plan = json.loads((folder / "own" / "plan.json").read_text(encoding="utf-8"))
    assert plan["model"]["name"] == "cnn.py:build" and len(plan["model"]["fingerprint"]) == 16
    assert plan["model"]["parameters"] == json.loads((built_in / "plan.json").read_text())["model"]["parameters"]


def test_a_task_of_two_inputs_and_outputs_is_the_same_on_any_layout_and_after_a_kill(
    train, start_command, folder, model_weights, weights, assert_near, assert_same_bits, wait_for_checkpoint
):
    succeed(train(*TABLE, "--epochs=3", "--checkpoint_every=5", "--run_dir=one", cwd=folder))
    process = start_command("train", *TABLE, "--epochs=3", "--checkpoint_every=5", "--run_dir=killed", cwd=folder)
    wait_for_checkpoint(folder / "killed", process)
    process.kill()
    process.wait()
    done = train("--run_dir=killed", cwd=folder)
    assert done.returncode == 1 and "loaded only if the command line names it" in done.stderr
    assert "Add --model=table.py:build --dataset=table.py:load." in done.stderr
    succeed(train("--run_dir=killed", *TABLE[:2], cwd=folder))
    assert_same_bits(weights(folder / "one"), weights(folder / "killed"))
    succeed(train(*TABLE, "--instances=2", "--epochs=3", "--run_dir=two", cwd=folder))
    assert_near(model_weights(folder / "one"), model_weights(folder / "two"))
    scores = [result(folder / name)["validation"] for name in ("one", "killed", "two")]
    assert [each["samples"] for each in scores] == [203] * 3
    assert set(scores[0]["metrics"]) == {
        "price_loss", "high_loss", "price_mae", "price_root_mean_squared_error", "high_auc",
    }  # fmt: skip
    assert scores[0] == scores[1]
    for name, value in scores[0]["metrics"].items():
        assert scores[2]["metrics"][name] == pytest.approx(value, rel=1e-4), name
    # The loss is the sum of its parts, and the own loss of the first output is the mean absolute error.
    metrics = scores[0]["metrics"]
    assert scores[0]["loss"] == pytest.approx(metrics["price_loss"] + 0.5 * metrics["high_loss"])
    assert metrics["price_loss"] == pytest.approx(metrics["price_mae"], rel=1e-5)


def test_a_checkpoint_is_refused_when_code_or_data_have_changed(train, folder):
    succeed(train(*TABLE, "--epochs=4steps", "--run_dir=changed", cwd=folder))
    text = (folder / "table.py").read_text(encoding="utf-8")
    (folder / "wider.py").write_text(text.replace("Dense(32", "Dense(48"), encoding="utf-8")
    (folder / "table.py").write_text(text.replace("Dense(32", "Dense(48"), encoding="utf-8")
    done = train(*TABLE, "--epochs=8steps", "--run_dir=changed", cwd=folder)
    assert done.returncode == 1 and "whose code has changed: the layer hidden was Dense(" in done.stderr
    assert "units=32" in done.stderr and "units=48" in done.stderr and "Traceback" not in done.stderr
    (folder / "table.py").write_text(text.replace("(n, 5)", "(n, 6)"), encoding="utf-8")
    done = train(*TABLE, "--epochs=8steps", "--run_dir=changed", cwd=folder)
    assert done.returncode == 1
    assert "its inputs were a: 5 float32, b: 3 float32 and are a: 6 float32, b: 3 float32" in done.stderr
    (folder / "table.py").write_text(text + "\n# a comment\n", encoding="utf-8")
    done = succeed(train(*TABLE, "--epochs=8steps", "--run_dir=changed", cwd=folder))
    assert "has changed since step 4 was saved; the layers are the same." in done.stderr
    (folder / "table.py").write_text(text, encoding="utf-8")


def test_weights_are_taken_from_a_run_layers_are_frozen_and_the_best_are_kept_and_exported(
    train, folder, built_in, model_weights
):
    words = ("--model=cnn.py:build", "--init_from=built_in", "--freeze=conv*", "--keep_best=accuracy", "--export")
    done = succeed(train(*FAST, *words, "--epochs=4steps", "--run_dir=tuned", cwd=folder))
    assert "Weights from built_in: 8 layers loaded" in done.stderr
    before, after = model_weights(built_in), model_weights(folder / "tuned")
    same = {name for name in before if np.array_equal(before[name], after[name])}
    assert len(same) == 15  # the kernels and norms of three convolutions
    assert result(folder / "tuned")["best"]["metric"] == "accuracy"
    assert (folder / "tuned" / "export" / "classes.txt").read_text(encoding="utf-8").startswith("T-shirt/top\n")

    import tensorflow as tf

    exported = tf.keras.models.load_model(str(folder / "tuned" / "export"), compile=False)
    probabilities = exported.predict(np.zeros([3, 28, 28, 1], np.uint8), verbose=0)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, rtol=1e-5)
    done = train(*FAST, "--model=cnn", "--freeze=conf1*", "--epochs=4steps", cwd=folder)
    assert done.returncode == 1 and "--freeze=conf1* matches no layer with weights. The nearest are" in done.stderr


def test_a_file_of_weights_starts_a_built_in_model(train, folder, built_in, model_weights):
    import tf_ipu_dp

    tf_ipu_dp.open_run(built_in).model().save_weights(str(folder / "first.weights.h5"))
    words = (*FAST, "--model=cnn", "--epochs=4steps", "--init_from=first.weights.h5", "--freeze=conv*")
    done = succeed(train(*words, "--run_dir=second", cwd=folder))
    assert "Weights from first.weights.h5: 8 layers loaded" in done.stderr
    before, after = model_weights(built_in), model_weights(folder / "second")
    assert len({name for name in before if np.array_equal(before[name], after[name])}) == 15


def test_weights_of_samples_count_the_same_on_two_instances(train, folder, model_weights, assert_near):
    words = ("--model=weights.py:regression", "--dataset=weights.py:arrays", "--ipus=2", "--micro_batch_size=8")
    words += ("--global_batch_size=32", "--epochs=3", "--deterministic")
    succeed(train(*words, "--run_dir=weighted_one", cwd=folder))
    succeed(train(*words, "--instances=2", "--run_dir=weighted_two", cwd=folder))
    assert_near(model_weights(folder / "weighted_one"), model_weights(folder / "weighted_two"))
    first, second = (result(folder / name)["validation"] for name in ("weighted_one", "weighted_two"))
    assert first["samples"] == second["samples"] == 37
    assert second["loss"] == pytest.approx(first["loss"], rel=1e-4)
    assert second["metrics"] == pytest.approx(first["metrics"], rel=1e-4)


def test_an_own_functional_model_is_cut_into_stages_and_trains_as_one(train, folder, model_weights, assert_near):
    words = ("--model=cnn.py:build", "--global_batch_size=128", "--micro_batch_size=16", "--epochs=4steps")
    words += ("--norm=group", "--deterministic")
    succeed(train(*words, "--ipus=2", "--run_dir=whole", cwd=folder))
    succeed(train(*words, "--ipus=2", "--pipeline_stages=2", "--run_dir=cut", cwd=folder))
    assert_near(model_weights(folder / "whole"), model_weights(folder / "cut"))
    stages = json.loads((folder / "cut" / "plan.json").read_text(encoding="utf-8"))["model"]["stages"]
    assert len(stages) == 2 and min(stage["share_of_work"] for stage in stages) > 0.3
    done = train(*words, "--ipus=2", "--pipeline_splits=hidden_dens", cwd=folder)
    assert done.returncode == 1 and "the nearest are hidden_dense" in done.stderr
    done = train("--model=cnn.py:subclassed", "--ipus=2", "--pipeline_stages=2", "--dry_run", cwd=folder)
    assert done.returncode == 1 and "returns a subclassed model" in done.stderr and "Traceback" not in done.stderr
