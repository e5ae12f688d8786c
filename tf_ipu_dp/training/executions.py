"""A Keras callback for the training loop: one call after every execution, with its times and logs."""

from __future__ import annotations

import dataclasses
import time
from typing import Any, Callable, Dict, Optional

import tensorflow as tf


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


class AfterExecution(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Calls `after` once per execution; fit stops when it returns False."""

    # Keras keeps the logs for such a callback on the host, without a copy per batch.
    _supports_tf_logs = False

    def __init__(self, after: Callable[[Execution], bool], clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__()
        self._after = after
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
        if not self._after(execution):
            self.model.stop_training = True

    def restart_idle_time(self) -> None:
        """Excludes the time since the last execution from the idle time of the next one."""
        self._idle_since = self._clock()
