"""How long a program of the device has waited for something, and whether it is waiting right now.

The program itself records both in variables as it runs; any thread may read them meanwhile. TensorFlow is imported
late, because `popdist` and `gcipuinfo` must not import it.
"""

from __future__ import annotations

import time
from typing import Any, Dict, List, Sequence, Tuple

from tf_ipu_dp.emulator.runtime import replica_handles


class Meter:
    """How long one kind of waiting has taken so far."""

    def __init__(self) -> None:
        # Seconds, and how many waits have begun and ended. In separate variables, because TensorFlow orders the
        # operations on one variable.
        self._variables: Dict[str, Any] = {}

    def seconds(self) -> float:
        """Returns the time that has been spent waiting."""
        return self._read("seconds")

    def is_waiting(self) -> bool:
        """Whether the program is waiting now."""
        begun = self._read("begun")
        return begun > self._read("ended")

    def clear_unfinished(self) -> None:
        """Ends waits that have no end, because the program failed while it was waiting."""
        if self._read("begun") != self._read("ended"):
            for name in ("begun", "ended"):
                self._variable(name).assign(0.0)

    def begin(self, after: Sequence[Any]) -> Any:
        """Returns an operation that records the beginning of a wait, once these tensors are computed."""
        return self._add("begun", 1.0, after)

    def end(self, after: Sequence[Any]) -> Any:
        """Returns an operation that records its end, once these tensors are computed."""
        return self._add("ended", 1.0, after)

    def take_turn(self, after: Sequence[Any]) -> Any:
        """Returns an operation that runs after those before it in a program, and once these tensors are computed."""
        return self._add("turns", 1.0, after)

    def spend(self, seconds: Any) -> Any:
        """Returns an operation that adds to the time."""
        import tensorflow as tf

        return self._add("seconds", tf.maximum(seconds, tf.zeros([], tf.float64)), ())

    def _add(self, name: str, value: Any, after: Sequence[Any]) -> Any:
        import tensorflow as tf

        with tf.control_dependencies(list(after)):
            return self._variable(name).assign_add(tf.convert_to_tensor(value, tf.float64), read_value=False)

    def _read(self, name: str) -> float:
        if name not in self._variables:
            return 0.0
        from tensorflow.python.ops import gen_resource_variable_ops

        variable = self._variables[name]
        # Reading it as TensorFlow's users do takes four times as long, and this is read in every execution.
        return float(gen_resource_variable_ops.read_variable_op(variable.handle, variable.dtype).numpy())

    def _variable(self, name: str) -> Any:
        if name not in self._variables:
            self._variables[name] = _make_variable(0.0)
        return self._variables[name]


class RecentTimes:
    """How long the last waits of one kind have taken, each of them, up to a number that is kept."""

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._variables: Tuple[Any, ...] = ()  # how many there have been, and the kept ones in a ring

    def read(self) -> Tuple[int, List[float]]:
        """Returns how many waits there have been so far, and the seconds of the last ones in their order."""
        if not self._variables:
            return 0, []
        total, ring = int(self._variables[0].numpy()), self._variables[1].numpy().tolist()
        oldest = total % self._kept
        return total, ring[:total] if total <= self._kept else ring[oldest:] + ring[:oldest]

    def add(self, seconds: Any) -> None:
        """Makes a traced program record a wait."""
        import tensorflow as tf

        if not self._variables:
            self._variables = (_make_variable(0, tf.int64), _make_variable([0.0] * self._kept))
        total, ring = self._variables
        place = total.read_value() % self._kept
        ring.scatter_update(tf.IndexedSlices(seconds[tf.newaxis], place[tf.newaxis]))
        total.assign_add(1, read_value=False)


def _make_variable(value: Any, dtype: Any = None) -> Any:
    """Makes a variable of 64-bit numbers that all replicas share."""
    import tensorflow as tf
    from tensorflow.python.ops import resource_variable_ops

    with tf.init_scope():
        variable = resource_variable_ops.ResourceVariable(value, dtype=dtype or tf.float64, trainable=False)
    replica_handles.keep_on_host(variable)
    return variable


def now(after: Sequence[Any] = ()) -> Any:
    """Returns the time at which these tensors are computed, in a traced program.

    TensorFlow refuses its own clock in a program with deterministic operations.
    """
    import tensorflow as tf
    from tensorflow.python.framework import config

    with tf.control_dependencies(list(after)):
        if not getattr(config, "is_op_determinism_enabled", bool)():
            return tf.timestamp()
        moment = tf.numpy_function(time.time, [], tf.float64)
        moment.set_shape([])
        return moment
