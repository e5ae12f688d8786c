"""What differs between runs: their flags and their learning curves. Reads the runs' folders, returns typed values."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from tf_ipu_dp import cli
from tf_ipu_dp.config import train_flags
from tf_ipu_dp.run_catalogue import summaries
from tf_ipu_dp.run_catalogue.summaries import RunSummary
from tf_ipu_dp.runs import run_folder, safe_files
from tf_ipu_dp.runs.json_files import read_object
from tf_ipu_dp.runs.records import MetricsRecord, TrainingRecord, ValidationRecord

STEP, EPOCH, SECONDS = "step", "epoch", "seconds"
AXES = (STEP, EPOCH, SECONDS)
# The curves, with their titles, in the order in which they are drawn.
METRICS: Dict[str, str] = {
    "validation_accuracy": "Validation accuracy (%)",
    "validation_loss": "Validation loss",
    "loss": "Training loss",
    "accuracy": "Training accuracy (%)",
    "samples_per_s": "Throughput (samples/s)",
    "learning_rate": "Learning rate",
}
IN_A_TERMINAL = ("validation_accuracy", "loss")
# Of the folder and the command, and not of what was trained.
_NOT_COMPARED = ("run_dir", "resume", "json", "dry_run", "format", "evaluate", "input_only")
_MAX_VALUE = 1e30  # a larger one is not drawn: axes could not be calculated
_MAX_TEXT = 80


@dataclasses.dataclass(frozen=True)
class FlagDifference:
    """A flag that differs, with its value in each run."""

    name: str
    values: Tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Curve:
    """One metric of one run."""

    run: int  # which of the runs
    x: Tuple[float, ...]
    y: Tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Several runs side by side."""

    runs: Tuple[RunSummary, ...]
    axis: str
    differences: Tuple[FlagDifference, ...]
    curves: Mapping[str, Tuple[Curve, ...]]  # by metric; only metrics that a run has

    @property
    def names(self) -> List[str]:
        """Returns what the runs are called here: as they were given on the command line."""
        return [run.name for run in self.runs]


def compare(paths: Sequence[Path], axis: str) -> Comparison:
    """Reads some runs; UsageError for a folder that is not a run's."""
    for path in paths:
        if not summaries.is_run(path):
            raise cli.UsageError(
                f"{path} is not the folder of a run: it has no run.flags. Give folders like runs/first."
            )
    runs = tuple(summaries.read_summary(path, name=str(path)) for path in paths)
    curves: Dict[str, List[Curve]] = {}
    for number, path in enumerate(paths):
        for metric, points in _read_curves(path, axis).items():
            if points:
                x, y = zip(*points)
                curves.setdefault(metric, []).append(Curve(number, x, y))
    others = sorted({*curves} - {*METRICS})  # of own tasks
    ordered = {metric: tuple(curves[metric]) for metric in (*METRICS, *others) if metric in curves}
    return Comparison(runs, axis, tuple(find_differences([read_flags(path) for path in paths])), ordered)


def title(metric: str) -> str:
    """Returns what a curve is called; the metrics of own tasks have their own names."""
    return METRICS.get(metric, metric)


def find_differences(flags: Sequence[Mapping[str, str]]) -> List[FlagDifference]:
    """Returns the flags that differ between runs, in the order of the help; flags of other releases are last."""
    known = [flag.name for flag in train_flags.FLAGS]
    defaults = train_flags.default_texts()  # what releases without a flag were trained with
    names = [*known, *sorted({name for each in flags for name in each} - {*known})]
    found = []
    for name in names:
        values = tuple(each.get(name, defaults.get(name, "-")) for each in flags)
        if name not in _NOT_COMPARED and len(set(values)) > 1:
            found.append(FlagDifference(name, values))
    return found


def read_flags(path: Path) -> Dict[str, str]:
    """Returns the flags of a run as typed after `=`; those that were not given are missing."""
    values = read_object(run_folder.RunFolder(path).config_json) or {}
    return {_shorten(str(name)): _flag_text(value) for name, value in values.items() if value is not None}


def _flag_text(value: Any) -> str:
    if isinstance(value, list):
        value = tuple(value)
    return _shorten(cli.typed(value))


def _read_curves(path: Path, axis: str) -> Dict[str, List[Tuple[float, float]]]:
    found: Dict[str, List[Tuple[float, float]]] = {}
    elapsed = 0.0
    try:
        lines = safe_files.read_lines(run_folder.RunFolder(path).metrics)
        for record in run_folder.parse_metrics(lines):
            if isinstance(record, TrainingRecord):
                elapsed = record.elapsed_s
            # A validation has no time of its own: it is that of the record before it.
            x = {STEP: float(record.step), EPOCH: record.epoch, SECONDS: elapsed}[axis]
            for metric, value in _values(record).items():
                if value is not None and all(math.isfinite(each) and abs(each) < _MAX_VALUE for each in (x, value)):
                    found.setdefault(metric, []).append((x, value))
    except (OSError, OverflowError):
        return found
    return found


def _values(record: MetricsRecord) -> Dict[str, Optional[float]]:
    accuracy = None if record.accuracy is None else 100 * record.accuracy
    if isinstance(record, ValidationRecord):
        own = {f"validation_{name}": value for name, value in record.metrics.items()}
        return {**own, "validation_accuracy": accuracy, "validation_loss": record.loss}
    return {
        **record.metrics,
        "loss": record.loss,
        "accuracy": accuracy,
        "samples_per_s": record.samples_per_s,
        "learning_rate": record.learning_rate,
    }


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 3]}..."
