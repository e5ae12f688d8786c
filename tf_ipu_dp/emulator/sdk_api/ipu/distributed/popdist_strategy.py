"""`tensorflow.python.ipu.distributed.popdist_strategy`: the strategy of one instance of a PopDist job.

Variables that are synchronised on read are local to an instance while a program of the device runs. Those to be summed
(metrics) are summed when the host reads them, which all instances have to do. Those to be averaged (moving
statistics) are averaged when the program ends, so that one instance can read and save a model alone.
"""

from __future__ import annotations

import weakref
from typing import Any, Callable, Dict, List, Optional

import tensorflow as tf
from tensorflow.python.distribute import values
from tensorflow.python.eager import def_function
from tensorflow.python.framework import auto_control_deps_utils
from tensorflow.python.util import tf_decorator

from tf_ipu_dp.emulator import patches
from tf_ipu_dp.emulator.runtime import device_functions, instances, replica_handles, replicas
from tf_ipu_dp.emulator.sdk_api import popdist
from tf_ipu_dp.emulator.sdk_api.ipu import ipu_strategy
from tf_ipu_dp.emulator.sdk_api.ipu.keras_extensions import KerasExtensions, ordinal_of

_CONSTANTS = (tf.keras.initializers.Zeros, tf.keras.initializers.Ones)


class _Extended(ipu_strategy.Extended):
    """Variables start with instance 0's values. Reductions are over the replicas of all instances."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._averaged: Any = weakref.WeakValueDictionary()  # by their handles' numbers

    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        if instances.count() == 1 or not tf.compat.v1.executing_eagerly_outside_functions():
            return super()._create_variable(next_creator, **kwargs)
        if not tf.executing_eagerly():
            kwargs["initial_value"] = _broadcast_initial_value(kwargs["initial_value"], kwargs.get("dtype"))
        variable = super()._create_variable(next_creator, **kwargs)
        differs = tf.executing_eagerly() and not _is_constant(kwargs.get("initial_value"))
        if differs and variable.is_initialized():  # it is not while a saved model is loaded
            variable.assign(instances.broadcast(variable.read_value(), "variable"))
        if kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ:
            aggregation = kwargs.get("aggregation")
            if aggregation == tf.VariableAggregation.SUM:
                return _SummedOnRead(self._container_strategy(), [variable], aggregation)
            if aggregation == tf.VariableAggregation.MEAN:
                self._averaged[replica_handles.handle_id(variable.handle)] = variable
        return variable

    @property
    def _global_batch_size(self) -> bool:
        """Whether Keras divides the batch_size of an Input by the replicas: no, it is that of a micro batch."""
        return False

    def average_over_instances(self, graph: Any) -> None:
        """Averages the moving statistics that a graph changes over the instances.

        The replicas of one instance keep different values, as in a job of one instance.
        """
        if not self._averaged:
            return
        # Handles are numbered as variables are made, which is in the same order everywhere.
        changed = [self._averaged[number] for number in sorted(_written(graph)) if number in self._averaged]

        def total(columns: List[List[Any]]) -> List[Any]:
            return instances.sum_over_instances([tf.stack(local) for local in columns], "statistics")

        totals = replicas.all_reduce_jointly([variable.read_value() for variable in changed], total) if changed else []
        for variable, of_replicas in zip(changed, totals):
            variable.assign(of_replicas[replicas.index()] / tf.cast(instances.count(), variable.dtype))

    def _batch_reduce_to(self, reduce_op: Any, value_destination_pairs: Any, options: Any = None) -> List[Any]:
        program = replicas.current()
        is_reduced = program is not None and (program.updating or not self._reduces)
        if instances.count() == 1 or is_reduced:
            return super()._batch_reduce_to(reduce_op, value_destination_pairs, options)

        def total(columns: List[List[Any]]) -> List[Any]:
            return instances.sum_over_instances([replicas.sum_values(local) for local in columns], "reduction")

        totals = replicas.all_reduce_jointly(
            [tf.convert_to_tensor(value) for value, _ in value_destination_pairs], total
        )
        if reduce_op == tf.distribute.ReduceOp.MEAN:
            count = instances.count() * replicas.count()
            return [value / tf.cast(count, value.dtype) for value in totals]
        return totals


class _SummedOnRead(values.SyncOnReadVariable):  # type: ignore[misc]
    """A variable that reads as the sum over the instances; for programs and checkpoints it is this instance's value."""

    def __getattr__(self, name: str) -> Any:
        if name == "_values":  # `_primary` reads it
            raise AttributeError(name)
        return getattr(self._primary, name)

    @property
    def handle(self) -> Any:
        return self._primary.handle

    def _get(self) -> Any:
        on_device = tf.distribute.has_strategy() and tf.distribute.get_replica_context() is not None
        if on_device or replicas.current() is not None:
            return self._primary
        return instances.sum_over_instances([self._primary.read_value()], "metric")[0]

    def value(self) -> Any:
        return tf.convert_to_tensor(self._get())

    def read_value(self) -> Any:
        return tf.identity(self._get())

    def _dense_var_to_tensor(self, dtype: Any = None, name: Any = None, as_ref: bool = False) -> Any:
        return tf.convert_to_tensor(self._get(), dtype=dtype, name=name)

    def assign(self, *args: Any, **kwargs: Any) -> Any:
        return self._primary.assign(*args, **kwargs)

    def assign_add(self, *args: Any, **kwargs: Any) -> Any:
        return self._primary.assign_add(*args, **kwargs)

    def assign_sub(self, *args: Any, **kwargs: Any) -> Any:
        return self._primary.assign_sub(*args, **kwargs)

    def _gather_saveables_for_checkpoint(self) -> Dict[str, Any]:
        return {"VARIABLE_VALUE": self._primary}


def _save_local_values() -> None:
    """Makes metrics save local values in Keras' archives, as in checkpoints, so that one instance can save alone."""

    def save_own_variables(self: Any, store: Any) -> None:
        for number, variable in enumerate(self._trainable_weights + self._non_trainable_weights):
            local = variable._primary if isinstance(variable, _SummedOnRead) else variable
            store[str(number)] = local.numpy()

    name = "save_own_variables"
    if hasattr(tf.keras.metrics.Metric, name) and not patches.is_applied("metric archives"):
        patches.set_attribute("metric archives", tf.keras.metrics.Metric, name, save_own_variables)


def _is_constant(initial_value: Any) -> bool:
    """Whether an initial value is the same on all instances. Most are, and each broadcast costs all instances time."""
    return isinstance(getattr(initial_value, "func", None), _CONSTANTS)


def _broadcast_initial_value(initial_value: Any, dtype: Any) -> Any:
    """Returns the initial value of a variable that is made while a function is traced, as a constant for the graph."""
    with tf.init_scope():
        local = tf.convert_to_tensor(initial_value() if callable(initial_value) else initial_value, dtype)
        return instances.broadcast(local, "variable").numpy()


def _written(graph: Any) -> List[int]:
    """Returns the numbers of the handles outside all graphs that the operations of a graph may write to."""
    written = {
        id(handle)
        for operation in graph.get_operations()
        for handle in auto_control_deps_utils.get_read_write_resource_inputs(operation)[1]
    }
    outside = [outer for outer, inner in graph.captures if id(inner) in written]
    while not all(hasattr(handle, "_id") for handle in outside):
        graph = graph.outer_graph
        within = {id(inner): outer for outer, inner in graph.captures}
        outside = [within.get(id(handle), handle) for handle in outside]
    return [replica_handles.handle_id(handle) for handle in outside]


class PopDistStrategy(tf.compat.v1.distribute.OneDeviceStrategy, KerasExtensions):  # type: ignore[misc]
    """The replicas of all instances. `num_replicas_in_sync` counts them, so Keras' losses are divided by them."""

    supports_loss_scaling = True
    spans_instances = True

    def __init__(
        self,
        ipu_device: str = "/device:IPU:0",
        add_ipu_cross_replica_reductions: bool = True,
        enable_dataset_iterators: bool = True,
        enable_keras_extensions: bool = True,
    ) -> None:
        popdist.init()
        reduces = add_ipu_cross_replica_reductions
        extended = _Extended(self, popdist.getNumTotalReplicas(), reduces)
        tf.compat.v1.distribute.Strategy.__init__(self, extended)
        self.device_ordinal = ordinal_of(ipu_device)
        self._averaging_functions: Any = weakref.WeakKeyDictionary()
        if instances.count() > 1:
            _save_local_values()
        ipu_strategy.prepare(self, enable_dataset_iterators, enable_keras_extensions)

    def update_ipu_config(self, config: Any) -> None:
        """Writes this instance's place in the job into the configuration."""
        config.experimental.multi_replica_distribution.process_count = popdist.getNumInstances()
        config.experimental.multi_replica_distribution.process_index = popdist.getInstanceIndex()

    def run(self, fn: Callable[..., Any], args: Any = (), kwargs: Any = None, options: Optional[Any] = None) -> Any:
        """Runs a function on the device; a plain one is traced first."""
        if not tf.executing_eagerly():
            results = device_functions.run_in_graph(self, fn, args, kwargs, options)
            if replicas.current() is None and tf.compat.v1.executing_eagerly_outside_functions():
                self.extended.average_over_instances(tf.compat.v1.get_default_graph())
            return results
        function = device_functions.as_function(fn)
        is_traced = not isinstance(function, def_function.Function)
        device_function = function if is_traced or instances.count() == 1 else self._averaging(function)
        results = device_functions.run_on_device(self, device_function, args, kwargs or {}, check_types=False)
        if is_traced:
            self.extended.average_over_instances(function.graph)
        return results

    def _averaging(self, function: Any) -> Any:
        """Returns a function that averages the moving statistics after the given one, the same object each time."""
        if function not in self._averaging_functions:

            def run_and_average(*args: Any, **kwargs: Any) -> Any:
                results = decorated.__wrapped__(*args, **kwargs)
                if not tf.executing_eagerly():  # as functions do for debugging
                    self.extended.average_over_instances(tf.compat.v1.get_default_graph())
                return results

            decorated = tf_decorator.make_decorator(function.python_function, run_and_average)
            self._averaging_functions[function] = function._clone(decorated)
        return self._averaging_functions[function]
