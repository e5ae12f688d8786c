"""The metrics of a Keras model on each replica of an instance, and what an execution reports of them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any, Callable, Dict, Iterator, List, Sequence

import numpy as np
import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx

from tf_ipu_dp.emulator.runtime import replicas
from tf_ipu_dp.emulator.runtime.execution_shape import Shape
from tf_ipu_dp.emulator.runtime.fusion.passes import Passes
from tf_ipu_dp.emulator.sdk_api.ipu import ipu_outfeed_queue

_LOGS = "_ipu_emulator_step_logs"
_BANKS = "_ipu_emulator_metric_banks"


class ReplicaMetrics:
    """The model's metrics on each replica. Those of time-sliced ones are in banks, and loaded into Keras' in turn."""

    def __init__(self, model: Any, shape: Shape, concurrent: bool) -> None:
        self._model, self._shape, self.concurrent = model, shape, concurrent
        self.slices = 1 if concurrent else shape.replicas

    def make_banks(self) -> None:
        """Makes the variables that store the replicas' metrics, if the metrics exist before tracing."""
        if self.slices > 1:
            for variable in self._variables():
                self._bank(variable)

    @contextlib.contextmanager
    def of_replica(self, number: Any) -> Iterator[Dict[str, Any]]:
        """Inside, operations are traced for one replica, with its own metrics.

        What is put into the dictionary is reported of this step in place of the metrics.
        """
        program = replicas.current()
        assert program is not None
        replica = tf.cast(number, tf.int32) % self.slices
        banks = [(variable, self._bank(variable)) for variable in self._variables()] if self.slices > 1 else []
        for variable, bank in banks:
            variable.assign(tf.gather(bank, replica))
        inner = program if self.concurrent else dataclasses.replace(program, index=lambda: replica)
        logs: Dict[str, Any] = {}
        try:
            with replicas.traced_as(inner):
                yield logs
        finally:
            program.needs_collectives |= inner.needs_collectives
            program.random_ops = inner.random_ops
        for variable, bank in banks:
            bank.scatter_update(tf.IndexedSlices(variable.read_value()[tf.newaxis], replica[tf.newaxis]))
        if self._shape.each_step:
            step_logs(self._model).enqueue(logs or metric_results(self._model))

    def adding_of_parts(self, passes: Passes, first_replica: Any) -> Callable[[Any, Any], None]:
        """Returns a function that adds to a variable of the metrics what each micro batch of a fused pass adds to it.

        What they add is stacked, in the order of the micro batches.
        """

        def add(variable: Any, added: Any) -> None:
            of_replicas = tf.reshape(added, [passes.steps, passes.replicas, *variable.shape])
            of_replicas = tf.reduce_sum(of_replicas, axis=0) if passes.steps > 1 else of_replicas[0]
            if self.slices == 1:
                variable.assign_add(of_replicas[0])
            elif passes.replicas == self.slices:
                self._bank(variable).assign_add(of_replicas)
            else:
                numbers = first_replica + tf.range(passes.replicas)
                self._bank(variable).scatter_add(tf.IndexedSlices(of_replicas, numbers))

        return add

    def logs(self) -> Dict[str, Any]:
        """Returns the logs of this instance: metrics of its last replica, or of all of them.

        Instances are not reduced over, as in the SDK: programs that report metrics of the whole job all-reduce them.
        """
        if self.concurrent:
            results = metric_results(self._model)
            tensors = [tf.convert_to_tensor(value) for value in results.values()]
            return dict(zip(results, replicas.all_reduce(tensors, lambda values: self.reduce(tf.stack(values)))))
        if self._shape.replicas == 1:
            return metric_results(self._model)
        return self._logs_of_replicas([self._bank(variable).read_value() for variable in self._variables()])

    def reduce(self, values: Any) -> Any:
        """Returns what is reported of the replicas' values, which are stacked."""
        if self._shape.metrics == "LIST":
            return values
        if self._shape.metrics == "SUM":
            return tf.reduce_sum(values, axis=0)
        return tf.reduce_mean(values, axis=0) if self._shape.metrics == "MEAN" else values[-1]

    def _logs_of_replicas(self, banks: Sequence[Any]) -> Dict[str, Any]:
        signature: Dict[str, Any] = {}

        def trace(replica: Any) -> Dict[str, Any]:
            with converting_code():
                results = self._results_with([bank[replica] for bank in banks])
            signature.update({name: tf.TensorSpec(value.shape, value.dtype) for name, value in results.items()})
            return results

        # Traced once and called in a loop, which needs the types of the results in advance.
        results_of = tf.function(trace, autograph=False).get_concrete_function(tf.TensorSpec([], tf.int32))
        if self._shape.metrics == "NONE":
            last: Dict[str, Any] = results_of(tf.constant(self._shape.replicas - 1))
            return last
        numbers = tf.range(self._shape.replicas)
        of_all = tf.map_fn(results_of, numbers, fn_output_signature=signature, parallel_iterations=1)
        return {name: self.reduce(values) for name, values in of_all.items()}

    def _results_with(self, values: Sequence[Any]) -> Dict[str, Any]:
        for variable, value in zip(self._variables(), values):
            variable.assign(value)
        return {name: tf.convert_to_tensor(value) for name, value in metric_results(self._model).items()}

    def _variables(self) -> List[Any]:
        return [variable for metric in self._model.metrics for variable in metric.variables]

    def _bank(self, variable: Any) -> Any:
        banks = vars(self._model).setdefault(_BANKS, {})
        owner, bank = banks.get(id(variable), (None, None))
        if owner is not variable or bank.shape[0] != self._shape.replicas:
            with tf.init_scope():
                # This initializer shows a strategy that all instances start with the same value.
                shape = [self._shape.replicas, *variable.shape]
                zeros = functools.partial(tf.keras.initializers.Zeros(), shape, dtype=variable.dtype)
                bank = tf.Variable(zeros, trainable=False)
                if tf.executing_eagerly() and np.any(_local_value(variable).numpy()):
                    bank.assign(tf.broadcast_to(_local_value(variable), shape))
            banks[id(variable)] = (variable, bank)
        return bank


def _local_value(variable: Any) -> Any:
    """Returns a metric's value in this instance; reading the variable otherwise adds up over the instances."""
    return getattr(variable, "_primary", variable).read_value()


def step_logs(model: Any) -> ipu_outfeed_queue.IPUOutfeedQueue:
    """Returns the queue of the logs of single steps."""
    queue: ipu_outfeed_queue.IPUOutfeedQueue = vars(model).setdefault(_LOGS, ipu_outfeed_queue.IPUOutfeedQueue())
    return queue


def metric_results(model: Any) -> Dict[str, Any]:
    """Returns the current values of the model's metrics."""
    logs: Dict[str, Any] = {}
    for metric in model.metrics:
        result = metric.result()
        if isinstance(result, dict):
            logs.update(result)
        else:
            logs[metric.name] = result
    return logs


def reset_metrics(model: Any) -> None:
    """Resets the metrics of all replicas. Keras itself resets only its own variables."""
    for variable, bank in vars(model).get(_BANKS, {}).values():
        bank.assign(tf.broadcast_to(_local_value(variable), bank.shape))


def converting_code() -> Any:
    """Inside, the user's code is converted by autograph; the emulator's is not."""
    return ag_ctx.ControlStatusCtx(ag_ctx.Status.ENABLED)
