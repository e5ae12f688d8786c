"""Destinations of a run's records: metrics.jsonl, TensorBoard, console, heartbeat. A sink has one `write(record)`."""

from __future__ import annotations

from pathlib import Path
from typing import Iterable, Protocol, Union

import tensorflow as tf

from tf_ipu_dp.planning.plan import RunPlan
from tf_ipu_dp.runs import result_report
from tf_ipu_dp.runs.heartbeat import StatusReporter
from tf_ipu_dp.runs.records import MetricsRecord, TrainingRecord, ValidationRecord
from tf_ipu_dp.runs.run_folder import RunFolder
from tf_ipu_dp.training.console import Console, render_duration


class Sink(Protocol):
    """Receives the records of a run in order."""

    def write(self, record: MetricsRecord) -> None:
        """Writes one record."""


class MetricsFileSink:
    """Appends to metrics.jsonl, except validations that it already has: a resumed run may repeat its last one."""

    def __init__(self, folder: RunFolder, validated_steps: Iterable[int]) -> None:
        self._folder, self._validated = folder, set(validated_steps)

    def write(self, record: MetricsRecord) -> None:
        """Appends a line."""
        if isinstance(record, ValidationRecord):
            if record.step in self._validated:
                return
            self._validated.add(record.step)
        self._folder.append_metrics(record)


class TensorBoardSink:
    """Writes every number of a record as a scalar."""

    def __init__(self, path: Path) -> None:
        self._writer = tf.summary.create_file_writer(str(path))

    def write(self, record: MetricsRecord) -> None:
        """Writes scalars at the record's step, and flushes them: a record comes once a second at most."""
        value = record.to_json()
        kind = value.pop("kind")
        with self._writer.as_default(step=record.step):
            for name, number in value.items():
                if isinstance(number, float):
                    tf.summary.scalar(f"{kind}/{name}", number)
                elif isinstance(number, dict):
                    for key, each in number.items():
                        if each is not None:
                            tf.summary.scalar(f"{kind}/{name}/{key}", each)
        self._writer.flush()

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()


class ConsoleSink:
    """Prints a line for each record; training records only where there is no progress bar."""

    def __init__(self, console: Console, plan: RunPlan) -> None:
        self._console, self._plan = console, plan

    def write(self, record: MetricsRecord) -> None:
        """Prints a line."""
        if isinstance(record, TrainingRecord):
            self._console.log(render_training_line(record, self._plan))
        else:
            self._console.info(f"validation after step {record.step:,}: {result_report.render_validation(record)}")


class HeartbeatSink:
    """Adds step and throughput to this instance's heartbeat."""

    def __init__(self, reporter: StatusReporter) -> None:
        self._reporter = reporter

    def write(self, record: MetricsRecord) -> None:
        """Updates the heartbeat with a training record."""
        if isinstance(record, TrainingRecord):
            self._reporter.update("training", record.step, record.samples_per_s)


def render_training_line(record: TrainingRecord, plan: RunPlan) -> str:
    """Returns the log's line for a training record."""
    updates, rate = plan.epochs.updates, record.samples_per_s
    eta = speed = ""
    if rate:
        remaining_s = (updates - record.step) * plan.batch.global_batch_size / rate
        eta = f"  eta {render_duration(remaining_s)}"
        speed = f"  {rate:,.0f} samples/s ({rate / plan.topology.replicas:,.0f} per replica)"
    width = len(str(updates))
    return (
        f"step {record.step:{width}}/{updates}  loss {_number(record.loss, 4)}  accuracy {_number(record.accuracy, 3)}"
        f"{speed}{eta}"
    )


def _number(value: Union[float, None], digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
