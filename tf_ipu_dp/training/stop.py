"""Why and when a run stops before its last step: signals, the time limit, early stopping, NaN, stalls.

The instances exchange stop requests together with the metrics of an execution, so that all of them stop after the same
step. No TensorFlow.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import signal
import threading
from types import FrameType
from typing import Any, Callable, Dict, Mapping, Optional, Sequence, Tuple

from tf_ipu_dp import cli, early_signals
from tf_ipu_dp.distributed.world import World
from tf_ipu_dp.runs.records import BestWeights, Scores, StopReason

# How often instances exchange metrics and stop requests; each exchange costs some milliseconds.
_EXCHANGE_PERIOD_S = 0.25
_LEAVE_WITHIN_S = 2.0


class SignalHandler:
    """Records SIGINT and SIGTERM, so that the run stops after its execution; a second signal exits at once.

    Before the first execution is done there is nothing to save, and a signal exits at once. The main thread may then be
    in TensorFlow or Horovod for a long time, where Python calls no handler: so another thread waits for signals too.
    """

    def __init__(self, info: Callable[[str], None], warning: Callable[[str], None]) -> None:
        self.received = 0
        self.before_leaving: Callable[[], None] = lambda: None  # removes what the run has written so far
        self._info, self._warning = info, warning
        self._is_training = False
        self._leaving = threading.Lock()
        self._before: Dict[int, Any] = {}

    def __enter__(self) -> SignalHandler:
        # Python lets only the main thread handle signals; a call from another one leaves them to the program.
        if threading.current_thread() is not threading.main_thread():
            return self
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        self._wakeup_before = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        threading.Thread(target=self._leave_while_starting, name="signals", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._before:
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._writing)  # which ends the thread

    def begin_training(self) -> None:
        """From now on a signal lets the run save."""
        self._is_training = True

    def _leave_while_starting(self) -> None:
        with os.fdopen(self._reading, "rb", buffering=0) as stream:
            while numbers := stream.read(1):  # to the end: a closed pipe would be reported at the next signal
                if numbers[0] in self._before and not self._is_training:
                    self._leave_now(numbers[0])

    def _leave_now(self, number: int) -> None:
        with self._leaving:  # of the two threads the second one waits for the end of the process
            # The handler may have interrupted a write to the same stream, or to a folder that does not respond.
            deadline = threading.Timer(_LEAVE_WITHIN_S, os._exit, (128 + number,))
            deadline.daemon = True
            deadline.start()
            with contextlib.suppress(RuntimeError, OSError):
                self.before_leaving()
                if not early_signals.is_launched():  # else the launcher reports it
                    name = signal.Signals(number).name
                    self._warning(f"train: {name} before the first update; there is nothing to save.")
            deadline.cancel()
            os._exit(128 + number)

    def _handle(self, number: int, _: Optional[FrameType]) -> None:
        if not self._is_training:
            self._leave_now(number)
            return
        name = signal.Signals(number).name
        if self.received:
            self._warning(f"{name}: exiting at once.")
            raise SystemExit(128 + number)
        self.received = number
        self._info(f"{name}: finishing the execution and saving; send it again to exit at once.")


class EarlyStopping:
    """Stops a run whose validation loss has not improved for some validations. `patience` 0: never."""

    def __init__(self, patience: int, losses: Mapping[int, Optional[float]]) -> None:
        """`losses` are those of validations before a resumption, by step."""
        self._patience = patience
        self._losses: Dict[int, Optional[float]] = dict(losses)

    def has_validated(self, step: int) -> bool:
        """Whether there was a validation after a step."""
        return step in self._losses

    def add(self, step: int, loss: Optional[float]) -> Optional[StopReason]:
        """Adds a validation's loss; returns why the run stops, if it does."""
        self._losses[step] = loss
        return self.reason()

    def reason(self) -> Optional[StopReason]:
        """Returns why the run stops after its last validation, if it does; a resumed run asks before it trains."""
        steps = sorted(self._losses)
        losses = [math.inf if self._losses[step] is None else self._losses[step] or 0.0 for step in steps]
        patience = self._patience
        if not patience or len(losses) <= patience or min(losses[-patience:]) < min(losses[:-patience]):
            return None
        return StopReason(
            StopReason.EARLY_STOPPING,
            transient=False,
            message=f"Validation loss has not improved for {cli.count(patience, 'validation')}; "
            f"stopping early after step {steps[-1]:,}.",
        )


# A metric whose name has one of these is better when it is higher; losses and errors, and all others, when lower.
_HIGHER_IS_BETTER = ("acc", "top", "auc", "precision", "recall", "f1", "fbeta", "iou", "dice", "r2", "sensitivity",
                     "specificity", "hinge_margin", "cosine")  # fmt: skip


def require_metric(metric: str, known: Sequence[str]) -> None:
    """Raises a UsageError for a metric of --keep_best that a validation does not have."""
    if metric not in known:
        raise cli.UsageError(
            f"--keep_best={metric} is not a metric of this task. Use --keep_best={cli.alternatives(known)}."
        )


class BestValidation:
    """The best validation of a run, by a metric; the first of several that are as good."""

    def __init__(self, metric: str) -> None:
        self._metric = metric
        self._higher = any(word in metric.lower() for word in _HIGHER_IS_BETTER) and "loss" not in metric.lower()
        self.best: Optional[BestWeights] = None

    def add(self, step: int, scores: Scores) -> None:
        """Adds a validation; UsageError if it has no such metric."""
        try:
            value = scores.by_name(self._metric)
        except KeyError:
            known = ["loss", *(["accuracy", "top5"] if scores.top1 is not None else []), *scores.metrics]
            require_metric(self._metric, known)
            raise
        if value is None:
            return
        best = self.best.value if self.best else None
        if best is None or (value > best if self._higher else value < best):
            self.best = BestWeights(step, scores.loss, "", self._metric, value)


@dataclasses.dataclass(frozen=True)
class Exchange:
    """The combined values of all instances after an execution."""

    loss: float  # mean over the instances
    accuracy: float
    signal: int  # received by any instance; 0: none
    time_is_up: bool  # by the leader's clock
    log_now: bool  # by the leader's clock
    numbers: Tuple[Sequence[float], ...]  # of every instance, as they were given
    others: Tuple[float, ...] = ()  # means of further metrics
    callback_stops: bool = False  # a callback of the user, on the leader, has asked to stop


class InstanceExchange:
    """Exchanges values between the instances after an execution. Decisions by time use the leader's clock."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._executions_left = 0
        self.last_step = self.step_before = 0  # of the last exchange and of the one before

    def resume_at(self, step: int) -> None:
        """Counts from the step of a checkpoint."""
        self.last_step = self.step_before = step

    def is_due(self, must_exchange: bool) -> bool:
        """Whether the instances exchange after this execution; the same on all of them, because no clock is used."""
        self._executions_left -= 1
        return must_exchange or self._executions_left <= 0 or self._world.instances == 1

    def run(  # noqa: PLR0913
        self,
        step: int,
        loss: float,
        accuracy: float,
        *,
        signal: int,
        time_is_up: bool,
        log_now: bool,
        execution_s: float,
        numbers: Sequence[float] = (),
        others: Sequence[float] = (),
        callback_stops: bool = False,
    ) -> Exchange:
        """Exchanges this instance's values with the others; the leader's speed decides when the next one is due.

        `numbers` are more to gather, and `others` further means of metrics, as many on every instance.
        """
        values = (loss, accuracy, signal, time_is_up, log_now, execution_s, callback_stops, *others)
        everyone = self._world.gather_numbers([*values, *numbers])
        columns = zip(*(row[: len(values)] for row in everyone))
        losses, accuracies, signals, times_up, log_requests, seconds, callbacks, *further = columns
        self._executions_left = max(int(_EXCHANGE_PERIOD_S / max(seconds[0], 1e-3)), 1)
        self.step_before, self.last_step = self.last_step, step
        return Exchange(
            _mean(losses),
            _mean(accuracies),
            int(max(signals)),
            bool(times_up[0]),
            bool(log_requests[0]),
            tuple(row[len(values) :] for row in everyone),
            tuple(map(_mean, further)),
            bool(callbacks[0]),
        )


def requested_stop(exchange: Exchange, step: int, time_limit: object, resume_command: str) -> Optional[StopReason]:
    """Returns the stop reason of a signal or of the time limit; None if there is neither."""
    if exchange.signal:
        kind, cause = StopReason.SIGNAL, signal.Signals(exchange.signal).name
    elif exchange.time_is_up:
        kind, cause = StopReason.TIME_LIMIT, f"--time_limit={time_limit}"
    else:
        return None
    return StopReason(kind, True, f"{cause} after step {step:,}, saved.", resume_command)


def callback_stop(step: int) -> StopReason:
    """Returns the stop reason for a callback of the user that has set stop_training."""
    message = f"A callback has set stop_training after step {step:,}."
    return StopReason(StopReason.EARLY_STOPPING, transient=False, message=message)


def not_finite(
    what: str, before: int, step: int, last_saved: str, *, learning_rate: float, precision: str
) -> StopReason:
    """Returns the stop reason for a loss or weights that became NaN or infinite between two steps."""
    advice = "use --loss_scaling=dynamic" if precision != "32.32" else "raise --warmup_epochs"
    return StopReason(
        StopReason.NOT_FINITE,
        transient=False,
        message=f"{what} became NaN or infinite between steps {before:,} and {step:,}. {last_saved} Start again in "
        f"another --run_dir with a lower --learning_rate (it rises to {learning_rate:g}), or {advice}.",
    )


def weights_differ(difference: str, step: int, last_saved: str, resume_command: str) -> StopReason:
    """Returns the stop reason for instances that no longer have the same weights."""
    return StopReason(
        StopReason.WEIGHTS_DIFFER,
        transient=True,
        message=f"The instances' weights differ after step {step:,}: {difference}. A host's memory or network may be "
        f"faulty. {last_saved} Resume from it with: {resume_command}",
    )


def stalled(sentence: str, last_saved: str, resume_command: str) -> StopReason:
    """Returns the stop reason for a run that makes no progress."""
    return StopReason(
        StopReason.STALL, transient=True, message=f"{sentence} {last_saved} Resume with: {resume_command}"
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
