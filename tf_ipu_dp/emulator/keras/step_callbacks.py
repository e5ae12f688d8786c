"""Callbacks for every step of every replica, as `set_asynchronous_callbacks` requests."""

from __future__ import annotations

from typing import Any, Callable, Dict

import tensorflow as tf

from tf_ipu_dp.emulator.keras import pipelines
from tf_ipu_dp.emulator.keras.model_options import options_of, pipelining_of
from tf_ipu_dp.emulator.keras.replica_data import local_replicas
from tf_ipu_dp.emulator.runtime import metrics


def reports_each_step(model: Any, predicts: bool = False) -> bool:
    """Whether callbacks are called for every step, in place of once per execution.

    A pipeline that accumulates its outputs has none for single steps. Predictions are never accumulated.
    """
    accumulates = pipelines.is_pipelined(model) and pipelining_of(model).accumulate_outfeed and not predicts
    return options_of(model).asynchronous and not accumulates


class StepCallbacks(tf.keras.callbacks.CallbackList):  # type: ignore[misc]
    """Calls the callbacks for every step of every replica, when the execution that made them is done."""

    def __init__(self, model: Any, given: Dict[str, Any], steps: int) -> None:
        verbose = 1 if given["verbose"] == "auto" else given["verbose"]
        super().__init__(given["callbacks"], add_history=True, add_progbar=verbose != 0, model=model, verbose=verbose,
                         epochs=given.get("epochs", 1), steps=steps)  # fmt: skip
        self._model, self._first = model, 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Keeps the number of the first step of the execution."""
        self._first = batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Calls the callbacks for every step."""
        self._call_for_each_step(super().on_train_batch_begin, super().on_train_batch_end)

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Keeps the number of the first step of the execution."""
        self._first = batch

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """Calls the callbacks for every step."""
        self._call_for_each_step(super().on_test_batch_begin, super().on_test_batch_end)

    def on_predict_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Keeps the number of the first step of the execution."""
        self._first = batch

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        """Calls the callbacks for every step with its part of the predictions, which are in the order of the steps."""
        count = local_replicas(self._model)
        steps = [step for step in range(self._first, batch + 1) for _ in range(count)]
        outputs = (logs or {}).get("outputs")
        parts = [tf.split(output, len(steps)) for output in tf.nest.flatten(outputs)]
        for number, step in enumerate(steps):
            super().on_predict_batch_begin(step)
            own = tf.nest.pack_sequence_as(outputs, [part[number] for part in parts])
            super().on_predict_batch_end(step, {"outputs": own})

    def _call_for_each_step(self, begin: Callable[..., None], end: Callable[..., None]) -> None:
        count = local_replicas(self._model)
        for number, logs in enumerate(metrics.step_logs(self._model), start=self._first):
            for replica in range(count):
                begin(number)
                end(number, {name: float(value[replica] if count > 1 else value) for name, value in logs.items()})
