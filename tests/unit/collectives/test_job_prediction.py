"""Predictions for planned jobs and for runs, from a calibration."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from tf_ipu_dp import cli
from tf_ipu_dp.collectives import buckets, calibration, job_prediction
from tf_ipu_dp.config import train_flags
from tf_ipu_dp.datasets import lookup
from tf_ipu_dp.planning import plan

CALIBRATION = calibration.Calibration(
    "2026-11-17",
    "Horovod 0.28.1 on Gloo",
    (calibration.MessageTime(2048.0, 1e-4), calibration.MessageTime(2_000_000.0, 2e-3)),
    jitter_factors=(0.9, 0.95, 1.0, 1.1, 1.5),
    horovod_fixed_s=1e-3,
    flops_per_s=1e11,
)


LINK = dataclasses.replace(CALIBRATION, link_bytes_per_s=1.25e8, shared_cores=2, facts={"fabric": "r4"})


def _predict(*words, found=CALIBRATION):
    config = train_flags.parse(words)
    run = plan.plan_run(config, lookup.find(config.dataset, config.data_dir, config.image_size))
    size = buckets.job_size(run, precision=config.precision, deterministic=False, threshold=buckets.FUSION_THRESHOLD)
    return job_prediction.predict_job(run, size, found)


def test_a_job_s_all_reduce_is_predicted_with_its_largest_share_of_an_update():
    found = _predict("--model=mlp", "--ipus=4", "--instances=4")
    assert (found.bytes, found.instances) == (971_048, 4)
    assert 1e-3 < found.low_s < found.seconds < found.high_s < 20e-3
    least_update_s = 6 * 242_304 * 128 / 1e11
    assert found.largest_share == pytest.approx(found.seconds / (found.seconds + least_update_s), rel=0.01)
    assert found.render().startswith("One all-reduce of 948 KiB between 4 instances takes about ")
    assert found.render().endswith("% of an update; predicted from the calibration of 2026-11-17.")


def test_one_instance_sends_nothing_and_more_instances_take_longer():
    assert _predict("--model=mlp", "--ipus=4") is None
    two, eight = (_predict("--model=mlp", f"--ipus={n}", f"--instances={n}") for n in (2, 8))
    assert two.seconds < eight.seconds


HOSTS = ("--model=mlp", "--ipus=4", "--instances=4", "--hosts=a,b")


def test_a_link_between_hosts_that_was_not_measured_is_not_guessed():
    found = _predict(*HOSTS).render()
    assert found.startswith(
        "No prediction of the all-reduce: the calibration of 2026-11-17 is of one host, and the link between 2 hosts "
        "is not known. Calibrate on a fabric like it, for example calibrate --fabric=ethernet-1g"
    )
    with pytest.raises(cli.UsageError, match="the link between 2 hosts is not known"):
        job_prediction.simulate_run(HOSTS, CALIBRATION)


def test_a_prediction_between_hosts_names_the_link_and_gives_each_host_its_own_cores():
    found = _predict(*HOSTS, found=LINK)
    assert " if hosts are joined by links of 1 Gbit/s, as on the fabric r4; predicted from" in found.render()
    # Four ranks on two hosts of two cores do not take turns; on one host they do.
    unlimited = dataclasses.replace(LINK, shared_cores=None)
    assert found.seconds == pytest.approx(_predict(*HOSTS, found=unlimited).seconds)
    one_host = HOSTS[:-1]
    assert _predict(*one_host, found=LINK).seconds > _predict(*one_host, found=unlimited).seconds
    assert _predict(*one_host, found=LINK).link is None
    result = job_prediction.simulate_run(HOSTS, LINK)
    assert result.description.title == "the run's exchanges, over links of 1 Gbit/s, as on the fabric r4"


def test_a_calibration_of_another_machine_says_so_in_every_prediction():
    other = dataclasses.replace(CALIBRATION, facts={"cores": "640"})
    sentence = f"It was calibrated with cores 640, and here {os.cpu_count()}. Calibrate again."
    assert _predict("--model=mlp", "--ipus=2", "--instances=2", found=other).render().endswith(f". {sentence}")
    result = job_prediction.simulate_run(["--model=mlp", "--ipus=2", "--instances=2"], other)
    assert result.description.notes == (sentence,)


def test_a_run_is_simulated_from_its_flags():
    result = job_prediction.simulate_run(["--model=mlp", "--ipus=2", "--instances=2"], CALIBRATION)
    (series,) = result.series
    assert (series.facts.ranks, series.facts.bytes) == (2, 971_048)
    predicted = _predict("--model=mlp", "--ipus=2", "--instances=2").seconds
    assert np.median(series.seconds) == pytest.approx(predicted, rel=0.2)


def _dry_run(path, *words):
    command = [sys.executable, "-m", "tf_ipu_dp.train", "--model=mlp", "--ipus=2", "--dry_run", *words]
    environ = {"TF_IPU_DP_CALIBRATION": str(path), "PATH": "", "HOME": str(path.parent)}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environ)


def test_a_plan_shows_the_prediction_where_there_is_a_calibration(tmp_path):
    path = tmp_path / "calibration.json"
    assert "One all-reduce" not in _dry_run(path, "--instances=2").stdout
    calibration.save(CALIBRATION, path)
    assert "One all-reduce of 948 KiB between 2 instances takes about" in _dry_run(path, "--instances=2").stdout
    assert "One all-reduce" not in _dry_run(path).stdout
    assert "One all-reduce" not in json.dumps(json.loads(_dry_run(path, "--instances=2", "--json").stdout))
    path.write_text("{")
    done = _dry_run(path, "--instances=2")
    assert done.returncode == 0 and "note: " in done.stdout and "Calibrate again." in done.stdout
