"""Who failed first in a job of many instances, and why. Pure: what was found is handed in, and ranked.

When an instance fails, the others fail after it, because they wait for it in vain; and what they say may be written
before the first one's error is. So the cause is not the earliest error, but the earliest of the worst kind.
"""

from __future__ import annotations

import dataclasses
import re
import signal
from typing import Any, List, Mapping, Optional, Sequence, Tuple

from tf_ipu_dp import cli
from tf_ipu_dp.runs.run_folder import InstanceError

LAST_LINES = 20
STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)

# What an instance says that has lost another one.
_ECHO = re.compile(
    r"HorovodInternalError|Horovod has been shut down|Horovod\w*(?:reduce|gather|cast)|\bgloo\b|MPI_ABORT|"
    r"has lost the others"
)
_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+")


@dataclasses.dataclass(frozen=True)
class Cause:
    """What ended a job. `status` is None where only the instance's own words are known."""

    instance: Optional[int]
    host: Optional[str]
    status: Optional[int]
    lines: Tuple[str, ...]  # the last ones that the instance has said or written
    final: bool  # starting again would end the same
    echoes: int = 0  # instances that failed because of this one
    reason: str = ""  # in poprun's words, where a host or the network failed and not the instance

    def __str__(self) -> str:
        if self.reason:
            return self.reason.rstrip(".")
        if self.instance is None:
            who = f"host {self.host}" if self.host else "the job"
        else:
            who = f"instance {self.instance}" + (f" on {self.host}" if self.host else "")
        return f"{who} {'failed' if self.status is None else f'ended with {_status_words(self.status)}'}"

    @property
    def is_death(self) -> bool:
        """Whether the process was ended from outside, or crashed, rather than that it failed by itself."""
        return bool(self.reason) or (self.status is not None and self.status > 128)

    def resembles(self, other: Cause) -> bool:
        """Whether two jobs have ended in the same way, whatever the numbers in what was said."""
        last = [_NUMBERS.sub("", each.lines[-1]) if each.lines else "" for each in (self, other)]
        return (self.status, last[0], bool(self.reason)) == (other.status, last[1], bool(other.reason))


def find_cause(
    status: int, report: Optional[Mapping[str, Any]], errors: Sequence[InstanceError], instances: int
) -> Cause:
    """Returns what ended a job that ended with a status.

    `report` is what the emulator's poprun has seen of the first that failed: instance, host, status, last_lines.
    `errors` are what the instances have written, the earliest first. A death without a word comes before a failure, and
    both before the complaint of one that lost another.
    """
    found: List[Tuple[int, Cause]] = []
    seen = _from_report(report) if report else None
    wrote = {error.instance for error in errors}
    if seen and seen.instance not in wrote:
        is_echo = _is_echo("\n".join(seen.lines))
        found.append((2 if is_echo else 0 if seen.is_death or seen.instance is None else 1, seen))
    for error in errors:
        lines = tuple(error.text.splitlines()[-LAST_LINES:])
        cause = Cause(error.instance, error.host, None, lines, not error.transient)
        found.append((2 if _is_echo(error.text) else 1, cause))
    if not found:
        return Cause(None, None, status, (), final=False)
    rank, cause = min(found, key=lambda pair: pair[0])
    silent = sorted(set(range(instances)) - wrote)
    if rank == 2 and not seen and silent:
        # All that wrote have lost another one, so that it is one of those that did not.
        only = silent[0] if len(silent) == 1 else None
        said = f"Of instance {cli.alternatives(silent)} there is no word; the others have lost their connection to it."
        cause = Cause(only, None, status, (said,), final=False)
    return dataclasses.replace(cause, echoes=sum(kind == 2 and other is not cause for kind, other in found))


def _from_report(report: Mapping[str, Any]) -> Cause:
    lines = tuple(str(line) for line in report.get("last_lines") or ())[-LAST_LINES:]
    status = int(report.get("status") or 1)
    told = any(line.startswith("train: ") for line in lines) and not any("Traceback" in line for line in lines)
    # A sentence and no more: a mistake of the user's, which an instance makes every time.
    final = status == 1 and told and not _is_echo("\n".join(lines))
    instance = report.get("instance")
    is_one = isinstance(instance, int) and instance >= 0
    reason = str(report.get("reason") or "")
    cause = Cause(instance if is_one else None, report.get("host") or None, status, lines, final and not reason)
    return dataclasses.replace(cause, reason=reason)


def _is_echo(text: str) -> bool:
    return bool(_ECHO.search(text))


def _status_words(status: int) -> str:
    try:
        return f"{status} ({signal.Signals(status - 128).name})"
    except ValueError:
        return str(status)
