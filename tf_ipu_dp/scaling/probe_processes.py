"""The processes of a calibration: starts them, reads the records that they write, and ends them.

On the emulator one program imports the trainer and forks the processes of all layouts, one layout after the other. The
Poplar SDK is not made for that: there, each process is a program of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Dict, Iterator, List, Mapping, Optional, Sequence, Type

from tf_ipu_dp import cli
from tf_ipu_dp.distributed.job_process import start_session, stop_session
from tf_ipu_dp.runs.records import TrainingRecord
from tf_ipu_dp.runs.run_folder import RunFolder
from tf_ipu_dp.scaling import our_runs, record_windows
from tf_ipu_dp.scaling.probe_program import Order

LIMIT_S = 600
_PROGRAM = "tf_ipu_dp.scaling.probe_program"
_POLL_S = 0.05
_STOP_S = 5.0
_OUTPUT = "output.txt"


@dataclasses.dataclass(frozen=True)
class Trained:
    """A run folder that is trained in, by which program, and what that printed."""

    process: subprocess.Popen[bytes]
    run_dir: Path
    output: Path

    def records(self) -> List[TrainingRecord]:
        """Returns the records so far; UsageError if the program has ended."""
        if self.process.poll() is not None:
            lines = [line for line in self.output.read_text(errors="replace").splitlines() if line.strip()]
            reason = lines[-1] if lines else "it printed nothing"
            raise cli.UsageError(f"The calibration of compute ended with {self.process.returncode}: {reason}")
        found = RunFolder(self.run_dir).read_metrics() if self.run_dir.exists() else []
        return [record for record in found if isinstance(record, TrainingRecord)]


class ProbeProcesses:
    """Trains layouts for a moment, in a folder that is removed at the end. A context; nothing starts before its use."""

    def __init__(self, *, emulated: bool) -> None:
        self._emulated = emulated
        self._temporary = tempfile.TemporaryDirectory(prefix="tf_ipu_dp_probe")
        self._folder = Path(self._temporary.name)
        self._program: Optional[subprocess.Popen[bytes]] = None
        self._starts = 0

    def __enter__(self) -> ProbeProcesses:
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self._stop_program()
        with contextlib.suppress(OSError):  # a process that was killed may have made a file meanwhile
            self._temporary.cleanup()

    def measure(self, words: Sequence[str], processes: int, environ: Mapping[str, str]) -> List[List[TrainingRecord]]:
        """Trains with the flags in so many processes at once, and returns the records of each in which all trained."""
        self._starts += 1
        flag_file = self._folder / f"{self._starts}.flags"
        flag_file.write_text("\n".join(words) + "\n")
        run_dirs = [self._folder / f"run-{self._starts}-{number}" for number in range(processes)]
        training = self._forked if self._emulated else self._started
        with training(flag_file, run_dirs, dict(environ)) as trained:
            return wait_for_records(trained)

    def measure_job(self, words: Sequence[str], environ: Dict[str, str]) -> List[TrainingRecord]:
        """Starts a job of several instances with `launch`, and returns its records."""
        self._stop_program()
        folder = Path(tempfile.mkdtemp(prefix="job", dir=self._folder))
        run_dir, output = folder / "run", folder / "output.txt"
        process = start_session(
            _python("tf_ipu_dp.launch", "--", *words, f"--run_dir={run_dir}"), {**self._variables(), **environ}, output
        )
        try:
            (records,) = wait_for_records([Trained(process, run_dir, output)])
        finally:
            stop_session(process)
        return records

    @contextlib.contextmanager
    def _forked(self, flag_file: Path, run_dirs: Sequence[Path], environ: Dict[str, str]) -> Iterator[List[Trained]]:
        if self._program is None:
            with (self._folder / _OUTPUT).open("wb") as output:
                self._program = subprocess.Popen(
                    _python(_PROGRAM), env=self._variables(), stdin=subprocess.PIPE, stdout=output,
                    stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip
        # The emulator keeps attached devices in this folder; those of processes that were killed would be refused.
        devices = self._make_devices()
        order = Order(str(flag_file), tuple(map(str, run_dirs)), {**environ, "IPU_EMULATOR_DIR": str(devices)})
        self._send(json.dumps(order.to_json()))
        yield [Trained(self._program, run_dir, self._folder / _OUTPUT) for run_dir in run_dirs]

    @contextlib.contextmanager
    def _started(self, flag_file: Path, run_dirs: Sequence[Path], environ: Dict[str, str]) -> Iterator[List[Trained]]:
        started: List[Trained] = []
        try:
            for run_dir in run_dirs:
                output = run_dir.with_suffix(".txt")
                words = _python(_PROGRAM, str(flag_file), str(run_dir))
                started.append(Trained(start_session(words, {**os.environ, **environ}, output), run_dir, output))
            yield started
        finally:
            for each in started:
                _kill(each.process)

    def _send(self, line: str) -> None:
        assert self._program is not None and self._program.stdin is not None
        # A program that has ended is found, with its reason, when the records are read.
        with contextlib.suppress(BrokenPipeError):
            self._program.stdin.write(line.encode() + b"\n")
            self._program.stdin.flush()

    def _stop_program(self) -> None:
        if self._program is None:
            return
        assert self._program.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._program.stdin.close()
        # At the end of its input it ends its processes and waits for them.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._program.wait(_STOP_S)
        _kill(self._program)
        self._program = None

    def _variables(self) -> Dict[str, str]:
        """Returns variables with emulated IPUs of their own, which no other job can hold."""
        if not self._emulated:
            return dict(os.environ)
        return {**os.environ, **our_runs.TIMED_OPTIMIZER, "IPU_EMULATOR_DIR": str(self._make_devices())}

    def _make_devices(self) -> Path:
        return Path(tempfile.mkdtemp(prefix="devices", dir=self._folder))


def wait_for_records(trained: Sequence[Trained]) -> List[List[TrainingRecord]]:
    """Returns the records of each process from the time in which all of them trained: enough of them to agree."""
    deadline = time.monotonic() + LIMIT_S
    skipped: Optional[List[int]] = None
    while time.monotonic() < deadline:
        records = [each.records() for each in trained]
        if skipped is None and all(records):
            # What is next written began while another one may still have been compiling.
            skipped = [len(each) + (1 if len(trained) > 1 else 0) for each in records]
        if skipped is not None:
            own = [record_windows.on_the_wall(each)[count:] for each, count in zip(records, skipped)]
            if record_windows.is_enough(own):
                return own
        time.sleep(_POLL_S)
    raise cli.UsageError(f"The calibration of compute has made too few updates in {LIMIT_S} s.")


def _python(*words: str) -> List[str]:
    return [sys.executable, "-m", *words]


def _kill(process: subprocess.Popen[bytes]) -> None:
    # Nothing of it is kept, so it need not write anything first.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
