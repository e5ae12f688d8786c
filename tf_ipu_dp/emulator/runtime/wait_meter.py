"""How long a program of the device has waited for something, and whether it is waiting right now.

The program itself notes both in variables as it runs; any thread may read them meanwhile. TensorFlow is imported late,
because `popdist` and `gcipuinfo` must not import it.
"""

from __future__ import annotations

import time
from typing import Any, Dict, Sequence

from tf_ipu_dp.emulator.runtime import replica_handles


class Meter:
    """What one kind of waiting has cost so far."""

    def __init__(self) -> None:
        # Seconds, and how many waits have begun and ended. Each by itself: operations on one variable keep an order.
        self._noted: Dict[str, Any] = {}

    def seconds(self) -> float:
        """Returns the time that has been spent waiting."""
        return self._read("seconds")

    def is_waiting(self) -> bool:
        """Whether somebody waits."""
        begun = self._read("begun")
        return begun > self._read("ended")

    def settle(self) -> None:
        """Says that nobody waits: a program that failed while it did has not noted its end."""
        if self._read("begun") != self._read("ended"):
            for name in ("begun", "ended"):
                self._variable(name).assign(0.0)

    def begin(self, after: Sequence[Any]) -> Any:
        """Notes, when these are there, that the waiting begins, and returns the operation. For traced programs."""
        return self._add("begun", 1.0, after)

    def end(self, after: Sequence[Any]) -> Any:
        """Notes, when these are there, that it has ended, and returns the operation."""
        return self._add("ended", 1.0, after)

    def spend(self, seconds: Any) -> Any:
        """Notes what it has cost, and returns the operation."""
        import tensorflow as tf

        return self._add("seconds", tf.maximum(seconds, tf.zeros([], tf.float64)), ())

    def _add(self, name: str, value: Any, after: Sequence[Any]) -> Any:
        import tensorflow as tf

        with tf.control_dependencies(list(after)):
            return self._variable(name).assign_add(tf.convert_to_tensor(value, tf.float64), read_value=False)

    def _read(self, name: str) -> float:
        return float(self._noted[name].numpy()) if name in self._noted else 0.0

    def _variable(self, name: str) -> Any:
        if name not in self._noted:
            import tensorflow as tf
            from tensorflow.python.ops import resource_variable_ops

            with tf.init_scope():
                noted = resource_variable_ops.ResourceVariable(0.0, dtype=tf.float64, trainable=False)
            replica_handles.keep_on_host(noted)
            self._noted[name] = noted
        return self._noted[name]


def now(after: Sequence[Any] = ()) -> Any:
    """Returns the time when these are there, in a traced program.

    TensorFlow's own clock refuses to run where a program has asked for deterministic operations.
    """
    import tensorflow as tf
    from tensorflow.python.framework import config

    with tf.control_dependencies(list(after)):
        if not getattr(config, "is_op_determinism_enabled", bool)():
            return tf.timestamp()
        moment = tf.numpy_function(time.time, [], tf.float64)
        moment.set_shape([])
        return moment
