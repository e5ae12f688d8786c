"""When a run stops, and that all instances stop for the same reason."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf_ipu_dp.distributed.world import World
from tf_ipu_dp.runs.records import StopReason
from tf_ipu_dp.training import stop


class FakeWorld(World):
    """Several instances whose numbers are given."""

    def gather_numbers(self, values):
        return [tuple(values), *self.distributed]


def exchange(others=(), **changes):
    values = {"loss": 1.0, "accuracy": 0.5, "signal": 0, "time_is_up": False, "log_now": False, "execution_s": 0.01}
    made = stop.InstanceExchange(FakeWorld(0, 1 + len(others), others))
    return made.run(8, **{**values, **changes})


def test_a_signal_to_any_instance_stops_all_and_clocks_are_the_leaders():
    others = [(3.0, 0.7, 15, 1.0, 1.0, 9.0, 1.0)]
    found = exchange(others)
    assert (found.loss, found.accuracy, found.signal) == (2.0, pytest.approx(0.6), 15)
    assert (found.time_is_up, found.log_now, found.callback_stops) == (False, False, False)
    found = exchange(time_is_up=True, log_now=True, others=[(3.0, 0.7, 0, 0.0, 0.0, 9.0, 0.0)])
    assert (found.time_is_up, found.log_now) == (True, True)
    assert exchange(others, callback_stops=True).callback_stops  # of the leader, where callbacks are called


def test_the_leaders_speed_decides_when_the_next_exchange_is_due():
    made = stop.InstanceExchange(FakeWorld(0, 2, [(1.0, 0.5, 0, 0, 0, 9.0, 0)]))
    assert made.is_due(must_exchange=False)
    made.run(1, loss=1.0, accuracy=0.5, signal=0, time_is_up=False, log_now=False, execution_s=0.05)
    assert [made.is_due(must_exchange=False) for _ in range(5)] == [False] * 4 + [True]
    assert (made.step_before, made.last_step) == (0, 1)
    made.run(9, loss=1.0, accuracy=0.5, signal=0, time_is_up=False, log_now=False, execution_s=math.inf)
    assert made.is_due(must_exchange=True)
    assert (made.step_before, made.last_step) == (1, 9)


def test_a_single_instance_always_knows():
    assert stop.InstanceExchange(World()).is_due(must_exchange=False)


def test_what_asks_a_run_to_stop_is_said_with_how_to_resume():
    found = stop.requested_stop(exchange(signal=15), 40, None, "--run_dir=runs/a")
    assert found == StopReason("signal", True, "SIGTERM after step 40, saved.", "--run_dir=runs/a")
    found = stop.requested_stop(exchange(time_is_up=True), 40, "2h", "--run_dir=runs/a")
    assert found == StopReason("time limit", True, "--time_limit=2h after step 40, saved.", "--run_dir=runs/a")
    assert stop.requested_stop(exchange(), 40, None, "") is None
    assert found.is_resumable and not found.is_failure


@pytest.mark.parametrize(
    ("reason", "transient"),
    [
        (stop.not_finite("The loss", 8, 16, "There is no checkpoint.", learning_rate=0.5, precision="32.32"), False),
        (stop.weights_differ("dense/kernel differs", 100, "The last checkpoint is of step 64.", "--run_dir=a"), True),
        (stop.stalled("No heartbeat for 7 s.", "There is no checkpoint.", "--run_dir=a"), True),
    ],
)
def test_failures_say_whether_they_are_transient(reason, transient):
    assert reason.is_failure and not reason.is_resumable and reason.transient is transient


def test_a_loss_that_is_not_finite_names_the_steps_and_what_to_change():
    found = stop.not_finite("The loss", 8, 16, "There is no checkpoint.", learning_rate=0.5, precision="16.16")
    assert found.message == (
        "The loss became NaN or infinite between steps 8 and 16. There is no checkpoint. Start again in another "
        "--run_dir with a lower --learning_rate (it rises to 0.5), or use --loss_scaling=dynamic."
    )


def test_early_stopping_waits_for_some_validations_without_a_lower_loss():
    early = stop.EarlyStopping(2, {})
    losses = [3.0, 2.0, 2.5, 1.9, 2.0, None]
    reasons = [early.add(step, loss) for step, loss in enumerate(losses, 1)]
    assert reasons[:-1] == [None] * 5
    assert reasons[-1] == StopReason(
        "early stopping", False, "Validation loss has not improved for 2 validations; stopping early after step 6."
    )
    assert not reasons[-1].is_failure and not reasons[-1].is_resumable


@given(st.lists(st.floats(0, 10) | st.none(), max_size=12), st.integers(1, 4), st.integers(0, 12))
def test_early_stopping_does_not_depend_on_where_a_run_was_resumed(losses, patience, cut):
    whole = stop.EarlyStopping(patience, {})
    reasons = [whole.add(step, loss) for step, loss in enumerate(losses)]
    resumed = stop.EarlyStopping(patience, dict(enumerate(losses[:cut])))
    assert [resumed.add(step, losses[step]) for step in range(cut, len(losses))] == reasons[cut:]
    assert all(resumed.has_validated(step) for step in range(len(losses))) and not resumed.has_validated(99)


def test_a_run_that_is_started_again_after_early_stopping_has_the_same_reason():
    early = stop.EarlyStopping(1, {})
    early.add(4, 1.0)
    reason = early.add(8, 2.0)
    assert reason is not None and stop.EarlyStopping(1, {4: 1.0, 8: 2.0}).reason() == reason
    assert stop.EarlyStopping(2, {4: 1.0, 8: 2.0}).reason() is None


def test_without_patience_a_run_never_stops_early():
    early = stop.EarlyStopping(0, {})
    assert [early.add(step, 1.0) for step in range(9)] == [None] * 9


def test_a_first_signal_is_noted_and_a_second_exits():
    said = []
    before = signal.getsignal(signal.SIGTERM)
    with stop.SignalHandler(said.append, said.append) as handler:
        handler.begin_training()
        os.kill(os.getpid(), signal.SIGTERM)
        assert handler.received == signal.SIGTERM
        with pytest.raises(SystemExit) as caught:
            os.kill(os.getpid(), signal.SIGTERM)
        assert caught.value.code == 128 + signal.SIGTERM
    assert [text.split(":")[0] for text in said] == ["SIGTERM", "SIGTERM"]
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("launched", [False, True])
def test_before_the_first_update_a_signal_exits_at_once_even_while_the_main_thread_is_in_a_library(
    launched, monkeypatch
):
    """The lock stands for Horovod's init: no handler of Python can run until it returns."""
    if launched:
        monkeypatch.setenv("POPDIST_NUM_TOTAL_REPLICAS", "2")
    code = """
import ctypes, os, signal, sys, threading
from tf_ipu_dp.training import stop

def leave():
    print("removed", flush=True)

with stop.SignalHandler(print, lambda text: print(text, flush=True)) as handler:
    handler.before_leaving = leave
    print("ready", flush=True)
    lock = (ctypes.c_byte * 64)()
    libc = ctypes.CDLL(None)
    libc.pthread_mutex_lock(lock)
    libc.pthread_mutex_lock(lock)  # for ever, whatever signal arrives
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=120)
    told = [] if launched else ["train: SIGTERM before the first update; there is nothing to save."]
    assert (process.returncode, out.splitlines()) == (143, ["removed", *told])
