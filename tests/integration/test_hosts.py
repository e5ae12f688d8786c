"""Jobs over several hosts: network namespaces, reached through a remote shell, with real processes and real Horovod."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tf_ipu_dp.emulator.launcher import host_job, remote_host, supervisor

WAITING = """
import os, subprocess, time
child = subprocess.Popen(["sleep", "300"], start_new_session=True)
print(os.getpid(), child.pid, flush=True)
time.sleep(300)
"""
SOON_S = 15  # a few seconds where nothing else runs, and far from the minutes that the programs here sleep
TRAINING = """
import numpy as np, popdist, popdist.tensorflow, tensorflow as tf
from tensorflow.python import ipu
from tensorflow.python.ipu import distributed
from tensorflow.python.ipu.distributed.popdist_strategy import PopDistStrategy
from tf_ipu_dp.emulator.runtime import instances

popdist.init()
own, count = popdist.getInstanceIndex(), popdist.getNumInstances()
assert distributed.allgather(tf.constant([own])).numpy().ravel().tolist() == list(range(count))
config = ipu.config.IPUConfig()
popdist.tensorflow.set_ipu_config(config)
config.configure_ipu_system()
features = np.random.RandomState(1).randn(64, 4).astype("float32")
data = tf.data.Dataset.from_tensor_slices((features, features.sum(1, keepdims=True))).shard(count, own)
tf.random.set_seed(own)  # so that equal weights can only come from instance 0
with PopDistStrategy().scope():
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(4,), kernel_initializer="ones")])
    model.compile("sgd", "mse", steps_per_execution=4)
    model.fit(data.batch(4, drop_remainder=True).repeat(), steps_per_epoch=16, verbose=0)
assert not instances.uses_shared_memory()
print(popdist.getLocalInstanceIndex(), *(f"{weight:.5f}" for weight in model.get_weights()[0].ravel()))
"""


@pytest.fixture(autouse=True)
def _failure_report(monkeypatch, tmp_path, emulator_dir):
    monkeypatch.setenv("IPU_EMULATOR_REPORT", str(tmp_path / "report.json"))


@pytest.fixture
def start(start_poprun):
    """Starts a program on hosts that a remote shell reaches, and returns the process of poprun."""

    def start_on(names, agent, *words, instances=4, **options):
        words = ("--host", ",".join(names), *words)
        return start_poprun(instances, instances, *words, OMPI_MCA_plm_rsh_agent=str(agent), **options)

    return start_on


@pytest.fixture
def run(start):
    """Runs a program on hosts that a remote shell reaches, and returns its exit code, stdout and stderr."""

    def run_on(*arguments, **options):
        process = start(*arguments, **options)
        stdout, stderr = process.communicate(timeout=240)
        return process.returncode, stdout, stderr

    return run_on


@pytest.fixture
def start_waiting(start, two_hosts):
    """Returns poprun, and the processes of its four instances, each with one that has left its session."""

    def start_on(names=two_hosts.names):
        process = start(names, two_hosts.agent, sys.executable, "-c", WAITING)
        lines = sorted(process.stdout.readline() for _ in range(4))
        return process, [[int(word) for word in line.split(":")[1].split()] for line in lines]

    return start_on


def are_running(pids):
    found = []
    for pid in pids:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
                found.append(pid)
        except OSError:
            continue
    return found


def assert_gone(groups):
    pids, deadline = [pid for group in groups for pid in group], time.monotonic() + SOON_S
    while are_running(pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = are_running(pids)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


@pytest.mark.slow
def test_two_hosts_of_two_instances_train_what_one_instance_trains(two_hosts, run, poprun):
    code, out, err = run(two_hosts.names, two_hosts.agent, "python3", "-c", TRAINING)
    assert code == 0, err
    lines = dict(line[len("[1,") :].split("]<stdout>:") for line in out.splitlines())
    locals_, weights = zip(*(lines[str(index)].split(" ", 1) for index in range(4)))
    assert locals_ == ("0", "1", "0", "1") and len(set(weights)) == 1
    code, alone, err = poprun(1, 4, "python3", "-c", TRAINING)
    assert code == 0, err
    expected = alone.split("0 ", 1)[1].split()
    assert [float(word) for word in weights[0].split()] == pytest.approx([float(word) for word in expected], rel=1e-4)
    assert not [pid for name in two_hosts.names for pid in two_hosts.pids(name)]


def test_an_instance_killed_on_another_host_ends_all_and_is_named_with_its_host(two_hosts, tmp_path, start_waiting):
    process, pids = start_waiting()
    os.kill(pids[3][0], signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 137
    assert f"instance 3 on host {two_hosts.names[1]} was killed by SIGKILL" in err
    assert_gone(pids)
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["instance"], report["host"], report["status"]) == (3, two_hosts.names[1], 137)
    assert report["last_lines"] == [f"{pids[3][0]} {pids[3][1]}"]


def test_a_job_may_have_this_host_too_and_ends_everywhere_when_poprun_is_killed(two_hosts, start_waiting):
    process, pids = start_waiting(["localhost", two_hosts.names[0]])
    assert set(pids[2]) | set(pids[3]) <= set(two_hosts.pids(two_hosts.names[0]))
    assert not (set(pids[0]) | set(pids[1])) & set(two_hosts.pids(two_hosts.names[0]))
    process.kill()
    process.wait()
    assert_gone(pids)


def test_a_lost_remote_shell_ends_the_job_with_a_sentence(two_hosts, start_waiting):
    process, pids = start_waiting()
    theirs = set(two_hosts.pids(two_hosts.names[1])) - {pid for group in pids for pid in group}
    for pid in theirs:
        if b"tf_ipu_dp.emulator.launcher.host_agent" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert f"The connection to host {two_hosts.names[1]} was lost" in err and "Traceback" not in err
    assert_gone(pids)


@pytest.mark.slow
def test_a_network_that_goes_down_ends_the_job_with_a_sentence(two_hosts, tmp_path, start_waiting):
    process, pids = start_waiting()
    two_hosts.cut(two_hosts.names[1])
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert f"Host {two_hosts.names[1]}" in err and "could not be reached for 15 s" in err and "Traceback" not in err
    assert_gone(pids)
    assert json.loads((tmp_path / "report.json").read_text())["host"] == two_hosts.names[1]


def test_a_signal_reaches_the_instances_of_all_hosts_once(two_hosts, start):
    program = (
        "import signal, sys, time\n"
        "def stop(number, frame): print('asked', flush=True); time.sleep(0.5); print('saved'); sys.exit(143)\n"
        "signal.signal(signal.SIGTERM, stop); print('ready', flush=True); time.sleep(300)"
    )
    process = start(two_hosts.names, two_hosts.agent, sys.executable, "-c", program)
    for _ in range(4):
        process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=120)
    told = sorted(line.split(":")[1] for line in out.splitlines())
    assert process.returncode == 143 and told == ["asked"] * 4 + ["saved"] * 4


def test_only_what_matters_of_the_environment_reaches_another_host(two_hosts, monkeypatch, run):
    for name in ("TF_HERE", "OTHER", "ASKED"):
        monkeypatch.setenv(name, "here")
    code, out, err = run(
        two_hosts.names, two_hosts.agent, "--mpi-local-args=-x ASKED -x 'GIVEN=a b'", sys.executable, "-c",
        "import os; print([os.environ.get(name) for name in ('TF_HERE', 'ASKED', 'GIVEN', 'OTHER')])",
        instances=2,
    )  # fmt: skip
    assert code == 0, err
    assert {line.split(":", 1)[1] for line in out.splitlines()} == {"['here', 'here', 'a b', None]"}


@pytest.mark.parametrize(
    ("names", "agent", "sentence"),
    [
        (["10.213.0.9"], "real", 'Host 10.213.0.9 cannot be reached: Cannot open network namespace "10.213.0.9"'),
        (["no-such-host"], "ssh", "Host no-such-host cannot be reached"),
        (["no-such-host"], "no-such-shell", "There is no no-such-shell to reach other hosts with"),
    ],
    ids=["unreachable", "unknown", "no shell"],
)
def test_a_host_that_cannot_be_reached_is_named_in_one_sentence(two_hosts, tmp_path, names, agent, sentence, run):
    code, out, err = run(
        [*names, two_hosts.names[0]], two_hosts.agent if agent == "real" else agent, "true", instances=2
    )
    assert code == 1 and not out
    assert err.startswith(f"poprun: {sentence}") and len(err.splitlines()) == 1
    assert json.loads((tmp_path / "report.json").read_text())["reason"] in err


def test_what_another_host_lacks_is_named_in_one_sentence(two_hosts, tmp_path, run):
    here = tmp_path / "here"
    here.mkdir()
    hiding = tmp_path / "hiding"
    command = f'mount -t tmpfs none {tmp_path}; host=$0; exec ip netns exec $host sh -c "$*"'
    hiding.write_text(f"#!/bin/sh\nexec unshare --mount sh -c '{command}' \"$@\"\n")
    hiding.chmod(0o755)
    cases = {
        f"has no directory {here}": (hiding, here, ["true"]),
        "no_such_program cannot be started": (two_hosts.agent, tmp_path, ["no_such_program"]),
        "has no address in --host-subnet 192.0.2.0/24": (
            two_hosts.agent, tmp_path, ["--host-subnet", "192.0.2.0/24", "true"],
        ),
    }  # fmt: skip
    for sentence, (agent, folder, words) in cases.items():
        code, _, err = run(two_hosts.names, agent, *words, instances=2, cwd=str(folder))
        assert code == 1 and sentence in err and "Host 10.213." in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("frame", ["no JSON", '{"unheard_of": 1}', '{"exited": [1]}', "[]"])
def test_a_host_that_sends_a_message_that_cannot_be_read_is_lost(frame):
    hello, answer = (f"printf '%b' '\\036ipu:{each}\\n'" for each in ('{"hello": ["there", []]}', frame))
    events = supervisor.Events()
    shell = ["sh", "-c", f"{hello}; grep -m1 -q job; {answer}; exec cat >/dev/null"]
    remote = remote_host.RemoteHost("there", shell, None, events)
    remote.wait_until_ready()
    remote.assign(host_job.HostJob(["true"], "/", {}, {0: {}}, pins=False))
    remote.prepare()
    what, (host, reason) = events.next(60)
    remote.close(0.0, terminate=False)
    assert (what, host) == ("host_lost", "there")
    assert reason.startswith("Host there sent a message that cannot be read")
