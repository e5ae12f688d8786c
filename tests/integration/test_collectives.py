"""All-reduces of real Horovod processes: on this host, across emulated hosts, interrupted and failing."""

from __future__ import annotations

import json
import signal

import emulated_hosts_needed
import numpy as np
import psutil
import pytest

from tf_ipu_dp.collectives import results


@pytest.fixture
def emulated_hosts():
    """For tests that need them."""
    emulated_hosts_needed.require_emulated_hosts()


@pytest.fixture(scope="module")
def collectives(run_command):
    """Runs a subcommand and returns the completed process."""
    return lambda *words: run_command("collectives", *words)


def test_every_trial_of_every_rank_is_kept_and_the_sums_are_right(collectives, tmp_path):
    done = collectives("measure", "--bytes=4KiB,100KB", "--ranks=3", "--trials=12", f"--out={tmp_path / 'm'}")
    assert done.returncode == 0, done.stderr
    found = results.read(tmp_path / "m")
    assert found.description.engine == "Horovod 0.28.1 on Gloo"
    assert [each.facts.bytes for each in found.series] == [4096, 100_000]
    for each in found.series:
        assert each.facts.wrong_sums == 0 and each.rank_seconds.shape == (12, 3) == each.late_s.shape
        np.testing.assert_allclose(each.seconds, each.rank_seconds.max(axis=1))
        assert (each.late_s.min(axis=1) == 0).all()
        assert each.engine_s.shape == (12,) and (each.engine_s > 0).all()
        # A rank that starts late waits less, but rank 0 cannot be faster than the engine on it.
        assert (each.engine_s <= each.rank_seconds[:, 0] + 1e-5).all()


def test_a_job_s_gradients_are_sent_as_training_sends_them(collectives, tmp_path):
    done = collectives(
        "measure", "--model=mlp", "--ipus=2", "--instances=2", "--trials=3", "--json", f"--out={tmp_path / 'm'}"
    )
    assert done.returncode == 0, done.stderr
    (series,) = json.loads(done.stdout)["results"][0]["series"]
    size = json.loads(collectives("size", "--model=mlp", "--json").stdout)["bytes"]
    assert (series["bytes"], series["ranks"], series["trials"]) == (size, 2, 3)


def test_a_calibration_at_two_ranks_predicts_more(collectives, train, tmp_path):
    path = tmp_path / "calibration.json"
    done = collectives("calibrate", "--trials=5", f"--out={path}")
    assert done.returncode == 0 and f"kept in {path}" in done.stderr, done.stderr
    done = collectives("simulate", f"--calibration={path}", "--replicas=2,8", "--bytes=971048", "--seed=1", "--json")
    assert done.returncode == 0, done.stderr
    two, eight = (row["p50_s"] for row in json.loads(done.stdout)["series"])
    assert 0 < two < eight
    plan = train("--model=mlp", "--ipus=2", "--instances=2", "--dry_run", TF_IPU_DP_CALIBRATION=str(path))
    assert "One all-reduce of 948 KiB between 2 instances takes about" in plan.stdout


@pytest.mark.usefixtures("emulated_hosts")
def test_a_slow_link_is_what_takes_the_time_across_emulated_hosts(collectives, tmp_path):
    size, rate = 400_000, 20e6 / 8
    done = collectives(
        "measure", "--fabric=ethernet-100m", "--rate=20Mbit", "--fabric_hosts=2", f"--bytes={size}", "--trials=10",
        f"--out={tmp_path / 'm'}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = results.read(tmp_path / "m")
    (series,) = found.series
    assert series.facts.link_bytes_per_s == rate and series.facts.wrong_sums == 0
    # Around a ring of two every byte goes over the link once.
    assert size / rate < np.median(series.seconds) < 2 * size / rate
    assert found.description.fabric == "ethernet-100m" and "self-check 0" in found.description.facts


@pytest.mark.usefixtures("emulated_hosts")
def test_round_robin_ranks_load_the_links_more_than_blocks(collectives, tmp_path):
    medians = {}
    for placement in ("block", "round-robin"):
        done = collectives(
            "measure", "--fabric=ethernet-100m", "--rate=20Mbit", "--fabric_hosts=2", "--ranks=4", "--bytes=200KB",
            "--trials=6", f"--placement={placement}", f"--out={tmp_path / placement}",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        medians[placement] = np.median(results.read(tmp_path / placement).series[0].seconds)
    assert medians["round-robin"] > 1.5 * medians["block"]


@pytest.fixture
def measuring(start_command, tmp_path):
    """Starts a measurement whose second size takes long; returns the process once the first one is complete."""
    return _start_measuring(start_command, "--bytes=4KiB,64MiB", "--ranks=2", f"--out={tmp_path / 'm'}")


def _start_measuring(start_command, *words):
    # A shell lets its background jobs ignore Ctrl-C, and the command would inherit that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = start_command("collectives", "measure", "--trials=500", *words)
    signal.signal(signal.SIGINT, before)
    for line in process.stderr:
        if "4,096 B: 500 trials" in line:
            return process
    raise AssertionError(f"the ranks ended with {process.wait()}")


def _children(process, text):
    found = psutil.Process(process.pid).children(recursive=True)
    names = {each: " ".join(each.cmdline()) for each in found}
    return [each for each, name in names.items() if text in name and "poprun" not in name]


def test_ctrl_c_keeps_and_reports_the_trials_so_far(measuring, tmp_path):
    measuring.send_signal(signal.SIGINT)
    out, err = measuring.communicate(timeout=120)
    assert measuring.returncode == 130, err
    assert "Interrupted: this is what was measured until then" in out
    assert "The engine's own times are missing: Horovod's timeline has them" in " ".join(out.split())
    assert "Traceback" not in err
    found = results.read(tmp_path / "m")
    assert len(found.series[0].seconds) == 500 and found.description.ended_early == "interrupted"


def test_a_rank_that_dies_is_named_and_the_trials_before_are_kept(measuring, tmp_path):
    _children(measuring, "collectives.rank")[-1].kill()
    out, err = measuring.communicate(timeout=120)
    assert measuring.returncode == 1, err
    assert "The ranks failed: poprun: instance" in out and "SIGKILL" in out and "Traceback" not in err
    assert "This is what was measured until then, 500 trials" in " ".join(out.split())
    found = results.read(tmp_path / "m")
    assert len(found.series[0].seconds) == 500 and found.description.ended_early == "failed"


def test_ranks_that_fail_before_the_first_trial_write_nothing(collectives, tmp_path):
    done = collectives(
        "measure", "--bytes=4KiB", "--hosts=no.such.host.invalid,other.invalid", f"--out={tmp_path / 'm'}"
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert not (tmp_path / "m").exists()


@pytest.mark.usefixtures("emulated_hosts")
def test_a_link_emulator_that_dies_ends_the_measurement_and_is_named(start_command, tmp_path):
    words = ("--fabric=wan", "--fabric_hosts=2", "--delay=100us", "--jitter=0", "--bytes=4KiB,64MiB")
    process = _start_measuring(start_command, *words, f"--out={tmp_path / 'm'}")
    (emulator,) = _children(process, "collectives.link_emulator")
    emulator.kill()
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1, err
    text = " ".join(out.split())
    assert "The link emulator ended with code -9: the hosts cannot reach each other." in text
    found = results.read(tmp_path / "m")
    assert len(found.series[0].seconds) == 500  # how busy the emulator was is read after that: it may have died before
