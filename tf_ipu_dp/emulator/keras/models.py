"""What Keras models can do on an IPU: replicated, accumulated and multi-step `fit`, `evaluate` and `predict`.

Keras' own loops run the executions. A dataset's elements are micro batches for one replica. An execution takes S x L
of them for L local replicas, and step counts are divided by L, so that Keras counts steps per replica as the SDK does.
Models outside an IPU strategy's scope are not affected.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from typing import Any, Callable, Dict, Optional, Sequence, Tuple

import tensorflow as tf

from tf_ipu_dp.emulator import patches
from tf_ipu_dp.emulator.keras import overrides, pipelines, saved_options
from tf_ipu_dp.emulator.keras.model_options import ReplicatedMetricReductionMethod, is_on_ipu, options_of, pipelining_of
from tf_ipu_dp.emulator.keras.replica_data import (
    ReplicaData,
    data_adapter,
    input_specs,
    local_replicas,
    shard_over_replicas,
    steps_per_execution,
)
from tf_ipu_dp.emulator.keras.step_callbacks import StepCallbacks, reports_each_step
from tf_ipu_dp.emulator.keras.tensorboard import RecordedExecution
from tf_ipu_dp.emulator.runtime import (
    batch_norm,
    execution,
    instances,
    metrics,
    model_building,
    model_strategy,
    random_numbers,
)
from tf_ipu_dp.emulator.runtime.execution_shape import Shape
from tf_ipu_dp.emulator.sdk_api.ipu import config as ipu_config
from tf_ipu_dp.emulator.sdk_api.ipu import ipu_infeed_queue, ipu_outfeed_queue, serving
from tf_ipu_dp.emulator.sdk_api.ipu.gradient_accumulation import GradientAccumulationReductionMethod as Method

_PATCH = "keras models"
_SHAPES = "_ipu_emulator_shapes"
_STATE_SHARDING = "replicated_optimizer_state_sharding"
_OPTIMIZER_ARGUMENTS = ("dtype", "name", "offload_weight_update_variables", _STATE_SHARDING)
_REFUSED_OPTIMIZER_ARGUMENTS = ("opt", "num_mini_batches", "experimental_normalize_gradients")
_REFUSED_INFEED_ARGUMENTS = ("dataset", "infeed_spec", "element_spec")
_REFUSED_OUTFEED_ARGUMENTS = ("outfeed_mode", "device_ordinal")
_stock: Dict[str, Callable[..., Any]] = {}


class _OnlyOnIpu:
    """A method that models outside an IPU strategy's scope do not have."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __get__(self, model: Any, kind: Any = None) -> Any:
        if model is None:
            return self._function
        if not is_on_ipu(model):
            raise AttributeError(
                f"{type(model).__name__!r} object has no attribute {self._function.__name__!r}: it is for models made "
                "in the scope of an IPU strategy."
            )
        return functools.partial(self._function, model)


def extend_keras() -> None:
    """Patches Keras so that models in an IPU strategy's scope run on the device. Calling it twice is harmless."""
    if patches.is_applied(_PATCH):
        return
    model = tf.keras.Model
    replacements: Dict[str, Callable[..., Any]] = {
        "compile": _compile,
        "fit": _fit,
        "evaluate": _evaluate,
        "predict": _predict,
        "train_on_batch": _on_batch("train_on_batch"),
        "test_on_batch": _on_batch("test_on_batch"),
        "predict_on_batch": _on_batch("predict_on_batch"),
        "reset_metrics": _reset_metrics,
        "_validate_and_get_metrics_result": _keep_logs,
        "make_train_function": _make_train_function,
        "make_test_function": _make_test_function,
        "make_predict_function": _make_predict_function,
    }
    for name, replacement in replacements.items():
        if hasattr(model, name):
            _stock[name] = getattr(model, name)
            patches.set_attribute(_PATCH, model, name, functools.wraps(_stock[name])(replacement))
    for method in _ADDED_METHODS:
        patches.set_attribute(_PATCH, model, method.__name__, _OnlyOnIpu(method))
    saved_options.extend_keras()


def set_gradient_accumulation_options(
    self: Any,
    gradient_accumulation_steps_per_replica: Optional[int] = None,
    gradient_accumulation_reduction_method: Any = "sum",
    use_v2_gradient_accumulation_optimizer: bool = False,
    **gradient_accumulation_optimizer_kwargs: Any,
) -> None:
    """Sets how many micro batches a replica adds up for one update, and how."""
    del use_v2_gradient_accumulation_optimizer
    steps = gradient_accumulation_steps_per_replica
    if steps is not None and (type(steps) is not int or steps < 1):
        raise ValueError(f"gradient_accumulation_steps_per_replica must be an int of 1 or more, not {steps!r}.")
    _refuse(gradient_accumulation_optimizer_kwargs, _REFUSED_OPTIMIZER_ARGUMENTS, "gradient accumulation optimizer")
    for name in gradient_accumulation_optimizer_kwargs:
        if name not in _OPTIMIZER_ARGUMENTS:
            raise TypeError(f"set_gradient_accumulation_options() got an unexpected keyword argument {name!r}.")
    sharding = {_STATE_SHARDING: gradient_accumulation_optimizer_kwargs.get(_STATE_SHARDING)}
    model_strategy.refuse_tensor_sharding(self.distribute_strategy, **sharding)
    options = options_of(self)
    options.accumulator_dtype = gradient_accumulation_optimizer_kwargs.get("dtype")
    options.method = Method.parse(gradient_accumulation_reduction_method)
    if steps is not None:
        options.accumulation = steps


def set_replication_options(self: Any, replicated_metric_reduction_method: Any = "NONE") -> None:
    """Sets how the metrics of several replicas are reported."""
    options_of(self).metrics = ReplicatedMetricReductionMethod.parse(replicated_metric_reduction_method)


def set_asynchronous_callbacks(self: Any, asynchronous: bool = False) -> None:
    """Sets whether callbacks are called for every step of every replica, or once per execution."""
    options_of(self).asynchronous = bool(asynchronous)


def set_infeed_queue_options(self: Any, **kwargs: Any) -> None:
    """Sets options of the queue of inputs; they are checked, and have no effect on a host."""
    _refuse(kwargs, _REFUSED_INFEED_ARGUMENTS, "infeed queue")
    ipu_infeed_queue.check_options(**kwargs)


def set_outfeed_queue_options(self: Any, **kwargs: Any) -> None:
    """Sets options of the queue of outputs; they are checked, and have no effect on a host."""
    _refuse(kwargs, _REFUSED_OUTFEED_ARGUMENTS, "outfeed queue")
    ipu_outfeed_queue.IPUOutfeedQueue(**kwargs)


@functools.wraps(serving.export_model, assigned=(), updated=())  # for its signature
def export_for_ipu_serving(self: Any, export_dir: str, *args: Any, **kwargs: Any) -> Any:
    """Writes the model as a SavedModel for serving."""
    return serving.export_model(self, export_dir, *args, **kwargs)


_ADDED_METHODS: Tuple[Callable[..., Any], ...] = (
    set_gradient_accumulation_options,
    set_replication_options,
    set_asynchronous_callbacks,
    set_infeed_queue_options,
    set_outfeed_queue_options,
    export_for_ipu_serving,
    pipelines.get_pipeline_stage_assignment,
    pipelines.set_pipeline_stage_assignment,
    pipelines.reset_pipeline_stage_assignment,
    pipelines.print_pipeline_stage_assignment_summary,
    pipelines.set_pipelining_options,
)


def _refuse(given: Dict[str, Any], names: Tuple[str, ...], what: str) -> None:
    for name in names:
        if name in given:
            raise ValueError(f"{name} cannot be given as an argument of the {what}.")


def _accumulation(model: Any) -> int:
    """Returns the micro batches of one replica that make one update."""
    if pipelines.is_pipelined(model):
        return pipelining_of(model).accumulation or 1
    return options_of(model).accumulation


def _compile(self: Any, *args: Any, **kwargs: Any) -> Any:
    if not is_on_ipu(self):
        return _stock["compile"](self, *args, **kwargs)
    given = _bind("compile", self, *args, **kwargs)
    if tf.is_tensor(given["steps_per_execution"]):
        given["steps_per_execution"] = int(given["steps_per_execution"])
    return _stock["compile"](self, **given)


def _fit(self: Any, x: Any = None, y: Any = None, *args: Any, **kwargs: Any) -> Any:
    if not is_on_ipu(self):
        return _stock["fit"](self, x, y, *args, **kwargs)
    given = _bind("fit", self, x, y, *args, **kwargs)
    _check_model(self, training=True)
    _check_accumulation(steps_per_execution(self), _accumulation(self))
    if given.get("validation_split") and given.get("validation_data") is None:
        arrays = (given["x"], given["y"], given["sample_weight"])
        (given["x"], given["y"], given["sample_weight"]), given["validation_data"] = (
            data_adapter().train_validation_split(arrays, validation_split=given["validation_split"])
        )
    given["validation_split"] = 0.0
    data = shard_over_replicas(
        self, given["x"], given["y"], given["sample_weight"], given["batch_size"], given["steps_per_epoch"],
        shuffle=given["shuffle"], class_weight=given["class_weight"],
    )  # fmt: skip
    _check_model(self, training=True)  # again: the data's shapes may have shown the stages of a subclass
    for steps in (steps_per_execution(self), min(steps_per_execution(self), data.steps)):
        _check_accumulation(steps, _accumulation(self))
    if given.get("validation_data") is not None:
        given.update(_validation(self, given, data.steps))
    given.update(x=data.dataset, y=None, sample_weight=None, batch_size=None, class_weight=None, shuffle=False)
    given["steps_per_epoch"] = data.steps
    with _limit_execution(self, data.steps):
        _check_pipeline(self, data, training=True)
        if reports_each_step(self):
            given["callbacks"] = StepCallbacks(self, given, data.steps)
        return _stock["fit"](self, **given)


def _validation(model: Any, given: Dict[str, Any], training_steps: int) -> Dict[str, Any]:
    """Returns the arguments of `fit` for its validation."""
    x, y, sample_weight = data_adapter().unpack_x_y_sample_weight(given["validation_data"])
    batch_size = given["validation_batch_size"] or given["batch_size"]
    data = shard_over_replicas(model, x, y, sample_weight, batch_size, given["validation_steps"])
    # The SDK checks the steps of validation as if there was one replica, and then those of each.
    for steps in (data.total, data.steps):
        if steps % min(steps_per_execution(model), training_steps):
            raise ValueError(
                f"validation has {data.total} steps, {data.steps} per replica, and {steps} is not a "
                f"multiple of steps_per_execution={steps_per_execution(model)}."
            )
    return {"validation_data": data.dataset, "validation_steps": data.steps, "validation_batch_size": None}


def _evaluate(self: Any, x: Any = None, y: Any = None, *args: Any, **kwargs: Any) -> Any:
    if not is_on_ipu(self) or kwargs.get("_use_cached_eval_dataset"):
        return _stock["evaluate"](self, x, y, *args, **kwargs)
    return _run_without_training("evaluate", self, _bind("evaluate", self, x, y, *args, **kwargs))


def _predict(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    if not is_on_ipu(self):
        return _stock["predict"](self, x, *args, **kwargs)
    return _run_without_training("predict", self, _bind("predict", self, x, *args, **kwargs))


def _run_without_training(name: str, model: Any, given: Dict[str, Any]) -> Any:
    _check_model(model, training=False)
    data = shard_over_replicas(
        model, given["x"], given.get("y"), given.get("sample_weight"), given["batch_size"], given["steps"]
    )
    given.update({key: None for key in ("y", "sample_weight") if key in given})
    given.update(x=data.dataset, batch_size=None, steps=data.steps)
    with _limit_execution(model, data.steps):
        _check_pipeline(model, data, training=False)
        if reports_each_step(model, predicts=name == "predict"):
            given["callbacks"] = StepCallbacks(model, given, data.steps)
        return _stock[name](model, **given)


def _on_batch(name: str) -> Callable[..., Any]:
    """Returns `train_on_batch` or a similar method: one micro batch for one replica and one step per execution."""

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_on_ipu(self):
            return _stock[name](self, *args, **kwargs)
        _check_model(self, training=name == "train_on_batch")
        wanted = steps_per_execution(self) * local_replicas(self)
        if wanted > 1:
            raise ValueError(
                f"{name} has one batch, and an execution takes {wanted} of them: {local_replicas(self)} replicas x "
                f"steps_per_execution={steps_per_execution(self)}. Use fit, evaluate or predict."
            )
        with _limit_execution(self, 1):
            return _stock[name](self, *args, **kwargs)

    return run


def _reset_metrics(self: Any) -> None:
    _stock["reset_metrics"](self)
    metrics.reset_metrics(self)


def _keep_logs(self: Any, logs: Any) -> Any:
    """Returns the logs of all replicas; later releases of Keras would replace them by the metrics of one replica."""
    return logs if is_on_ipu(self) else _stock["_validate_and_get_metrics_result"](self, logs)


def _make_train_function(self: Any, force: bool = False) -> Any:
    if not is_on_ipu(self):
        return _stock["make_train_function"](self, force)
    model_building.build_optimizer(self)
    options: Any = pipelining_of(self) if pipelines.is_pipelined(self) else options_of(self)
    shape = _execution_shape(
        self,
        accumulation=_accumulation(self),
        method=options.method,
        accumulator_dtype=options.accumulator_dtype,
        each_step=reports_each_step(self),
    )

    def make(model: Any, shape: Shape) -> Callable[[Any], Any]:
        return RecordedExecution(model, execution.make_train_function(model, shape))

    self.train_function = _cached(self, "train", shape, force, self.train_function, make)
    return self.train_function


def _make_test_function(self: Any, force: bool = False) -> Any:
    if not is_on_ipu(self):
        return _stock["make_test_function"](self, force)
    shape = _execution_shape(self, each_step=reports_each_step(self))
    self.test_function = _cached(self, "test", shape, force, self.test_function, execution.make_test_function)
    return self.test_function


def _make_predict_function(self: Any, force: bool = False) -> Any:
    if not is_on_ipu(self):
        return _stock["make_predict_function"](self, force)
    make = execution.make_predict_function
    self.predict_function = _cached(self, "predict", _execution_shape(self), force, self.predict_function, make)
    return self.predict_function


def _execution_shape(model: Any, **training: Any) -> Shape:
    reduction = ReplicatedMetricReductionMethod.NONE if pipelines.is_pipelined(model) else options_of(model).metrics
    return Shape(
        steps_per_execution(model),
        local_replicas(model),
        metrics=reduction.name,
        configuration=ipu_config.configured_system().number,
        generation=random_numbers.generation(),
        members=instances.members(),
        **training,
    )


def _cached(model: Any, name: str, shape: Shape, force: bool, existing: Any, make: Callable[..., Any]) -> Any:
    """Returns the existing function, or a new one if `compile` has dropped it or the execution's shape has changed."""
    shapes = vars(model).setdefault(_SHAPES, {})
    if existing is None or force or shapes.get(name) != shape:
        shapes[name] = shape
        return make(model, shape)
    return existing


def _check_model(model: Any, training: bool) -> None:
    if model.run_eagerly:
        raise RuntimeError("run_eagerly=True cannot be used with an IPU strategy.")
    overrides.check_model(model)
    if training and (pipelines.is_pipelined(model) or options_of(model).accumulation > 1):
        overrides.check_optimizer(model.optimizer)
    pipelines.check_before_run(model, training)


def _check_pipeline(model: Any, data: ReplicaData, training: bool) -> None:
    """Checks what the SDK checks only when it compiles."""
    if pipelines.is_pipelined(model):
        batch_norm.refuse_pipeline()
    pipelines.check_before_run(model, training, steps_per_execution(model), input_specs(data.dataset))


def _check_accumulation(steps_per_execution: int, accumulation: int) -> None:
    if steps_per_execution % accumulation:
        raise RuntimeError(
            f"steps_per_execution={steps_per_execution} is not a multiple of "
            f"gradient_accumulation_steps_per_replica={accumulation}."
        )


class _limit_execution:  # noqa: N801
    """Attaches the device for a loop, and limits steps_per_execution to the number of steps."""

    def __init__(self, model: Any, steps: int) -> None:
        self._model, self._steps, self._before = model, steps, steps_per_execution(model)
        self._host: Any = ipu_infeed_queue.on_host()
        self._iterators_before = list(execution.in_use)  # of a loop whose callback runs this one

    def __enter__(self) -> None:
        ipu_config.configured_system().attach()
        self._host.__enter__()
        if self._before > self._steps:
            logging.getLogger("tensorflow").warning(
                "steps_per_execution=%d is larger than the %d steps per replica and is reduced to that.",
                self._before,
                self._steps,
            )
            self._model._steps_per_execution.assign(self._steps)

    def __exit__(self, *raised: Any) -> None:
        self._host.__exit__(*raised)
        if self._before > self._steps:
            self._model._steps_per_execution.assign(self._before)
        _delete_iterators(self._iterators_before)


def _delete_iterators(kept: Sequence[Any]) -> None:
    """Deletes all iterators but some in the background: tf.data may take seconds for it, waiting for its own threads.

    Python waits for the thread at exit: TensorFlow crashes if it is unloaded while it deletes an iterator.
    """
    unused = [each for each in execution.in_use if not any(each is other for other in kept)]
    execution.in_use[:] = kept
    threading.Thread(target=unused.clear, daemon=False).start()


def _bind(name: str, model: Any, *args: Any, **kwargs: Any) -> Dict[str, Any]:
    """Returns all arguments of one of Keras' methods by name, with its own defaults."""
    bound = inspect.signature(_stock[name]).bind(model, *args, **kwargs)
    bound.apply_defaults()
    given: Dict[str, Any] = dict(bound.arguments)
    del given["self"]
    given.update(given.pop("kwargs", {}))
    return given
