"""Deletes runs: only folders that are runs, never one that is alive, and nothing that a run did not write.

What would be deleted is planned first, so that it can be shown. Links are removed and never followed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import stat
from pathlib import Path
from typing import Dict, List, Optional, Sequence, TextIO, Tuple

from tf_ipu_dp.run_catalogue import summaries
from tf_ipu_dp.run_catalogue.summaries import RunSummary
from tf_ipu_dp.runs import run_folder, safe_files

# Deleted last: an interrupted deletion leaves a folder that is still known as a run.
_LAST = ("plan.json", "run.flags", ".lock")
_NAMES = {
    *(each.name for each in vars(run_folder.RunFolder(Path())).values() if isinstance(each, Path) and each.name),
    *_LAST,
    "status",
    ".export",
    ".export-old",
    "tracking.json",
    "wandb",
}
_PATTERNS = (re.compile(r"errors-\d+"), re.compile(r"\.trial-.*"), re.compile(r"\..*\.tmp"))
_LOGS = (".log", ".out", ".err")


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A run that was chosen to be deleted: how much that frees, or why it is kept."""

    run: RunSummary
    bytes: int
    kept: str = ""  # the reason, as a part of a sentence

    @property
    def path(self) -> Path:
        return Path(self.run.run_dir)


def plan(
    chosen: Sequence[RunSummary], all_runs: Sequence[RunSummary], *, older_than_s: Optional[float], keep_best: bool,
    now: float,
) -> List[Candidate]:  # fmt: skip
    """Returns what would become of the chosen runs that are old enough.

    The best run is the best of all runs of its model and data set, whatever was chosen.
    """
    best = find_best(all_runs) if keep_best else {}
    found = []
    for run in chosen:
        path = Path(run.run_dir)
        changed = summaries.changed_at(path)
        if older_than_s is not None and (changed is None or now - changed < older_than_s):
            continue
        kept = _why_kept(run, path, now)
        if not kept and best.get((run.model, run.dataset)) == run.run_dir:
            kept = f"it has the best accuracy of {run.model} on {run.dataset}"
        found.append(Candidate(run, 0 if kept else measure(path), kept))
    return found


def find_best(runs: Sequence[RunSummary]) -> Dict[Tuple[Optional[str], Optional[str]], str]:
    """Returns the folder of the run with the best accuracy, by model and data set; of equal ones the newest."""
    best: Dict[Tuple[Optional[str], Optional[str]], RunSummary] = {}
    for run in runs:
        before = best.get((run.model, run.dataset))
        if run.best_accuracy is not None and (before is None or _rank(run) > _rank(before)):
            best[(run.model, run.dataset)] = run
    return {key: run.run_dir for key, run in best.items()}


def delete(candidate: Candidate, now: float) -> str:
    """Deletes a run, and returns why it was not if it was not. The run is locked meanwhile: nobody can resume it."""
    path = candidate.path
    lock: Optional[TextIO] = None
    try:
        if not summaries.is_run(path):
            return "it is not the folder of a run any more"
        if (path / ".lock").is_symlink():
            return ".lock in it is a link"
        lock = safe_files.lock_file(path / ".lock", wait=False)
        why = _why_kept(candidate.run, path, now)
        if why:
            return why
        names = sorted(entry.name for entry in path.iterdir())
        for name in [*(name for name in names if name not in _LAST), *(name for name in _LAST if name in names)]:
            _remove(path / name)
        path.rmdir()
    except BlockingIOError:
        return "it is running"
    except OSError as error:
        return f"it cannot be deleted ({error.strerror or error})"
    finally:
        if lock:
            lock.close()
    return ""


def measure(path: Path) -> int:
    """Returns the bytes on the disk of a folder. A file with several names counts once; links are not followed."""
    total, seen = 0, set()
    for folder, _, files in os.walk(path, followlinks=False):
        for name in [*files, "."]:
            with contextlib.suppress(OSError):
                found = os.lstat(Path(folder, name))
                if (found.st_dev, found.st_ino) not in seen:
                    seen.add((found.st_dev, found.st_ino))
                    total += found.st_blocks * 512
    return total


def _why_kept(run: RunSummary, path: Path, now: float) -> str:
    if run.state == summaries.RUNNING or summaries.is_running(path, now):
        return "it is running"
    others = _foreign_entries(path)
    if others:
        return f"{others[0]} in it is not a run's file"
    if path.resolve() == Path.cwd():
        return "it is the current folder"
    return ""


def _foreign_entries(path: Path) -> List[str]:
    """Returns what is in a run's folder that no run writes there: it may be somebody's only copy."""
    names = sorted(entry.name for entry in path.iterdir())
    return [
        name for name in names
        if name not in _NAMES and Path(name).suffix not in _LOGS and not any(p.fullmatch(name) for p in _PATTERNS)
    ]  # fmt: skip


def _remove(path: Path) -> None:
    if stat.S_ISDIR(os.lstat(path).st_mode):
        shutil.rmtree(path)
    else:
        path.unlink()


def _rank(run: RunSummary) -> Tuple[float, float]:
    return (run.best_accuracy or 0.0, run.changed or 0.0)
