"""What is measured between two training records: means of loss and accuracy, throughput, utilisation, collectives."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Callable, Collection, List, Mapping, Optional, Sequence, Tuple

from tf_ipu_dp.distributed.world import World
from tf_ipu_dp.monitoring.sampler import Sampler, Usage
from tf_ipu_dp.planning.plan import RunPlan
from tf_ipu_dp.runs.records import InstanceTimes, TrainingRecord, finite
from tf_ipu_dp.sdk import Sdk
from tf_ipu_dp.training.exchange_meter import ExchangeMeter
from tf_ipu_dp.training.executions import Execution


@dataclasses.dataclass(frozen=True)
class WindowTotals:
    """The executions since the last record."""

    loss: float
    accuracy: float
    others: Tuple[float, ...]  # further metrics of an own task
    samples: int  # of the whole job, in the timed executions
    executions: int  # timed ones: all except the one that compiled
    seconds: float
    executing_s: float


class Window:
    """Means over the steps since the last record, from Keras's running means since `fit` was called.

    `running` tells which further metrics are no means over samples, like an AUC: two of their values do not tell that
    of the steps between, so these stay the ones since `fit` was called.
    """

    def __init__(self, running: Sequence[bool] = ()) -> None:
        self._running = tuple(running)
        self._reported: Tuple[float, ...] = ()  # updates, then the sums of losses, accuracies and other metrics
        self._now: Tuple[float, ...] = (0, 0.0, 0.0)
        self._clear()

    def add(
        self,
        updates: int,
        loss: float,
        accuracy: float,
        samples: int,
        execution: Execution,
        others: Sequence[float] = (),
    ) -> None:
        """Adds one execution; updates and means count from the start of `fit`. 0 samples: it is not timed."""
        self._now = (updates, *(mean * updates for mean in (loss, accuracy, *others)))
        if samples:
            self._samples += samples
            self._executions += 1
            self._seconds += execution.seconds + execution.idle_s
            self._executing_s += execution.seconds

    def take(self) -> WindowTotals:
        """Returns the totals since the last call, and starts again."""
        before = self._reported or (0.0,) * len(self._now)
        steps = max(self._now[0] - before[0], 1)
        loss, accuracy, *others = ((now - then) / steps for now, then in zip(self._now[1:], before[1:]))
        for place, is_running in enumerate(self._running[: len(others)]):
            if is_running:
                others[place] = self._now[3 + place] / max(self._now[0], 1)
        totals = WindowTotals(
            loss, accuracy, tuple(others), self._samples, self._executions, self._seconds, self._executing_s
        )
        self._reported = self._now
        self._clear()
        return totals

    def _clear(self) -> None:
        self._samples = self._executions = 0
        self._seconds = self._executing_s = 0.0


@dataclasses.dataclass(frozen=True)
class DeviceUse:
    """This instance's device since the last record."""

    usage: Usage
    input_wait_s: Optional[float]  # None: not reported
    collective_s: Optional[float]
    optimizer_s: Optional[float]
    program_collective_s: Optional[float]


class _Growing:
    """What a total, which is counted since the start of the process, has grown by since it was last asked for."""

    def __init__(self, read: Callable[[], Optional[float]]) -> None:
        self._read, self._before = read, 0.0

    def take(self) -> Optional[float]:
        """Returns the difference; None: not reported."""
        now = self._read()
        if now is None:
            return None
        grown, self._before = now - self._before, now
        return grown


class DeviceMeter:
    """How busy this instance's IPUs were, and how long they waited; adds up over the run."""

    def __init__(self, sdk: Sdk, sampler: Sampler) -> None:
        self._sampler = sampler
        self._totals = [_Growing(read) for read in (sdk.collective_s, sdk.optimizer_s, sdk.program_collective_s)]
        self._busy_s = self._measured_s = 0.0
        self.input_wait_s: Optional[float] = None
        self.collective_s: Optional[float] = None

    @property
    def utilisation_pct(self) -> Optional[float]:
        return 100 * self._busy_s / self._measured_s if self._measured_s else None

    def restart(self) -> None:
        """Excludes the time before this call, which was not training."""
        self._sampler.mark()
        self._take_totals()

    def take(self, window: WindowTotals) -> DeviceUse:
        """Returns what was measured since the last call."""
        usage = self._sampler.mark()
        waited_s = None
        if usage.utilisation_pct is not None and window.seconds:
            busy_s = usage.seconds * usage.utilisation_pct / 100
            waited_s = max(window.executing_s - busy_s, 0.0)
            self.input_wait_s = (self.input_wait_s or 0.0) + waited_s
            self._measured_s += usage.seconds
            self._busy_s += busy_s
        collective_s, *others = self._take_totals()
        if collective_s is not None:
            self.collective_s = (self.collective_s or 0.0) + collective_s
        return DeviceUse(usage, waited_s, collective_s, *others)

    def _take_totals(self) -> List[Optional[float]]:
        return [total.take() for total in self._totals]


class RunMeter:
    """Measures a run record by record.

    `learning_rate` returns the rate of an update, `bookkeeping_s` the time in logging and checkpoints so far.
    """

    def __init__(
        self,
        plan: RunPlan,
        sdk: Sdk,
        world: World,
        learning_rate: Callable[[int], float],
        bookkeeping_s: Callable[[], float],
        metrics: Sequence[str] = (),
        running_metrics: Collection[str] = (),
    ) -> None:
        self._metrics = tuple(metrics)  # names of what an own task counts besides the loss
        self._running = [name in running_metrics for name in metrics]
        self._plan, self._world, self._learning_rate = plan, world, learning_rate
        self._bookkeeping = _Growing(bookkeeping_s)
        self._sampler = Sampler(sdk.gcipuinfo, pid=os.getpid())
        self._window, self._epoch_began_at = Window(self._running), 0
        self.device = DeviceMeter(sdk, self._sampler)
        self.exchanges = ExchangeMeter(sdk, world.instances)
        self.records: List[TrainingRecord] = []
        self.timed_samples = 0

    def start(self) -> None:
        """Starts to sample the device's utilisation."""
        self._sampler.start()

    def stop(self) -> None:
        """Ends sampling."""
        self._sampler.stop()

    def start_epoch(self, step: int) -> None:
        """Begins a call of `fit` after a step."""
        self._window, self._epoch_began_at = Window(self._running), step
        self.device.restart()

    def add(
        self,
        step: int,
        loss: float,
        accuracy: float,
        execution: Execution,
        *,
        timed: bool,
        others: Sequence[float] = (),
    ) -> None:
        """Adds the execution that ended with a step; the one that compiled is not timed."""
        samples = self._plan.epochs.device_iterations * self._plan.batch.global_batch_size if timed else 0
        self.timed_samples += samples
        self._window.add(step - self._epoch_began_at, loss, accuracy, samples, execution, others)

    def take_record(self, step: int, elapsed_s: float) -> TrainingRecord:
        """Returns what all instances measured since the last record; called by all of them."""
        window = self._window.take()
        use = self.device.take(window)
        last = self.exchanges.take_last()
        instances = _gather_instance_times(self._world, window, use, self._bookkeeping.take(), last)
        slowest_s = max(each.seconds for each in instances)
        record = TrainingRecord(
            step=step,
            epoch=step / self._plan.epochs.updates_per_epoch,
            loss=finite(window.loss),
            accuracy=finite(window.accuracy),
            learning_rate=self._learning_rate(step - 1),
            samples_per_s=window.samples / slowest_s if slowest_s else None,
            input_wait_s=use.input_wait_s,
            elapsed_s=elapsed_s,
            ipu_utilisation_pct={str(ipu): percent for ipu, percent in use.usage.per_ipu_pct.items()},
            instances=instances,
            executions=window.executions,
            metrics={name: finite(value) for name, value in zip(self._metrics, window.others)},
        )
        self.records.append(record)
        return record


def _gather_instance_times(
    world: World, window: WindowTotals, use: DeviceUse, bookkeeping_s: Optional[float], last: Mapping[int, int]
) -> Tuple[InstanceTimes, ...]:
    """Returns where the seconds since the last record went, for every instance; `last` is known to all of them."""
    waits = (use.input_wait_s, use.collective_s, use.optimizer_s, use.program_collective_s)
    numbers = (window.seconds, window.executing_s, *waits, bookkeeping_s)
    everyone = world.gather_numbers([math.nan if number is None else number for number in numbers])
    found = []
    for instance, (seconds, executing_s, *others) in enumerate(everyone):
        waited_s, collective_s, *rest = map(_none_if_nan, others)
        times = (seconds, executing_s, waited_s, collective_s)
        found.append(InstanceTimes(instance, *times, last.get(instance), *rest))
    return tuple(found)


def _none_if_nan(number: float) -> Optional[float]:
    return None if math.isnan(number) else number
