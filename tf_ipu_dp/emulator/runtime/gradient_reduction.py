"""Gradient reduction for Keras models: from the gradients of one micro batch to the weight update, top to bottom.

1. `catch_gradients` runs a training step without its update: the model's own on one micro batch, or a fused pass over
   several (see `fusion`).
2. `accumulate` adds up the gradients of an update in place: over the micro batches of a replica, and over the replicas
   of this instance if they are time-sliced. A mean over the accumulated micro batches, if requested, is taken here.
3. `all_reduce` sums over the replicas of this instance that run concurrently, then over all instances.
4. `apply` makes one weight update of the sums, which is the same on all replicas.

Between 2 and 4 gradients are packed (`Packing`). Gradients are summed over replicas, never averaged, as the SDK does.
Programs with a custom training loop reduce through their strategy instead, in its `_batch_reduce_to`.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any, Callable, Dict, List, Optional, Protocol, Sequence

import tensorflow as tf
from tensorflow.python.framework import config as tf_config

from tf_ipu_dp.emulator.runtime import graph_loops, instances, model_strategy, optimizer_meter, replicas
from tf_ipu_dp.emulator.runtime.accumulation import accumulator_dtype
from tf_ipu_dp.emulator.runtime.execution_shape import Shape
from tf_ipu_dp.emulator.runtime.fusion.passes import Passes
from tf_ipu_dp.emulator.sdk_api.ipu.gradient_accumulation import GradientAccumulationReductionMethod as Method

# How much of the backward pass is left when the next forward pass begins, counted in gradients. If it began at once,
# two passes would take the memory of two. If it began later, cores would wait: with a third left ResNet-20 takes 6 %
# less memory, and is 6 % slower.
_BACKWARD_LEFT = 0.95
_LARGE = 1 << 16  # elements


class StateOfReplicas(Protocol):
    """Other variables that forward passes change. A time-sliced replica must not see another one's values."""

    def begin(self) -> List[Any]:
        """Returns the values that every replica starts a micro batch with; nothing if replicas are not time-sliced."""

    def zeros(self) -> List[Any]:
        """Returns what a loop over the replicas carries before the first one."""

    def restore(self, start: List[Any]) -> None:
        """Assigns the variables the values that every replica starts with."""

    def collect(self, carried: Sequence[Any], start: List[Any], replica: Any) -> List[Any]:
        """Returns what the loop carries with the values of one more replica."""

    def finish(self, carried: Sequence[Any]) -> None:
        """Assigns the variables their final values from those of all replicas."""


def catch_gradients(model: Any, train_step: Callable[[], Any], accumulated: bool) -> List[Any]:
    """Runs a training step of the model without the update; returns dense gradients.

    If they are `accumulated`, they are computed by Keras' own `minimize`, even if the optimizer inherits another one.
    """
    catcher = _GradientCatcher(model.optimizer, accumulated)
    with optimizer_meter.replaced(model, "optimizer", catcher):
        train_step()
    gradients = [catcher.gradients.get(variable.ref()) for variable in model.trainable_variables]
    return [
        tf.zeros_like(variable) if gradient is None else tf.convert_to_tensor(gradient)
        for gradient, variable in zip(gradients, model.trainable_variables)
    ]


def accumulate(
    model: Any,
    shape: Shape,
    slices: int,
    passes: Passes,
    packing: Packing,
    next_gradients: Callable[[Any, Sequence[Any]], List[Any]],
    state: StateOfReplicas,
) -> List[Any]:
    """Returns the gradients of one update, packed, added up over its passes on `slices` time-sliced replicas.

    `next_gradients` returns the gradients of the next pass. It takes the number of its first replica, and what was
    accumulated before: the device is busy, and does not wait for input, until that is computed.
    """
    mean = _MeanOfMicroBatches(shape, passes.steps)
    passes_of_step, steps = slices // passes.replicas, shape.accumulation // passes.steps
    if not loops_over_passes(shape, passes):
        sums: List[Any] = []
        for number in range(steps):
            start = state.begin()
            collected = state.zeros() if start else []
            for place in range(passes_of_step):
                state.restore(start)
                gradients = packing.pack(next_gradients(tf.constant(place * passes.replicas), sums))
                collected = state.collect(collected, start, tf.constant(place))
                shares = [mean.share(each, number) for each in gradients]
                sums = [mean.before(before, number) + share for before, share in zip(sums, shares)] if sums else shares
            state.finish(collected)
            model._train_counter.assign_add(passes.steps)
        return [mean.finish(each) for each in sums]
    zeros = packing.zeros(_summing_dtypes(packing))
    packed_count = len(zeros)
    until: List[Any] = []

    def step_of_all_replicas(number: Any, *total: Any) -> List[Any]:
        start = state.begin()

        def one_pass(place: Any, *carried: Any) -> List[Any]:
            state.restore(start)
            gradients = next_gradients(place * passes.replicas, carried)
            if passes.micro_batches == 1:  # fused passes begin without waiting: they are planned to fit into memory
                until[:] = gradients[int(len(gradients) * _BACKWARD_LEFT) :][:1]
            totals = [
                before + mean.share(tf.cast(each, before.dtype), number)
                for before, each in zip(carried, packing.pack(gradients))
            ]
            return totals + state.collect(carried[packed_count:], start, place)

        carried = [*(mean.before(each, number) for each in total), *(state.zeros() if start else [])]
        carried = graph_loops.repeat(passes_of_step, one_pass, carried, graph_loops.IN_FLIGHT, until)
        state.finish(carried[packed_count:])
        model._train_counter.assign_add(passes.steps)
        return carried[:packed_count]

    if passes_of_step > 1:  # the replicas' state must be final before their next micro batches
        total = graph_loops.repeat(steps, step_of_all_replicas, zeros)
    else:
        total = graph_loops.repeat(steps, step_of_all_replicas, zeros, graph_loops.IN_FLIGHT, until)
    return [mean.finish(gradient) for gradient in total]


def loops_over_passes(shape: Shape, passes: Passes) -> bool:
    """Whether the passes of an update are repetitions of one loop. A few fused ones are not.

    Without a loop there is nothing to add the first gradients to, which for a model of many weights takes longer than
    tracing it twice, and nothing to pack.
    """
    count = shape.replicas * shape.accumulation // passes.micro_batches
    return passes.micro_batches == 1 or count > graph_loops.IN_FLIGHT


class _MeanOfMicroBatches:
    """How accumulated gradients become a mean, if one is requested.

    Sums of 16-bit numbers overflow. So there MEAN adds g / A, and RUNNING_MEAN keeps the mean of the micro batches so
    far, as the SDK does. In other types the sum is divided once at the end, which takes less time and rounds less.
    """

    def __init__(self, shape: Shape, steps: int) -> None:
        """`steps`: how many of the accumulated micro batches of a replica are added at a time."""
        self._count, self._steps = shape.accumulation, steps
        self._method = shape.method if shape.accumulation > 1 else Method.SUM

    def before(self, total: Any, number: Any) -> Any:
        """Returns the accumulated gradients as they are before the micro batches with a number are added."""
        if self._method is not Method.RUNNING_MEAN or not _is_narrow(total):
            return total
        position = tf.cast(number, total.dtype)
        return total * (position / (position + 1))

    def share(self, gradient: Any, number: Any) -> Any:
        """Returns what the micro batches with a number add."""
        if self._method is Method.SUM or not _is_narrow(gradient):
            return gradient
        if self._method is Method.MEAN:
            return gradient / tf.cast(self._count, gradient.dtype)
        return gradient / ((tf.cast(number, gradient.dtype) + 1) * self._steps)

    def finish(self, total: Any) -> Any:
        """Returns the reduced gradients."""
        if self._method is Method.SUM or _is_narrow(total):
            return total
        return total / tf.cast(self._count, total.dtype)


def _is_narrow(tensor: Any) -> bool:
    return bool(tensor.dtype.size < tf.float32.size)


@dataclasses.dataclass(frozen=True)
class Contribution:
    """Tensors to be reduced, and how the values of concurrent replicas are combined. Instances are always summed."""

    tensors: List[Any]
    combine: Callable[[List[Any]], Any] = replicas.sum_values


def all_reduce(
    model: Any,
    concurrent: bool,
    name: str,
    contributions: Sequence[Contribution],
    *,
    has_gradients: bool = False,
) -> List[List[Any]]:
    """Returns the tensors of each contribution, combined over the concurrent replicas and summed over the instances.

    All of them are sent in one exchange, because for a small model each exchange takes longer than the computation. So
    moving statistics are sent with the gradients if an execution makes one update.
    """
    tensors = [tensor for each in contributions for tensor in each.tensors]
    combines = [each.combine for each in contributions for _ in each.tensors]
    spans_instances = model_strategy.spans_instances(model)

    def over_instances(own: List[Any]) -> List[Any]:
        return instances.sum_over_instances(own, name, has_gradients=has_gradients) if spans_instances else own

    if concurrent:
        tensors = replicas.all_reduce_jointly(
            tensors, lambda columns: over_instances([combine(values) for combine, values in zip(combines, columns)])
        )
    else:
        tensors = over_instances(tensors)
    reduced = iter(tensors)
    return [[next(reduced) for _ in each.tensors] for each in contributions]


def apply(model: Any, packing: Packing, sums: List[Any]) -> None:
    """Makes one weight update with reduced gradients. It is traced once for all replicas.

    Unpacked gradients come from one backward pass. There, variables are updated while it computes other gradients.
    """
    program = replicas.current()
    assert program is not None
    updating = dataclasses.replace(program, updating=True)

    def update() -> None:
        gradients = packing.unpack([tf.cast(each, dtype) for each, dtype in zip(sums, packing.dtypes())])
        pairs = list(zip(gradients, model.trainable_variables))
        model_strategy.call_as_replica(model, lambda: model.optimizer.apply_gradients(pairs))

    try:
        with replicas.traced_as(updating):
            if packing.is_used or optimizer_meter.is_asked():
                optimizer_meter.timed(sums, update)
            else:
                update()
    finally:
        program.needs_collectives |= updating.needs_collectives
        program.random_ops = updating.random_ops


class Packing:
    """Packs many small tensors into few: loops and exchanges between instances cost per tensor, not per byte.

    The small tensors of a type are concatenated in a vector, always in the same order. Large ones are not packed:
    copying them would cost memory.
    """

    def __init__(self, like: Sequence[Any], dtypes: Optional[Sequence[Any]] = None, is_used: bool = True) -> None:
        """`dtypes`: the types that tensors are packed in, if they are not those of `like`.

        If it is not used, tensors stay as they are: there is neither a loop nor an exchange.
        """
        self.is_used = is_used
        own = dtypes or [tf.as_dtype(each.dtype).base_dtype for each in like]
        self._shapes = [tf.TensorShape(each.shape) for each in like]
        self._sizes = [shape.num_elements() for shape in self._shapes]
        self._unpacked: List[int] = []
        vectors: Dict[Any, List[int]] = {}
        for place, size in enumerate(self._sizes):
            if not is_used or size is None or size >= _LARGE:
                self._unpacked.append(place)
            else:
                vectors.setdefault(own[place], []).append(place)
        self._vectors = list(vectors.values())
        self._dtypes = [*vectors, *(own[place] for place in self._unpacked)]
        self._own = list(own)

    def pack(self, tensors: Sequence[Any]) -> List[Any]:
        """Returns the vectors, then the large tensors."""
        flat = tf.constant([-1])
        tensors = [tf.cast(tensor, dtype) for tensor, dtype in zip(tensors, self._own)]

        def flatten(place: int) -> Any:
            if self._shapes[place].rank == 1:
                return tensors[place]
            return tf.raw_ops.Reshape(tensor=tensors[place], shape=flat)

        packed = [tf.concat([flatten(place) for place in places], axis=0) for places in self._vectors]
        return packed + [tensors[place] for place in self._unpacked]

    def unpack(self, packed: Sequence[Any]) -> List[Any]:
        """Returns the original tensors."""
        tensors: List[Any] = [None] * len(self._shapes)
        for places, vector in zip(self._vectors, packed):
            for place, part in zip(places, tf.split(vector, [self._sizes[place] for place in places])):
                shape = self._shapes[place]
                tensors[place] = part if shape.rank == 1 else tf.reshape(part, shape)
        for place, tensor in zip(self._unpacked, packed[len(self._vectors) :]):
            tensors[place] = tensor
        return tensors

    def dtypes(self) -> List[Any]:
        """Returns the types of the packed tensors."""
        return list(self._dtypes)

    def zeros(self, dtypes: Optional[Sequence[Any]] = None) -> List[Any]:
        """Returns packed zeros, of other types if they are given."""
        sizes = [[sum(self._sizes[place] for place in places)] for places in self._vectors]
        shapes = [*sizes, *(self._shapes[place] for place in self._unpacked)]
        return [tf.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes or self._dtypes)]


def accumulator_dtypes(model: Any, shape: Shape) -> List[Any]:
    """Returns the types of the gradients that the optimizer gets: those of the accumulators if there are any."""
    choice = shape.accumulator_dtype if shape.accumulation > 1 else None
    return [accumulator_dtype(choice, variable) for variable in model.trainable_variables]


def _summing_dtypes(packing: Packing) -> List[Any]:
    """Returns the types in which packed gradients are added up.

    In deterministic mode, sums are so exact that the order in which instances and replicas add makes no difference.
    Otherwise the last bit sometimes decides on which side of a ReLU a value is.
    """
    if not is_deterministic():
        return packing.dtypes()
    return [tf.float64 if dtype == tf.float32 else dtype for dtype in packing.dtypes()]


def is_deterministic() -> bool:
    """Whether the program asks TensorFlow for deterministic operations."""
    enabled = getattr(tf_config, "is_op_determinism_enabled", None)  # from TensorFlow 2.8 on
    return bool(enabled and enabled()) or os.environ.get("TF_DETERMINISTIC_OPS", "").lower() in ("1", "true")


class _GradientCatcher:
    """Replaces the optimizer during a forward and backward pass, and stores the gradients."""

    def __init__(self, optimizer: Any, accumulated: bool) -> None:
        self._optimizer, self._accumulated = optimizer, accumulated
        self.gradients: Dict[Any, Any] = {}  # by reference to the variable

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def minimize(self, loss: Any, var_list: Any, tape: Any = None, **unused: Any) -> None:
        """Stores the gradients instead of applying them. Optimizers that scale the loss do so in here."""
        minimize = _first_minimize(type(self._optimizer)) if self._accumulated else type(self._optimizer).minimize
        with optimizer_meter.replaced(self._optimizer, "apply_gradients", self._store):
            minimize(self._optimizer, loss, var_list, tape=tape)
        if not self.gradients:
            raise NotImplementedError(
                f"{type(self._optimizer).__name__}.minimize does not call self.apply_gradients, so the emulator cannot "
                "sum its gradients over replicas. Call it, or use one replica."
            )

    def _store(self, grads_and_vars: Any, *unused: Any, **unused_by_name: Any) -> None:
        self.gradients = {variable.ref(): gradient for gradient, variable in grads_and_vars}


def _first_minimize(kind: Any) -> Any:
    """Returns `minimize` of the first class of an optimizer's ancestors that has it."""
    return next(vars(each)["minimize"] for each in reversed(kind.__mro__) if "minimize" in vars(each))
