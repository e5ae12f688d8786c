"""Runs pip and other programs of an installation: progress, a log, and a failure as one sentence."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Dict, List, Optional, Sequence

from tf_ipu_dp.environment.status import KilledError, SetupError, Status

_LOG = "install.log"
_NO_NETWORK = re.compile(
    r"(NewConnectionError|ConnectTimeoutError|NameResolutionError|ProxyError|ReadTimeoutError|Connection refused|"
    r"Temporary failure in name resolution|Name or service not known|Network is unreachable|timed out|SSLError)"
)


def pip(
    python: Path,
    words: Sequence[str],
    log_dir: Path,
    status: Status,
    what: str,
    settings: Optional[Dict[str, str]] = None,
) -> None:
    """Runs pip of a Python; `what` begins the sentence about a failure."""
    common = ["--disable-pip-version-check", "--no-input", "--progress-bar", "off", "--retries", "2"]
    run([str(python), "-m", "pip", words[0], *common, *words[1:]], log_dir, status, what, settings)


def run(
    command: Sequence[str], log_dir: Path, status: Status, what: str, settings: Optional[Dict[str, str]] = None
) -> None:
    """Runs a command, shows its progress, logs all its output, and turns a failure into a sentence."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    environment.update(settings or {}, PYTHONUNBUFFERED="1")
    log_path = log_dir / _LOG
    lines: List[str] = []
    with log_path.open("a", encoding="utf-8") as log:
        log.write(f"$ {' '.join(command)}\n")
        # close_fds=False passes the lock on.
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment,
            text=True, errors="replace", close_fds=False,
        ) as process:  # fmt: skip
            assert process.stdout
            for line in process.stdout:
                log.write(line)
                lines.append(line.strip())
                show_progress(line.strip(), status)
    if process.returncode == 0:
        return
    reason = _NO_NETWORK.search("\n".join(lines))
    if reason:
        raise SetupError(
            f"the package index cannot be reached ({reason[0]}). Check the network, the proxy "
            f"(https_proxy) or pip's index settings and start again; details are in {log_path}."
        )
    if process.returncode < 0:
        raise KilledError(f"{what} was killed by signal {-process.returncode}; details: {log_path}. Start again.")
    errors = [line for line in lines if re.match(r"(\w*Error\b|ERROR:|error:)", line)]
    detail = (errors or [line for line in lines if line] or ["no output"])[-1]
    raise SetupError(f"{what} failed: {detail.rstrip('.')}. The whole output is in {log_path}.")


def show_progress(line: str, status: Status) -> None:
    """Shows what a line of pip's or the compiler's output says of the progress."""
    compiled = re.match(r"\[(\d+)/(\d+)\]", line)
    download = re.match(r"Downloading (\S+).*?\(([\d.]+) (kB|MB)\)", line)
    if compiled:
        status.progress(f"compiling {compiled[1]} of {compiled[2]}", keep=int(compiled[1]) % 20 == 0)
    elif download:
        large = download[3] == "MB" and float(download[2]) > 10
        status.progress(f"downloading {download[1].rsplit('/', 1)[-1]} ({download[2]} {download[3]})", keep=large)
    elif line.startswith("Collecting "):
        status.progress(f"collecting {line.split()[1]}")
    elif line.startswith("Installing collected packages"):
        status.progress(f"installing {line.count(',') + 1} packages", keep=True)
