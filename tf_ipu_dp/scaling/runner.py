"""Measures the cells of a study, one run after the other, and keeps each measurement as soon as it is there.

A run that fails is a measurement with its reason. Ctrl-C ends the run of the moment and keeps what was measured.
"""

from __future__ import annotations

import dataclasses
import shutil
import statistics
import time
from pathlib import Path
from typing import Callable, Dict, List, Optional, Sequence, Tuple

from tf_ipu_dp import cli
from tf_ipu_dp.config import train_flags
from tf_ipu_dp.config.train_flags import TrainConfig
from tf_ipu_dp.datasets.info import DatasetInfo
from tf_ipu_dp.planning import plan
from tf_ipu_dp.scaling import modes, order, our_runs
from tf_ipu_dp.scaling.engines import orders
from tf_ipu_dp.scaling.engines.protocol import Answer, Order
from tf_ipu_dp.scaling.modes import Length
from tf_ipu_dp.scaling.our_runs import Place
from tf_ipu_dp.scaling.parts import Announce, Parts
from tf_ipu_dp.scaling.process_use import ProcessUse
from tf_ipu_dp.scaling.records import Cell, Measurement, Study
from tf_ipu_dp.scaling.study_folder import StudyFolder
from tf_ipu_dp.training.console import render_duration

# Until a run was measured, one is taken to last so much longer than its timed updates: start, compilation, warm-up.
_START_S = 10.0
_CHECKPOINTS = "checkpoints"
Step = Tuple[Cell, int]  # a cell and its repeat


@dataclasses.dataclass(frozen=True)
class Settings:
    """What all cells of a study have in common when they are run."""

    config: TrainConfig
    dataset: DatasetInfo
    updates: Optional[int] = None  # timed in every cell, in place of the study's seconds
    place: Place = dataclasses.field(default_factory=Place)


class Runner:
    """Measures what is left of a study."""

    def __init__(
        self, study: Study, settings: Settings, folder: StudyFolder, parts: Parts, announce: Announce,
        now: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._study, self._settings, self._folder, self._parts = study, settings, folder, parts
        self._announce, self._now = announce, now
        self._missing = {engine: parts.missing(engine) for engine in study.engines}
        self._update_s = {each.cell: each.update_s for each in study.predictions}

    def run(self) -> List[Measurement]:
        """Measures every repeat of every cell that is not done, and returns all measurements, earlier ones included."""
        steps = order.plan_order(self._study.cells, self._study.repeats, self._study.seed)
        done = {(each.cell, each.repeat) for each in self._folder.read_measurements() if each.is_done}
        left = [(cell, repeat) for cell, repeat in steps if (cell.key, repeat) not in done]
        if len(left) < len(steps):
            self._announce(f"{len(steps) - len(left)} of {cli.count(len(steps), 'run')} are already measured.")
        for number, step in enumerate(left):
            measured = self._measure(*step)
            self._folder.append(measured)
            self._announce(self._progress(measured, step, len(steps) - len(left) + number + 1, left[number + 1 :]))
        return self._folder.read_measurements()

    def time_left_s(self, left: Sequence[Step], measured: Sequence[Measurement]) -> float:
        """Returns about how long some runs take: as long as the same cell took, or as the others did."""
        took: Dict[str, List[float]] = {}
        for each in measured:
            if each.total_s:
                took.setdefault(each.cell, []).append(each.total_s)
        others = [statistics.median(times) for times in took.values()]
        typical = statistics.median(others) if others else self._study.seconds + _START_S
        cells = [cell for cell, _ in left if self._missing[cell.engine] is None]
        return sum(statistics.median(took[cell.key]) if cell.key in took else typical for cell in cells)

    def _progress(self, measured: Measurement, step: Step, number: int, left: Sequence[Step]) -> str:
        cell, repeat = step
        total = len(self._study.cells) * self._study.repeats
        size = cli.count(cell.size, self._study.unit[:-1])
        result = f"{measured.samples_per_s:,.0f} samples/s" if measured.is_done else f"{measured.state}: "
        text = f"{number} of {total}: {cell.engine}, {size}, repeat {repeat + 1}: {result}{measured.reason}"
        if not left:
            return text
        remaining = self.time_left_s(left, self._folder.read_measurements())
        return f"{text.rstrip('.')}; about {render_duration(remaining)} left"

    def _measure(self, cell: Cell, repeat: int) -> Measurement:
        problem = self._missing[cell.engine]
        if problem is not None:
            return Measurement(cell.key, repeat, Measurement.MISSING, problem)
        folder = self._folder.clear_run(cell.key, repeat)
        run_dir = str(folder.relative_to(self._folder.path))
        began = self._now()
        try:
            length = self.plan_length(cell)
            ours = self._parts.is_ours(cell.engine)
            made = self._run_ours(cell, length, folder) if ours else self._run_other(cell, length, folder)
        except cli.UsageError as error:
            reason = " ".join(str(error).split())
            took_s = self._now() - began
            return Measurement(cell.key, repeat, Measurement.FAILED, reason, total_s=took_s, run_dir=run_dir)
        # Weights of a large model in every run would fill the disk.
        shutil.rmtree(folder / _CHECKPOINTS, ignore_errors=True)
        return dataclasses.replace(made, repeat=repeat, run_dir=run_dir)

    def plan_length(self, cell: Cell) -> Length:
        """Returns the updates of a run of a cell, from the predicted time of an update."""
        config = self._settings.config
        iterations = (config.device_iterations or 1) if self._parts.is_ours(cell.engine) else 1
        if self._study.target_accuracy is None:
            return modes.plan_length(self._study.seconds, self._predicted(cell), iterations, self._settings.updates)
        # All updates of the run are measured: those of its epochs.
        planned = self._plan(cell).epochs
        warmup = -(-max(planned.updates // 10, 1) // iterations) * iterations
        return Length(warmup, max(planned.updates - warmup, 1))

    def _predicted(self, cell: Cell) -> Optional[float]:
        """Returns the predicted time of an update; of another engine, that of the cell with the same batch."""
        if cell.key in self._update_s:
            return self._update_s[cell.key]
        alike = [each for each in self._study.cells if each.key in self._update_s]
        alike.sort(key=lambda each: (each.global_batch_size != cell.global_batch_size, abs(each.size - cell.size)))
        return self._update_s[alike[0].key] if alike else None

    def _plan(self, cell: Cell) -> plan.RunPlan:
        epochs = cli.flag_text("epochs", self._settings.config.epochs)
        if self._parts.is_ours(cell.engine):
            layout: Sequence[str] = cell.words
        else:
            layout = (f"--ipus={cell.replicas}", f"--micro_batch_size={cell.micro_batch_size}")
        return plan.plan_run(train_flags.parse([*self._study.words, *layout, epochs]), self._settings.dataset)

    def _run_ours(self, cell: Cell, length: Length, folder: Path) -> Measurement:
        config, place = self._settings.config, self._settings.place
        epochs = config.epochs if self._study.target_accuracy is not None else None
        return our_runs.run(cell, self._study.words, length, folder, place, self._parts.decompose, epochs=epochs)

    def _run_other(self, cell: Cell, length: Length, folder: Path) -> Measurement:
        watching: List[ProcessUse] = []

        def watch(pid: int) -> None:
            watching.append(ProcessUse(pid).__enter__())

        began = self._now()
        try:
            answers = self._parts.run_engine(cell, self.make_order(cell, length), folder, self._settings.place, watch)
        finally:
            for use in watching:
                use.stop()
        total_s = self._now() - began
        return measure_answers(cell, length, answers, total_s, watching[0] if watching else None)

    def make_order(self, cell: Cell, length: Length) -> Order:
        """Returns what a program of another engine is asked to train."""
        # Hosts by name are taken to have the cores of this one; emulated ones share them.
        here = -(-cell.instances // cell.hosts) if self._settings.place.hosts else cell.instances
        return orders.make_order(
            self._settings.config,
            batch_size=cell.micro_batch_size,
            processes=cell.instances,
            on_this_machine=here,
            length=length,
            learning_rate=self._plan(cell).recipe.learning_rate,
        )


def measure_answers(
    cell: Cell, length: Length, answers: Sequence[Answer], total_s: float, use: Optional[ProcessUse]
) -> Measurement:
    """Returns the measurement of what all processes of an engine answered; UsageError if some did not."""
    if len(answers) != cell.instances:
        raise cli.UsageError(f"{len(answers)} of {cli.count(cell.instances, 'process', 'processes')} answered.")
    slowest = max(answers, key=lambda answer: answer.seconds)
    return Measurement(
        cell=cell.key,
        repeat=0,
        state=Measurement.DONE,
        samples=sum(answer.samples for answer in answers),
        updates=length.updates,
        seconds=slowest.seconds,
        total_s=total_s,
        input_wait_s=slowest.input_wait_s,
        memory_bytes=use.memory_bytes if use is not None else None,
        busy=use.busy(total_s - slowest.seconds, total_s) if use is not None else None,
        others_busy=use.others() if use is not None else None,
    )
