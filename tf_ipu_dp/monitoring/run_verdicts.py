"""The bottlenecks of the runs in a snapshot. Imports the planner only where there is a run."""

from __future__ import annotations

import collections
import dataclasses
from pathlib import Path
from typing import Dict

from tf_ipu_dp import cli
from tf_ipu_dp.monitoring.snapshots import GONE, Snapshot
from tf_ipu_dp.runs.records import Verdict


def add_verdicts(snapshot: Snapshot) -> Snapshot:
    """Returns the snapshot with the verdict on each of its runs that has one."""
    runs = snapshot.runs
    if not runs:
        return snapshot
    from tf_ipu_dp.monitoring import diagnosis

    found: Dict[str, Verdict] = {}
    for run in runs:
        folder = Path(run.run_dir)
        verdict = diagnosis.explain_recent(folder)
        if run.leader.state == GONE:  # the last verdict of a run is about all of it
            try:
                verdict = diagnosis.explain(folder).verdict
            except cli.UsageError:  # its folder is gone too
                verdict = None
        if verdict is not None:
            found[run.run_dir] = verdict
    return dataclasses.replace(snapshot, verdicts=found)


def name_runs(snapshot: Snapshot) -> Dict[str, str]:
    """Returns the name of each run by its folder; runs of the same name are shown by their folders."""
    runs = snapshot.runs
    counts = collections.Counter(run.run for run in runs)
    return {run.run_dir: run.run if run.run and counts[run.run] == 1 else run.run_dir for run in runs}
