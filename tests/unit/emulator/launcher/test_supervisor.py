"""What happens to a job, in order."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading

import pytest

from tf_ipu_dp.emulator.launcher import processes
from tf_ipu_dp.emulator.launcher.supervisor import Events


@pytest.fixture
def events():
    found = Events()
    before = signal.signal(signal.SIGUSR1, found.signalled)
    yield found
    signal.signal(signal.SIGUSR1, before)


def test_a_signal_that_does_not_interrupt_the_wait_is_an_event_all_the_same(events):
    # The kernel hands it to the other thread, so that nothing wakes up the main one, which has to run the handler.
    other = threading.Timer(0.1, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGUSR1))
    other.start()
    assert events.next(60.0) == ("signalled", signal.SIGUSR1)
    other.join()


def test_without_an_event_the_wait_ends_at_its_timeout(events):
    assert events.next(0.0) == ("", None)
    assert events.next(0.3) == ("", None)
    events.output_closed()
    assert events.next(None) == ("output_closed", None)


FORKING = """
import os, signal, sys
from tf_ipu_dp.emulator.launcher import processes, stop_signals, supervisor

events = supervisor.Events()
signal.signal(signal.SIGTERM, events.signalled)
reading, writing = os.pipe()
restore = stop_signals.restore_in_child

def wait_and_restore(mask):
    os.read(reading, 1)  # the child, which has the handlers of its parent and does not lead its group yet
    restore(mask)

stop_signals.restore_in_child = wait_and_restore
command = processes.Command([sys.executable, "-c", "print('the program runs')"], dict(os.environ))
local = processes.LocalProcesses("", {0: command}, None, events)
done = {"is_done": lambda self: True, "can_fork": lambda self: True, "seconds": 0.0}
local._preloading = type("Preloaded", (), done)()
local._output = type("Output", (), {"write": lambda self, *given: print(given), "finish": lambda self, *given: None})()
local.start()
local.send_signal(signal.SIGTERM)
os.write(writing, b"x")
print(events.next(60.0), flush=True)
local.close(0.0, terminate=False)
"""


def test_a_fork_that_has_not_set_its_handlers_yet_does_not_swallow_a_signal():
    done = subprocess.run([sys.executable, "-c", FORKING], capture_output=True, text=True, check=False, timeout=100)
    assert done.stdout == "('exited', Exit(index=0, status=143, by_signal=15))\n", done.stdout + done.stderr


class StoppedProcess:
    """Receives what happens to a process that stops itself."""

    def __init__(self):
        self.happened = queue.SimpleQueue()

    def write(self, index, name, data):
        pass

    def finish(self, index, name):
        pass

    def exited(self, ended):
        self.happened.put(ended)

    def stopped(self, index, pid, seconds):
        self.happened.put((index, pid, seconds))


def test_a_process_that_is_stopped_ends_by_a_signal_as_one_that_runs():
    observer = StoppedProcess()
    program = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP); signal.pause()"
    words = [sys.executable, "-c", program]
    local = processes.LocalProcesses("", {4: processes.Command(words, dict(os.environ))}, observer, observer)
    local.prepare()
    local.start()
    try:
        os.waitid(os.P_PID, local._processes[4].pid, os.WSTOPPED | os.WNOWAIT)
        local.send_signal(signal.SIGTERM)
        assert observer.happened.get(timeout=60).by_signal == signal.SIGTERM
    finally:
        local.close(0.0, terminate=False)


def test_a_process_that_is_stopped_for_too_long_is_reported_once(monkeypatch):
    for name, value in (("_STATE_POLL_S", 0.05), ("_OTHERS_REPORT_WITHIN_S", 0.1)):
        monkeypatch.setattr(processes, name, value)
    observer = StoppedProcess()
    words = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"]
    local = processes.LocalProcesses("", {4: processes.Command(words, dict(os.environ))}, observer, observer, 0.1)
    local.prepare()
    local.start()
    try:
        index, pid, seconds = observer.happened.get(timeout=60)
        assert (index, pid) == (4, local._processes[4].pid) and seconds > 0.2
        assert observer.happened.empty()
    finally:
        local.close(0.0, terminate=False)
    assert observer.happened.get(timeout=60).by_signal == signal.SIGKILL
