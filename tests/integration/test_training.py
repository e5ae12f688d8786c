"""Training as a user starts it: real models, small data, real checkpoints, real signals."""

from __future__ import annotations

import functools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tf_ipu_dp.emulator.devices import registry

SMALL = ("--model=mlp", "--dataset=synthetic", "--sdk=emulator", "--image_size=28")
RUN = (*SMALL, "--ipus=4", "--micro_batch_size=16", "--device_iterations=4", "--epochs=2", "--deterministic")


@pytest.fixture
def start(start_command):
    return functools.partial(start_command, "train")


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, train):
    """A run that nobody interrupts."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    done = train(*RUN, f"--run_dir={folder}", "--export", "--log_every=16")
    assert done.returncode == 0, done.stderr
    return folder, done


@pytest.mark.slow
def test_a_run_leaves_its_folder_its_table_and_what_it_learned(whole, steps_of):
    folder, done = whole
    assert {path.name for path in folder.iterdir() if not path.name.startswith(".")} == {
        "config.json", "run.flags", "plan.json", "metrics.jsonl", "result.json", "checkpoints", "tensorboard", "export",
    }  # fmt: skip
    assert re.search(r"^compiling\.\.\. \d+ s$", done.stderr, re.MULTILINE)
    score = r"loss \d+\.\d{4}  accuracy \d+\.\d %  learning rate \S+"
    speed = r"[\d,]+ samples/s \([\d,]+ per replica\)  eta \d+ s"
    assert re.search(rf"^step 144/256  epoch 1\.12  {score}  {speed}$", done.stderr, re.MULTILINE)
    assert "\b" not in done.stderr and "\r" not in done.stderr
    parts = ("  input wait", "  between", "  saving")
    for row in ("Start-up", "Compiling", "Training", *parts, "Evaluation", "Other", "Throughput", "Accuracy"):
        assert re.search(rf"^{row} +[\d.,]+  ", done.stdout, re.MULTILINE), row
    assert "ottleneck" in done.stdout
    result = json.loads((folder / "result.json").read_text())
    assert result["updates"] == 256 and result["validation"]["samples"] == 2048
    assert result["validation"]["top1"] > 0.5 and 0 < result["utilisation_pct"] <= 100
    seconds = result["seconds"]
    parts = sum(seconds[name] for name in ("compile", "training", "evaluation", "overhead"))
    assert parts == pytest.approx(seconds["total"], rel=1e-3)
    assert steps_of(folder) == [128, 256]


@pytest.mark.slow
def test_the_metrics_have_every_logged_step_and_every_validation(whole, records):
    folder, _ = whole
    found = records(folder)
    trained = [record for record in found if record["kind"] == "train"]
    assert [record["step"] for record in trained] == list(range(16, 257, 16))
    keys = {"loss", "accuracy", "learning_rate", "samples_per_s", "input_wait_s", "ipu_utilisation_pct"}
    assert all(keys <= set(record) for record in trained)
    assert trained[-1]["loss"] < trained[0]["loss"]
    assert set(trained[-1]["ipu_utilisation_pct"]) == {"0", "1", "2", "3"}
    assert [record["step"] for record in found if record["kind"] == "validation"] == [128, 256]
    assert list((folder / "tensorboard").glob("events.*"))


@pytest.mark.slow
def test_the_export_is_loaded_and_asked_by_plain_tensorflow(whole, tmp_path):
    folder, _ = whole
    code = """
import sys, numpy as np, tensorflow as tf
model = tf.saved_model.load(sys.argv[1])
serve = model.signatures["serving_default"]
(name, spec), = serve.structured_input_signature[1].items()
assert spec.dtype == tf.uint8, spec
(answer,) = serve(**{name: tf.constant(np.random.RandomState(0).randint(0, 256, (3, 28, 28, 3)), tf.uint8)}).values()
assert answer.shape == (3, 10) and np.allclose(np.sum(answer, 1), 1, atol=1e-5)
assert not [name for name in sys.modules if name.startswith("tf_ipu_dp")]
print("ok")
"""
    command = [sys.executable, "-c", code, str(folder / "export")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.stdout == "ok\n", done.stderr


@pytest.mark.slow
def test_the_lines_that_are_printed_load_the_export_with_its_classes(train, tmp_path):
    folder = tmp_path / "run"
    done = train("--ipus=2", "--model=mlp", "--epochs=2steps", "--novalidate", "--export", f"--run_dir={folder}")
    assert done.returncode == 0, done.stderr
    where = f"Exported the weights of step 2 to {folder / 'export'}. To use them:\n"
    code = done.stderr.partition(where)[2].split("\n")[:2]
    assert code[1].endswith("# 8-bit images; the names of the classes are in classes.txt")
    names = (folder / "export" / "classes.txt").read_text().splitlines()
    assert (len(names), names[0], names[9]) == (10, "T-shirt/top", "ankle boot")
    ask = ["import numpy as np; images = np.zeros((3, 28, 28, 1), np.uint8)", *code, "print(probabilities.shape)"]
    asked = subprocess.run(
        [sys.executable, "-c", "\n".join(line.strip() for line in ask)],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert asked.stdout.endswith("(3, 10)\n"), asked.stderr


@pytest.mark.slow
def test_killed_at_random_moments_a_run_still_ends_in_the_same_bits(
    whole, tmp_path, train, start, records, steps_of, weights, assert_same_bits, wait_for_checkpoint
):
    folder = tmp_path / "killed"
    words = (*RUN, f"--run_dir={folder}", "--checkpoint_every=8", "--keep_checkpoints=2")
    rng = random.Random(7)
    kills = 0
    seen = set()
    while kills < 3:
        process = start(*words)
        # The moment is a number of steps in the metrics, and then some milliseconds, so that every start gets on.
        before = max(steps_of(folder), default=0)
        goal = min(before + rng.randrange(1, 48), 240)
        wait_for_checkpoint(folder, process, after=goal - 1)
        time.sleep(rng.random() * 0.05)
        process.kill()
        process.communicate()
        if process.returncode == 0:
            break
        kills += 1
        seen.add(steps_of(folder)[-1])
    assert kills >= 3 and len(seen) >= 3
    done = train(*words)
    assert done.returncode == 0 and "Resuming from step" in done.stderr, done.stderr
    assert_same_bits(weights(whole[0]), weights(folder))
    trained = [record["step"] for record in records(folder) if record["kind"] == "train"]
    assert trained == sorted(set(trained))


@pytest.mark.slow
def test_a_signal_saves_and_the_next_start_goes_on_to_the_same_bits(
    whole, tmp_path, train, start, steps_of, weights, assert_same_bits, wait_for_step
):
    folder, step = tmp_path / "stopped", 0
    words = (*RUN, f"--run_dir={folder}", "--log_every=4", "--keep_checkpoints=1")
    for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        process = start(*words)
        wait_for_step(folder, process, step + 1)
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=120)
        assert process.returncode == code, stderr
        assert "finishing the execution and saving" in stderr and "Traceback" not in stderr
        assert f"\nResume with: python -m tf_ipu_dp.train --run_dir={folder}\n" in stdout
        assert step == 0 or f"Resuming from step {step} " in stderr
        before, (step,) = step, steps_of(folder)
        assert before < step < 256
    done = train(f"--run_dir={folder}")  # takes the run's own flags
    assert done.returncode == 0 and f"Resuming from step {step} " in done.stderr
    assert_same_bits(weights(whole[0]), weights(folder))


@pytest.mark.slow
def test_the_learning_rate_of_a_resumed_run_may_change_and_the_log_says_so(tmp_path, train, records):
    words = (*SMALL, "--ipus=2", "--lr_schedule=constant", "--warmup_epochs=0", "--log_every=4", "--novalidate")
    folder = f"--run_dir={tmp_path / 'run'}"
    assert train(*words, "--learning_rate=0.05", "--epochs=8steps", folder).returncode == 0
    done = train(folder, "--learning_rate=0.01", "--epochs=16steps")
    assert done.returncode == 0 and "From step 8 on, --learning_rate was 0.05 and is 0.01.\n" in done.stderr
    rates = {record["step"]: record["learning_rate"] for record in records(tmp_path / "run")}
    assert rates == {4: pytest.approx(0.05), 8: pytest.approx(0.05), 12: pytest.approx(0.01), 16: pytest.approx(0.01)}
    assert "--ipus=2" in (tmp_path / "run" / "run.flags").read_text().splitlines()


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(whole, tmp_path, train, weights, assert_same_bits):
    folder = tmp_path / "damaged"
    shutil.copytree(whole[0], folder)
    victim = next((folder / "checkpoints" / "step-00000256").glob("state.data*"))
    victim.write_bytes(victim.read_bytes()[:-10])
    done = train(*RUN, f"--run_dir={folder}")
    assert done.returncode == 0, done.stderr
    assert "step-00000256 is damaged" in done.stderr and "Resuming from step 128" in done.stderr
    assert (folder / "checkpoints" / "set-aside-step-00000256").exists()
    assert_same_bits(weights(whole[0]), weights(folder))


@pytest.mark.slow
@pytest.mark.parametrize(
    "differences",
    [
        {"--global_batch_size=128": "a global batch of 128, but the run was trained with global batch 64"},
        {
            "--model=cnn": "--model was mlp and is cnn",
            "--updates_per_epoch=64": "--updates_per_epoch was 128 and is 64",
        },
    ],
    ids=["plan", "flags"],
)
def test_a_checkpoint_of_another_run_is_refused_with_the_differences(whole, differences, train):
    before = contents(whole[0])
    done = train(*RUN, f"--run_dir={whole[0]}", *differences)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert not [sentence for sentence in differences.values() if sentence not in done.stderr], done.stderr
    assert before == contents(whole[0])


@pytest.mark.slow
def test_the_same_checkpoint_scores_the_same_on_any_number_of_replicas(whole, train):
    done = train("--evaluate", f"--run_dir={whole[0]}", "--ipus=1", "--json")
    assert done.returncode == 0, done.stderr
    alone = json.loads(done.stdout)
    on_four = json.loads((whole[0] / "result.json").read_text())["validation"]
    assert on_four["samples"] == 2048
    for name in ("loss", "top1", "top5", "samples"):
        assert alone[name] == on_four[name], name


@pytest.mark.slow
def test_a_loss_that_is_not_finite_stops_the_run_with_the_step_and_the_last_good_checkpoint(
    tmp_path, train, steps_of, weights
):
    done = train(
        *RUN, f"--run_dir={tmp_path / 'nan'}", "--learning_rate=1e5", "--checkpoint_every=4", "--lr_schedule=constant"
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    sentence = done.stderr.strip().splitlines()[-1]
    assert re.search(r"became NaN or infinite between steps \d+ and \d+", sentence) and "--learning_rate" in sentence
    kept = steps_of(tmp_path / "nan")
    if kept:
        assert f"of step {kept[-1]}" in sentence
        assert all(np.isfinite(value).all() for value in weights(tmp_path / "nan").values())
    else:
        assert "There is no checkpoint." in sentence


@pytest.mark.slow
def test_a_pipelined_sixteen_bit_run_with_eight_bit_input_trains(tmp_path, train):
    words = (*SMALL, "--ipus=4", "--pipeline_stages=2", "--micro_batch_size=8", "--epochs=8steps", "--recompute")
    done = train(
        *words, f"--run_dir={tmp_path / 'run'}", "--precision=16.16", "--eight_bit_io", "--device_iterations=2"
    )
    assert done.returncode == 0, done.stderr
    assert "grouped pipeline of 2 stages" in done.stderr and "Accuracy" in done.stdout


@pytest.mark.slow
def test_the_same_global_batch_ends_in_the_same_weights_however_it_is_divided(tmp_path, train, weights):
    ends = []
    for ipus, accumulation in ((1, 8), (4, 2)):
        folder = tmp_path / f"{ipus}x{accumulation}"
        words = ("--model=cnn", "--norm=group", "--dataset=synthetic", "--image_size=28", "--sdk=emulator")
        done = train(
            *words, f"--ipus={ipus}", f"--gradient_accumulation={accumulation}", "--micro_batch_size=4",
            "--epochs=16steps", "--learning_rate=0.01", "--deterministic", f"--run_dir={folder}",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        ends.append({name: value for name, value in weights(folder).items() if "OPTIMIZER_SLOT" not in name})
    for name, value in ends[0].items():
        scale = np.abs(value).max() if value.dtype.kind == "f" else 1
        np.testing.assert_allclose(ends[1][name], value, atol=1e-5 * scale, err_msg=name)


@pytest.mark.slow
def test_input_that_the_device_makes_is_learned_with_losses_that_are_finite_and_not_zero(tmp_path, train, records):
    words = ("--model=mlp", "--dataset=synthetic_device", "--sdk=emulator", "--image_size=28", "--ipus=2")
    done = train(*words, "--epochs=64steps", "--log_every=16", f"--run_dir={tmp_path / 'run'}", "--json")
    assert done.returncode == 0, done.stderr
    losses = [record["loss"] for record in records(tmp_path / "run") if record.get("loss") is not None]
    assert np.isfinite(losses).all() and losses[0] > 0


@pytest.mark.slow
def test_the_input_alone_is_measured_and_compared_with_the_model(train):
    done = train(*SMALL, "--ipus=2", "--input_only", "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["input_samples_per_s"] > 0 and answer["input_bytes_per_s"] > 0 and answer["model_samples_per_s"] > 0


def test_a_folder_that_cannot_be_written_is_refused_before_training(tmp_path, train):
    (tmp_path / "file").write_text("")
    done = train(*SMALL, f"--run_dir={tmp_path / 'file' / 'run'}")
    assert done.returncode == 1 and "--run_dir=" in done.stderr and "Traceback" not in done.stderr


def test_a_data_set_that_is_not_there_is_one_sentence(tmp_path, train):
    done = train("--dataset=cifar10", f"--data_dir={tmp_path}", f"--run_dir={tmp_path / 'run'}", "--sdk=emulator")
    assert done.returncode == 1 and str(tmp_path) in done.stderr and "Traceback" not in done.stderr
    assert "download_and_prepare" in done.stderr
    assert not (tmp_path / "run").exists()
    done = train("--dataset=no_such_set", f"--data_dir={tmp_path}", "--dry_run")
    assert done.returncode == 1 and "no_such_set" in done.stderr and "Traceback" not in done.stderr


def test_more_ipus_than_there_are_is_one_sentence_and_leaves_no_folder(tmp_path, train):
    done = train(*SMALL, "--ipus=8", f"--run_dir={tmp_path / 'run'}", IPU_EMULATOR_IPUS="4")
    assert done.returncode == 1 and "--ipus=8 cannot be attached" in done.stderr and "Traceback" not in done.stderr
    assert "; set IPU_EMULATOR_IPUS=8 for a larger one. Use fewer --ipus.\n" in done.stderr
    assert not (tmp_path / "run").exists()


def test_busy_ipus_are_refused_with_who_holds_them(tmp_path, train, emulator_dir):
    attachment = registry.Partition.from_environment({**os.environ, "IPU_EMULATOR_IPUS": "4"}).attach(count=4)
    done = train(*SMALL, "--ipus=4", f"--run_dir={tmp_path / 'run'}", IPU_EMULATOR_IPUS="4")
    attachment.release()
    assert done.returncode == 1 and f"Process {os.getpid()} of " in done.stderr and " holds IPUs 0-3. " in done.stderr
    assert "gc-monitor" not in done.stderr and "python -m tf_ipu_dp.monitor" in done.stderr


@pytest.fixture(scope="module")
def unheard(tmp_path_factory):
    """The flags of a run of three steps whose messages nobody reads."""
    words = (
        *RUN,
        f"--run_dir={tmp_path_factory.mktemp('runs') / 'unheard'}",
        "--device_iterations=1",
        "--epochs=3steps",
    )
    command = [sys.executable, "-m", "tf_ipu_dp.train", *words, "--log_every=1"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        process.stderr.readline()
        process.stderr.close()
        assert process.wait(timeout=240) == 0
    return words


@pytest.mark.slow
def test_executions_that_do_not_meet_the_checkpoint_are_refused(unheard, train):
    done = train(*unheard, "--device_iterations=4", "--epochs=2")
    assert done.returncode == 1 and "--device_iterations=4 does not fit" in done.stderr


@pytest.mark.slow
def test_a_run_whose_checkpoints_cannot_be_read_is_not_begun_again_beside_them(whole, tmp_path, train):
    folder = tmp_path / "run"
    shutil.copytree(whole[0], folder)
    for manifest in (folder / "checkpoints").glob("*/manifest.json"):
        manifest.write_text("{}")
    before = contents(folder / "checkpoints")
    done = train(*RUN, f"--run_dir={folder}")
    assert done.returncode == 1 and "Use another --run_dir." in done.stderr
    assert before == contents(folder / "checkpoints")


@pytest.mark.slow
def test_a_run_goes_on_when_nobody_reads_what_it_says(unheard):
    closed = subprocess.run(
        f"{sys.executable} -m tf_ipu_dp.train {' '.join(unheard)} --json 2>&-",
        shell=True, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert closed.returncode == 0 and json.loads(closed.stdout)["verdict"]["sentence"] == "Nothing was left to train."


@pytest.mark.slow
def test_a_run_that_diverges_in_its_last_update_does_not_end_well(tmp_path, train):
    words = ("--epochs=2steps", "--learning_rate=1000000", "--lr_schedule=constant", "--warmup_epochs=0", "--json")
    done = train(*SMALL, *words, f"--run_dir={tmp_path / 'run'}")
    assert done.returncode == 1 and not done.stdout
    assert "became NaN or infinite between steps" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_records_that_are_missing_are_told_in_a_sentence(tmp_path, train):
    folder = tmp_path / "data" / "some_set" / "1.0.0"
    folder.mkdir(parents=True)
    split = {"filepathTemplate": "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}", "numBytes": "100"}
    splits = [{**split, "name": name, "shardLengths": ["512"]} for name in ("train", "test")]
    info = {"name": "some_set", "version": "1.0.0", "fileFormat": "tfrecord", "splits": splits}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    kinds = "tensorflow_datasets.core.features"
    image = {
        "pythonClassName": f"{kinds}.image_feature.Image",
        "image": {"shape": {"dimensions": ["28", "28", "1"]}, "dtype": "uint8", "encodingFormat": "png"},
    }
    label = {"pythonClassName": f"{kinds}.class_label_feature.ClassLabel", "classLabel": {"numClasses": "10"}}
    both = {
        "pythonClassName": f"{kinds}.features_dict.FeaturesDict",
        "featuresDict": {"features": {"image": image, "label": label}},
    }
    (folder / "features.json").write_text(json.dumps(both))
    done = train(
        "--dataset=some_set", f"--data_dir={tmp_path / 'data'}", "--sdk=emulator", f"--run_dir={tmp_path / 'run'}"
    )
    assert (
        done.returncode == 1 and "--dataset=some_set cannot be read" in done.stderr and "Traceback" not in done.stderr
    )


def test_numbers_that_are_none_are_refused(train):
    for flag in ("learning_rate", "warmup_epochs", "weight_decay", "momentum"):
        done = train(f"--{flag}=nan", "--dry_run")
        assert done.returncode == 1 and f"--{flag}=nan" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_time_limit_saves_and_ends_well_and_the_run_goes_on_later(tmp_path, train, steps_of):
    folder = tmp_path / "run"
    words = (*SMALL, "--epochs=500", "--log_every=8", "--checkpoint_every=100000", f"--run_dir={folder}")
    done = train(*words, "--time_limit=4s")
    assert done.returncode == 0, done.stderr
    assert (
        "--time_limit=4s after step" in done.stdout
        and f"saved.\nResume with: python -m tf_ipu_dp.train --run_dir={folder}\n" in done.stdout
    )
    (step,) = steps_of(folder)
    done = train(*words, f"--epochs={step + 4}steps")
    assert f"Resuming from step {step:,}" in done.stderr and steps_of(folder)[-1] == step + 4


def test_a_run_without_validation_has_no_scores_and_no_validation_records(tmp_path, train, records):
    folder = tmp_path / "run"
    done = train(*SMALL, "--epochs=2", "--novalidate", "--json", f"--run_dir={folder}")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["validation"] is None
    assert {each["kind"] for each in records(folder)} == {"train"}


@pytest.mark.slow
def test_a_run_whose_validation_gets_no_better_stops_early(tmp_path, train, records):
    folder = tmp_path / "run"
    done = train(*SMALL, "--epochs=50", "--learning_rate=0", "--early_stop=2", "--json", f"--run_dir={folder}")
    assert done.returncode == 0, done.stderr
    losses = [each["loss"] for each in records(folder) if each["kind"] == "validation"]
    assert len(losses) == 3 and "stopping early" in done.stderr
    assert json.loads(done.stdout)["stopped"]["kind"] == "early stopping"
    again = train(*SMALL, "--epochs=50", "--learning_rate=0", "--early_stop=2", "--json", f"--run_dir={folder}")
    assert again.returncode == 0 and json.loads(again.stdout)["stopped"] == json.loads(done.stdout)["stopped"]
    assert [each["loss"] for each in records(folder) if each["kind"] == "validation"] == losses


@pytest.mark.slow
def test_early_stopping_keeps_the_best_weights_and_exports_them(tmp_path, train, records):
    folder = tmp_path / "run"
    # Few samples, which are soon learnt by heart.
    words = ("--model=mlp", "--dataset=fashion_mini", "--sdk=emulator", "--epochs=60", "--lr_schedule=constant")
    done = train(*words, "--early_stop=2", "--export", "--keep_checkpoints=1", "--json", f"--run_dir={folder}")
    assert done.returncode == 0, done.stderr
    losses = {each["step"]: each["loss"] for each in records(folder) if each["kind"] == "validation"}
    best = min(losses, key=lambda step: (losses[step], step))
    found = json.loads(done.stdout)["best"]
    assert (found["step"], found["loss"]) == (best, losses[best]) and best < max(losses)
    assert f"Exported the weights of step {best:,} to {folder / 'export'}" in done.stderr

    def evaluated(*flags):
        return json.loads(train("--evaluate", "--json", f"--run_dir={folder}", *flags).stdout)

    assert (evaluated()["step"], evaluated("--weights=newest")["step"]) == (best, max(losses))
    assert evaluated()["loss"] == pytest.approx(losses[best])
