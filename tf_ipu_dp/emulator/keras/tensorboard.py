"""What a TensorBoard callback records of training: the logs of each execution, and the graph of the program."""

from __future__ import annotations

import sys
from typing import Any, Callable, Dict

import tensorflow as tf

from tf_ipu_dp.emulator.runtime.fusion.passes import Passes


class RecordedExecution:
    """An execution that trains. Its logs are written to the summary writer that a callback has made the default."""

    def __init__(self, model: Any, execution: Callable[[Any], Dict[str, Any]]) -> None:
        self._model, self._execution = model, execution
        # In later releases of Keras the callback writes them itself.
        self._write = getattr(sys.modules[tf.keras.Model.__module__], "write_scalar_summaries", None)

    @property
    def passes(self) -> Passes:
        """How the micro batches of an update are divided into passes, once it is traced."""
        return self._execution.passes  # type: ignore[attr-defined]

    def __call__(self, iterator: Any) -> Dict[str, Any]:
        logs = self._execution(iterator)
        traced = self._execution.traced  # type: ignore[attr-defined]
        if getattr(self._model, "train_tf_function", None) is not traced:  # setting it makes Keras look at all layers
            self._model.train_tf_function = traced
        if self._write is not None and tf.summary.should_record_summaries():
            # Once per execution, on the host: the results of single steps do not leave the device.
            self._write(logs, step=self._model._train_counter)
        return logs
