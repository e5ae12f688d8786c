"""Keras callbacks of the training loop: its own, called after every execution with times and logs, and the user's."""

from __future__ import annotations

import dataclasses
import time
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence

import tensorflow as tf

from tf_ipu_dp import cli, user_code
from tf_ipu_dp.runs.records import Scores


@dataclasses.dataclass(frozen=True)
class Execution:
    """One call into the device."""

    began_s: float  # by the callback's clock
    ended_s: float
    idle_s: float  # since the previous execution, or since fit was called
    logs: Dict[str, float]  # running means since fit was called

    @property
    def seconds(self) -> float:
        return self.ended_s - self.began_s


class TrainingCallback(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Calls a function after each execution and one after each epoch; fit stops when one of them returns False."""

    # Keras keeps the logs for such a callback on the host, without a copy per batch.
    _supports_tf_logs = False

    def __init__(
        self,
        after_execution: Callable[[Execution], bool],
        after_epoch: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__()
        self._after_execution, self._after_epoch = after_execution, after_epoch
        self._clock = clock
        self._idle_since = clock()
        self._began: Optional[float] = None

    def on_train_begin(self, logs: Any = None) -> None:
        self._idle_since = self._clock()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._began = self._clock()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        now = self._clock()
        began = self._idle_since if self._began is None else self._began
        values = {name: float(value) for name, value in (logs or {}).items()}
        execution = Execution(began, now, began - self._idle_since, values)
        self._idle_since, self._began = now, None
        if not self._after_execution(execution):
            self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if not self._after_epoch():
            self.model.stop_training = True
        self.restart_idle_time()

    def restart_idle_time(self) -> None:
        """Excludes the time since the last execution from the idle time of the next one."""
        self._idle_since = self._clock()


class OwnCallbacks(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Calls the user's Keras callbacks for a run as for one `fit`, although a run may be several calls of it.

    A batch is one execution, numbered as the SDK does: by its last micro batch. An epoch ends after its validation,
    whose scores are in the logs as val_loss, val_accuracy and so on. With several instances a callback that sets
    stop_training does not end `fit` here, where the others would wait for this one: `has_stopped` is for them, too.
    """

    _supports_tf_logs = False

    def __init__(self, model: Any, callbacks: Sequence[Any], *, stops_fit: bool = True) -> None:
        super().__init__()
        self._all = list(callbacks)
        self._model, self._stops_fit = model, stops_fit
        self._began = False
        self._logs: Dict[str, float] = {}
        self.has_stopped = False

    def set_params(self, params: Any) -> None:
        self._tell("set_params", params)

    def on_train_begin(self, logs: Any = None) -> None:
        if not self._began:
            self._began = True
            self._tell("set_model", self._model)
            self._tell("on_train_begin", logs)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._tell("on_epoch_begin", epoch, logs)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._tell("on_train_batch_begin", batch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        stopped_before = self._model.stop_training
        self._logs = {name: float(value) for name, value in (logs or {}).items()}
        self._tell("on_train_batch_end", batch, dict(self._logs))
        self.has_stopped |= bool(self._model.stop_training) and not stopped_before
        if not self._stops_fit:
            self._model.stop_training = stopped_before

    def end_epoch(self, epoch: int, scores: Optional[Scores]) -> None:
        """Ends an epoch, with the scores of its validation if there was one."""
        logs: Dict[str, Optional[float]] = dict(self._logs)
        if scores:
            logs["val_loss"] = scores.loss
            if scores.top1 is not None:
                logs["val_accuracy"] = scores.top1
            logs.update({f"val_{name}": value for name, value in scores.metrics.items()})
        self._model.stop_training = False
        self._tell("on_epoch_end", epoch, logs)
        self.has_stopped |= bool(self._model.stop_training)

    def finish(self) -> None:
        """Ends the run."""
        if self._began:
            self._tell("on_train_end", dict(self._logs))

    def _tell(self, event: str, *values: Any) -> None:
        for each in self._all:
            try:
                getattr(each, event)(*values)
            except cli.UsageError:
                raise
            except Exception as error:  # any: it is the user's code that raises
                raise cli.UsageError(
                    f"The callback {type(each).__name__} failed in {event}: {user_code.describe_error(error)}"
                ) from error


def load_callbacks(reference: str, offered: Mapping[str, Any]) -> List[Any]:
    """Returns the callbacks that a function of the user makes; UsageError with one sentence if it does not."""
    returned = user_code.call_by_name(user_code.load_function(reference), offered, reference)
    found = list(returned) if isinstance(returned, (list, tuple)) else [returned]
    require_callbacks(found, f"--callbacks={reference} returned")
    return found


def require_callbacks(found: Sequence[Any], origin: str, takes: str = "returns") -> None:
    """Raises a UsageError if something that is not a Keras callback is among some; `origin` begins the sentence."""
    wrong = [each for each in found if not isinstance(each, tf.keras.callbacks.Callback)]
    if wrong:
        raise cli.UsageError(
            f"{origin} {type(wrong[0]).__name__} where a Keras callback (tf.keras.callbacks) is expected. It {takes} "
            "one, or a list of them."
        )
    rates = (tf.keras.callbacks.LearningRateScheduler, tf.keras.callbacks.ReduceLROnPlateau)
    setting = [each for each in found if isinstance(each, rates)]
    if setting:
        raise cli.UsageError(
            f"{origin} {type(setting[0]).__name__}, which sets the learning rate. That is the part of --learning_rate "
            "and --lr_schedule: leave it out."
        )
