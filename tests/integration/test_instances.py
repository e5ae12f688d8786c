"""Training as several instances: real processes, real Horovod, real faults."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SMALL = ("--sdk=emulator", "--dataset=synthetic", "--image_size=28", "--deterministic")
MLP = (*SMALL, "--model=mlp", "--micro_batch_size=16")
FAULTS = Path(__file__).resolve().with_name("faults.py")
TRAIN = ("python3", "-m", "tf_ipu_dp.train")


@pytest.fixture(scope="module")
def train(poprun):
    """Trains on these instances and replicas to the end and returns stdout and stderr."""

    def run(instances, replicas, folder, *words):
        code, out, err = poprun(instances, replicas, *TRAIN, *words, f"--run_dir={folder}")
        assert code == 0, err
        return out, err

    return run


def test_the_same_global_batches_end_in_the_same_weights_though_a_run_goes_on_on_other_instances_and_replicas(
    tmp_path, monkeypatch, train, steps_of, model_weights, assert_near
):
    for name in ("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS"):  # kernels cut their sums by them
        monkeypatch.setenv(name, "1")
    words = (
        *SMALL,
        "--model=cnn",
        "--norm=group",
        "--micro_batch_size=16",
        "--global_batch_size=128",
        "--checkpoint_every=4",
        "--learning_rate=0.005",
        "--lr_schedule=constant",
    )
    folder = tmp_path / "moved"
    for instances, replicas, steps in ((4, 4, 4), (1, 8, 8), (2, 2, 12)):
        _, err = train(instances, replicas, folder, *words, f"--epochs={steps}steps")
    assert "Resuming from step 8" in err and "accumulation 4" in err
    assert steps_of(folder) == [4, 8, 12]
    train(1, 4, tmp_path / "whole", *words, "--epochs=12steps")
    assert_near(model_weights(tmp_path / "whole"), model_weights(folder))


def test_instances_that_are_asked_for_are_started_and_only_the_first_speaks_and_writes_and_validates_each_sample_once(
    tmp_path, run_command, poprun, steps_of
):
    folder = tmp_path / "run"
    words = ("--instances=2", "--ipus=2", *MLP, "--epochs=8steps", "--json", "--check_weights_every=4")
    done = run_command("train", *words, f"--run_dir={folder}")
    assert done.returncode == 0 and "2 instances x 1 replica" in done.stderr, done.stderr
    assert all(line.startswith("[1,0]") for line in done.stderr.splitlines() if "<std" in line)
    assert steps_of(folder) == [8]
    result = json.loads(done.stdout)
    assert result["replicas"] == 2 and result["validation"]["samples"] == 2048
    assert not list(folder.glob(".trial*")) and not (folder / "errors").exists() and not (folder / "status").exists()
    shares = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])["instances"]
    assert [share["instance"] for share in shares] == [0, 1]

    code, out, err = poprun(2, 2, *TRAIN, "--evaluate", "--json", f"--run_dir={folder}")
    assert code == 0, err
    assert json.loads(out.split(":", 1)[1])["loss"] == pytest.approx(result["validation"]["loss"], rel=1e-6)


def test_a_signal_to_one_instance_stops_all_after_the_same_step(
    tmp_path, start_poprun, steps_of, pids_of, wait_for_step
):
    folder = tmp_path / "run"
    process = start_poprun(2, 2, *TRAIN, *MLP, "--epochs=50", "--log_every=2", f"--run_dir={folder}")
    wait_for_step(folder, process, 2)
    os.kill(pids_of(folder)[1], signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 143, err
    assert "SIGTERM after step" in out and len(steps_of(folder)) == 1
    assert not list((folder / "errors").glob("*"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, train, model_weights):
    folder = tmp_path_factory.mktemp("runs") / "undisturbed"
    train(2, 4, folder, *MLP, *DISTURBED)
    return model_weights(folder)


DISTURBED = ("--epochs=128steps", "--checkpoint_every=8", "--log_every=2")


def test_after_kill_9_of_one_instance_and_then_the_other_the_run_goes_on_to_the_same_bits(
    tmp_path, undisturbed, start_poprun, train, records, pids_of, model_weights, wait_for_step, assert_same_bits
):
    folder, chance = tmp_path / "run", random.Random(1)
    for victim in (1, 0):
        step = max((record["step"] for record in records(folder)), default=0) + chance.randrange(2, 40)
        process = start_poprun(2, 4, *TRAIN, *MLP, *DISTURBED, f"--run_dir={folder}")
        wait_for_step(folder, process, step)
        pids = pids_of(folder)
        os.kill(pids[victim], signal.SIGKILL)
        _, err = process.communicate(timeout=120)
        assert (
            process.returncode == 137
            and f"instance {victim} was killed by SIGKILL" in err.splitlines()[-1]
            and "Traceback" not in err
        )
        assert all(not Path(f"/proc/{pid}").exists() for pid in pids)
    train(2, 4, folder, *MLP, *DISTURBED)
    assert_same_bits(undisturbed, model_weights(folder))


def test_an_instance_that_is_stuck_in_its_input_is_named_with_what_it_waits_for(tmp_path, poprun):
    folder = tmp_path / "run"
    code, _, err = poprun(
        2, 2, "python3", FAULTS, "stuck_input", *MLP, "--epochs=50", "--device_iterations=1", "--stall_timeout=6s",
        f"--run_dir={folder}",
    )  # fmt: skip
    assert code == 1
    assert "instance 1 on" in err and "training after step 8, waiting for input" in err


def test_instances_that_were_not_started_alike_are_refused_before_the_first_step(tmp_path, poprun):
    code, _, err = poprun(2, 2, "python3", FAULTS, "unlike", *MLP, f"--run_dir={tmp_path / 'run'}")
    assert code == 1 and not (tmp_path / "run").exists()
    for what in ("the version of tf_ipu_dp 9.9", "the data", "--seed 7"):
        assert f"instance 1 on {os.uname().nodename} has {what}" in err
    assert err.count("The instances differ") == 1 and "Traceback" not in err


def test_weights_that_drift_apart_are_found_and_the_variable_is_named(tmp_path, poprun):
    code, _, err = poprun(
        2, 2, "python3", FAULTS, "drift", *MLP, "--epochs=20steps", "--check_weights_every=4", "--checkpoint_every=2",
        f"--run_dir={tmp_path / 'run'}",
    )  # fmt: skip
    assert code == 1
    assert "The instances' weights differ after step 8: hidden1_dense/kernel:0 differs between the instances" in err
    assert "The last checkpoint is of step 6." in err


def test_two_hosts_train_what_one_trains_and_go_on_after_their_link_was_cut(
    tmp_path, two_hosts, undisturbed, poprun, start_poprun, steps_of, model_weights, wait_for_step, assert_near
):
    folder, agent = tmp_path / "hosts", two_hosts.agent
    over = (",".join(two_hosts.names), *TRAIN, *MLP, *DISTURBED, f"--run_dir={folder}")
    process = start_poprun(4, 4, "--host", *over, OMPI_MCA_plm_rsh_agent=agent)
    wait_for_step(folder, process, 10)
    two_hosts.cut(two_hosts.names[1])
    _, err = process.communicate(timeout=120)
    assert process.returncode and two_hosts.names[1] in err.splitlines()[-1] and "Traceback" not in err
    assert steps_of(folder)[-1] < 128
    two_hosts.restore(two_hosts.names[1])
    code, _, err = poprun(4, 4, "--host", *over, OMPI_MCA_plm_rsh_agent=agent)
    assert code == 0 and "Resuming from step" in err, err
    assert_near(undisturbed, model_weights(folder))
