"""One execution of a Keras model on an emulated device: S micro batches on each of L local replicas.

Replicas are sliced where they can be (see `replicas`): their micro batches run through the same variables, and what
differs between replicas is put in order around them. Gradients are added up and applied once. Metrics are kept per
replica. Other variables that a forward pass changes (batch normalisation) start from the same values for each replica;
then the mean of the floats is kept, and the first replica's value of the rest. A model whose replicas need each other's
values runs its replicas together instead.

Loops are loops of the graph, so tracing does not grow with replicas, accumulation or steps. Two micro batches are in
flight at a time, while everything that has an effect keeps the order of the steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from typing import Any, Callable, Dict, FrozenSet, Iterator, List, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.framework import auto_control_deps_utils
from tensorflow.python.framework import config as tf_config

from tf_ipu_dp.emulator.runtime import feeds, instances, packing, replicas
from tf_ipu_dp.emulator.sdk_api.ipu import config as ipu_config
from tf_ipu_dp.emulator.sdk_api.ipu import ipu_outfeed_queue

_IN_FLIGHT = 2
# How much of the backward pass is left when the next forward pass begins. Counted in gradients. The later it begins,
# the more of the last one's activations are gone: here two take little more memory than one, and keep the cores busy.
_LEFT_TO_DO = 0.35
_LOGS = "_ipu_emulator_step_logs"
_BANKS = "_ipu_emulator_metric_banks"
# Random operations draw from streams of their own, which have no order that a program could rely on.
_UNORDERED = ("RandomUniform", "RandomUniformInt", "RandomStandardNormal", "TruncatedNormal", "VarHandleOp")

# Tensors, and how the values of replicas that run together become one.
_Part = Tuple[List[Any], Callable[[List[Any]], Any]]

in_use: List[Any] = []  # iterators that executions have read, until the run over them ends


@dataclasses.dataclass(frozen=True)
class Shape:
    """How one execution is made up. Everything in it is known before tracing."""

    steps: int
    replicas: int
    accumulation: int = 1
    mean: bool = False
    metrics: str = "NONE"
    each_step: bool = False
    generation: int = 0
    members: Optional[FrozenSet[int]] = None  # the instances it is confined to


def make_train_function(model: Any, shape: Shape) -> Callable[[Any], Dict[str, Any]]:
    """Returns the function of an execution that trains: iterator in, logs out."""

    def train(iterator: Any, metrics: _Metrics) -> Dict[str, Any]:
        spans = _spans_instances(model)
        updates = shape.steps // shape.accumulation
        is_stock = shape.replicas * shape.accumulation == 1 and not spans  # and may have no variables yet
        gradients = packing.Packing([] if is_stock else model.trainable_variables)

        def update(number: Any) -> List[Any]:
            del number
            if is_stock:
                with metrics.of_replica(0):
                    _as_replica(model, model.train_step, next(iterator))
                model._train_counter.assign_add(1)
            else:
                own = _accumulate(model, iterator, shape, metrics, gradients)
                (summed,) = metrics.exchange("gradients", [(own, replicas.total)])
                _apply(model, gradients, summed)
            return []

        if not spans:
            _repeat(updates, update)
            return metrics.logs(metrics.exchange("results", [metrics.to_exchange()])[0])
        moving = [variable for variable in _moving(model) if variable.dtype.is_floating]
        statistics = packing.Packing(moving)

        def at_the_end() -> List[_Part]:
            # Moving statistics are linear, so once per execution is enough.
            return [(statistics.pack([each.value() for each in moving]), _first), metrics.to_exchange()]

        if updates == 1:  # as one exchange: each costs a small model more time than its work
            own = _accumulate(model, iterator, shape, metrics, gradients)
            summed, totals, results = metrics.exchange("update", [(own, replicas.total), *at_the_end()])
            _apply(model, gradients, summed)
        else:
            _repeat(updates, update)
            totals, results = metrics.exchange("results", at_the_end())
        means = [total / tf.cast(instances.count(), total.dtype) for total in totals]
        for variable, mean in zip(moving, statistics.unpack(means)):
            variable.assign(mean)
        return metrics.logs(results)

    return _Execution(model, shape, train, "train_step")


def make_test_function(model: Any, shape: Shape) -> Callable[[Any], Dict[str, Any]]:
    """Returns the function of an execution that evaluates."""

    def test(iterator: Any, metrics: _Metrics) -> Dict[str, Any]:
        def step(number: Any) -> List[Any]:
            with metrics.of_replica(number):
                _as_replica(model, model.test_step, next(iterator))
            return []

        _repeat(shape.steps * metrics.slices, step, in_flight=_IN_FLIGHT)
        model._test_counter.assign_add(shape.steps)
        return metrics.logs(metrics.exchange("results", [metrics.to_exchange()])[0])

    return _Execution(model, shape, test, "test_step")


def make_predict_function(model: Any, shape: Shape) -> Callable[[Any], Any]:
    """Returns the function of an execution that predicts; the micro batches come back joined, in order."""

    def predict(iterator: Any, metrics: _Metrics) -> Any:
        model._predict_counter.assign_add(shape.steps)

        def step(number: Any) -> Any:
            with metrics.of_replica(number):
                return _as_replica(model, model.predict_step, next(iterator))

        first = step(tf.constant(0))
        for output in tf.nest.flatten(first):
            ipu_outfeed_queue.check_feed_type(output.dtype, "A prediction")
        if shape.steps * shape.replicas == 1:
            return first
        stacked = [output[tf.newaxis] for output in tf.nest.flatten(first)]
        count = shape.steps * metrics.slices
        if count > 1:
            stacked = [tf.concat(parts, axis=0) for parts in zip(stacked, _stack(count - 1, step, first))]
        if metrics.together:
            stacked = [_interleave(tensor) for tensor in replicas.meet(stacked, tf.stack)]
        return tf.nest.pack_sequence_as(first, [_join(tensor) for tensor in stacked])

    return _Execution(model, shape, predict, "predict_step")


def reset_metrics(model: Any) -> None:
    """Forgets the metrics of all replicas, as Keras forgets those that it can see."""
    for variable, bank in vars(model).get(_BANKS, {}).values():
        bank.assign(tf.broadcast_to(_own_value(variable), bank.shape))


class _Execution:
    """A function of an iterator, traced for sliced replicas, or for replicas that run together if they must meet."""

    def __init__(self, model: Any, shape: Shape, body: Callable[[Any, _Metrics], Any], step: str) -> None:
        """`step` is the name of the model's method that the body calls."""
        self._model, self._shape, self._body, self._step = model, shape, body, step
        self._program = replicas.Program(shape.replicas)
        self._sliced: Any = None
        self._traced_for: Any = None
        self._together: Any = None

    def __call__(self, iterator: Any) -> Any:
        if not in_use or in_use[-1] is not iterator:
            in_use.append(iterator)
        run = self._compile(iterator)
        with ipu_config.configured_system().executing():
            try:
                return run(iterator)
            except tf.errors.OutOfRangeError as error:  # which Keras would take for the end of the epoch
                raise ValueError(
                    f"The dataset ended in the middle of an execution of {self._shape.steps} steps on "
                    f"{self._shape.replicas} replicas: repeat() it, or take fewer steps."
                ) from error

    def _compile(self, iterator: Any) -> Callable[[Any], Any]:
        """Returns what executes the program, traced by now: the IPUs do not work meanwhile."""
        # The state of a stateful layer belongs to a replica, and is not among the model's variables.
        stateful = self._shape.replicas > 1 and getattr(self._model, "stateful", False)
        if self._together is None and not stateful:
            try:
                self._compile_sliced(iterator)
                return self._run_sliced
            except Exception:
                if not self._program.must_meet:
                    raise
        self._compile_together(iterator)
        return self._run_together

    def _compile_sliced(self, iterator: Any) -> None:
        if self._sliced is None:
            if self._shape.replicas * self._shape.accumulation > 1 or _spans_instances(self._model):
                _build(self._model, iterator, self._step)
                _Metrics(self._model, self._shape, together=False).make_banks()
            self._sliced = tf.function(lambda iterator: self._trace(iterator, together=False), autograph=False)
            # TensorFlow takes all of these functions for one that is traced again and again.
            self._sliced._omit_frequent_tracing_warning = True
        if self._traced_for != iterator.element_spec:
            with replicas.tracing(self._program):
                self._sliced.get_concrete_function(iterator)
            self._traced_for = iterator.element_spec

    def _run_sliced(self, iterator: Any) -> Any:
        with replicas.traced_as(self._program):
            return self._sliced(iterator)

    def _trace(self, iterator: Any, together: bool) -> Any:
        with _converting_code():
            return self._body(iterator, _Metrics(self._model, self._shape, together))

    def _compile_together(self, iterator: Any) -> None:
        if self._together is None:

            def call(*parts: Any) -> Any:
                own = tf.nest.pack_sequence_as(iterator, list(parts), expand_composites=True)
                return self._trace(own, together=True)

            tensors = tf.nest.flatten(iterator, expand_composites=True)
            self._together = replicas.TogetherFunction(call, tensors, replicas.Program(self._shape.replicas))

    def _run_together(self, iterator: Any) -> Any:
        return self._together(tf.nest.flatten(iterator, expand_composites=True))


class _Metrics:
    """The model's metrics on each replica. Sliced replicas keep theirs in banks and take turns with Keras' own."""

    def __init__(self, model: Any, shape: Shape, together: bool) -> None:
        self._model, self._shape, self.together = model, shape, together
        self.slices = 1 if together else shape.replicas

    def make_banks(self) -> None:
        """Makes what replicas keep their metrics in, if the metrics are known before tracing."""
        if self.slices > 1:
            for variable in self._variables():
                self._bank(variable)

    @contextlib.contextmanager
    def of_replica(self, number: Any) -> Iterator[None]:
        """What is traced inside is done by the replica whose turn it is, with its own metrics."""
        program = replicas.current()
        assert program is not None
        replica = tf.cast(number, tf.int32) % self.slices
        banks = [(variable, self._bank(variable)) for variable in self._variables()] if self.slices > 1 else []
        for variable, bank in banks:
            variable.assign(tf.gather(bank, replica))
        inner = program if self.together else dataclasses.replace(program, index=lambda: replica)
        try:
            with replicas.traced_as(inner):
                yield
        finally:
            program.must_meet |= inner.must_meet
            program.random_ops = inner.random_ops
        for variable, bank in banks:
            bank.scatter_update(tf.IndexedSlices(variable.read_value()[tf.newaxis], replica[tf.newaxis]))
        if self._shape.each_step:
            step_logs(self._model).enqueue(metric_results(self._model))

    def exchange(self, name: str, parts: Sequence[_Part]) -> List[List[Any]]:
        """Returns each part's tensors, combined over the replicas that run together, and added up over instances."""
        sizes = [len(tensors) for tensors, _ in parts]
        flat = [tensor for tensors, _ in parts for tensor in tensors]
        ways = [combine for tensors, combine in parts for _ in tensors]
        spans = _spans_instances(self._model)

        def over_instances(own: List[Any]) -> List[Any]:
            return instances.sum_over_instances(own, name) if spans else own

        if self.together:
            flat = replicas.meet_once(
                flat, lambda columns: over_instances([combine(values) for combine, values in zip(ways, columns)])
            )
        else:
            flat = over_instances(flat)
        found = iter(flat)
        return [[next(found) for _ in range(size)] for size in sizes]

    def to_exchange(self) -> _Part:
        """Returns what `logs` needs of everybody."""
        if self.together:
            results = metric_results(self._model).values()
            return [tf.convert_to_tensor(value) for value in results], lambda values: self._reduce(tf.stack(values))
        if self._shape.replicas > 1:
            return [self._bank(variable).read_value() for variable in self._variables()], _first
        spans = _spans_instances(self._model)
        return [variable.read_value() for variable in self._variables()] if spans else [], _first

    def logs(self, exchanged: Sequence[Any]) -> Dict[str, Any]:
        """Returns the logs: the last replica's metrics, or all replicas' as the model asks."""
        spans = _spans_instances(self._model)
        if self.together:
            return {
                name: value / tf.cast(instances.count(), value.dtype) if spans else value
                for name, value in zip(metric_results(self._model), exchanged)
            }
        if self._shape.replicas == 1 and not spans:
            return metric_results(self._model)
        own = [variable.read_value() for variable in self._variables()] if spans else []
        logs = self._results_with(exchanged) if self._shape.replicas == 1 else self._logs_of_replicas(exchanged)
        with tf.control_dependencies(list(logs.values())):
            for variable, value in zip(self._variables(), own):  # which are added up when the host reads them
                variable.assign(value)
        return logs

    def _logs_of_replicas(self, banks: Sequence[Any]) -> Dict[str, Any]:
        signature: Dict[str, Any] = {}

        def trace(replica: Any) -> Dict[str, Any]:
            with _converting_code():
                results = self._results_with([bank[replica] for bank in banks])
            signature.update({name: tf.TensorSpec(value.shape, value.dtype) for name, value in results.items()})
            return results

        # Traced once and called in a loop, which has to know the types of the results before.
        results_of = tf.function(trace, autograph=False).get_concrete_function(tf.TensorSpec([], tf.int32))
        if self._shape.metrics == "NONE":
            last: Dict[str, Any] = results_of(tf.constant(self._shape.replicas - 1))
            return last
        numbers = tf.range(self._shape.replicas)
        of_all = tf.map_fn(results_of, numbers, fn_output_signature=signature, parallel_iterations=1)
        return {name: self._reduce(values) for name, values in of_all.items()}

    def _results_with(self, values: Sequence[Any]) -> Dict[str, Any]:
        for variable, value in zip(self._variables(), values):
            variable.assign(value)
        return {name: tf.convert_to_tensor(value) for name, value in metric_results(self._model).items()}

    def _reduce(self, values: Any) -> Any:
        if self._shape.metrics == "LIST":
            return values
        if self._shape.metrics == "SUM":
            return tf.reduce_sum(values, axis=0)
        return tf.reduce_mean(values, axis=0) if self._shape.metrics == "MEAN" else values[-1]

    def _variables(self) -> List[Any]:
        return [variable for metric in self._model.metrics for variable in metric.variables]

    def _bank(self, variable: Any) -> Any:
        banks = vars(self._model).setdefault(_BANKS, {})
        known, bank = banks.get(id(variable), (None, None))
        if known is not variable or bank.shape[0] != self._shape.replicas:
            with tf.init_scope():
                # In this form a strategy sees that it begins alike everywhere.
                shape = [self._shape.replicas, *variable.shape]
                zeros = functools.partial(tf.keras.initializers.Zeros(), shape, dtype=variable.dtype)
                bank = tf.Variable(zeros, trainable=False)
                if tf.executing_eagerly() and np.any(_own_value(variable).numpy()):
                    bank.assign(tf.broadcast_to(_own_value(variable), shape))
            banks[id(variable)] = (variable, bank)
        return bank


def _own_value(variable: Any) -> Any:
    """Returns a metric's value in this instance; instances add theirs up where it is read otherwise."""
    return getattr(variable, "_primary", variable).read_value()


def step_logs(model: Any) -> ipu_outfeed_queue.IPUOutfeedQueue:
    """Returns the queue of the logs of single steps."""
    queue: ipu_outfeed_queue.IPUOutfeedQueue = vars(model).setdefault(_LOGS, ipu_outfeed_queue.IPUOutfeedQueue())
    return queue


def metric_results(model: Any) -> Dict[str, Any]:
    """Returns the present values of the model's metrics."""
    logs: Dict[str, Any] = {}
    for metric in model.metrics:
        result = metric.result()
        if isinstance(result, dict):
            logs.update(result)
        else:
            logs[metric.name] = result
    return logs


def _accumulate(model: Any, iterator: Any, shape: Shape, metrics: _Metrics, gradients: packing.Packing) -> List[Any]:
    """Returns the gradients of one update, packed, added up over the micro batches of this replica or of all sliced."""
    nothing = gradients.zeros(_accumulators(gradients))
    own = len(nothing)
    until: List[Any] = []
    moving = _moving(model) if shape.replicas > 1 else []
    statistics = packing.Packing(moving)

    def step_of_all(number: Any, *total: Any) -> List[Any]:
        del number
        start = statistics.pack([variable.value() for variable in moving]) if metrics.slices > 1 else []

        def step_of_one(replica: Any, *carried: Any) -> List[Any]:
            for variable, value in zip(moving, statistics.unpack(start) if start else []):
                variable.assign(value)
            with feeds.overlapping(carried):
                micro_batch = next(iterator)
            with metrics.of_replica(replica):
                found = _as_replica(model, lambda data: micro_step(model, data), micro_batch)
            until[:] = found[int(len(found) * _LEFT_TO_DO) :][:1]
            totals = [before + tf.cast(each, before.dtype) for before, each in zip(carried, gradients.pack(found))]
            values = statistics.pack([variable.value() for variable in moving]) if start else []
            return totals + [_keep(kept, value, replica) for kept, value in zip(carried[own:], values)]

        kept = statistics.zeros() if start else []
        carried = _repeat(metrics.slices, step_of_one, [*total, *kept], _IN_FLIGHT, until)
        kept = carried[own:]
        if metrics.together:
            kept = replicas.meet(statistics.pack([variable.value() for variable in moving]), _keep_all)
        means = [each / tf.cast(shape.replicas, each.dtype) if each.dtype.is_floating else each for each in kept]
        for variable, value in zip(moving, statistics.unpack(means)):
            variable.assign(value)
        model._train_counter.assign_add(1)
        return carried[:own]

    if shape.replicas > 1:  # whose statistics are settled before their next micro batches
        total = _repeat(shape.accumulation, step_of_all, nothing)
    else:
        total = _repeat(shape.accumulation, step_of_all, nothing, _IN_FLIGHT, until)
    return [gradient / tf.cast(shape.accumulation, gradient.dtype) for gradient in total] if shape.mean else total


def _accumulators(gradients: packing.Packing) -> List[Any]:
    """Returns the types in which gradients are added up.

    Where TensorFlow is asked to be deterministic, sums are so exact that the order in which instances and replicas add
    makes no difference. Else the last bit decides now and then on which side of a ReLU a value lies.
    """
    if not _is_deterministic():
        return gradients.dtypes()
    return [tf.float64 if dtype == tf.float32 else dtype for dtype in gradients.dtypes()]


def _is_deterministic() -> bool:
    asked = getattr(tf_config, "is_op_determinism_enabled", None)  # from TensorFlow 2.8 on
    return bool(asked and asked()) or os.environ.get("TF_DETERMINISTIC_OPS", "").lower() in ("1", "true")


def _converting_code() -> Any:
    """In it, the user's code is converted by autograph; this module is not."""
    return ag_ctx.ControlStatusCtx(ag_ctx.Status.ENABLED)


def _moving(model: Any) -> List[Any]:
    """Returns the variables that forward passes change, but for the metrics, which are kept apart."""
    metrics = {id(variable) for metric in model.metrics for variable in metric.variables}
    return [each for each in model.non_trainable_variables if not each.trainable and id(each) not in metrics]


def _keep(kept: Any, value: Any, replica: Any) -> Any:
    return kept + value if value.dtype.is_floating else tf.where(tf.equal(replica, 0), value, kept)


def _keep_all(values: List[Any]) -> Any:
    return replicas.total(values) if values[0].dtype.is_floating else values[0]


def _apply(model: Any, gradients: packing.Packing, summed: List[Any]) -> None:
    """Makes one weight update, which is the same on all replicas."""
    program = replicas.current()
    assert program is not None
    updating = dataclasses.replace(program, updating=True)
    try:
        with replicas.traced_as(updating):
            sums = [tf.cast(each, dtype) for each, dtype in zip(summed, gradients.dtypes())]
            pairs = list(zip(gradients.unpack(sums), model.trainable_variables))
            _as_replica(model, lambda: model.optimizer.apply_gradients(pairs))
    finally:
        program.must_meet |= updating.must_meet
        program.random_ops = updating.random_ops


def _spans_instances(model: Any) -> bool:
    return instances.count() > 1 and getattr(model.distribute_strategy, "spans_instances", False)


def _first(values: List[Any]) -> Any:
    return values[0]


def _as_replica(model: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls the function in the replica context of the model's strategy."""
    strategy = model.distribute_strategy
    with strategy.scope():
        return strategy.extended.call_for_each_replica(function, args=arguments)


def micro_step(model: Any, data: Any) -> List[Any]:
    """Runs the model's own training step on one micro batch, but for the update: returns the gradients, dense."""
    catcher = _GradientCatcher(model.optimizer)
    with _replaced(model, "optimizer", catcher):
        model.train_step(data)
    return [
        tf.zeros_like(variable) if gradient is None else tf.convert_to_tensor(gradient)
        for gradient, variable in zip(catcher.gradients, model.trainable_variables)
    ]


class _GradientCatcher:
    """Stands in for the optimizer during a forward and backward pass."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.gradients: List[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def minimize(self, loss: Any, var_list: Any, tape: Any = None, **unused: Any) -> None:
        """Keeps the gradients instead of applying them. Optimizers that scale the loss do it in here."""
        compute = getattr(self._optimizer, "_compute_gradients", None) or self._optimizer.compute_gradients
        self.gradients = [gradient for gradient, _ in compute(loss, var_list, tape=tape)]


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Swaps an attribute past Keras' tracking."""
    before = vars(owner)[name]
    vars(owner)[name] = value
    try:
        yield
    finally:
        vars(owner)[name] = before


def _build(model: Any, iterator: Any, step: str) -> None:
    """Makes the variables of model, losses, metrics and optimizer, which the loops have to know from the start.

    Of a model that predicts they are its own: it may have no loss, and its metrics have nothing to compare.
    """
    predicts = step == "predict_step"
    if not model.built or not (predicts or _build_metrics(model, iterator.element_spec)):
        # A step that is traced and never run makes all of them. Evaluation has all but the optimizer's.
        trial_step = model.predict_step if predicts else model.test_step
        trial = tf.function(lambda data: _as_replica(model, trial_step, data))
        trial.get_concrete_function(iterator.element_spec)
    if step == "train_step":
        build_optimizer(model)
        _make_slots(model)


def _build_metrics(model: Any, spec: Any) -> bool:
    """Makes the metrics from the model's known outputs, which costs no tracing; returns whether that could be done."""
    outputs = getattr(model, "outputs", None)
    if not outputs or not isinstance(spec, tuple) or len(spec) < 2:
        return False
    batch = tf.nest.flatten(spec[0])[0].shape[0]
    try:
        predicted = [tf.TensorSpec([batch, *output.shape[1:]], output.dtype) for output in outputs]
        y_pred = predicted[0] if len(predicted) == 1 else predicted
        if isinstance(spec[1], dict):
            y_pred = dict(zip(model.output_names, predicted))
        for container in (model.compiled_loss, model.compiled_metrics):
            if container is not None and not container._built:
                build = container.build
                build(y_pred) if container is model.compiled_loss else build(y_pred, spec[1])
    except Exception:
        return False
    return True


def build_optimizer(model: Any) -> None:
    """Makes the optimizer's variables outside the traced loop where Keras would make them inside."""
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    is_built = getattr(optimizer, "_built", getattr(optimizer, "built", False))
    if model.built and hasattr(optimizer, "build") and not is_built:
        with model.distribute_strategy.scope():
            optimizer.build(model.trainable_variables)


def _make_slots(model: Any) -> None:
    """Makes the variables of a legacy optimizer. Made while tracing, they would cost a second tracing."""
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    if model.built and hasattr(optimizer, "_create_all_weights"):
        with model.distribute_strategy.scope(), tf.name_scope(optimizer._name):
            optimizer._create_all_weights(model.trainable_variables)


def _repeat(
    count: int,
    body: Callable[..., Sequence[Any]],
    carried: Sequence[Any] = (),
    in_flight: int = 1,
    until: Sequence[Any] = (),
) -> List[Any]:
    """Repeats the body in a loop of the graph. Repetitions may overlap; what has an effect keeps their order.

    In `until` the body puts what a repetition must have before the next one begins to have effects.
    """
    if count == 1:
        return list(body(tf.constant(0), *carried))

    def ordered(number: Any, turn: Any, *values: Any) -> List[Any]:
        graph = tf.compat.v1.get_default_graph()
        made_before = len(graph.get_operations())
        gate = tf.identity(turn)
        results = list(body(number, *values))
        effects = _effects(graph.get_operations()[made_before:])
        for operation in effects:
            operation._add_control_input(gate.op)
        with tf.control_dependencies([*effects, *until]):
            turn = tf.identity(gate)
        return [number + 1, turn, *results]

    results = tf.while_loop(
        lambda number, *_: number < count,
        ordered,
        [tf.constant(0), tf.constant(0), *carried],
        parallel_iterations=in_flight,
        maximum_iterations=count,
    )
    return list(results[2:])


def _effects(operations: Sequence[Any]) -> List[Any]:
    """Returns the operations that change something outside the graph, and those that read what is changed."""
    touching = []
    changed = set()
    for operation in operations:
        if not operation.op_def.is_stateful or operation.type in _UNORDERED:
            continue
        reads, writes = auto_control_deps_utils.get_read_write_resource_inputs(operation)
        changed |= {id(handle) for handle in writes}
        touching.append((operation, {id(handle) for handle in (*reads, *writes)}))
    return [operation for operation, handles in touching if not handles or changed & handles]


def _stack(count: int, step: Callable[[Any], Any], like: Any) -> List[Any]:
    """Returns the stacked results of steps from 1 on, which have the types and shapes of `like`."""
    arrays = [tf.TensorArray(each.dtype, count, element_shape=each.shape) for each in tf.nest.flatten(like)]

    def write(number: Any, *written: Any) -> List[Any]:
        return [array.write(number, each) for array, each in zip(written, tf.nest.flatten(step(number + 1)))]

    return [array.stack() for array in _repeat(count, write, arrays, _IN_FLIGHT)]


def _interleave(tensor: Any) -> Any:
    """Turns [replica, step, batch, ...] into [step x replica, batch, ...]."""
    swapped = tf.transpose(tensor, [1, 0, *range(2, tensor.shape.rank)])
    return _join(swapped)


def _join(tensor: Any) -> Any:
    """Turns [one, other, ...] into [one x other, ...]."""
    return tf.reshape(tensor, tf.concat([[-1], tf.shape(tensor)[2:]], axis=0))
