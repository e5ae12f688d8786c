"""The micro batches in a pass: tensors divided into them, and what is traced for one of them."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, Callable, Dict, Iterator, List, Tuple

import tensorflow as tf

from tf_ipu_dp.emulator.runtime import replicas
from tf_ipu_dp.emulator.runtime.fusion.passes import Passes


class CannotBeFusedError(Exception):
    """Tracing has found something that a fused pass cannot compute. The program is traced again without fusing."""


class Draws:
    """The random operations of an update whose passes are traced `times` times, and draw as if it were once."""

    def __init__(self, times: int) -> None:
        self.times, self.traced = times, 0
        self.made: Dict[int, Tuple[int, Any]] = {}
        self._first_operation = -1

    @contextlib.contextmanager
    def of_next_pass(self) -> Iterator[None]:
        """Inside, a pass is traced."""
        program = replicas.current()
        assert program is not None
        if self.traced:
            program.random_ops = self._first_operation
        else:
            self._first_operation = program.random_ops
        yield
        self.traced += 1


class Parts:
    """The micro batches of the pass that is being traced, in the order in which replicas would run them."""

    def __init__(self, passes: Passes, micro_batch_size: int, first_replica: Any, draws: Draws) -> None:
        """`first_replica`: the local index of the first replica in the pass, as a tensor."""
        self.passes, self._size, self._first, self._draws = passes, micro_batch_size, first_replica, draws
        self.count = passes.micro_batches
        self.inside = False  # while something is traced for one micro batch
        self._first_draw = 0
        self._recorded: Dict[int, List[Any]] = {}

    @property
    def samples(self) -> int:
        """The samples of the whole pass."""
        return self.count * self._size

    def call_each(self, function: Callable[..., Any], arguments: Any) -> Any:
        """Returns what a function returns for each micro batch, joined. Tensors among the arguments are divided."""
        leaves = tf.nest.flatten(arguments)
        divided = [tf.split(leaf, self.count) if self._is_divided(leaf) else [leaf] * self.count for leaf in leaves]
        outputs = []
        for number in range(self.count):
            own = tf.nest.pack_sequence_as(arguments, [column[number] for column in divided])
            with self._traced_for(number):
                outputs.append(function(*own))
        return tf.nest.map_structure(self._join, *outputs)

    def separate(self, tensor: Any) -> Any:
        """Returns a tensor of all samples as [micro batch, sample, ...]."""
        if not self._is_divided(tensor):
            raise CannotBeFusedError("A target or an output has another number of rows than the input has samples.")
        return tf.reshape(tensor, [self.count, self._size, *tensor.shape[1:]])

    def average_over_replicas(self, variable: Any, value: Any) -> Any:
        """Takes the new value of a variable on the replica of the current micro batch, and assigns it the mean.

        Each replica's step starts with the same value. So it is assigned when all replicas in the pass have theirs.
        """
        if not self.inside:
            raise CannotBeFusedError("A layer changes a variable where no micro batch is computed.")
        values = self._recorded.setdefault(id(variable), [])
        values.append(value)
        if len(values) == self.passes.replicas:
            self._recorded[id(variable)] = []
            variable.assign(tf.add_n(values) / len(values))
        return value

    @contextlib.contextmanager
    def _traced_for(self, number: int) -> Iterator[None]:
        program = replicas.current()
        assert program is not None
        if number == 0:
            self._first_draw = program.random_ops
        replica = self._first + number % self.passes.replicas
        draws = replicas.DrawsOfParts(
            self._draws.traced * self.count + number, self._draws.times * self.count, self._draws.made
        )
        inner = dataclasses.replace(program, index=lambda: replica, random_ops=self._first_draw, draws_of_parts=draws)
        self.inside = True
        try:
            with replicas.traced_as(inner):
                yield
        finally:
            self.inside = False
            program.needs_collectives |= inner.needs_collectives
            program.random_ops = inner.random_ops

    def _is_divided(self, leaf: Any) -> bool:
        if not tf.is_tensor(leaf) or leaf.shape.rank == 0:
            return False
        if leaf.shape.rank is None or leaf.shape[0] != self.samples:
            raise CannotBeFusedError(f"A tensor of shape {leaf.shape} cannot be divided into micro batches.")
        return True

    def _join(self, *tensors: Any) -> Any:
        if any(not tf.is_tensor(each) or each.shape.rank in (None, 0) for each in tensors):
            raise CannotBeFusedError("A layer returns something that cannot be joined along the samples.")
        if any(each.shape[0] != self._size for each in tensors):
            raise CannotBeFusedError("A layer returns another number of samples than it gets.")
        return tf.concat(tensors, axis=0)
