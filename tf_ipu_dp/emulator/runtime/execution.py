"""One execution of a Keras model on an emulated device: S micro batches on each of L local replicas.

Replicas are time-sliced where they can be (see `replicas`): their micro batches run through the same variables, and
what differs between replicas is exchanged around them. Gradients are added up and applied once per update
(`gradient_reduction`), metrics are kept per replica (`metrics`), and so are other variables that a forward pass changes
(`moving_statistics`). A model whose replicas need each other's values runs its replicas concurrently instead.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict, List, Sequence

import tensorflow as tf

from tf_ipu_dp.emulator.runtime import (
    device_functions,
    feeds,
    gradient_reduction,
    graph_loops,
    metrics,
    model_building,
    model_strategy,
    optimizer_meter,
    replicas,
    synthetic_data,
)
from tf_ipu_dp.emulator.runtime.concurrent_function import ConcurrentFunction
from tf_ipu_dp.emulator.runtime.execution_shape import Shape
from tf_ipu_dp.emulator.runtime.fusion import step as fused_step
from tf_ipu_dp.emulator.runtime.fusion.parts import Draws, Parts
from tf_ipu_dp.emulator.runtime.fusion.passes import SLICED
from tf_ipu_dp.emulator.runtime.gradient_capture import GradientCaptureContext
from tf_ipu_dp.emulator.runtime.metrics import ReplicaMetrics
from tf_ipu_dp.emulator.runtime.model_strategy import call_as_replica
from tf_ipu_dp.emulator.runtime.moving_statistics import InstanceStatistics, MovingStatistics
from tf_ipu_dp.emulator.sdk_api.ipu import config as ipu_config
from tf_ipu_dp.emulator.sdk_api.ipu import ipu_outfeed_queue, loops

in_use: List[Any] = []  # iterators that executions have read, until the run over them ends


def make_train_function(model: Any, shape: Shape) -> Callable[[Any], Dict[str, Any]]:
    """Returns the function of an execution that trains: iterator in, logs out."""

    def train(iterator: Any, replica_metrics: ReplicaMetrics, fuses: bool) -> Dict[str, Any]:
        # A loop even for one step, which is not in the graph then: what optimizers accumulate must divide it.
        with loops.tracing_body_of(loops.Loop(shape.steps // shape.accumulation)):
            return train_in_loop(iterator, replica_metrics, fuses)

    def train_in_loop(iterator: Any, replica_metrics: ReplicaMetrics, fuses: bool) -> Dict[str, Any]:
        spans_instances = model_strategy.spans_instances(model)
        if shape.replicas * shape.accumulation == 1 and not spans_instances:
            _train_like_keras(model, shape, iterator, replica_metrics)
            return replica_metrics.logs()
        updates = shape.steps // shape.accumulation
        statistics = InstanceStatistics(model) if spans_instances else None
        passes = fused_step.plan(model, shape, iterator.element_spec) if fuses else SLICED
        execution.passes = passes
        is_fused, is_loop = passes.micro_batches > 1, gradient_reduction.loops_over_passes(shape, passes)
        packing = gradient_reduction.Packing(
            model.trainable_variables,
            gradient_reduction.accumulator_dtypes(model, shape),
            is_used=spans_instances or is_loop,
        )

        def next_gradients(replica: Any, after: Sequence[Any]) -> List[Any]:
            (micro_batch,) = feeds.draw_together(iterator, 1, after)
            with replica_metrics.of_replica(replica), GradientCaptureContext():
                return gradients_of(lambda: model.train_step(micro_batch))

        def next_fused_gradients(first_replica: Any, after: Sequence[Any], draws: Draws) -> List[Any]:
            micro_batches = feeds.draw_together(iterator, passes.micro_batches, after)
            size = tf.nest.flatten(micro_batches[0])[0].shape[0]
            parts = Parts(passes, size, first_replica, draws)
            add = replica_metrics.adding_of_parts(passes, first_replica)
            with draws.of_next_pass():
                return gradients_of(lambda: fused_step.train_step(model, micro_batches, parts, add))

        def gradients_of(train_step: Callable[[], Any]) -> List[Any]:
            accumulated = shape.accumulation > 1
            return call_as_replica(model, lambda: gradient_reduction.catch_gradients(model, train_step, accumulated))

        def accumulate() -> gradient_reduction.Contribution:
            groups = shape.replicas // passes.replicas
            moving = MovingStatistics(model, groups, replica_metrics.concurrent)
            run_pass = next_gradients
            if is_fused:
                draws = Draws(1 if is_loop else shape.replicas * shape.accumulation // passes.micro_batches)
                run_pass = functools.partial(next_fused_gradients, draws=draws)
            return gradient_reduction.Contribution(
                gradient_reduction.accumulate(model, shape, replica_metrics.slices, passes, packing, run_pass, moving)
            )

        def update(number: Any) -> List[Any]:
            del number
            (sums,) = gradient_reduction.all_reduce(
                model, replica_metrics.concurrent, "gradients", [accumulate()], has_gradients=True
            )
            gradient_reduction.apply(model, packing, sums)
            return []

        if statistics is None:
            graph_loops.repeat(updates, update)
            return replica_metrics.logs()
        if updates == 1:  # in one exchange
            contributions = [accumulate(), statistics.contribution()]
            sums, totals = gradient_reduction.all_reduce(
                model, replica_metrics.concurrent, "update", contributions, has_gradients=True
            )
            gradient_reduction.apply(model, packing, sums)
        else:
            graph_loops.repeat(updates, update)
            contributions = [statistics.contribution()]
            (totals,) = gradient_reduction.all_reduce(model, replica_metrics.concurrent, "statistics", contributions)
        statistics.assign_mean(totals)
        return replica_metrics.logs()

    execution = _Execution(model, shape, train, "train_step")
    return execution


def make_test_function(model: Any, shape: Shape) -> Callable[[Any], Dict[str, Any]]:
    """Returns the function of an execution that evaluates."""

    def test(iterator: Any, replica_metrics: ReplicaMetrics, fuses: bool) -> Dict[str, Any]:
        del fuses

        def step(number: Any) -> List[Any]:
            with replica_metrics.of_replica(number):
                call_as_replica(model, model.test_step, next(iterator))
            return []

        def own_step(number: Any) -> Dict[str, Any]:
            with replica_metrics.of_replica(number) as reported:
                returned = call_as_replica(model, model.test_step, next(iterator))
                reported.update({name: tf.convert_to_tensor(value) for name, value in returned.items()})
            return reported

        count = shape.steps * replica_metrics.slices
        if type(model).test_step is tf.keras.Model.test_step:
            graph_loops.repeat(count, step, in_flight=graph_loops.IN_FLIGHT)
            logs = replica_metrics.logs()
        else:
            logs = _returned_logs(replica_metrics, count, own_step)
        model._test_counter.assign_add(shape.steps)
        return logs

    return _Execution(model, shape, test, "test_step")


def make_predict_function(model: Any, shape: Shape) -> Callable[[Any], Any]:
    """Returns the function of an execution that predicts; the micro batches come back joined, in order.

    As in the SDK, the outputs of the replicas are reduced like their metrics, and every replica returns the result.
    """

    def predict(iterator: Any, replica_metrics: ReplicaMetrics, fuses: bool) -> Any:
        del fuses
        model._predict_counter.assign_add(shape.steps)

        def step(number: Any) -> Any:
            with replica_metrics.of_replica(number):
                return call_as_replica(model, model.predict_step, next(iterator))

        first = step(tf.constant(0))
        for output in tf.nest.flatten(first):
            ipu_outfeed_queue.check_feed_type(output.dtype, "A prediction")
        if shape.steps * shape.replicas == 1:
            return first
        stacked = [output[tf.newaxis] for output in tf.nest.flatten(first)]
        count = shape.steps * replica_metrics.slices
        if count > 1:
            stacked = [tf.concat(parts, axis=0) for parts in zip(stacked, graph_loops.stack(count - 1, step, first))]
        if replica_metrics.concurrent:
            stacked = [_interleave(tensor) for tensor in replicas.all_reduce(stacked, tf.stack)]
        reduced = [_reduce_over_replicas(tensor, shape) for tensor in stacked]
        return tf.nest.pack_sequence_as(first, [_join(tensor) for tensor in reduced])

    return _Execution(model, shape, predict, "predict_step")


class _Execution:
    """A function of an iterator, traced for time-sliced replicas, or for concurrent ones if they need collectives."""

    def __init__(self, model: Any, shape: Shape, body: Callable[[Any, ReplicaMetrics, bool], Any], step: str) -> None:
        """`step` is the name of the model's method that the body calls."""
        self._model, self._shape, self._body, self._step = model, shape, body, step
        self._program = replicas.Program(shape.replicas)
        self._sliced: Any = None
        self._traced_for: Any = None
        self._concurrent: Any = None
        self._concrete: Any = None  # of the last compilation
        self._fuses = True  # until tracing finds that micro batches cannot be fused
        self.passes = SLICED  # of an update, in what was traced last

    @property
    def traced(self) -> Any:
        """The `tf.function` of time-sliced replicas, whose graph can be shown; None for concurrent ones."""
        return self._sliced if self._concurrent is None else None

    def __call__(self, iterator: Any) -> Any:
        if not in_use or in_use[-1] is not iterator:
            in_use.append(iterator)
        run = self._compile(iterator)
        if ipu_config.configured_system().only_compiles():
            return device_functions.zeros_like(self._concrete.structured_outputs)
        with ipu_config.configured_system().executing(), synthetic_data.replaced_weights(self._model):
            try:
                results, discarded = run(iterator), synthetic_data.is_used_for("outfeed")
                return tf.nest.map_structure(tf.zeros_like, results) if discarded else results
            except tf.errors.OutOfRangeError as error:  # Keras would treat it as the end of the epoch
                raise ValueError(
                    f"The dataset ended in the middle of an execution of {self._shape.steps} steps on "
                    f"{self._shape.replicas} replicas: repeat() it, or take fewer steps."
                ) from error

    def _compile(self, iterator: Any) -> Callable[[Any], Any]:
        """Returns what executes the traced program. Tracing does not count as work of the IPUs."""
        # The state of a stateful layer belongs to a replica, and is not among the model's variables.
        stateful = self._shape.replicas > 1 and getattr(self._model, "stateful", False)
        if self._concurrent is None and not stateful:
            try:
                self._compile_sliced(iterator)
                return self._run_sliced
            except Exception:
                if not self._program.needs_collectives:
                    raise
        self._compile_concurrent(iterator)
        return self._run_concurrent

    def _compile_sliced(self, iterator: Any) -> None:
        if self._sliced is None:
            if self._shape.replicas * self._shape.accumulation > 1 or model_strategy.spans_instances(self._model):
                model_building.build(self._model, iterator, self._step)
                ReplicaMetrics(self._model, self._shape, concurrent=False).make_banks()
            self._sliced = self._make_sliced()
        if self._traced_for == iterator.element_spec:
            return
        try:
            self._trace_sliced(iterator)
        except Exception:
            if not self._fuses or self._program.needs_collectives:
                raise
            # Whatever it was: if the program itself is wrong, tracing it without fusing tells.
            self._fuses, self._sliced = False, self._make_sliced()
            self._trace_sliced(iterator)
        self._traced_for = iterator.element_spec

    def _make_sliced(self) -> Any:
        function = tf.function(lambda iterator: self._trace(iterator, False, self._fuses), autograph=False)
        # TensorFlow would mistake these functions for one function that is traced too often.
        function._omit_frequent_tracing_warning = True
        return function

    def _trace_sliced(self, iterator: Any) -> None:
        with replicas.tracing(self._program):
            self._concrete = self._sliced.get_concrete_function(iterator)

    def _run_sliced(self, iterator: Any) -> Any:
        # The concrete function: `tf.function` would look it up by the types of its arguments in every execution.
        with replicas.traced_as(self._program):
            return self._concrete(iterator)

    def _trace(self, iterator: Any, concurrent: bool, fuses: bool) -> Any:
        with metrics.converting_code():
            return self._body(iterator, ReplicaMetrics(self._model, self._shape, concurrent), fuses)

    def _compile_concurrent(self, iterator: Any) -> None:
        if self._concurrent is None:

            def call(*parts: Any) -> Any:
                replica_iterator = tf.nest.pack_sequence_as(iterator, list(parts), expand_composites=True)
                return self._trace(replica_iterator, concurrent=True, fuses=False)

            tensors = tf.nest.flatten(iterator, expand_composites=True)
            self._concurrent = ConcurrentFunction(call, tensors, replicas.Program(self._shape.replicas))
            self._concrete = self._concurrent.concrete

    def _run_concurrent(self, iterator: Any) -> Any:
        return self._concurrent(tf.nest.flatten(iterator, expand_composites=True))


def _train_like_keras(model: Any, shape: Shape, iterator: Any, replica_metrics: ReplicaMetrics) -> None:
    """Runs the model's own training step: there is nothing to reduce. The model may have no variables yet."""

    def update(number: Any) -> List[Any]:
        del number
        timing = optimizer_meter.timing_where_asked(model.optimizer)
        with replica_metrics.of_replica(0), GradientCaptureContext(), timing:
            call_as_replica(model, model.train_step, next(iterator))
        model._train_counter.assign_add(1)
        return []

    graph_loops.repeat(shape.steps, update)


def _returned_logs(replica_metrics: ReplicaMetrics, count: int, step: Callable[[Any], Any]) -> Any:
    """Returns the logs of steps that are the program's own: what the last step of each local replica has returned."""
    first = step(tf.constant(0))
    steps = [value[tf.newaxis] for value in tf.nest.flatten(first)]
    if count > 1:
        steps = [tf.concat(parts, axis=0) for parts in zip(steps, graph_loops.stack(count - 1, step, first))]
    last = [values[-replica_metrics.slices :] for values in steps]
    if replica_metrics.concurrent:
        own = [values[0] for values in last]
        reduced = replicas.all_reduce(own, lambda values: replica_metrics.reduce(tf.stack(values)))
    else:
        reduced = [replica_metrics.reduce(values) for values in last]
    return tf.nest.pack_sequence_as(first, reduced)


def _reduce_over_replicas(outputs: Any, shape: Shape) -> Any:
    """Replaces the outputs of each replica, [step x replica, batch, ...], by what all replicas give together."""
    if shape.metrics == "NONE" or shape.replicas == 1:
        return outputs
    of_steps = tf.reshape(outputs, tf.concat([[shape.steps, shape.replicas], tf.shape(outputs)[1:]], axis=0))
    if shape.metrics == "LIST":
        return tf.repeat(of_steps, shape.replicas, axis=0)
    reduce = tf.reduce_mean if shape.metrics == "MEAN" else tf.reduce_sum
    return tf.repeat(reduce(of_steps, axis=1), shape.replicas, axis=0)


def _interleave(tensor: Any) -> Any:
    """Turns [replica, step, batch, ...] into [step x replica, batch, ...]."""
    swapped = tf.transpose(tensor, [1, 0, *range(2, tensor.shape.rank)])
    return _join(swapped)


def _join(tensor: Any) -> Any:
    """Turns [one, other, ...] into [one x other, ...]."""
    joined = tf.reshape(tensor, tf.concat([[-1], tf.shape(tensor)[2:]], axis=0))
    rows = tensor.shape[0] * tensor.shape[1] if None not in tensor.shape[:2].as_list() else None
    return tf.ensure_shape(joined, [rows, *tensor.shape[2:]])
