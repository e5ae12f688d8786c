"""The usage of IPUs on the emulated partition, with a clock set by hand."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_ipu_dp.emulator.devices import registry
from tf_ipu_dp.emulator.sdk_api import gcipuinfo
from tf_ipu_dp.monitoring import sampler as sampler_module
from tf_ipu_dp.monitoring.sampler import Sampler, Usage


class Clock:
    """A clock that advances only by hand."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    """The clock of the emulated partition."""
    standing = Clock()
    monkeypatch.setattr(time, "monotonic", standing)
    return standing


def sampler_of_this_process(clock=time.monotonic):
    return Sampler(gcipuinfo, pid=os.getpid(), clock=clock)


def test_a_mark_returns_the_mean_since_the_previous_mark_and_not_since_the_ipus_were_attached(partition, clock):
    attachment = partition.attach(count=2)
    clock.now += 100  # idle, before the first sample
    sampler = sampler_of_this_process(clock)
    assert sampler.mark(clock.now) == Usage(0.0, None, {0: None, 1: None}, sampler.latest())
    attachment.begin_execution()
    clock.now += 6
    attachment.end_execution(waited=0.0)
    clock.now += 2
    usage = sampler.mark(clock.now)
    assert (usage.seconds, usage.utilisation_pct, usage.per_ipu_pct) == (8.0, 75.0, {0: 75.0, 1: 75.0})
    clock.now += 4
    assert sampler.mark().utilisation_pct == 0.0
    assert [(ipu.id, ipu.pid, ipu.session_utilisation_pct) for ipu in usage.ipus] == [
        (0, os.getpid(), 5.56),
        (1, os.getpid(), 5.56),
    ]
    attachment.release()


# What happens in a stretch: an execution of so many seconds with a share of waiting, a sample, or a pause.
EVENTS = st.one_of(
    st.tuples(st.just("execute"), st.floats(0.1, 20), st.floats(0, 1), st.integers(0, 3)),
    st.tuples(st.just("sample"), st.just(0.0), st.just(0.0), st.just(0)),
    st.tuples(st.just("pause"), st.floats(0.1, 20), st.just(0.0), st.just(0)),
)


@settings(max_examples=60)
@given(st.lists(EVENTS, min_size=1, max_size=12))
def test_samples_between_two_marks_do_not_change_the_result(events):
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPU_EMULATOR_DIR", str(Path(folder) / "partition"))
        patch.setenv("IPU_EMULATOR_IPUS", "4")
        patch.setattr(time, "monotonic", clock)
        attachment = registry.Partition.from_environment(os.environ).attach(count=4)
        sampler = sampler_of_this_process(clock)
        sampler.mark()
        began, busy = clock.now, 0.0
        for kind, seconds, waiting, samples in events:
            if kind == "sample":
                sampler.sample()
            elif kind == "pause":
                clock.now += seconds
            else:
                start = clock.now
                attachment.begin_execution(lambda start=start, waiting=waiting: (clock.now - start) * waiting)
                for _ in range(samples + 1):
                    clock.now += seconds / (samples + 1)
                    sampler.sample()
                attachment.end_execution(waited=seconds * waiting)
                busy += seconds * (1 - waiting)
        usage = sampler.mark(clock.now)
        attachment.release()
    total = clock.now - began
    assert usage.seconds == pytest.approx(total)
    if total:
        assert usage.utilisation_pct == pytest.approx(100 * busy / total, abs=0.02)
    else:
        assert usage.utilisation_pct is None


def test_input_waits_that_are_known_only_at_the_end_are_subtracted_from_the_next_samples(partition, clock):
    attachment = partition.attach(count=1)
    sampler = sampler_of_this_process(clock)
    sampler.mark()
    for _ in range(4):
        attachment.begin_execution()
        for _ in range(5):
            clock.now += 1
            sampler.sample()
        attachment.end_execution(waited=4.0)
    clock.now += 20
    # 4 of 40 seconds. The last execution was reported as too busy, and no later work could correct that.
    assert 100 * 4 / 40 <= sampler.mark().utilisation_pct <= 100 * 8 / 40 + 0.02
    attachment.release()


def test_ipus_of_other_processes_do_not_count(partition, clock):
    code = (
        "import os, sys; from tf_ipu_dp.emulator.devices import registry\n"
        "attachment = registry.Partition.from_environment(os.environ).attach(count=4)\n"
        "attachment.begin_execution(); print('ready', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "ready\n"
        sampler = sampler_of_this_process(clock)
        sampler.mark()
        clock.now += 1
        usage = sampler.mark()
        assert (usage.utilisation_pct, usage.per_ipu_pct, usage.ipus) == (None, {}, ())
        assert usage.problem == f"gcipuinfo shows no IPU of process {os.getpid()}"
        attachment = partition.attach(count=2)
        clock.now += 1
        assert sampler.mark().per_ipu_pct == {4: 0.0, 5: 0.0}
        attachment.release()
    finally:
        process.communicate()


def test_a_library_that_cannot_be_started_is_a_problem_and_not_an_error(partition, monkeypatch, clock):
    monkeypatch.setenv("IPU_EMULATOR_IPUS", "3")
    sampler = sampler_of_this_process(clock)
    sampler.start()
    clock.now += 5
    usage = sampler.mark(clock.now)
    sampler.stop()
    assert (usage.seconds, usage.utilisation_pct, usage.ipus) == (5.0, None, ())
    assert "IPU_EMULATOR_IPUS='3' is not possible" in usage.problem
    monkeypatch.setenv("IPU_EMULATOR_IPUS", "8")
    assert sampler.mark().problem == usage.problem, "it is not tried again and again"


def test_the_query_after_a_failed_one_covers_its_time_too(partition, clock):
    attachment = partition.attach(count=1)
    sampler = sampler_of_this_process(clock)
    sampler.mark()
    attachment.begin_execution()
    clock.now += 3
    partition.folder.chmod(0o755)
    failed = sampler.mark()
    assert (failed.seconds, failed.utilisation_pct, failed.per_ipu_pct) == (3.0, None, {0: None})
    assert failed.problem.startswith("gcipuinfo failed (RegistryError: ")
    partition.folder.chmod(0o700)
    attachment.end_execution(waited=0.0)
    clock.now += 1
    usage = sampler.mark()
    assert (usage.utilisation_pct, usage.problem) == (75.0, None)
    attachment.release()


def test_the_thread_samples_by_itself_and_ends(partition):
    attachment = partition.attach(count=1)
    before = threading.active_count()
    sampler = sampler_of_this_process()
    sampler.start()
    first, deadline = sampler.latest(), time.monotonic() + 60
    while sampler.latest() is first and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    assert sampler.latest() is not first
    sampler.stop()
    assert threading.active_count() == before
    attachment.release()


def test_a_period_of_less_than_a_second_is_refused():
    with pytest.raises(ValueError, match=r"0\.1 s is too short"):
        Sampler(gcipuinfo, pid=1, period_s=0.1)


COMPUTE = """
import os, time
import tensorflow as tf
from tf_ipu_dp.monitoring.sampler import Sampler
from tf_ipu_dp.emulator.sdk_api import gcipuinfo
from tf_ipu_dp.emulator.sdk_api.ipu import config, ipu_strategy

ipus = config.IPUConfig()
ipus.auto_select_ipus = 2
ipus.configure_ipu_system()
strategy = ipu_strategy.IPUStrategy()

@tf.function
def compute(steps):
    x = tf.eye(200)
    for _ in tf.range(steps):
        x = tf.matmul(x, x)
    return x

strategy.run(compute, [tf.constant(1)])
sampler = Sampler(gcipuinfo, pid=os.getpid())
sampler.start()
began = time.monotonic()
while time.monotonic() - began < 2.5:
    strategy.run(compute, [tf.constant(2000)])
computing = sampler.mark()
sum(range(3_000_000))
idle = sampler.mark()
sampler.stop()
print(computing.utilisation_pct, idle.utilisation_pct, *computing.per_ipu_pct)
"""


@pytest.mark.slow
def test_a_process_that_computes_is_busy_and_one_that_does_not_is_idle(partition, tmp_path):
    program = tmp_path / "compute.py"
    program.write_text(COMPUTE)
    environ = {**os.environ, "PYTHONPATH": str(Path(sampler_module.__file__).parents[2])}
    done = subprocess.run([sys.executable, program], stdout=subprocess.PIPE, text=True, check=True, env=environ)
    computing, idle, *ipus = done.stdout.split()
    assert float(computing) > 60
    assert float(idle) < 40
    assert ipus == ["0", "1"]
