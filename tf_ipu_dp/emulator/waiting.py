"""How long a program of the device has waited for something, and whether it does right now. Imports TensorFlow late.

The program itself notes both in a variable as it runs; any thread may read it meanwhile.
"""

from __future__ import annotations

import time
from typing import Any, Optional, Sequence

_SECONDS, _WAITS = range(2)


class Meter:
    """What one kind of waiting has cost so far."""

    def __init__(self) -> None:
        self._noted: Optional[Any] = None  # seconds, and how many waits have begun and not ended

    def seconds(self) -> float:
        """Returns the time that has been spent waiting."""
        return 0.0 if self._noted is None else float(self._noted.numpy()[_SECONDS])

    def is_waiting(self) -> bool:
        """Whether somebody waits."""
        return self._noted is not None and bool(self._noted.numpy()[_WAITS] > 0)

    def settle(self) -> None:
        """Says that nobody waits: a program that failed while it did has not noted its end."""
        if self.is_waiting():
            assert self._noted is not None
            self._noted.assign(self._noted * [1.0, 0.0])

    def begin(self, after: Sequence[Any]) -> Any:
        """Notes, when these are there, that the waiting begins, and returns the operation. For traced programs."""
        import tensorflow as tf

        with tf.control_dependencies(list(after)):
            return self._variable().assign_add(tf.constant([0.0, 1.0], tf.float64), read_value=False)

    def end(self, seconds: Any, after: Sequence[Any]) -> Any:
        """Notes, when these are there, that it has ended, and returns the operation."""
        import tensorflow as tf

        with tf.control_dependencies(list(after)):
            spent = tf.stack([tf.maximum(seconds, tf.zeros([], tf.float64)), tf.constant(-1.0, tf.float64)])
            return self._variable().assign_add(spent, read_value=False)

    def _variable(self) -> Any:
        if self._noted is None:
            import tensorflow as tf
            from tensorflow.python.ops import resource_variable_ops

            from tf_ipu_dp.emulator import replicas

            with tf.init_scope():
                noted = resource_variable_ops.ResourceVariable([0.0, 0.0], dtype=tf.float64, trainable=False)
            replicas.keep_on_host(noted)
            self._noted = noted
        return self._noted


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
