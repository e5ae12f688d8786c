"""How poprun reports the first failure: a sentence on stderr, and a JSON file for the program that started it."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Sequence

from tf_ipu_dp.emulator.launcher import stop_signals
from tf_ipu_dp.emulator.launcher.supervisor import Failure

FILE_VARIABLE = stop_signals.REPORT_VARIABLE


def render(failure: Failure, *, instances: int, hosts: int) -> str:
    """Returns the sentence for a failure of an instance or a host."""
    ended = failure.exit
    if failure.reason or ended is None:
        return failure.reason
    where = f" on host {failure.host}" if hosts > 1 else ""
    if ended.by_signal:
        how = f"was killed by {signal.Signals(ended.by_signal).name}"
    else:
        how = f"exited with status {ended.status}"
    others = "; the other instances were stopped" if instances > 1 else ""
    return f"instance {ended.index}{where} {how}{others}."


def write(instance: int, host: str, failure: Failure, last_lines: Sequence[str]) -> None:
    """Writes instance, host, status, last_lines and reason to the file that IPU_EMULATOR_REPORT names, if it is set."""
    if not os.environ.get(FILE_VARIABLE):
        return
    path = Path(os.environ[FILE_VARIABLE])
    record = {
        "instance": instance,
        "host": socket.gethostname() if host in ("", "localhost") else host,
        "status": failure.status,
        "last_lines": list(last_lines),
        "reason": failure.reason,
    }
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(record), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        print(f"poprun: {FILE_VARIABLE}={path} cannot be written ({error.strerror}).", file=sys.stderr)
