"""A run from Python: `tf_ipu_dp.open_run("runs/first")` has its records, its result and its model.

Reading needs no TensorFlow; only `model()` imports it. Code is loaded only if the caller names it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Dict, List, Optional, Union

from tf_ipu_dp import cli, missing_packages, user_code
from tf_ipu_dp.config.train_flags import TrainConfig
from tf_ipu_dp.datasets.info import DatasetInfo
from tf_ipu_dp.prediction import trained_run
from tf_ipu_dp.run_catalogue import comparison, summaries
from tf_ipu_dp.runs import checkpoints, run_folder
from tf_ipu_dp.runs.plan_record import PlanRecord
from tf_ipu_dp.runs.records import MetricsRecord, RunResult, TrainingRecord, ValidationRecord


class Metrics(List[MetricsRecord]):
    """The records of a run in order: TrainingRecord and ValidationRecord objects."""

    @property
    def training(self) -> List[TrainingRecord]:
        """The records of training alone."""
        return [record for record in self if isinstance(record, TrainingRecord)]

    @property
    def validation(self) -> List[ValidationRecord]:
        """The validations alone."""
        return [record for record in self if isinstance(record, ValidationRecord)]

    def to_pandas(self) -> Any:
        """Returns a pandas.DataFrame with a row for each record; what only the other kind has is missing there."""
        try:
            import pandas
        except ImportError as error:
            # From release 3 on it brings a numpy that TensorFlow 2.15 excludes.
            raise cli.UsageError(
                f"to_pandas() needs pandas ({error}). Install it with: pip install 'pandas<3'"
            ) from error
        hidden = ("schema", "instances", "ipu_utilisation_pct")  # not numbers
        rows = [{key: value for key, value in each.to_json().items() if key not in hidden} for each in self]
        return pandas.DataFrame(rows)


class Run:
    """One run. What it has is read when it is asked for, so that a run can be watched while it trains."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._folder = run_folder.RunFolder(path)

    def __repr__(self) -> str:
        return f"<tf_ipu_dp run {str(self.path)!r}: {self.state}>"

    @property
    def metrics(self) -> Metrics:
        """The records so far."""
        return Metrics(self._folder.read_metrics())

    @property
    def result(self) -> Optional[RunResult]:
        """The result; None while the run trains, or if it was killed."""
        return self._folder.read_result()

    @property
    def plan(self) -> Optional[PlanRecord]:
        """The plan of the last start."""
        return self._folder.read_plan()

    @property
    def flags(self) -> Dict[str, str]:
        """The flags, as typed after `=`; those that were not given and have no default are missing."""
        return comparison.read_flags(self.path)

    @property
    def summary(self) -> summaries.RunSummary:
        """One line about it, as in the table of `python -m tf_ipu_dp.runs`."""
        return summaries.read_summary(self.path)

    @property
    def state(self) -> str:
        """Whether it is running, finished, interrupted, failed or damaged."""
        return self.summary.state

    def model(self, *, model: Any = None, dataset: Any = None, weights: str = "best") -> Any:
        """Returns the trained model as a Keras model, on no device.

        Models of images take 8-bit ones, and classifications return probabilities. For an own model give `model`, the
        function that it was trained with or its reference (FILE.py:function), and `dataset` if that was one too;
        without them its export is taken, which needs no code. UsageError if there is neither.
        """
        words = [cli.flag_text("weights", weights)]
        for name, given in (("model", model), ("dataset", dataset)):
            if given is not None:
                kind = "data" if name == "dataset" else name  # as train(data=...) calls it
                words.append(cli.flag_text(name, user_code.refer_to(given, kind)))
        found = None
        try:
            planned = trained_run.plan_prediction(self._folder, words, samples=1, learn_here=_learn)
            found = checkpoints.find(self._folder.stores_of(weights), lambda _: None)
            reason = f"{self.path} has no good checkpoint and no export. Train it first."
        except cli.UsageError as error:
            reason = str(error)
        if found is None and not trained_run.has_export(self._folder):
            raise cli.UsageError(reason)
        missing_packages.require("tensorflow")
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        from tf_ipu_dp.prediction import predictor

        if found is None:
            return predictor.load_export(self._folder.export)
        return predictor.plain_model(planned.config, planned.plan, found)


def _learn(config: TrainConfig) -> DatasetInfo:
    missing_packages.require("tensorflow")
    from tf_ipu_dp.training import own_models

    return own_models.learn(config)


def open_run(run_dir: Union[str, os.PathLike[str]]) -> Run:
    """Returns the run in a folder; UsageError if it is not the folder of a run."""
    path = cli.expand_path(run_dir)
    if not summaries.is_run(path):
        raise cli.UsageError(f"{path} is not the folder of a run: it has no run.flags. Give one like runs/first.")
    return Run(path)
