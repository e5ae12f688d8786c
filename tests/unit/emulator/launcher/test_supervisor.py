"""What happens to a job, in order."""

from __future__ import annotations

import signal
import threading

import pytest

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
