"""Fixtures for tests that start commands: runs and what is in their folders, poprun, and two hosts on one machine.

The hosts are network namespaces with addresses of their own, joined by a bridge.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

# What .ci/run also runs in the SDK-age and the modern environment, because Python or TensorFlow decide the outcome:
# files, or how the names of tests begin. The rest would cost minutes there and tell nothing new.
EVERY_ENVIRONMENT = (
    "test_emulator_command.py",
    "test_plain_keras.py",
    "test_programs.py",
    "test_doctor_command.py::test_the_test_environment_is_ready",
    "test_instances.py::test_instances_that_are_asked_for_are_started",
    "test_instances.py::test_the_same_global_batches_end_in_the_same_weights",
    "test_popdist_programs.py::test_collectives_keep_types_sets_and_order",
    "test_popdist_programs.py::test_two_instances_get_what_one_gets[cnn_trainer-",
    "test_popdist_programs.py::test_two_instances_get_what_one_gets[device_collectives-",
    "test_popdist_programs.py::test_two_instances_get_what_one_gets[own_loop-",
    "test_popdist_programs.py::test_two_instances_get_what_one_gets[regularised-",
    "test_popdist_programs.py::test_two_instances_get_what_one_gets[shared_batch_norm-",
    "test_popdist_programs.py::test_two_instances_get_what_one_gets[transformer-",
    "test_training.py::test_a_pipelined_sixteen_bit_run_with_eight_bit_input_trains",
    "test_training.py::test_a_run_leaves_its_folder_its_table_and_what_it_learned",
    "test_training.py::test_a_signal_saves_and_the_next_start_goes_on_to_the_same_bits",
    "test_training.py::test_the_export_is_loaded_and_asked_by_plain_tensorflow",
    "test_training.py::test_the_same_checkpoint_scores_the_same_on_any_number_of_replicas",
    "test_wheel.py::test_the_wheel_of_the_sdist_is_installed",
)


def pytest_collection_modifyitems(items):
    """Marks the tests of this folder, and those among them that every environment runs."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.integration)
            if f"{item.path.name}::{item.name}".startswith(EVERY_ENVIRONMENT):
                item.add_marker(pytest.mark.every_environment)


@pytest.fixture(scope="session")
def train(run_command):
    """Runs the train command with these flags and returns the completed process."""
    return functools.partial(run_command, "train")


@pytest.fixture(scope="session")
def records():
    """Reads the records of a run's metrics.jsonl; a line that is still being written is left out."""

    def read(folder):
        path = folder / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    return read


@pytest.fixture(scope="session")
def steps_of():
    """Lists the steps that a run's folder has checkpoints of."""
    return lambda folder: sorted(int(path.name[len("step-") :]) for path in folder.glob("checkpoints/step-*"))


@pytest.fixture(scope="session")
def pids_of():
    """Reads the process ids of a run's instances, in their order, from their status files."""

    def read(folder):
        files = sorted((folder / "status").glob("instance-*.json"))
        return [json.loads(path.read_text(encoding="utf-8"))["pid"] for path in files]

    return read


@pytest.fixture(scope="session")
def wait_for_checkpoint(steps_of, wait_until):
    """Waits until a run that a process trains has a checkpoint of a later step, and returns that step."""

    def wait(folder, process, after=0):
        wait_until(lambda: process.poll() is not None or max(steps_of(folder), default=0) > after, limit_s=240)
        assert process.poll() is None, process.communicate()[1]
        return max(steps_of(folder))

    return wait


@pytest.fixture(scope="session")
def wait_for_step(records, wait_until):
    """Waits until the metrics of a run that a process trains have reached a step."""

    def reached(folder, step):
        return max((record["step"] for record in records(folder)), default=0) >= step

    def wait(folder, process, step):
        wait_until(lambda: process.poll() is not None or reached(folder, step), limit_s=240)
        assert process.poll() is None, process.communicate()[1]

    return wait


@pytest.fixture(scope="session")
def weights(steps_of):
    """Reads the variables of model and optimizer in a run's newest checkpoint with plain TensorFlow, by name."""

    def read(folder):
        import tensorflow as tf

        reader = tf.train.load_checkpoint(str(folder / "checkpoints" / f"step-{steps_of(folder)[-1]:08d}" / "state"))
        names = [name for name in reader.get_variable_to_shape_map() if name.startswith(("model/", "optimizer/"))]
        return {name: reader.get_tensor(name) for name in sorted(names)}

    return read


@pytest.fixture(scope="session")
def model_weights(weights):
    """Reads the model's floating-point variables in a run's newest checkpoint, without the optimizer's."""

    def read(folder):
        found = {name: value for name, value in weights(folder).items() if name.startswith("model/")}
        found = {name: value for name, value in found.items() if "OPTIMIZER_SLOT" not in name}
        return {name: value for name, value in found.items() if value.dtype.kind == "f"}

    return read


@pytest.fixture(scope="session")
def assert_same_bits():
    """Asserts that two sets of variables are the same, bit by bit."""

    def check(first, second):
        assert first.keys() == second.keys() and first
        for name, value in first.items():
            np.testing.assert_array_equal(second[name], value, err_msg=name)

    return check


@pytest.fixture(scope="session")
def assert_near():
    """Asserts that two sets of variables differ by at most 1e-5 of each variable's largest value."""

    def check(first, second):
        assert first.keys() == second.keys() and first
        for name, value in first.items():
            np.testing.assert_allclose(second[name], value, atol=1e-5 * np.abs(value).max(), rtol=0, err_msg=name)

    return check


AGENT = """#!/bin/sh
host=$1
shift
exec env -i HOME="$HOME" PATH="$PATH" ip netns exec "$host" sh -c "$*"
"""


_NUMBERS = itertools.count()


class TwoHosts:
    """Hosts that `agent` runs commands on. Each is named by its address."""

    def __init__(self, folder):
        # The kernel may take a moment to remove a link or namespace, so no name is used twice.
        number, unique = os.getpid() % 250 + 1, f"{os.getpid() % 100_000}n{next(_NUMBERS)}"
        self._bridge = f"ipu{unique}"
        self._links = [f"ipu{unique}{letter}" for letter in "ab"]
        self.names = [f"10.213.{number}.{last}" for last in (1, 2)]
        self.gateway = f"10.213.{number}.254"  # of the machine that both are on
        self.agent = str(folder / "agent")
        Path(self.agent).write_text(AGENT, encoding="utf-8")
        Path(self.agent).chmod(0o755)

    def make(self):
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("addr", "add", f"{self.gateway}/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        for name, link in zip(self.names, self._links):
            _ip("netns", "add", name)
            _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", link, "master", self._bridge, "up")
            _ip("-n", name, "addr", "add", f"{name}/24", "dev", "eth0")
            for interface in ("lo", "eth0"):
                _ip("-n", name, "link", "set", interface, "up")
        deadline = time.monotonic() + 60
        while any(not self._is_up(name) for name in self.names) and time.monotonic() < deadline:
            time.sleep(0.05)

    def remove(self):
        for name in self.names:
            _ip("netns", "del", name, check=False)
        for link in self._links:
            _ip("link", "del", link, check=False)
        _ip("link", "del", self._bridge, check=False)

    def cut(self, host):
        """Takes the network from a host."""
        _ip("-n", host, "link", "set", "eth0", "down")

    def restore(self, host):
        """Gives it back."""
        _ip("-n", host, "link", "set", "eth0", "up")

    def pids(self, host):
        """Returns the processes that run on a host."""
        done = subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True, check=True)
        return [int(word) for word in done.stdout.split()]

    def _is_up(self, name):
        return "state UP" in _ip("-n", name, "link", "show", "eth0")


def _ip(*words, check=True):
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0 or not check, f"ip {' '.join(words)}: {done.stderr}"
    return done.stdout


@pytest.fixture
def two_hosts(tmp_path):
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the command ip (package iproute2)")
    allowed = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, check=False)
    if allowed.returncode != 0:
        pytest.skip(f"this machine does not let root make network namespaces: {allowed.stderr.strip()}")
    hosts = TwoHosts(tmp_path)
    try:
        hosts.make()
        yield hosts
    finally:
        hosts.remove()
