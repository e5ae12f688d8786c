"""How processes that were started are ended."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

from tf_ipu_dp.distributed import job_process


def test_a_process_that_does_not_listen_is_made_to_end(monkeypatch):
    monkeypatch.setattr(job_process, "_STOP_S", 0.2)
    program = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True) as process:
        process.stdout.readline()
        job_process.stop_session(process)
        assert process.returncode == -9


def test_a_signal_that_does_not_interrupt_the_wait_is_forwarded_all_the_same():
    # The kernel hands it to the other thread, so that nothing wakes up the main one, which has to run the handler.
    forwarder = job_process._SignalForwarder(lambda pid: False)
    with subprocess.Popen(["sleep", "300"]) as process, forwarder:
        other = threading.Timer(0.1, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGTERM))
        other.start()
        assert forwarder.wait(process) == 143
        other.join()


def test_a_signal_before_the_process_is_known_is_forwarded_once():
    asked = []
    forwarder = job_process._SignalForwarder(lambda pid: asked.append(pid) or False)
    with forwarder, subprocess.Popen(["sleep", "300"]) as process:
        signal.raise_signal(signal.SIGINT)
        assert not asked
        assert forwarder.wait(process) == 130
    assert asked == [process.pid]
