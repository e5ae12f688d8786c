"""poprun's agent on another host: `python -m tf_ipu_dp.emulator.launcher.host_agent`, started through a remote shell.

Starts the processes of one host, forwards their output and exits, and ends all of them when poprun's heartbeat or the
network of the job is lost.
"""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import socket
import sys
import threading
import time
from typing import Any, Optional, Sequence, Tuple

from tf_ipu_dp.emulator.launcher import host_messages, network, processes
from tf_ipu_dp.emulator.launcher.host_job import HostJob, inherited_environment

_SERVER_TIMEOUT_S = 10.0
_POLL_S = 0.02  # until the processes are prepared
_CLONE_NEWUTS, _MAX_HOST_NAME = 0x04000000, 64


class HostAgent:
    """The other side of `RemoteHost`. It also receives the output and exits of the processes."""

    def __init__(self) -> None:
        # None requests the end. Signal handlers may add it at any moment.
        self._inbox: queue.SimpleQueue[Optional[Tuple[str, Any]]] = queue.SimpleQueue()
        self._processes: Optional[processes.LocalProcesses] = None
        self._unstarted: Optional[processes.LocalProcesses] = None  # while they are prepared
        self._server: Optional[Tuple[str, int]] = None
        self._write_lock = threading.Lock()

    def run(self) -> None:
        """Follows poprun's messages until the job or poprun has ended."""
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, lambda *_: self._inbox.put(None))
        interfaces = [[each.name, each.address, each.netmask] for each in network.read_interfaces()]
        self._send("hello", [socket.gethostname(), interfaces])
        for target in (self._read_messages, self._send_heartbeats):
            threading.Thread(target=target, daemon=True).start()
        last_message_at = time.monotonic()
        while True:
            self._start_when_prepared()
            try:
                message = self._inbox.get(timeout=1.0 if self._unstarted is None else _POLL_S)
            except queue.Empty:
                if time.monotonic() - last_message_at > host_messages.HEARTBEAT_TIMEOUT_S:
                    break
                continue
            if message is None:
                break
            last_message_at = time.monotonic()
            kind, value = message
            if kind == "job":
                self._prepare(HostJob.from_json(value))
            elif kind == "signal" and self._processes is not None:
                if self._unstarted is not None:
                    self._report_not_started(self._unstarted.indices, value)
                    break
                self._processes.send_signal(value)
            elif kind == "close":
                self._unstarted = None
                threading.Thread(target=self._close, args=tuple(value), daemon=True).start()
        if self._processes is not None:
            self._processes.close(processes.FAILURE_GRACE_S, terminate=True)

    def write(self, index: int, name: str, data: bytes) -> None:
        """Forwards output of a process."""
        self._send("output", [index, name, data.decode("latin-1")])

    def finish(self, index: int, name: str) -> None:
        """Forwards the end of a process's output."""
        self._send("finish", [index, name])

    def exited(self, ended: processes.Exit) -> None:
        """Forwards the exit of a process."""
        self._send("exited", [ended.index, ended.status, ended.by_signal])

    def stopped(self, index: int, pid: int, seconds: float) -> None:
        """Forwards that a process has been stopped for some time."""
        self._send("stopped", [index, pid, seconds])

    def _prepare(self, job: HostJob) -> None:
        problem = network.why_unreachable(job.server, _SERVER_TIMEOUT_S)
        if problem:
            self._fail(f"{problem} Choose another network with --host-subnet CIDR.")
            return
        if job.own_name and not _set_host_name(job.own_name):
            self._fail(
                f"another host has the same name {socket.gethostname()}, and Horovod would treat both as one. "
                "Give them different names."
            )
            return
        self._program, self._server = job.program[0], job.server
        self._processes = processes.LocalProcesses(
            "", job.commands(inherited_environment()), self, self, job.stall_timeout_s
        )
        self._unstarted = self._processes
        self._unstarted.prepare()

    def _start_when_prepared(self) -> None:
        if self._unstarted is None or not self._unstarted.is_prepared():
            return
        prepared, self._unstarted = self._unstarted, None
        try:
            prepared.start()
        except OSError as error:
            self._fail(f"{self._program} cannot be started ({error.strerror}).")
            return
        threading.Thread(target=self._watch_network, args=(self._server,), daemon=True).start()

    def _report_not_started(self, indices: Sequence[int], number: int) -> None:
        """Reports processes that a signal has ended before they were started."""
        for index in indices:
            self.exited(processes.Exit(index, 128 + number, number))
        self._send("closed", 1)

    def _close(self, grace_s: float, terminate: bool) -> None:
        if self._processes is not None:
            self._processes.close(grace_s, terminate)
            while not self._processes.is_drained():
                time.sleep(0.01)
        self._send("closed", 1)

    def _read_messages(self) -> None:
        for line in sys.stdin.buffer:
            self._inbox.put(host_messages.decode(line))
        self._inbox.put(None)

    def _send_heartbeats(self) -> None:
        while True:
            self._send("heartbeat", 1)
            time.sleep(host_messages.HEARTBEAT_S)

    def _watch_network(self, server: Optional[Tuple[str, int]]) -> None:
        """Fails when the server cannot be reached: the remote shell may use another network than the instances."""
        while True:
            time.sleep(host_messages.HEARTBEAT_S)
            problem = network.why_unreachable(server, host_messages.HEARTBEAT_TIMEOUT_S)
            if problem:
                self._fail(problem)
                return

    def _fail(self, problem: str) -> None:
        self._send("failed", problem)
        self._inbox.put(None)

    def _send(self, kind: str, value: Any) -> None:
        data = host_messages.PREFIX + host_messages.encode(kind, value)
        try:
            with self._write_lock:
                sys.stdout.buffer.write(data)
                sys.stdout.buffer.flush()
        except (OSError, ValueError):  # poprun has ended
            self._inbox.put(None)


def _set_host_name(name: str) -> bool:
    """Sets a separate host name for this process and its children: containers on different hosts may share one."""
    libc = ctypes.CDLL(None, use_errno=True)
    text = name.encode()[:_MAX_HOST_NAME]
    return bool(libc.unshare(_CLONE_NEWUTS) == 0 and libc.sethostname(text, len(text)) == 0)


if __name__ == "__main__":
    HostAgent().run()
    os._exit(0)  # threads may be blocked in writes to a closed connection
