"""Which processes a view shows, and in which order. Pure."""

from __future__ import annotations

import dataclasses
import os
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

from tf_ipu_dp import cli
from tf_ipu_dp.monitoring.snapshots import Process, Snapshot

# What a table can be sorted by, and whether the largest value comes first.
_ORDERS: Mapping[str, Tuple[Callable[[Process], Any], bool]] = {
    "ipus": (lambda each: min(each.ipus, default=None), False),
    "pid": (lambda each: each.pid, False),
    "user": (lambda each: each.user, False),
    "run": (lambda each: None if each.run is None else (each.run, each.run_dir or "", each.instance or 0), False),
    "time": (lambda each: each.elapsed_s, True),
    "done": (lambda each: each.done_pct, True),
    "eta": (lambda each: each.eta_s, False),
    "loss": (lambda each: each.loss, False),
    "speed": (lambda each: each.samples_per_s, True),
    "cpu": (lambda each: each.cpu_pct, True),
    "memory": (lambda each: each.memory_gib, True),
}
SORT_NAMES = tuple(_ORDERS)


@dataclasses.dataclass(frozen=True)
class View:
    """What a user asked to see."""

    user: Optional[str] = None
    run: Optional[str] = None  # a name, or a folder
    sort: str = SORT_NAMES[0]
    each_ipu: bool = False  # a row for each IPU, in place of a row for each process

    @property
    def filtered(self) -> bool:
        return self.user is not None or self.run is not None

    def apply(self, snapshot: Snapshot) -> Snapshot:
        """Returns the snapshot with the chosen processes in the chosen order, and the IPUs that they hold."""
        chosen = sort_processes(_choose(snapshot.processes, self), self.sort)
        if not self.filtered:
            return dataclasses.replace(snapshot, processes=chosen)
        held = {ipu for process in chosen for ipu in process.ipus}
        folders = {process.run_dir for process in chosen}
        return dataclasses.replace(
            snapshot,
            processes=chosen,
            ipus=tuple(ipu for ipu in snapshot.ipus if ipu.id in held),
            verdicts={folder: verdict for folder, verdict in snapshot.verdicts.items() if folder in folders},
        )

    def describe(self, snapshot: Snapshot) -> Optional[str]:
        """Returns a sentence on what the filters leave out; None without filters."""
        if not self.filtered:
            return None
        given = " ".join(f"--{name}={value}" for name, value in (("user", self.user), ("run", self.run)) if value)
        shown, found = len(_choose(snapshot.processes, self)), len(snapshot.processes)
        if shown:
            return f"{given}: {shown} of {cli.count(found, 'process', 'processes')} shown."
        users = sorted({each.user for each in snapshot.processes if each.user})
        runs = sorted({each.run for each in snapshot.processes if each.run})
        others = [f"--user={name}" for name in users if self.user] + [f"--run={name}" for name in runs if self.run]
        advice = f"Those that do: {', '.join(others)}." if others else "Leave the filter out to see all IPUs."
        return f"No process of {given} holds IPUs. {advice}"


def sort_processes(processes: Tuple[Process, ...], name: str) -> Tuple[Process, ...]:
    """Returns the processes in an order; those without a value come last, as they came."""
    read, largest_first = _ORDERS[name]
    known: List[Tuple[Any, Process]] = [(read(each), each) for each in processes if read(each) is not None]
    known.sort(key=lambda pair: pair[0], reverse=largest_first)
    return (*(each for _, each in known), *(each for each in processes if read(each) is None))


def next_order(name: str) -> str:
    """Returns the order after another, and the first after the last."""
    return SORT_NAMES[(SORT_NAMES.index(name) + 1) % len(SORT_NAMES)]


def _choose(processes: Tuple[Process, ...], view: View) -> Tuple[Process, ...]:
    chosen = [each for each in processes if view.run is None or _is_of_run(each, view.run)]
    # The user of an instance on another host is not known, but the run is that of its instances here.
    owners: Dict[Optional[str], Optional[str]] = {each.run_dir: each.user for each in chosen if each.user}
    return tuple(
        each
        for each in chosen
        if view.user is None or (each.user or (each.run_dir and owners.get(each.run_dir))) == view.user
    )


def _is_of_run(process: Process, text: str) -> bool:
    """Whether a run is meant: by its name, by its folder, or by the end of its folder."""
    if process.run is None:
        return False
    folder = os.path.normpath(process.run_dir or "")
    meant = os.path.normpath(os.path.expanduser(text))  # noqa: PTH111 - text, and not yet a path
    return text == process.run or folder in (meant, os.path.abspath(meant)) or folder.endswith(f"/{meant}")  # noqa: PTH100
