"""Starts a job through a launcher and waits for it: forwards signals to it and reports how it ended."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import IO, Any, Callable, Deque, Iterator, Mapping, Optional, Sequence, Tuple

from tf_ipu_dp import early_signals, terminal_text
from tf_ipu_dp.distributed import launchers
from tf_ipu_dp.distributed.failures import LauncherReport
from tf_ipu_dp.distributed.job import Job
from tf_ipu_dp.runs import json_files

_STALL_VARIABLE = "IPU_EMULATOR_STALL_TIMEOUT"
_RENDEZVOUS_VARIABLE = "IPU_EMULATOR_RENDEZVOUS"
_OUTPUT_TIMEOUT_S = 15.0
_MAX_LAUNCHER_LINES = 50
_PR_SET_PDEATHSIG = 1
_STOP_S = 20.0
_SIGNALS_S = 0.25  # at most until a signal is handled


@dataclasses.dataclass(frozen=True)
class JobEnd:
    """How a job ended: its exit status, and the launcher's report of the first failure, if there is one."""

    status: int
    report: Optional[LauncherReport]


class JobStarter:
    """Starts jobs through one launcher. `extra` are words for the launcher itself."""

    def __init__(self, launcher: str, extra: Tuple[str, ...]) -> None:
        self.launcher = launcher
        self._extra = extra
        self._job_id = os.getpid() + int(re.sub(r"\D", "", os.environ.get("SLURM_JOB_ID", "")) or 0)

    def command(self, job: Job) -> launchers.LaunchCommand:
        """Returns the command that starts a job."""
        program = [sys.executable, "-m", "tf_ipu_dp.train", *job.words]
        return launchers.make_command(
            self.launcher,
            job.plan.topology,
            program,
            python=sys.executable,
            environ=os.environ,
            extra=self._extra,
            job_id=self._job_id,
            root=os.geteuid() == 0,
        )

    def run(self, job: Job, output: Optional[IO[str]] = None, environ: Optional[Mapping[str, str]] = None) -> JobEnd:
        """Starts a job and returns how it ended.

        Its output goes to the output of this process, or to a file. `environ` is added to the launcher's environment.
        """
        command = self.command(job)
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.json"
            shown = {} if output is not None else self._terminal_variables(job)
            given = {**os.environ, **(environ or {}), **shown, **command.environ, "IPU_EMULATOR_REPORT": str(report)}
            if self.launcher == "emulator" and job.config.stall_timeout.seconds:
                given[_STALL_VARIABLE] = str(job.config.stall_timeout.seconds)
            if _RENDEZVOUS_VARIABLE in command.environ:
                given[_RENDEZVOUS_VARIABLE] += f"/{secrets.token_hex(16)}"  # which instance 0 asks the others for
            with _SignalForwarder(self._request_stop) as forwarder:
                process = subprocess.Popen(
                    list(command.words),
                    env=given,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.PIPE if self.launcher == "mpirun" else output,
                    # A terminal's Ctrl-C must reach the launcher once, through the forwarder.
                    start_new_session=True,
                    preexec_fn=self._prepare_child if sys.platform == "linux" else None,  # noqa: PLW1509
                )
                with _copy_output(process.stderr, output or sys.stderr) as launcher_lines:
                    status = forwarder.wait(process)
            written = json_files.read_object(report)
            if written is not None:
                return JobEnd(status, LauncherReport.from_json(written))
            return JobEnd(status, launchers.read_mpirun_output(b"".join(launcher_lines).decode(errors="replace")))

    def _prepare_child(self) -> None:
        die_with_parent()
        if self.launcher == "emulator":  # our poprun unblocks them as soon as it can handle them
            early_signals.block()

    def _terminal_variables(self, job: Job) -> Mapping[str, str]:
        """Returns what shows the leader of a job on this host as a single instance would look: a bar, and no tags."""
        if self.launcher != "emulator" or job.plan.topology.hosts.names or not sys.stderr.isatty():
            return {}
        found = {terminal_text.TERMINAL_VARIABLE: os.ttyname(sys.stderr.fileno()), "IPU_EMULATOR_UNTAGGED": "0"}
        if sys.stdout.isatty():
            found[terminal_text.RESULT_TERMINAL_VARIABLE] = os.ttyname(sys.stdout.fileno())
        return found

    def _request_stop(self, pid: int) -> bool:
        """Asks the instances to save and exit; returns whether that was possible.

        The emulator's poprun forwards a signal. The other launchers would kill the instances within a second.
        """
        if self.launcher == "srun":
            return _signal_job_step(os.environ.get("SLURM_JOB_ID", ""), launchers.step_name(self._job_id))
        # Instances share stop requests, so it is enough to signal those on this host.
        return self.launcher != "emulator" and _signal_instances_below(pid)


class _SignalForwarder:
    """Forwards SIGINT and SIGTERM to a process.

    For the first of them, `request_stop` is called with the process id; if it returns True, the process itself is not
    signalled.
    """

    def __init__(self, request_stop: Callable[[int], bool]) -> None:
        self._request_stop = request_stop
        self._process: Optional[Any] = None
        self._received = 0
        self._is_forwarded = False

    def __enter__(self) -> _SignalForwarder:
        self._handlers = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def wait(self, process: Any) -> int:
        """Returns the exit status: 128 plus the number for a signal, also where the launcher reports another status."""
        self._process = process
        if self._received and not self._is_forwarded:
            self._forward(self._received, first=True)
        while True:
            # A handler runs between two steps of this thread only: a signal just before a wait would not end it.
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = int(process.wait(_SIGNALS_S))
                break
        if self._received and code:
            return 128 + self._received
        return code if code >= 0 else 128 - code

    def _on_signal(self, number: int, _: Optional[FrameType]) -> None:
        first, self._received = not self._received, number
        if self._process:
            self._forward(number, first)

    def _forward(self, number: int, first: bool) -> None:
        self._is_forwarded = True
        if self._process and not (first and self._request_stop(self._process.pid)):
            self._process.send_signal(number)


@contextlib.contextmanager
def _copy_output(source: Optional[IO[bytes]], target: IO[str]) -> Iterator[Deque[bytes]]:
    """Copies a launcher's output, and keeps the launcher's last lines: those without the tag of an instance."""
    launcher_lines: Deque[bytes] = collections.deque(maxlen=_MAX_LAUNCHER_LINES)

    def copy() -> None:
        for line in source or ():
            with contextlib.suppress(OSError):  # keep reading: a launcher with a full pipe would block
                os.write(target.fileno(), line)
            if not line.startswith(b"["):
                launcher_lines.append(line)

    thread = threading.Thread(target=copy, daemon=True)
    thread.start()
    yield launcher_lines
    thread.join(_OUTPUT_TIMEOUT_S)


def _signal_job_step(slurm_job: str, name: str) -> bool:
    """Sends SIGTERM to the tasks of a Slurm job step; returns whether that was possible."""
    listing = ["squeue", "--steps", f"--jobs={slurm_job}", "--noheader", "--format=%i %j"]
    try:
        listed = subprocess.run(listing, capture_output=True, text=True, check=True).stdout.splitlines()
        steps = [line.split()[0] for line in listed if line.split()[1:] == [name]]
        if steps:
            subprocess.run(["scancel", "--signal=TERM", *steps], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return False
    return bool(steps)


def _signal_instances_below(pid: int) -> bool:
    """Sends SIGTERM to the instances that a process has started on this host; returns whether there are any."""
    found = False
    try:
        children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return False
    for child in children:
        with contextlib.suppress(OSError):
            # Only instances start like this: in mpirun's command line the program comes later.
            if Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")[1:3] == [b"-m", b"tf_ipu_dp.train"]:
                os.kill(child, signal.SIGTERM)
                found = True
                continue
        found = _signal_instances_below(child) or found
    return found


def die_with_parent() -> None:
    """Makes the kernel send SIGTERM to this process when its parent is killed, so that a job saves and exits."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def start_session(words: Sequence[str], environ: Mapping[str, str], output: Path) -> subprocess.Popen[bytes]:
    """Starts a process in a session of its own, which ends with this process; its output goes to a file.

    A terminal's Ctrl-C does not reach it, so that this process can end it in order.
    """
    with output.open("wb") as stream:
        return subprocess.Popen(
            words,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509
        )


def stop_session(process: Any) -> None:
    """Ends a process that has a session of its own, with all that is in it: asks first, and then makes it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()
