"""Floating point exceptions and NaN on overflow, as `floating_point_behaviour` asks, at the results of operations.

An operation is examined by what it makes of finite inputs. What happens inside of it, and in the update of a variable
in place, is not seen. Programs that ask for nothing are traced without any of this.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from typing import Any, Iterator, List, Optional, Sequence, Tuple

import tensorflow as tf
from tensorflow.python.eager import context

# Operations that only move values, and those that programs call: their parts are examined.
_SKIPPED = frozenset({
    "Assert", "BroadcastTo", "ConcatV2", "Enter", "Exit", "ExpandDims", "Gather", "GatherV2", "Identity", "IdentityN",
    "If", "IsFinite", "IsInf", "IsNan", "Merge", "NextIteration", "Pack", "PartitionedCall", "PreventGradient",
    "Reshape", "Select", "SelectV2", "Shape", "Slice", "Split", "SplitV", "Squeeze", "StatefulPartitionedCall",
    "StatelessIf", "StatelessWhile", "StopGradient", "StridedSlice", "Switch", "TensorListStack", "Tile", "Transpose",
    "Unpack", "While",
})  # fmt: skip
# The place among the inputs of what must not be zero.
_DIVISORS = {
    "Div": 1, "FloorDiv": 1, "Inv": 0, "Log": 0, "RealDiv": 1, "Reciprocal": 0, "Rsqrt": 0, "SqrtGrad": 0, "Xdivy": 1,
}  # fmt: skip
_MARK = "ipu floating point exception"
_SENTENCES = {
    "inv": "an invalid operation (floating_point_behaviour.inv)",
    "div0": "a division by zero (floating_point_behaviour.div0)",
    "oflo": "an overflow (floating_point_behaviour.oflo)",
}


@dataclasses.dataclass(frozen=True)
class Behaviour:
    """Which events raise, and whether overflows of 16-bit numbers become NaN."""

    inv: bool = False
    div0: bool = False
    oflo: bool = False
    nanoo: bool = False


_behaviour = Behaviour()
_has_warned = False


def configure(behaviour: Behaviour, stochastic_rounding: bool) -> None:
    """Sets the behaviour of programs that are traced from now on."""
    global _behaviour, _has_warned  # noqa: PLW0603
    _behaviour = behaviour
    if stochastic_rounding and not _has_warned:
        _has_warned = True
        logging.getLogger(__name__).warning(
            "emulator: stochastic rounding is not emulated; 16-bit numbers are rounded to the nearest."
        )


@contextlib.contextmanager
def examining() -> Iterator[None]:
    """Inside, operations are traced together with what the configured behaviour asks for."""
    if _behaviour == Behaviour():
        yield
        return
    callbacks = context.context()
    examine = _Examiner(_behaviour)
    callbacks.add_op_callback(examine)
    try:
        yield
    finally:
        callbacks.remove_op_callback(examine)


@contextlib.contextmanager
def saturating() -> Iterator[None]:
    """Inside, traced operations limit 16-bit numbers to the largest one, as an IPU does unless `nanoo` is set."""
    if _behaviour.nanoo:
        yield
        return
    callbacks = context.context()
    callbacks.add_op_callback(_saturate_outputs)
    try:
        yield
    finally:
        callbacks.remove_op_callback(_saturate_outputs)


def saturate(tensor: Any) -> Any:
    """Returns a tensor with the largest 16-bit number where it is infinite; unchanged if overflows become NaN."""
    if _behaviour.nanoo:
        return tensor
    largest = tf.sign(tensor) * tf.cast(tf.float16.max, tensor.dtype)
    return tf.where(tf.math.is_inf(tensor), largest, tensor)


def explain(error: Exception) -> Optional[str]:
    """Returns what the Poplar runtime reports for an error that a traced check has raised; None for other errors."""
    message = str(getattr(error, "message", error))
    for name, sentence in _SENTENCES.items():
        _, found, rest = message.partition(f"{_MARK} {name} in ")
        if found:
            return f"[Poplar][Execute engine] floating point exception: {sentence} in the operation {rest.split()[0]}."
    return None


def _saturate_outputs(
    op_type: str, inputs: Any, attrs: Any, outputs: Any, op_name: Any = None, graph: Any = None
) -> Any:
    """Called by TensorFlow for every operation; what it returns replaces the outputs of a traced one."""
    del inputs, attrs, op_name
    if graph is None or op_type in _SKIPPED:
        return outputs
    return [saturate(output) if output.dtype == tf.float16 else output for output in outputs]


class _Examiner:
    """Called by TensorFlow for every operation that is traced."""

    def __init__(self, behaviour: Behaviour) -> None:
        self._behaviour = behaviour

    def __call__(
        self, op_type: str, inputs: Any, attrs: Any, outputs: Any, op_name: Any = None, graph: Any = None
    ) -> Any:
        """Returns the operation's outputs with the checks behind them."""
        del attrs
        floats = [tensor for tensor in inputs if tensor.dtype.is_floating]
        if graph is None or op_type in _SKIPPED or not (floats or op_type == "Cast"):
            return outputs
        divisor = inputs[_DIVISORS[op_type]] if op_type in _DIVISORS else None
        name = op_name.decode() if isinstance(op_name, bytes) else str(op_name)
        return [self._examine(output, floats, divisor, name) for output in outputs]

    def _examine(self, output: Any, floats: Sequence[Any], divisor: Any, name: str) -> Any:
        wanted = self._behaviour
        becomes_nan = wanted.nanoo and output.dtype == tf.float16
        if not output.dtype.is_floating or not (wanted.inv or wanted.div0 or wanted.oflo or becomes_nan):
            return output
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(each)) for each in floats]) if floats else True
        infinite = tf.logical_and(tf.math.is_inf(output), finite)
        by_zero = tf.zeros_like(infinite) if divisor is None else tf.logical_and(infinite, tf.equal(divisor, 0))
        overflow = tf.logical_and(infinite, tf.logical_not(by_zero))
        events: List[Tuple[str, Any]] = []
        if wanted.oflo:
            events.append(("oflo", overflow))
        if wanted.div0 and divisor is not None:
            events.append(("div0", by_zero))
        if wanted.inv:
            events.append(("inv", tf.logical_and(tf.math.is_nan(output), finite)))
        checks = [
            tf.debugging.Assert(tf.logical_not(tf.reduce_any(event)), [f"{_MARK} {kind} in {name} "])
            for kind, event in events
        ]
        with tf.control_dependencies(checks):
            if becomes_nan:
                return tf.where(overflow, tf.constant(float("nan"), tf.float16), output)
            return tf.identity(output)
