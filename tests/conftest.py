"""Fixtures for all tests: an emulated partition of their own, commands, instances, and waiting for a condition."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time

import pytest
from hypothesis import HealthCheck, settings

# A slow machine must not fail a test, and the same code must give the same result: examples depend on the test alone.
# Other ones are tried with --hypothesis-profile=explore.
_TESTS = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("tests", _TESTS, derandomize=True)
settings.register_profile("explore", _TESTS, derandomize=False, max_examples=1000)
settings.load_profile("tests")


@pytest.fixture(scope="session", autouse=True)
def _test_environment(tmp_path_factory):
    """Gives the test process emulated IPUs that no other job on this machine can attach, and silences TensorFlow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPU_EMULATOR_DIR", str(tmp_path_factory.mktemp("partition") / "of_tests"))
        patch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
        # That of the developer's machine would add a prediction to plans.
        patch.setenv("TF_IPU_DP_CALIBRATION", str(tmp_path_factory.mktemp("calibration") / "none.json"))
        # What is learned of own models is kept there.
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _seeded():
    """Seeds Python's generator, which later releases of Keras draw the seeds of their initializers from."""
    random.seed(1)


@pytest.fixture
def emulator_dir(tmp_path, monkeypatch):
    """Gives one test a partition of its own and returns the partition's folder, which is not made yet."""
    folder = tmp_path / "partition"
    monkeypatch.setenv("IPU_EMULATOR_DIR", str(folder))
    return folder


@pytest.fixture(scope="session")
def run_command():
    """Runs `python -m tf_ipu_dp.NAME WORDS...` and returns the completed process, whatever its exit code."""

    def run(name, *words, timeout=300, cwd=None, **environ):
        return subprocess.run(
            _command_line(name, words), capture_output=True, text=True, check=False, timeout=timeout, cwd=cwd,
            env={**os.environ, **environ},
        )  # fmt: skip

    return run


@pytest.fixture
def start_command():
    """Starts `python -m tf_ipu_dp.NAME WORDS...` and returns the process, which is killed if it outlives the test."""
    processes = []

    def start(name, *words, cwd=None, **environ):
        process = subprocess.Popen(
            _command_line(name, words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd,
            env={**os.environ, **environ},
        )  # fmt: skip
        processes.append(process)
        return process

    yield start
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


@pytest.fixture(scope="session")
def poprun(run_command):
    """Runs a program as instances under the emulator's poprun and returns its exit code, stdout and stderr."""

    def run(instances, replicas, *words, **options):
        shape = ("--num-instances", instances, "--num-replicas", replicas)
        done = run_command("emulator.poprun", *shape, *words, **options)
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.fixture
def start_poprun(start_command):
    """Starts a program as instances under the emulator's poprun and returns the process of poprun."""

    def start(instances, replicas, *words, **options):
        shape = ("--num-instances", instances, "--num-replicas", replicas)
        return start_command("emulator.poprun", *shape, *words, **options)

    return start


def _command_line(name, words):
    return [sys.executable, "-m", f"tf_ipu_dp.{name}", *map(str, words)]


@pytest.fixture(scope="session")
def wait_until():
    """Waits until a condition holds and returns its value; fails with the condition's name after the limit."""

    def wait(condition, limit_s=120.0, pause_s=0.01):
        deadline = time.monotonic() + limit_s
        while not (value := condition()):
            assert time.monotonic() < deadline, f"{condition} did not hold within {limit_s:g} s"
            time.sleep(pause_s)
        return value

    return wait


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Hands out the files that start processes early: they have few tests, and xdist leaves such files to the end."""
    from xdist.scheduler import LoadFileScheduling

    class LongFilesFirst(LoadFileScheduling):
        def schedule(self):
            super().schedule()
            for file in [file for file in reversed(self.workqueue) if "integration" in file]:
                self.workqueue.move_to_end(file, last=False)

    return LongFilesFirst(config, log) if config.getvalue("dist") == "loadfile" else None
