"""One line about each run below a folder: what it trained, how far it came, how well, and what is wrong with it.

All files are foreign input. A run whose files cannot be read has a summary too, which says what is wrong. Links are not
followed, and nothing is written or locked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import stat
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Tuple

from tf_ipu_dp import cli
from tf_ipu_dp.monitoring import snapshots
from tf_ipu_dp.runs import heartbeat, run_folder, safe_files
from tf_ipu_dp.runs.json_files import read_object
from tf_ipu_dp.runs.plan_record import PlanRecord
from tf_ipu_dp.runs.records import Record, RecordError, RunResult, ValidationRecord

RUNNING, FINISHED, INTERRUPTED, FAILED, DAMAGED = "running", "finished", "interrupted", "failed", "damaged"
STATES = (RUNNING, FINISHED, INTERRUPTED, FAILED, DAMAGED)
_MAX_DEPTH = 8
# An instance on another host cannot be asked whether it is alive; one that was silent for so long is not.
_OTHER_HOST_SILENT_S = 600.0
_VALIDATION = b'"validation"'
_MAX_TEXT = 200


@dataclasses.dataclass(frozen=True)
class RunSummary(Record):
    """One run. None: not known."""

    run_dir: str
    name: str  # of the folder, as seen from the folder that was searched
    state: str
    started: Optional[float] = None  # when it was last started, in seconds since the epoch
    changed: Optional[float] = None  # when its newest file was written
    model: Optional[str] = None
    dataset: Optional[str] = None
    instances: Optional[int] = None
    replicas: Optional[int] = None
    pipeline_stages: Optional[int] = None
    ipus: Optional[int] = None
    global_batch_size: Optional[int] = None
    step: Optional[int] = None
    planned_steps: Optional[int] = None
    best_accuracy: Optional[float] = None  # of all validations
    best_loss: Optional[float] = None
    samples_per_s: Optional[float] = None
    training_s: Optional[float] = None
    verdict: Optional[str] = None
    problem: Optional[str] = None  # what is wrong with the run or its files
    version: Optional[str] = None

    @property
    def layout(self) -> str:
        """Returns `2 x 4` for 2 instances with 4 replicas each, and the stages of a pipeline; a dash if not known."""
        if not self.instances or not self.replicas:
            return "-"
        stages = f", {self.pipeline_stages} stages" if (self.pipeline_stages or 1) > 1 else ""
        return f"{self.instances} x {self.replicas // self.instances}{stages}"


def find_runs(folder: Path) -> List[Path]:
    """Returns the folders of runs below a folder, or the folder itself if it is one, in the order of their names."""
    if not folder.is_dir():
        raise cli.UsageError(f"{folder} is not a folder. Give one that has runs in it, like runs.")
    return sorted(_walk(folder, _MAX_DEPTH))


def is_run(path: Path) -> bool:
    """Whether a folder is that of a run, and no link: every run writes its flags before anything else."""
    return _is_real(path, stat.S_ISDIR) and _is_real(run_folder.RunFolder(path).run_flags, stat.S_ISREG)


def read_summaries(folder: Path, now: float) -> List[RunSummary]:
    """Returns a summary of each run below a folder."""
    return [read_summary(path, now, _name_below(path, folder)) for path in find_runs(folder)]


def read_summary(path: Path, now: Optional[float] = None, name: Optional[str] = None) -> RunSummary:
    """Returns the summary of one run. It never fails: what cannot be read becomes the summary's problem."""
    now = time.time() if now is None else now
    found: Dict[str, Any] = {"run_dir": str(path), "name": path.name if name is None else name, "state": DAMAGED}
    try:
        found.update(_read(path, now))
    except (OSError, ValueError, ArithmeticError, RecursionError) as error:
        found["problem"] = f"it cannot be read ({_shorten(str(error))})"
    return RunSummary(**found)


def is_running(path: Path, now: float) -> bool:
    """Whether a process works on a run, by its heartbeats; on another host, whether it did within ten minutes."""
    return any(
        snapshots.is_instance_running(status, now) or _spoke_elsewhere(status, now)
        for status in heartbeat.read_run(path)
    )


def changed_at(path: Path) -> Optional[float]:
    """Returns when the newest file of a run was written, in seconds since the epoch; links are not followed."""
    folder = run_folder.RunFolder(path)
    entries = [entry for entry in vars(folder).values() if isinstance(entry, Path)]
    entries += [heartbeat.path_of(path, 0), *_children(folder.checkpoints), *_children(folder.errors)]
    times = [_time_of(entry) for entry in entries]
    return max((each for each in times if each is not None), default=None)


def saved_steps(store: Path) -> Tuple[int, ...]:
    """Returns the steps of the checkpoints in a folder, in ascending order; whether they are good is not checked."""
    names = [entry.name for entry in _children(store)]
    digits = [name[len("step-") :] for name in names if name.startswith("step-")]
    return tuple(sorted(int(each) for each in digits if each.isascii() and each.isdigit() and len(each) <= 12))


def _read(path: Path, now: float) -> Dict[str, Any]:
    folder = run_folder.RunFolder(path)
    values: Dict[str, Any] = {"started": _time_of(folder.run_flags), "changed": changed_at(path)}
    problems = []
    plan = result = None
    try:
        plan = PlanRecord.from_json(read_object(folder.plan_json))
    except RecordError as error:
        problems.append(_describe(folder.plan_json, error))
    if folder.result_json.exists() or folder.result_json.is_symlink():
        try:
            result = RunResult.from_json(read_object(folder.result_json))
        except RecordError as error:
            problems.append(_describe(folder.result_json, error))
    values.update(_read_config(folder))
    if plan is not None:
        values.update(_of_plan(plan))
    if result is not None:
        values.update(_of_result(result))
    accuracy, loss, step = _read_validations(folder)
    if result is not None and result.scores is not None:
        accuracy = max(filter(None, [accuracy, _share(result.scores.top1)]), default=None)
    values.update(best_accuracy=accuracy, best_loss=loss)
    values["state"], reason = _state(folder, result, now)
    if result is None:
        values["step"] = max(
            [step, *(status.step for status in heartbeat.read_run(path)), *saved_steps(folder.checkpoints)], default=0
        )
    if problems:
        values.update(state=values["state"] if values["state"] == RUNNING else DAMAGED, problem="; ".join(problems))
    elif reason:
        values["problem"] = reason
    return values


def _read_config(folder: run_folder.RunFolder) -> Dict[str, Any]:
    config = read_object(folder.config_json) or {}
    texts = {key: config.get(key) for key in ("model", "dataset")}
    return {key: _shorten(value) for key, value in texts.items() if isinstance(value, str)}


def _of_plan(plan: PlanRecord) -> Dict[str, Any]:
    return {
        "model": _shorten(plan.model.name),
        "dataset": _shorten(plan.dataset.name),
        "instances": plan.topology.instances,
        "replicas": plan.topology.replicas,
        "pipeline_stages": plan.topology.pipeline_stages,
        "ipus": plan.topology.ipus,
        "global_batch_size": plan.batch.global_batch_samples,
        "planned_steps": plan.training.updates,
        "version": _shorten(plan.version),
    }


def _of_result(result: RunResult) -> Dict[str, Any]:
    return {
        "model": _shorten(result.model),
        "dataset": _shorten(result.dataset),
        "step": result.updates,
        "planned_steps": result.planned_updates,
        "samples_per_s": result.samples_per_s,
        "training_s": result.times.training_s,
        "verdict": _shorten(result.verdict.sentence),
    }


def _state(folder: run_folder.RunFolder, result: Optional[RunResult], now: float) -> Tuple[str, Optional[str]]:
    """Returns the state of a run and, if it did not end well, why."""
    if is_running(folder.path, now):
        return RUNNING, None
    if result is None:
        errors = folder.read_errors()
        said = _last_line(errors[0].text) if errors else "it ended without a result"
        return FAILED, _shorten(said)
    if result.is_finished:
        return FINISHED, None
    return INTERRUPTED, _shorten(result.stopped.message) if result.stopped else None


def _read_validations(folder: run_folder.RunFolder) -> Tuple[Optional[float], Optional[float], int]:
    """Returns the best accuracy and loss of all validations, and the last step of all records."""
    accuracies, losses, step = [], [], 0
    last = b""
    with contextlib.suppress(OSError):
        for line in safe_files.read_lines(folder.metrics):
            last = line or last
            if _VALIDATION in line:  # most lines are training records, which need not be parsed
                for record in run_folder.parse_metrics([line]):
                    if isinstance(record, ValidationRecord):
                        accuracies.append(_share(record.accuracy))
                        losses.append(record.loss)
    for record in run_folder.parse_metrics([last]):
        step = record.step
    known = [each for each in accuracies if each is not None]
    return max(known, default=None), min((each for each in losses if each is not None), default=None), step


def _walk(folder: Path, depth: int) -> Iterator[Path]:
    if is_run(folder):
        yield folder
        return
    with contextlib.suppress(OSError):
        for entry in folder.iterdir() if depth else ():
            if not entry.name.startswith(".") and _is_real(entry, stat.S_ISDIR):
                yield from _walk(entry, depth - 1)


def _name_below(path: Path, folder: Path) -> str:
    return path.name or str(path) if path == folder else str(path.relative_to(folder))


def _children(folder: Path) -> List[Path]:
    with contextlib.suppress(OSError):
        return list(folder.iterdir()) if _is_real(folder, stat.S_ISDIR) else []
    return []


def _is_real(path: Path, is_kind: Any) -> bool:
    """Whether a path is of a kind itself, and not a link to it."""
    try:
        return bool(is_kind(os.lstat(path).st_mode))
    except (OSError, ValueError):
        return False


def _time_of(path: Path) -> Optional[float]:
    try:
        return os.lstat(path).st_mtime
    except (OSError, ValueError):
        return None


def _spoke_elsewhere(status: heartbeat.Status, now: float) -> bool:
    import socket

    return status.host != socket.gethostname() and now - status.time <= _OTHER_HOST_SILENT_S


def _share(value: Optional[float]) -> Optional[float]:
    """Returns an accuracy; None for a number that cannot be one."""
    return value if value is not None and 0 <= value <= 1 else None


def _describe(path: Path, error: RecordError) -> str:
    if not path.exists():
        return f"{path.name} is missing"
    return f"{path.name} is not what a run writes ({_shorten(str(error))})"


def _last_line(text: str) -> str:
    """Returns the last line of an error, which in a traceback is the error itself."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "it failed")


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 3]}..."
