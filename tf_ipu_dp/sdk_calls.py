"""Calls into the SDK that a child process makes one after the other, and what the SDK answered to each.

The SDK may end the process, hang, or print whatever it likes: the child reports each call on a line of its own, before
and after it, and the parent names the call that was not answered. Never imports TensorFlow.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import tempfile
import threading
from typing import IO, Any, Dict, Iterator, Optional, Sequence, TextIO

from tf_ipu_dp import cli

_MARK = "sdk-call "


@dataclasses.dataclass(frozen=True)
class Call:
    """One call. `answer` is what came back in a few words, or the SDK's error."""

    name: str
    ok: bool
    answer: str


class Reporter:
    """Writes the calls of this process to a stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def begin(self, name: str) -> None:
        """Reports that a call is being made."""
        self._write({"begin": name})

    def end(self, call: Call) -> None:
        """Reports the answer."""
        self._write({"end": dataclasses.asdict(call)})

    def refuse(self, sentence: str) -> None:
        """Reports that no call can be made at all."""
        self._write({"refused": sentence})

    def _write(self, value: Dict[str, Any]) -> None:
        self._stream.write(f"{_MARK}{json.dumps(value)}\n")
        self._stream.flush()


def read_calls(command: Sequence[str], limit_s: float) -> Iterator[Call]:
    """Runs a command whose process reports its calls, and yields them as they are answered.

    A call that is not answered within the limit is ended with the process. `cli.UsageError` if the process refuses.
    """
    pending: Optional[str] = None
    with tempfile.TemporaryFile() as stderr, _started(command, stderr) as process, _Limit(process, limit_s) as limit:
        assert process.stdout is not None
        for line in process.stdout:
            limit.restart()
            if not line.startswith(_MARK):
                continue
            value = json.loads(line[len(_MARK) :])
            if "refused" in value:
                raise cli.UsageError(value["refused"])
            pending = value.get("begin")
            if "end" in value:
                yield Call(**value["end"])
        code = process.wait()
        if pending is not None or code:
            reason = f"no answer within {limit_s:.0f} s" if limit.is_reached else _describe_exit(code)
            yield Call(pending or "exit", False, ", ".join(filter(None, (reason, _last_line(stderr)))))


class _Limit:
    """Kills a process that has been silent for too long."""

    def __init__(self, process: subprocess.Popen[str], limit_s: float) -> None:
        self.is_reached = False
        self._process, self._limit_s = process, limit_s
        self._timer: Optional[threading.Timer] = None

    def __enter__(self) -> _Limit:
        self.restart()
        return self

    def __exit__(self, *raised: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def restart(self) -> None:
        """Begins to count anew."""
        self.__exit__()
        self._timer = threading.Timer(self._limit_s, self._kill)
        self._timer.daemon = True
        self._timer.start()

    def _kill(self) -> None:
        self.is_reached = True
        _kill_group(self._process)


@contextlib.contextmanager
def _started(command: Sequence[str], stderr: IO[bytes]) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr, text=True, errors="replace",
        env={"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ}, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            if process.poll() is None:
                _kill_group(process)


def _kill_group(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"the process ended with exit code {code}"
    try:
        return f"the process was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"the process was killed by signal {-code}"


def _last_line(stderr: IO[bytes]) -> str:
    stderr.seek(0)
    lines = [line.strip() for line in stderr.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else ""
