"""Watches the processes of a job until all have ended: the first failure ends the others, and no process is left.

When one process fails, its peers lose their connection to it and fail within milliseconds, so poprun may see them end
before it. Two rules find the first failure, and both are needed:

- Processes are ordered by when they *began* to end. A process that ends by itself first closes its connections, in
  Horovod's exit handler, so it sends an exit notice before that (`exit_notices`). Without a notice, its end counts.
- A process that is killed by a signal sends no notice, but its peers do. So one that was killed comes before all that
  exited with a status. SIGABRT does not count: Gloo aborts a process that has lost its peer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import queue
import signal
import threading
import time
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from tf_ipu_dp.emulator.launcher import stop_signals
from tf_ipu_dp.emulator.launcher.connection_watch import ConnectionWatch
from tf_ipu_dp.emulator.launcher.processes import FAILURE_GRACE_S, Exit, HostProcesses

SIGNAL_GRACE_S = 120.0  # after a signal from outside: a training run saves a checkpoint
_SETTLE_S = 0.3  # after the first failure: further ones in this time count as its consequence or its cause
_POLL_S = 0.02
_GRACE_POLL_S = 0.5  # how often it is checked whether processes still can use their grace time
_SIGNALS_S = 0.25  # at most until a signal is handled


@dataclasses.dataclass(frozen=True)
class Failure:
    """What ended the job: the first process that failed, a signal, or the loss of a host."""

    status: int
    exit: Optional[Exit] = None
    host: str = ""
    reason: str = ""  # a sentence, if the exit status alone does not explain the failure
    may_start_again: bool = False  # the instances have never been connected


class Events:
    """A queue of what happens to a job, filled from any thread and by signal handlers."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Tuple[str, Any]] = queue.SimpleQueue()

    def exiting(self, index: int) -> None:
        """Adds an exit notice: a process is about to end, with or without an error."""
        self._queue.put(("exiting", index))

    def exited(self, ended: Exit) -> None:
        """Adds the end of a process."""
        self._queue.put(("exited", ended))

    def host_lost(self, host: str, reason: str) -> None:
        """Adds the loss of a host, with all its processes."""
        self._queue.put(("host_lost", (host, reason)))

    def stalled(self, failure: Failure) -> None:
        """Adds that instances do not connect to each other, or that one is stopped."""
        self._queue.put(("stalled", failure))

    def stopped(self, index: int, pid: int, seconds: float) -> None:
        """Adds that a process has been stopped for some time."""
        self._queue.put(("stopped", (index, pid, seconds)))

    def signalled(self, number: int, _: Any = None) -> None:
        """Adds a signal to poprun itself. A signal handler."""
        self._queue.put(("signalled", number))

    def output_closed(self) -> None:
        """Adds that the reader of poprun's output has closed it."""
        self._queue.put(("output_closed", None))

    def next(self, timeout_s: Optional[float]) -> Tuple[str, Any]:
        """Returns kind and value of the next event, or ("", None) after the timeout.

        It wakes up every now and then, because handlers of signals run between the steps of the main thread only: one
        that arrives just before a wait, or in another thread, does not end the wait.
        """
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = max(deadline - time.monotonic(), 0.0)
            with contextlib.suppress(queue.Empty):
                return self._queue.get(timeout=min(left_s, _SIGNALS_S))
            if left_s <= _SIGNALS_S:
                return "", None


def supervise(
    hosts: Sequence[HostProcesses], events: Events, watch: ConnectionWatch, stall_timeout_s: float = 0.0
) -> Optional[Failure]:
    """Starts the processes, waits until all have ended, and returns the first failure, or None if all succeeded.

    A first SIGINT, SIGTERM or SIGHUP is forwarded, so that the program can save; a second one kills all processes.
    While `watch` sees instances in Horovod's init, where they cannot handle a signal, they are not waited for. If there
    is a stall timeout, all of them have to call it within that time.
    """
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores it, to survive the terminal
        numbers.append(signal.SIGHUP)
    handlers = {number: signal.signal(number, events.signalled) for number in numbers}
    supervisor = _Supervisor(hosts, events, watch)
    try:
        supervisor.start()
        watch.expect_all(stall_timeout_s)
        return supervisor.run()
    finally:
        supervisor.close()
        for number, handler in handlers.items():
            signal.signal(number, handler)


class _Supervisor:
    """One job from its start to its end."""

    def __init__(self, hosts: Sequence[HostProcesses], events: Events, watch: ConnectionWatch) -> None:
        self._hosts, self._events, self._watch = hosts, events, watch
        self._host_names = {index: each.host for each in hosts for index in each.indices}
        self._running = set(self._host_names)
        self._exit_order: List[int] = []  # by exit notice, or by end for processes without one
        self._failed: List[Exit] = []
        self._failure: Optional[Failure] = None  # other than the exit of a process
        self._terminate_at: Optional[float] = None
        self._kill_at: Optional[float] = None
        self._is_terminated = False
        self._grace_s = FAILURE_GRACE_S
        self._handlers: Dict[str, Callable[[Any], None]] = {
            "exiting": self._on_exiting,
            "exited": self._on_exited,
            "host_lost": self._on_host_lost,
            "stalled": self._on_stalled,
            "stopped": self._on_stopped,
            "signalled": self._on_signalled,
            "output_closed": self._on_output_closed,
        }

    def start(self) -> None:
        """Starts the processes of each host when it is prepared, unless the job has ended before."""
        waiting = list(self._hosts)
        for each in waiting:
            each.prepare()
        while waiting and not (self._is_terminated or self._failure or self._failed):
            for each in [each for each in waiting if each.is_prepared()]:
                waiting.remove(each)
                each.start()
            if waiting:
                self._handle_next(_POLL_S)
        for each in waiting:
            self._running -= set(each.indices)

    def run(self) -> Optional[Failure]:
        while self._running:
            deadlines = [at for at in (self._termination_time(), self._kill_at) if at is not None]
            left_s = max(min(deadlines) - time.monotonic(), 0) if deadlines else None
            self._handle_next(left_s if left_s is None else min(left_s, _GRACE_POLL_S))
        if self._failure is not None or not self._failed:
            return self._failure
        killed = [ended for ended in self._failed if ended.by_signal not in (0, signal.SIGABRT)]
        first = min(killed or self._failed, key=lambda ended: self._exit_order.index(ended.index))
        return Failure(first.status, first, self._host_names[first.index])

    def _handle_next(self, timeout_s: Optional[float]) -> None:
        """Handles the next event, if there is one within the timeout, and ends processes whose time is over."""
        kind, value = self._events.next(timeout_s)
        if kind:
            self._handlers[kind](value)
        now = time.monotonic()
        terminate_at = self._termination_time()
        if terminate_at is not None and now >= terminate_at:
            self._terminate(signal.SIGTERM, FAILURE_GRACE_S)
        if self._kill_at is not None and self._watch.is_connecting():
            self._kill_at = min(self._kill_at, now + FAILURE_GRACE_S)
        if self._kill_at is not None and now >= self._kill_at:
            self._send_signal(signal.SIGKILL)
            self._kill_at, self._grace_s = None, 0.0

    def close(self) -> None:
        """Waits until no process is left and all output is shown."""
        if self._kill_at is not None:
            self._grace_s = max(self._kill_at - time.monotonic(), 0.0)
        closing = [
            threading.Thread(target=each.close, args=(self._grace_s, not self._is_terminated), daemon=True)
            for each in self._hosts
        ]
        for thread in closing:
            thread.start()
        while any(thread.is_alive() for thread in closing) or not all(each.is_drained() for each in self._hosts):
            kind, _ = self._events.next(_POLL_S)
            if kind == "signalled":
                if not any(thread.is_alive() for thread in closing):
                    return  # only output is left that is not being read
                self._send_signal(signal.SIGKILL)

    def _termination_time(self) -> Optional[float]:
        """Returns when the running processes are terminated after a failure. It may move with every event."""
        if self._terminate_at is None:
            return None
        failed = {ended.index for ended in self._failed}
        earlier = itertools.takewhile(lambda index: index not in failed, self._exit_order)
        # A process that began to end before those that failed may be the first failure: wait for its status.
        is_undecided = any(index in self._running for index in earlier)
        return self._terminate_at + (FAILURE_GRACE_S if is_undecided else 0.0)

    def _on_exiting(self, index: int) -> None:
        if index not in self._exit_order:
            self._exit_order.append(index)

    def _on_exited(self, ended: Exit) -> None:
        self._on_exiting(ended.index)
        self._running.discard(ended.index)
        if ended.status and not self._is_terminated:
            self._failed.append(ended)
            self._terminate_at = self._terminate_at or time.monotonic() + _SETTLE_S

    def _on_host_lost(self, loss: Tuple[str, str]) -> None:
        host, reason = loss
        indices = {index for index, name in self._host_names.items() if name == host}
        self._running -= indices
        if not self._is_terminated:
            self._failure = self._failure or Failure(1, Exit(min(indices), 1), host, reason)
            self._terminate_at = self._terminate_at or time.monotonic()

    def _on_stopped(self, value: Tuple[int, int, float]) -> None:
        index, pid, seconds = value
        host = self._host_names[index]
        where = f" on host {host}" if len(self._hosts) > 1 else ""
        reason = f"instance {index}{where} (pid {pid}) has been stopped for {seconds:.0f} s, by SIGSTOP or a debugger."
        self._on_stalled(Failure(1, Exit(index, 1), host, reason, may_start_again=not self._watch.was_connected))

    def _on_stalled(self, failure: Failure) -> None:
        if not self._is_terminated and not self._failed:
            self._failure = self._failure or failure
            self._terminate(signal.SIGTERM, FAILURE_GRACE_S)

    def _on_signalled(self, number: int) -> None:
        if self._is_terminated or self._failed:
            self._kill_at = time.monotonic()
        else:
            self._failure = self._failure or Failure(128 + number, reason=stop_signals.render(number))
            self._terminate(number, SIGNAL_GRACE_S)

    def _on_output_closed(self, _: None) -> None:
        if not self._is_terminated:
            self._failure = self._failure or Failure(128 + signal.SIGPIPE)
            self._terminate(signal.SIGTERM, FAILURE_GRACE_S)

    def _terminate(self, number: int, grace_s: float) -> None:
        self._is_terminated, self._terminate_at = True, None
        self._kill_at = time.monotonic() + grace_s
        self._send_signal(number)

    def _send_signal(self, number: int) -> None:
        for each in self._hosts:
            each.send_signal(number)
