"""The processes of a job on another machine: reached through a remote shell, run by an agent there (`host_agent`)."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from tf_ipu_dp.emulator.launcher import host_messages, processes
from tf_ipu_dp.emulator.launcher.host_job import HostJob
from tf_ipu_dp.emulator.launcher.network import HostError, Interface
from tf_ipu_dp.emulator.launcher.supervisor import Events

REMOTE_SHELL_VARIABLE = "OMPI_MCA_plm_rsh_agent"  # Open MPI's variable for a remote shell other than ssh
_ANSWER_TIMEOUT_S = 20.0  # longer than ssh's ConnectTimeout of 10 s
_MAX_SHELL_LINES = 20


def find_remote_shell(choices: Optional[str]) -> List[str]:
    """Returns the command that runs a line on another machine: the first that exists of a list like `ssh : rsh`."""
    commands = [shlex.split(each) for each in (choices or "ssh").split(":") if each.strip()]
    for words in commands:
        if words and shutil.which(words[0]):
            options = ["-x", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"] if Path(words[0]).name == "ssh" else []
            return [*words, *options]
    names = " or ".join(words[0] for words in commands if words) or repr(choices)
    raise HostError(
        "", f"There is no {names} to reach other hosts with. Name a remote shell in {REMOTE_SHELL_VARIABLE}."
    )


class RemoteHost:
    """The processes of a job on another machine; used like `processes.LocalProcesses`."""

    def __init__(self, host: str, shell: Sequence[str], output: processes.Output, events: Events) -> None:
        self.host = host
        self.indices: List[int] = []
        self.hostname = ""  # as reported by the machine
        self.interfaces: List[Interface] = []
        self._job: Optional[HostJob] = None
        self._output, self._events = output, events
        self._shell_lines: List[str] = []  # the last ones that the remote shell wrote to its stderr
        self._answered, self._closed = threading.Event(), threading.Event()
        self._problem = ""
        self._is_handling = False
        self._last_message_at = time.monotonic()
        self._send_lock = threading.Lock()
        self._handlers: Dict[str, Callable[[Any], None]] = {
            "hello": self._on_hello,
            "heartbeat": lambda _: None,
            "output": self._on_output,
            "finish": self._on_finish,
            "exited": self._on_exited,
            "stopped": lambda value: self._events.stopped(*value),
            "failed": self._on_failed,
            "closed": lambda _: self._closed.set(),
        }
        self._process = subprocess.Popen(
            [*shell, host, _agent_command_line()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        for target in (self._read_messages, self._read_shell_errors, self._send_heartbeats):
            threading.Thread(target=target, daemon=True).start()

    def wait_until_ready(self) -> None:
        """Returns when the agent has answered, or raises HostError."""
        self._answered.wait(_ANSWER_TIMEOUT_S)
        if not self._answered.is_set():
            self._problem = f"Host {self.host} did not answer within {_ANSWER_TIMEOUT_S:.0f} s."
        if self._problem:
            raise HostError(self.host, self._problem)

    def assign(self, job: HostJob) -> None:
        """Sets what the host runs."""
        self._job, self.indices = job, list(job.instances)

    def prepare(self) -> None:
        """Starts the processes, when the agent has prepared them. A failure to start them is reported as an event."""
        assert self._job is not None
        self._send("job", self._job.to_json())

    def is_prepared(self) -> bool:
        """Nothing is left to wait for."""
        return True

    def start(self) -> None:
        """Does nothing: the agent starts them."""

    def send_signal(self, number: int) -> None:
        """Sends a signal to every process."""
        self._send("signal", number)

    def close(self, grace_s: float, terminate: bool) -> None:
        """Ends the processes that are left, and the connection."""
        if not self._problem and self._job is not None:
            self._send("close", [grace_s, terminate])
            self._closed.wait(grace_s + processes.FAILURE_GRACE_S)
        self._problem = self._problem or "closed"
        self._closed.set()
        with contextlib.suppress(OSError, ValueError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(processes.FAILURE_GRACE_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def is_drained(self) -> bool:
        """Whether all output has been forwarded, after `close`."""
        return self._closed.is_set()

    def _send(self, kind: str, value: Any) -> None:
        assert self._process.stdin is not None
        with self._send_lock, contextlib.suppress(OSError, ValueError):  # a lost connection is found by the reader
            self._process.stdin.write(host_messages.encode(kind, value))
            self._process.stdin.flush()

    def _send_heartbeats(self) -> None:
        while not self._problem:
            self._send("heartbeat", 1)
            time.sleep(host_messages.HEARTBEAT_S)
            age_s = time.monotonic() - self._last_message_at
            if self._answered.is_set() and age_s > host_messages.HEARTBEAT_TIMEOUT_S and not self._is_handling:
                self._report_lost(f"Host {self.host} has not answered for {age_s:.0f} s.")

    def _read_messages(self) -> None:
        assert self._process.stdout is not None
        try:
            for line in self._process.stdout:
                self._last_message_at = time.monotonic()
                if line.startswith(host_messages.PREFIX):
                    self._handle(line[len(host_messages.PREFIX) :])
        except Exception as error:
            self._report_lost(f"Host {self.host} sent a message that cannot be read ({type(error).__name__}: {error}).")
            return
        self._process.wait()
        time.sleep(0.1)  # for the last lines of the remote shell
        self._report_lost(self._why_it_ended())

    def _handle(self, message: bytes) -> None:
        self._is_handling = True  # a slow reader of our output must not look like a lost heartbeat
        try:
            kind, value = host_messages.decode(message)
            self._handlers[kind](value)
        finally:
            self._last_message_at, self._is_handling = time.monotonic(), False

    def _read_shell_errors(self) -> None:
        assert self._process.stderr is not None
        for raw in self._process.stderr:
            line = raw.decode("utf-8", "replace").strip()
            self._shell_lines = [*self._shell_lines[-_MAX_SHELL_LINES:], line]
            if self.hostname and line:
                self._output.write(min(self.indices, default=0), "stderr", f"{self.host}: {line}\n".encode())

    def _report_lost(self, reason: str) -> None:
        if not self._problem:
            self._problem = reason
            self._answered.set()
            if self._job is not None:
                self._events.host_lost(self.host, reason)
        self._closed.set()

    def _why_it_ended(self) -> str:
        code = self._process.returncode
        last_line = next((line for line in reversed(self._shell_lines) if line), "")
        if code == host_messages.NO_DIRECTORY:
            return f"Host {self.host} has no directory {Path.cwd()}. Make it there, or start from one that all have."
        if code == host_messages.NO_PYTHON:
            return f"Host {self.host} has no {sys.executable}. Install the same environment at the same place there."
        if "No module named" in last_line:
            return f"Host {self.host} has an incomplete environment in {sys.prefix}: {last_line}."
        if self.hostname:
            return f"The connection to host {self.host} was lost{f' ({last_line})' if last_line else ''}."
        return f"Host {self.host} cannot be reached: {last_line or f'the remote shell exited with status {code}'}."

    def _on_hello(self, value: Sequence[Any]) -> None:
        self.hostname, interfaces = value
        self.interfaces = [Interface(*each) for each in interfaces]
        self._answered.set()

    def _on_output(self, value: Tuple[int, str, str]) -> None:
        self._output.write(value[0], value[1], value[2].encode("latin-1"))

    def _on_finish(self, value: Tuple[int, str]) -> None:
        self._output.finish(*value)

    def _on_exited(self, value: Tuple[int, int, int]) -> None:
        self._events.exited(processes.Exit(*value))

    def _on_failed(self, value: str) -> None:
        self._report_lost(f"Host {self.host}: {value}")


def _agent_command_line() -> str:
    """Returns the command line that starts the agent. It works in any login shell."""
    root = Path(__file__).resolve().parents[3]
    directory, python = shlex.quote(str(Path.cwd())), shlex.quote(sys.executable)
    script = (
        f"cd {directory} 2>/dev/null || exit {host_messages.NO_DIRECTORY}; "
        f"test -x {python} || exit {host_messages.NO_PYTHON}; "
        f"PYTHONPATH={shlex.quote(str(root))} exec {python} -m tf_ipu_dp.emulator.launcher.host_agent"
    )
    return f"exec sh -c {shlex.quote(script)}"
