"""Destinations of a run's records: metrics.jsonl, console, heartbeat. A sink has one `write(record)`. No TensorFlow."""

from __future__ import annotations

import math
from typing import Iterable, Optional, Protocol

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


class ConsoleSink:
    """Prints a line for each record; training records only where there is no progress bar."""

    def __init__(self, console: Console, plan: RunPlan) -> None:
        self._console, self._plan = console, plan
        self._speed = SmoothedRate()
        self.lowest_loss = math.inf  # of the validations so far

    def write(self, record: MetricsRecord) -> None:
        """Prints a line."""
        if isinstance(record, TrainingRecord):
            self._speed.add(record)
            self._console.log(render_training_line(record, self._plan, self._speed.samples_per_s))
            return
        line = f"validation after step {record.step:,}: {result_report.render_validation(record)}"
        is_best = record.loss is not None and record.loss < self.lowest_loss
        self._console.info(line, "green" if is_best else "")
        if is_best:
            self.lowest_loss = record.loss or 0.0


class HeartbeatSink:
    """Adds step, throughput, loss and the time left to this instance's heartbeat."""

    def __init__(self, reporter: StatusReporter) -> None:
        self._reporter = reporter
        self._speed = SmoothedRate()
        self._last_step: Optional[int] = None
        self._samples_per_step: Optional[float] = None

    def write(self, record: MetricsRecord) -> None:
        """Updates the heartbeat with a training record."""
        if isinstance(record, TrainingRecord):
            self._reporter.update("training", record.step, record.samples_per_s)
            self._reporter.report_training(record.loss, self._expect_time_left(record))

    def _expect_time_left(self, record: TrainingRecord) -> Optional[float]:
        """Returns the seconds of training that are left; None before the second record.

        The first record leaves out the execution that compiled, so that its samples do not match its steps.
        """
        self._speed.add(record)
        if self._last_step is not None and record.step > self._last_step:
            samples = (record.samples_per_s or 0.0) * max((each.seconds for each in record.instances), default=0.0)
            self._samples_per_step = samples / (record.step - self._last_step) or self._samples_per_step
        self._last_step = record.step
        planned, rate = self._reporter.status().planned_steps, self._speed.samples_per_s
        if not (planned and rate and self._samples_per_step):
            return None
        return max(planned - record.step, 0) * self._samples_per_step / rate


class SmoothedRate:
    """Samples per second of the latest records, older ones counting less: one slow record must not change the eta much.

    Only training is in the rates of records, so that validation does not disturb it.
    """

    _KEPT = 0.8  # of the weight of all earlier records, for each new one

    def __init__(self) -> None:
        self._samples = self._seconds = 0.0

    @property
    def samples_per_s(self) -> Optional[float]:
        return self._samples / self._seconds if self._seconds else None

    def add(self, record: TrainingRecord) -> None:
        """Adds a record."""
        seconds = max((each.seconds for each in record.instances), default=0.0)
        if record.samples_per_s and seconds:
            self._samples = self._KEPT * self._samples + record.samples_per_s * seconds
            self._seconds = self._KEPT * self._seconds + seconds


def render_training_line(record: TrainingRecord, plan: RunPlan, smoothed: Optional[float]) -> str:
    """Returns the log's line for a training record; `smoothed` are the samples/s that the eta is calculated with."""
    updates, rate = plan.epochs.updates, record.samples_per_s
    speed = f"  {rate:,.0f} samples/s ({rate / plan.topology.replicas:,.0f} per replica)" if rate else ""
    eta = ""
    if smoothed:
        eta = f"  eta {render_duration((updates - record.step) * plan.batch.global_batch_size / smoothed)}"
    accuracy = "  accuracy -" if record.accuracy is None else f"  accuracy {100 * record.accuracy:.1f} %"
    if record.accuracy is None and record.metrics:
        accuracy = ""
    accuracy += "".join(f"  {name} {result_report.number(value, 4)}" for name, value in record.metrics.items())
    loss = "-" if record.loss is None else f"{record.loss:.4f}"
    return (
        f"step {record.step:{len(str(updates))}}/{updates}  epoch {record.epoch:.2f}  loss {loss}"
        f"{accuracy}  learning rate {record.learning_rate:.3g}{speed}{eta}"
    )
