"""A run for TensorBoard: curves of training and validation in the same charts, flags as hyperparameters, images."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Iterable, Optional, Sequence, Tuple, Union

import numpy as np
import tensorflow as tf

from tf_ipu_dp import cli
from tf_ipu_dp.config.train_flags import TrainConfig
from tf_ipu_dp.runs.records import MetricsRecord, TrainingRecord, ValidationRecord
from tf_ipu_dp.training.scalars import scalars

# TensorBoard draws the same tag of several folders in one chart.
_TRAINING, _VALIDATION = "train", "validation"
Examples = Tuple[Any, Sequence[str]]  # 8-bit images, and the names of their classes
_EVENTS = "events.out.tfevents.*"


class TensorBoardSink:
    """Writes records as scalars. A resumed run is one curve: the records before it are written anew."""

    def __init__(
        self, folder: Path, cfg: TrainConfig, past: Iterable[MetricsRecord], examples: Optional[Examples] = None
    ) -> None:
        # Event files cannot be truncated to the step of a checkpoint.
        for path in folder.glob(f"**/{_EVENTS}"):
            if not path.is_dir():  # which somebody else has made
                path.unlink()
        self._writers = {
            kind: tf.summary.create_file_writer(str(folder / name))
            for kind, name in ((TrainingRecord, _TRAINING), (ValidationRecord, _VALIDATION))
        }
        _write_flags(folder, cfg)
        if examples is not None:
            self._write_examples(*examples)
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
            for name, number in scalars(record).items():
                if number is not None:
                    tf.summary.scalar(name, np.asarray(number, np.float32))

    def _write_examples(self, images: Any, names: Sequence[str]) -> None:
        """Writes images of the training set, with the names of their classes below them."""
        told = ", ".join(f"{number}: {name}" for number, name in enumerate(names))
        with self._writers[TrainingRecord].as_default(step=0):
            tf.summary.image("examples", images, max_outputs=len(images), description=told)

    def _flush(self) -> None:
        for writer in self._writers.values():
            writer.flush()


def render_command(folder: Path) -> str:
    """Returns the command that shows the run."""
    return f"tensorboard --logdir={folder}"


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
