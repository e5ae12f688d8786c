"""Accumulates gradients over micro batches, for optimizers that update every A-th time they are called.

The state is made of variables, once per list of variables to update: one accumulator each, and the position in the
window. So it works in eager mode, in a `tf.function` and in a graph of TF1, in or out of a loop.
"""

from __future__ import annotations

import dataclasses
import numbers
from typing import Any, Callable, Dict, List, Sequence, Tuple

import tensorflow as tf

from tf_ipu_dp.emulator.runtime import graph_loops, replicas
from tf_ipu_dp.emulator.sdk_api.ipu import loops
from tf_ipu_dp.emulator.sdk_api.ipu.gradient_accumulation import GradientAccumulationReductionMethod as Method


@dataclasses.dataclass(frozen=True)
class _State:
    """The state for one list of variables."""

    position: Any
    accumulators: List[Any]


class Window:
    """A window of `count` micro batches; their gradients are reduced by `method` and passed on with the last one.

    `dtype` is that of the accumulators and of the gradients passed on: None for the variable's, a type, or a function
    of the variable.
    """

    def __init__(self, count: Any, method: Any, dtype: Any = None) -> None:
        if not isinstance(count, numbers.Integral) or isinstance(count, bool) or count < 1:
            raise ValueError(f"num_mini_batches must be an int of 1 or more, not {count!r}.")
        self.count = int(count)
        self.method = Method.parse(method)
        self.dtype = dtype
        self._states: Dict[Tuple[Any, ...], _State] = {}

    def add(self, gradients: Sequence[Any], variables: Sequence[Any], update: Callable[[List[Any]], Any]) -> Any:
        """Adds one micro batch. With the last one of the window, `update` gets the reduced gradients."""
        arrived = [
            tf.cast(tf.convert_to_tensor(gradient), accumulator_dtype(self.dtype, variable))
            for gradient, variable in zip(gradients, variables)
        ]
        if self.count == 1:
            return update(arrived)
        _check_loop(self.count)
        state = self._state_for(variables)
        position = state.position.read_value()
        reduced = [
            add_gradient(self.method, self.count, accumulator.read_value(), gradient, position)
            for accumulator, gradient in zip(state.accumulators, arrived)
        ]

        def update_and_reset() -> Any:
            operations = [update(reduced)]
            # Through identities, since a branch does not wait for tensors of the graph around it that it does not use.
            with tf.control_dependencies([tf.identity(value) for value in reduced]):
                operations += [_assign(accumulator, tf.zeros_like(accumulator)) for accumulator in state.accumulators]
            return _finished(operations)

        def keep() -> Any:
            return _finished([_assign(accumulator, value) for accumulator, value in zip(state.accumulators, reduced)])

        done = tf.cond(tf.equal(position, self.count - 1), update_and_reset, keep)
        with tf.control_dependencies([done]):
            return tf.group(_assign(state.position, (position + 1) % self.count))

    def _state_for(self, variables: Sequence[Any]) -> _State:
        key = tuple(variable.ref() for variable in variables)
        if key not in self._states:
            # Outside of the function or loop that is being traced, because it may be traced again.
            with tf.init_scope():
                self._states[key] = _State(
                    _variable("position", [], tf.int32),
                    [
                        _variable("accumulator", variable.shape, accumulator_dtype(self.dtype, variable))
                        for variable in variables
                    ],
                )
        return self._states[key]


def _check_loop(count: int) -> None:
    """Refuses what the compiler refuses: it must know the length of the loop around, and the window must divide it.

    The length of a loop over `tf.range`, and of one with a condition, is not known here, so these are accepted.
    """
    loop = loops.innermost()
    if loop is not None and loop.iterations is not None:
        if loop.iterations % count == 0:
            return
        reason = f"which does not divide the loop's {loop.iterations}"
    elif replicas.current() is None:
        return
    elif loop is not None and loop.is_counted:
        reason = "but the length of the loop around is not known when the program is compiled"
    elif loop is None and not graph_loops.is_in_loop():
        reason = "but there is no loop around: use ipu.loops.repeat, or tf.range of a constant"
    else:
        return
    raise tf.errors.FailedPreconditionError(None, None, f"{count} micro batches are accumulated, {reason}.")


def add_gradient(method: Method, count: int, accumulated: Any, gradient: Any, position: Any) -> Any:
    """Returns the accumulator with the gradient of the micro batch at a position of the window of `count`."""
    if not gradient.dtype.is_floating or method is Method.SUM:
        return accumulated + gradient
    if method is Method.MEAN:
        return accumulated + gradient / tf.cast(count, gradient.dtype)
    before = tf.cast(position, gradient.dtype)
    return accumulated * (before / (before + 1)) + gradient / (before + 1)


def accumulator_dtype(choice: Any, like: Any) -> Any:
    """Returns the type of an accumulator: the one given, what a given function returns, or that of the variable."""
    chosen = choice(like) if callable(choice) and not isinstance(choice, type) else choice
    return tf.as_dtype(like.dtype if chosen is None else chosen).base_dtype


def _variable(name: str, shape: Any, dtype: Any) -> Any:
    # The TF1 class: in a graph it joins the collection that global_variables_initializer() looks at.
    return tf.compat.v1.Variable(
        lambda: tf.zeros(shape, dtype), trainable=False, name=f"gradient_accumulation/{name}", use_resource=True
    )


def _assign(variable: Any, value: Any) -> Any:
    return variable.assign(value, read_value=False)


def _finished(operations: List[Any]) -> Any:
    """Returns a constant after the operations: both branches of a condition must return the same type."""
    with tf.control_dependencies([operation for operation in operations if operation is not None]):
        return tf.constant(0)
