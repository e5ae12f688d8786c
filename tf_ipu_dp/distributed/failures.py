"""Which instance of a job failed first, and why. Pure: the evidence is passed in.

When one instance fails, the others lose their peer and fail too, and their errors may be written before its own.
The first failure is found from two kinds of evidence:

- The launcher's report. The emulator's poprun watches all processes and reports the first failure
  (`emulator/launcher/supervisor.py` describes how); mpirun prints which instance was killed. Only a launcher
  knows of an instance that was killed or of a host that was lost. The SDK's poprun and srun report nothing.
- The error files in the run's folder. An instance that fails writes its traceback, and whether a restart can help; one
  that stalls is reported by another. Only they have the whole error, but a killed instance writes none, and they are
  not visible where the hosts share no disk.

In both, an error about a lost peer (`is_lost_peer`) is a secondary failure: it is the first one only if there is no
other. The report takes precedence over the error files, unless the reported instance wrote an error itself: then the
earliest error counts. Both kinds are needed, and nothing else is used.
"""

from __future__ import annotations

import dataclasses
import re
import signal
from typing import Any, Mapping, Optional, Sequence, Tuple

from tf_ipu_dp import cli
from tf_ipu_dp.runs.run_folder import InstanceError

LAST_LINES = 20
STOP_STATUSES = (128 + signal.SIGINT, 128 + signal.SIGTERM)

LOST_PEERS = "lost its peers"  # in messages of our own instances
# Messages of Horovod, Gloo and Open MPI about a lost peer. Gloo's errors contain its file names.
_LOST_PEER = re.compile(
    r"HorovodInternalError|Horovod has been shut down|Horovod\w*(?:reduce|gather|cast|toall)|\bgloo\b|MPI_ABORT|"
    rf"Connection closed by peer|{LOST_PEERS}"
)
_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+")


def is_lost_peer(text: str) -> bool:
    """Whether an error is a consequence of the failure of another instance."""
    return bool(_LOST_PEER.search(text))


@dataclasses.dataclass(frozen=True)
class LauncherReport:
    """The first failure, as the launcher saw it."""

    instance: Optional[int]
    host: Optional[str]
    status: int
    last_lines: Tuple[str, ...] = ()
    lost_host: str = ""  # a sentence, where a host or its network failed rather than the instance

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> LauncherReport:
        """Reads the report that the emulator's poprun writes to the file in IPU_EMULATOR_REPORT."""
        instance = value.get("instance")
        return cls(
            instance=instance if isinstance(instance, int) and instance >= 0 else None,
            host=value.get("host") or None,
            status=int(value.get("status") or 1),
            last_lines=tuple(str(line) for line in value.get("last_lines") or ())[-LAST_LINES:],
            lost_host=str(value.get("reason") or ""),
        )


@dataclasses.dataclass(frozen=True)
class FirstFailure:
    """The first failure of a job. `status` is None if only the instance's error file is known."""

    instance: Optional[int]
    host: Optional[str]
    status: Optional[int]
    last_lines: Tuple[str, ...]  # of its error file or its output
    transient: bool  # a restart may help
    secondary_failures: int = 0  # instances that failed as a consequence
    lost_host: str = ""  # a sentence, where a host or its network failed rather than the instance

    def __str__(self) -> str:
        if self.lost_host:
            return self.lost_host.rstrip(".")
        if self.instance is None:
            subject = f"host {self.host}" if self.host else "the job"
        else:
            subject = f"instance {self.instance}" + (f" on {self.host}" if self.host else "")
        return f"{subject} {'failed' if self.status is None else _render_status(self.status)}"

    @property
    def is_kill(self) -> bool:
        """Whether the process was killed, crashed or lost its host, instead of failing by itself."""
        return bool(self.lost_host) or (self.status is not None and self.status > 128)

    def resembles(self, other: FirstFailure) -> bool:
        """Whether two jobs failed in the same way; numbers in their last lines are ignored."""
        last = [_NUMBERS.sub("", each.last_lines[-1]) if each.last_lines else "" for each in (self, other)]
        return (self.status, last[0], bool(self.lost_host)) == (other.status, last[1], bool(other.lost_host))


def find_first_failure(
    status: int, report: Optional[LauncherReport], errors: Sequence[InstanceError], instances: int
) -> FirstFailure:
    """Returns the first failure of a job that exited with a status. `errors` are in order of time."""
    wrote_error = {error.instance for error in errors}
    # An instance that reports a stall exits with status 1: the stalled one failed first.
    reported_stall = report is not None and report.status == 1 and any(e.reported_by is not None for e in errors)
    # What all have found together is the cause, whichever of them ends first.
    is_common = report is not None and report.status == 1 and any(error.common for error in errors)
    found = [(_from_error(error), is_lost_peer(error.text)) for error in errors]
    if report and report.instance not in wrote_error and not reported_stall and not is_common:
        found.insert(0, (_from_report(report), is_lost_peer("\n".join(report.last_lines))))
    if not found:
        return FirstFailure(None, None, status, (), transient=True)
    primary = [failure for failure, is_secondary in found if not is_secondary]
    secondary = [failure for failure, is_secondary in found if is_secondary]
    without_error = sorted(set(range(instances)) - wrote_error)
    if primary:
        first = primary[0]
    elif not report and without_error:
        # Every instance that wrote an error lost a peer, so the first is one of those that wrote none.
        lost = f"Instance {cli.alternatives(without_error)} wrote no error; the others lost their connection to it."
        instance = without_error[0] if len(without_error) == 1 else None
        first = FirstFailure(instance, None, status, (lost,), transient=True)
    else:
        first = secondary[0]
    return dataclasses.replace(first, secondary_failures=sum(failure is not first for failure in secondary))


def _from_error(error: InstanceError) -> FirstFailure:
    lines = tuple(error.text.splitlines()[-LAST_LINES:])
    if error.common:
        return FirstFailure(None, None, None, lines, transient=error.transient)
    return FirstFailure(error.instance, error.host, None, lines, transient=error.transient)


def _from_report(report: LauncherReport) -> FirstFailure:
    lines = report.last_lines
    # One sentence without a traceback is a mistake of the user, which would be repeated. The error file shows that too,
    # but is not visible where the hosts share no disk.
    is_usage_error = any(line.startswith("train: ") for line in lines) and not any(
        "Traceback" in line for line in lines
    )
    is_permanent = report.status == 1 and is_usage_error and not is_lost_peer("\n".join(lines)) and not report.lost_host
    return FirstFailure(
        report.instance, report.host, report.status, lines, transient=not is_permanent, lost_host=report.lost_host
    )


def _render_status(status: int) -> str:
    try:
        return f"was killed by {signal.Signals(status - 128).name}"
    except ValueError:
        return f"exited with status {status}"
