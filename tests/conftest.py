"""Fixtures for all tests: an emulated partition of their own, commands, instances, and waiting for a condition."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent import futures
from multiprocessing import reduction
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tf_ipu_dp.emulator.launcher import preload

# A slow machine must not fail a test, and the same code must give the same result: examples depend on the test alone.
# Other ones are tried with --hypothesis-profile=explore.
_TESTS = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("tests", _TESTS, derandomize=True)
settings.register_profile("explore", _TESTS, derandomize=False, max_examples=1000)
settings.load_profile("tests")

PRELOADED_COMMANDS = Path(__file__).with_name("preloaded_commands.py")
MESSAGE_BYTES = 100


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
    """Runs `python -m tf_ipu_dp.NAME WORDS...` and returns the completed process, whatever its exit code.

    Commands that train are forks of a process that has imported TensorFlow, where they would not notice it: those of
    `start_command` and of wrappers are always fresh. IPU_EMULATOR_PRELOAD=0 makes all of them so.
    """
    preloaded = PreloadedCommands()

    def run(name, *words, timeout=900, cwd=None, **environ):
        line, environ = _command_line(name, words), {**os.environ, **environ}
        if preloaded.can_run(name, line, environ):
            return preloaded.run(line, environ, cwd, timeout)
        return subprocess.run(line, capture_output=True, text=True, check=False, timeout=timeout, cwd=cwd, env=environ)

    yield run
    preloaded.close()


class PreloadedCommands:
    """Runs commands in forks of a process that has imported TensorFlow, which starts with the first of them."""

    def __init__(self):
        self._environ = dict(os.environ)
        self._connection = self._process = self._is_ready = None

    def can_run(self, name, line, environ):
        """Whether a command needs TensorFlow, and would not notice that another process has imported it."""
        return (
            name in ("train", "predict", "emulator", "emulator.poprun")
            and not {"--dry_run", "--help", "--version"} & set(line)
            # What poprun asks before it forks instances of train: whether variables are read before the fork.
            and preload.can_fork(_command_line("train", ()), [environ, self._environ])
            and (self._is_ready if self._process else self._start())
        )

    def run(self, line, environ, cwd, timeout):
        """Runs a command to its end, as `subprocess.run` does."""
        self._connection.send(json.dumps([line, environ, cwd and str(cwd)]).encode())
        pid = int(self._connection.recv(MESSAGE_BYTES))
        watch = threading.Timer(timeout, os.kill, (pid, signal.SIGKILL))
        watch.start()
        streams = [os.fdopen(each, encoding="utf-8") for each in reduction.recvfds(self._connection, 2)]
        with futures.ThreadPoolExecutor(2) as readers:
            out, err = readers.map(lambda stream: stream.read(), streams)
        code = int(self._connection.recv(MESSAGE_BYTES))
        is_late = not watch.is_alive()
        watch.cancel()
        for stream in streams:
            stream.close()
        if is_late:
            raise subprocess.TimeoutExpired(line, timeout, out, err)
        return subprocess.CompletedProcess(line, code, out, err)

    def _start(self):
        """Starts the process and returns whether it could import everything."""
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, str(PRELOADED_COMMANDS), str(theirs.fileno())]
            self._process = subprocess.Popen(command, env=self._environ, pass_fds=[theirs.fileno()])
        self._is_ready = self._connection.recv(MESSAGE_BYTES) == b"ready"
        return self._is_ready

    def close(self):
        """Ends the process."""
        if self._process is not None:
            self._connection.close()
            self._process.wait()


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
    """Hands out the files that start processes early: they have few tests, and xdist leaves such files to the end.

    Then no worker trains for minutes while the other one has nothing left to do.
    """
    from xdist.scheduler import LoadFileScheduling

    class LongFilesFirst(LoadFileScheduling):
        def schedule(self):
            super().schedule()
            for file in [file for file in reversed(self.workqueue) if "integration" in file or "campaigns" in file]:
                self.workqueue.move_to_end(file, last=False)

    return LongFilesFirst(config, log) if config.getvalue("dist") == "loadfile" else None
