"""Jobs of several instances: real processes, real Horovod, and programs that do not know of the emulator."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

PROGRAMS = Path(__file__).resolve().parents[1] / "programs"
TRAIN = ("python3", "-m", "tf_ipu_dp.train", "--sdk=emulator", "--dataset=synthetic", "--image_size=28")


@pytest.fixture(autouse=True)
def partition(monkeypatch, tmp_path):
    monkeypatch.setenv("IPU_EMULATOR_DIR", str(tmp_path / "partition"))
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")


def start(instances, replicas, *words):
    command = [sys.executable, "-m", "tf_ipu_dp.emulator.poprun", "--num-instances", str(instances)]
    return subprocess.Popen(
        [*command, "--num-replicas", str(replicas), *map(str, words)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def poprun(instances, replicas, *words):
    process = start(instances, replicas, *words)
    stdout, stderr = process.communicate(timeout=240)
    return process.returncode, stdout, stderr


def weights(folder):
    import tensorflow as tf

    newest = sorted((folder / "checkpoints").glob("step-*"))[-1]
    reader = tf.train.load_checkpoint(str(newest / "state"))
    names = [name for name in reader.get_variable_to_shape_map() if name.startswith("model/")]
    return {name: reader.get_tensor(name) for name in names if reader.get_tensor(name).dtype.kind == "f"}


COLLECTIVES = """
import popdist, tensorflow as tf
from tensorflow.python.ipu import distributed
popdist.init()
own, count = popdist.getInstanceIndex(), popdist.getNumInstances()
total = distributed.allreduce(tf.constant([1.0, own]), tf.distribute.ReduceOp.SUM)
assert total.numpy().tolist() == [count, sum(range(count))], total
mean = distributed.allreduce(tf.constant([float(own)]), tf.distribute.ReduceOp.MEAN)
assert mean.numpy().tolist() == [sum(range(count)) / count], mean
assert distributed.allgather(tf.constant([own, 7])).numpy().tolist() == [[i, 7] for i in range(count)]
assert distributed.broadcast(tf.constant([own + 5])).numpy().tolist() == [5]
popdist.synchronize()
print("done", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("instances", [1, 2, 4])
def test_instances_exchange_what_they_have(instances):
    code, out, err = poprun(instances, 4, "python3", "-c", COLLECTIVES)
    assert code == 0, err
    assert sorted(out.splitlines()) == [f"[1,{index}]<stdout>:done" for index in range(instances)]


@pytest.mark.slow
@pytest.mark.parametrize(("norm", "tolerance"), [("group", 1e-5), ("batch", 1e-4)])
def test_the_same_global_batch_ends_in_the_same_weights_on_any_layout_of_instances(tmp_path, norm, tolerance):
    ends = []
    for instances in (1, 2, 4):
        folder = tmp_path / str(instances)
        code, _, err = poprun(
            instances, 4, *TRAIN, "--model=cnn", f"--norm={norm}", "--micro_batch_size=4", "--epochs=8steps",
            "--learning_rate=0.005", f"--run_dir={folder}",
        )  # fmt: skip
        assert code == 0, err
        ends.append(weights(folder))
    for other in ends[1:]:
        for name, value in ends[0].items():
            np.testing.assert_allclose(other[name], value, atol=tolerance * np.abs(value).max(), err_msg=name)


@pytest.mark.slow
def test_only_instance_0_speaks_and_writes_and_validation_counts_every_sample_once(tmp_path):
    code, out, err = poprun(2, 2, *TRAIN, "--model=mlp", "--epochs=8steps", "--json", f"--run_dir={tmp_path / 'run'}")
    assert code == 0, err
    assert all(line.startswith("[1,0]") for line in (out + err).splitlines() if "<std" in line)
    result = json.loads(out.split(":", 1)[1])
    assert result["replicas"] == 2 and result["validation"]["samples"] == 2048
    assert not list((tmp_path / "run").glob(".trial*"))


@pytest.mark.slow
def test_a_signal_to_one_instance_stops_all_after_the_same_step(tmp_path):
    folder = tmp_path / "run"
    process = start(2, 2, *TRAIN, "--model=mlp", "--epochs=50", "--log_every=2", f"--run_dir={folder}")
    while process.poll() is None and not (folder / "metrics.jsonl").exists():
        time.sleep(0.02)
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True)
    os.kill(int(children.stdout.split()[1]), signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    assert "SIGTERM after step" in out
    assert len(list((folder / "checkpoints").glob("step-*"))) == 1


@pytest.mark.slow
def test_a_killed_instance_ends_the_job_and_is_named(tmp_path):
    folder = tmp_path / "run"
    process = start(2, 2, *TRAIN, "--model=mlp", "--epochs=50", "--log_every=2", f"--run_dir={folder}")
    while process.poll() is None and not (folder / "metrics.jsonl").exists():
        time.sleep(0.02)
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True)
    began = time.monotonic()
    os.kill(int(children.stdout.split()[1]), signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - began < 10
    assert process.returncode == 137 and "instance 1 ended with 137" in err
