"""A run for TensorBoard: curves of training and validation in the same charts, and the flags as hyperparameters."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Dict, Iterable, Optional, Union

import numpy as np
import tensorflow as tf

from tf_ipu_dp import cli
from tf_ipu_dp.config.train_flags import TrainConfig
from tf_ipu_dp.runs.records import MetricsRecord, TrainingRecord, ValidationRecord

# TensorBoard draws the same tag of several folders in one chart.
_TRAINING, _VALIDATION = "train", "validation"
_EVENTS = "events.out.tfevents.*"


class TensorBoardSink:
    """Writes records as scalars. A resumed run is one curve: the records before it are written anew."""

    def __init__(self, folder: Path, cfg: TrainConfig, past: Iterable[MetricsRecord]) -> None:
        # Event files cannot be truncated to the step of a checkpoint.
        for path in folder.glob(f"**/{_EVENTS}"):
            path.unlink()
        self._writers = {
            kind: tf.summary.create_file_writer(str(folder / name))
            for kind, name in ((TrainingRecord, _TRAINING), (ValidationRecord, _VALIDATION))
        }
        _write_flags(folder, cfg)
        for record in past:
            self._write(record)
        self._flush()

    def write(self, record: MetricsRecord) -> None:
        """Writes scalars at the record's step, and flushes them: a record comes once a second at most."""
        self._write(record)
        self._flush()

    def close(self) -> None:
        """Closes the files."""
        for writer in self._writers.values():
            writer.close()

    def _write(self, record: MetricsRecord) -> None:
        # Arrays: TensorFlow keeps a copy of every Python number that it has seen, the steps included.
        with self._writers[type(record)].as_default(step=tf.constant(np.asarray(record.step, np.int64))):
            for name, number in _scalars(record).items():
                if number is not None:
                    tf.summary.scalar(name, np.asarray(number, np.float32))

    def _flush(self) -> None:
        for writer in self._writers.values():
            writer.flush()


def render_command(folder: Path) -> str:
    """Returns the command that shows the run."""
    return f"tensorboard --logdir={folder}"


def _scalars(record: MetricsRecord) -> Dict[str, Optional[float]]:
    """Returns the numbers of a record by their tag; shares are per cent, as everywhere that people read them."""
    shared = {"loss": record.loss, "accuracy_pct": _percent(record.accuracy), **record.metrics}
    if isinstance(record, ValidationRecord):
        return {**shared, "top5_pct": _percent(record.top5), "seconds": record.seconds}
    used = [percent for percent in record.ipu_utilisation_pct.values() if percent is not None]
    return {
        **shared,
        "learning_rate": record.learning_rate,
        "samples_per_s": record.samples_per_s,
        "input_wait_s": record.input_wait_s,
        "ipu_utilisation_pct": sum(used) / len(used) if used else None,  # the mean: many IPUs are one chart
    }


def _percent(share: Optional[float]) -> Optional[float]:
    return None if share is None else 100 * share


def _write_flags(folder: Path, cfg: TrainConfig) -> None:
    """Writes the flags for TensorBoard's table of hyperparameters, with the scores of the validation."""
    from tensorboard.plugins.hparams import api

    values = {field.name: _hyperparameter(getattr(cfg, field.name)) for field in dataclasses.fields(cfg)}
    scores = [api.Metric(tag, group=_VALIDATION) for tag in ("loss", "accuracy_pct")]
    writer = tf.summary.create_file_writer(str(folder))
    with writer.as_default(step=0):
        api.hparams_config(hparams=[api.HParam(name) for name in values], metrics=scores)
        api.hparams({name: value for name, value in values.items() if value is not None})
    writer.close()


def _hyperparameter(value: Any) -> Union[bool, float, str, None]:
    return value if value is None or isinstance(value, (bool, int, float)) else cli.typed(value)
