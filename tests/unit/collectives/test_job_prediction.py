"""Predictions for planned jobs and for runs, from a calibration."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

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


def _predict(*words):
    config = train_flags.parse(words)
    run = plan.plan_run(config, lookup.find(config.dataset, config.data_dir, config.image_size))
    size = buckets.job_size(run, precision=config.precision, deterministic=False, threshold=buckets.FUSION_THRESHOLD)
    return job_prediction.predict_job(run, size, CALIBRATION)


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
