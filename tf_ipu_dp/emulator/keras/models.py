"""What Keras models can do on an IPU: replicated, accumulated and multi-step `fit`, `evaluate` and `predict`.

Keras' own loops do the work. A dataset's elements are micro batches for one replica; an execution takes S x L of them
for L local replicas, and step counts are divided by L, so that Keras counts steps per replica as the SDK does. Models
outside an IPU strategy's scope go through untouched.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import functools
import logging
import sys
import threading
from typing import Any, Callable, Dict, Optional, Tuple

import numpy as np
import tensorflow as tf

from tf_ipu_dp.emulator.keras import pipelines
from tf_ipu_dp.emulator.runtime import execution, instances, random_numbers
from tf_ipu_dp.emulator.sdk_api.ipu import config as ipu_config
from tf_ipu_dp.emulator.sdk_api.ipu import ipu_infeed_queue, ipu_outfeed_queue
from tf_ipu_dp.emulator.sdk_api.ipu.gradient_accumulation import GradientAccumulationReductionMethod as Method

OPTIONS = "_ipu_emulator_options"
_SHAPES = "_ipu_emulator_shapes"
_REFUSED_OPTIMIZER_ARGUMENTS = ("opt", "num_mini_batches", "experimental_normalize_gradients")
_REFUSED_INFEED_ARGUMENTS = ("dataset", "infeed_spec", "element_spec")
_REFUSED_OUTFEED_ARGUMENTS = ("outfeed_mode", "device_ordinal")
_OVERRIDES = (
    "train_step",
    "test_step",
    "predict_step",
    "make_train_function",
    "make_test_function",
    "make_predict_function",
)
_stock: Dict[str, Callable[..., Any]] = {}


class ReplicatedMetricReductionMethod(enum.Enum):
    """What `fit` and `evaluate` tell of the replicas' metrics. NONE: those of the last one."""

    NONE = "NONE"
    LIST = "LIST"
    SUM = "SUM"
    MEAN = "MEAN"

    @classmethod
    def parse(cls, method: Any) -> ReplicatedMetricReductionMethod:
        """Returns the method of a name or of the enum itself."""
        if isinstance(method, cls):
            return method
        if isinstance(method, str) and method.upper() in cls.__members__:
            return cls[method.upper()]
        raise ValueError(f"{method!r} is not a reduction of metrics; it is one of {', '.join(cls.__members__)}.")


@dataclasses.dataclass
class Options:
    """The IPU options of one model that is no pipeline, and those that all models have."""

    accumulation: int = 1
    method: Method = Method.SUM
    metrics: ReplicatedMetricReductionMethod = ReplicatedMetricReductionMethod.NONE
    asynchronous: bool = False

    def as_config(self) -> Dict[str, Any]:
        """Returns what is saved with a model."""
        return {**vars(self), "method": self.method.name, "metrics": self.metrics.name}

    @classmethod
    def from_config(cls, config: Dict[str, Any]) -> Options:
        """Reads it again."""
        method, metrics = Method.parse(config["method"]), ReplicatedMetricReductionMethod.parse(config["metrics"])
        return cls(**{**config, "method": method, "metrics": metrics})


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
    """Makes Keras models look whether they belong to an IPU strategy. Doing it twice is harmless."""
    if _stock:
        return
    model = tf.keras.Model
    replacements: Dict[str, Callable[..., Any]] = {
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
    for name in _OVERRIDES:
        _stock[name] = getattr(model, name)
    for name, replacement in replacements.items():
        if not hasattr(model, name):
            continue
        _stock[name] = getattr(model, name)
        setattr(model, name, functools.wraps(_stock[name])(replacement))
    for method in (
        set_gradient_accumulation_options,
        set_replication_options,
        set_asynchronous_callbacks,
        set_infeed_queue_options,
        set_outfeed_queue_options,
        export_for_ipu_serving,
    ):
        setattr(model, method.__name__, _OnlyOnIpu(method))
    pipelines.attach(_OnlyOnIpu)


def is_on_ipu(model: Any) -> bool:
    """Whether a model was made in the scope of an IPU strategy with Keras extensions."""
    return bool(getattr(getattr(model, "_distribution_strategy", None), "enable_keras_extensions", False))


def options_of(model: Any) -> Options:
    """Returns a model's options; they are made on first use."""
    found: Options = vars(model).setdefault(OPTIONS, Options())
    return found


def local_replicas(model: Any) -> int:
    """Returns how often this process's device holds the model."""
    ipus, width = model._distribution_strategy.ipus(), pipelines.ipus_per_replica(model)
    if ipus % width:
        raise tf.errors.InternalError(
            None, None, f"The device's {ipus} IPUs are not a multiple of the {width} that the pipeline needs."
        )
    return ipus // width


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
    options = options_of(self)
    options.method = Method.parse(gradient_accumulation_reduction_method)
    if steps is not None:
        options.accumulation = steps


def set_replication_options(self: Any, replicated_metric_reduction_method: Any = "NONE") -> None:
    """Sets what is told of the metrics of several replicas."""
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


def export_for_ipu_serving(self: Any, export_dir: str, *args: Any, **kwargs: Any) -> Any:
    """Writes the model as a SavedModel for serving."""
    from tf_ipu_dp.emulator.sdk_api.ipu import serving

    return serving.export_model(self, export_dir, *args, **kwargs)


def _refuse(given: Dict[str, Any], names: Tuple[str, ...], what: str) -> None:
    for name in names:
        if name in given:
            raise ValueError(f"{name} cannot be given as an argument of the {what}.")


def _accumulation(model: Any) -> int:
    """Returns the micro batches of one replica that make one update."""
    if pipelines.is_pipelined(model):
        return pipelines.pipelining_of(model).accumulation or 1
    return options_of(model).accumulation


def _fit(self: Any, x: Any = None, y: Any = None, *args: Any, **kwargs: Any) -> Any:
    if not is_on_ipu(self):
        return _stock["fit"](self, x, y, *args, **kwargs)
    given = _bind("fit", self, x, y, *args, **kwargs)
    _check_model(self, training=True)
    accumulation = _accumulation(self)
    _check_accumulation(_steps_per_execution(self), accumulation)
    adapters = _data_adapter()
    if given.get("validation_split") and given.get("validation_data") is None:
        (given["x"], given["y"], given["sample_weight"]), given["validation_data"] = adapters.train_validation_split(
            (given["x"], given["y"], given["sample_weight"]), validation_split=given["validation_split"]
        )
    given["validation_split"] = 0.0
    dealt = _deal(self, given["x"], given["y"], given["sample_weight"], given["batch_size"], given["steps_per_epoch"],
                  shuffle=given["shuffle"], class_weight=given["class_weight"])  # fmt: skip
    _check_accumulation(min(_steps_per_execution(self), dealt.steps), accumulation)
    if given.get("validation_data") is not None:
        parts = adapters.unpack_x_y_sample_weight(given["validation_data"])
        validation_batch = given["validation_batch_size"] or given["batch_size"]
        validation = _deal(self, parts[0], parts[1], parts[2], validation_batch, given["validation_steps"])
        # The SDK checks the steps of validation as if there was one replica, and then those of each.
        for steps in (validation.total, validation.steps):
            if steps % min(_steps_per_execution(self), dealt.steps):
                raise ValueError(
                    f"validation has {validation.total} steps, {validation.steps} per replica, and {steps} is not a "
                    f"multiple of steps_per_execution={_steps_per_execution(self)}."
                )
        given.update(validation_data=validation.dataset, validation_steps=validation.steps)
        given["validation_batch_size"] = None
    given.update(x=dealt.dataset, y=None, sample_weight=None, batch_size=None, class_weight=None, shuffle=False)
    given["steps_per_epoch"] = dealt.steps
    with _cut_execution(self, dealt.steps):
        _check_pipeline(self, dealt, training=True)
        if _tells_each_step(self):
            given["callbacks"] = _EachStep(self, given, dealt.steps)
        return _stock["fit"](self, **given)


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
    dealt = _deal(model, given["x"], given.get("y"), given.get("sample_weight"), given["batch_size"], given["steps"])
    given.update({key: None for key in ("y", "sample_weight") if key in given})
    given.update(x=dealt.dataset, batch_size=None, steps=dealt.steps)
    with _cut_execution(model, dealt.steps):
        _check_pipeline(model, dealt, training=False)
        if _tells_each_step(model):
            given["callbacks"] = _EachStep(model, given, dealt.steps)
        return _stock[name](model, **given)


def _on_batch(name: str) -> Callable[..., Any]:
    """Returns `train_on_batch` and the like: one micro batch, for one replica that takes one step at a time."""

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_on_ipu(self):
            return _stock[name](self, *args, **kwargs)
        _check_model(self, training=name == "train_on_batch")
        wanted = _steps_per_execution(self) * local_replicas(self)
        if wanted > 1:
            raise ValueError(
                f"{name} has one batch, and an execution takes {wanted} of them: {local_replicas(self)} replicas x "
                f"steps_per_execution={_steps_per_execution(self)}. Use fit, evaluate or predict."
            )
        with _cut_execution(self, 1):
            return _stock[name](self, *args, **kwargs)

    return run


def _reset_metrics(self: Any) -> None:
    _stock["reset_metrics"](self)
    execution.reset_metrics(self)


def _keep_logs(self: Any, logs: Any) -> Any:
    """The logs are those of the replicas; the metrics that later releases of Keras would ask are one replica's."""
    return logs if is_on_ipu(self) else _stock["_validate_and_get_metrics_result"](self, logs)


def _tells_each_step(model: Any) -> bool:
    accumulates = pipelines.is_pipelined(model) and pipelines.pipelining_of(model).accumulate_outfeed
    return options_of(model).asynchronous and not accumulates


class _EachStep(tf.keras.callbacks.CallbackList):  # type: ignore[misc]
    """Calls the callbacks for every step of every replica, when the execution that made them is done."""

    def __init__(self, model: Any, given: Dict[str, Any], steps: int) -> None:
        verbose = 1 if given["verbose"] == "auto" else given["verbose"]
        super().__init__(given["callbacks"], add_history=True, add_progbar=verbose != 0, model=model, verbose=verbose,
                         epochs=given.get("epochs", 1), steps=steps)  # fmt: skip
        self._model, self._first = model, 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Remembers where the execution begins."""
        self._first = batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Tells of every step."""
        self._tell(super().on_train_batch_begin, super().on_train_batch_end)

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Remembers where the execution begins."""
        self._first = batch

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """Tells of every step."""
        self._tell(super().on_test_batch_begin, super().on_test_batch_end)

    def on_predict_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Remembers where the execution begins."""
        self._first = batch

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        """Tells of every step. Its predictions are a part of the execution's, which are in the order of the steps."""
        count = local_replicas(self._model)
        steps = [step for step in range(self._first, batch + 1) for _ in range(count)]
        outputs = (logs or {}).get("outputs")
        parts = [tf.split(output, len(steps)) for output in tf.nest.flatten(outputs)]
        for number, step in enumerate(steps):
            super().on_predict_batch_begin(step)
            own = tf.nest.pack_sequence_as(outputs, [part[number] for part in parts])
            super().on_predict_batch_end(step, {"outputs": own})

    def _tell(self, begin: Callable[..., None], end: Callable[..., None]) -> None:
        count = local_replicas(self._model)
        for number, logs in enumerate(execution.step_logs(self._model), start=self._first):
            for replica in range(count):
                begin(number)
                end(number, {name: float(value[replica] if count > 1 else value) for name, value in logs.items()})


def _make_train_function(self: Any, force: bool = False) -> Any:
    if not is_on_ipu(self):
        return _stock["make_train_function"](self, force)
    execution.build_optimizer(self)
    pipelined = pipelines.is_pipelined(self)
    method = pipelines.pipelining_of(self).method if pipelined else options_of(self).method
    shape = _execution_shape(
        self, accumulation=_accumulation(self), mean=method is not Method.SUM, each_step=_tells_each_step(self)
    )
    self.train_function = _cached(self, "train", shape, force, self.train_function, execution.make_train_function)
    self.train_tf_function = self.train_function
    return self.train_function


def _make_test_function(self: Any, force: bool = False) -> Any:
    if not is_on_ipu(self):
        return _stock["make_test_function"](self, force)
    shape = _execution_shape(self, each_step=_tells_each_step(self))
    self.test_function = _cached(self, "test", shape, force, self.test_function, execution.make_test_function)
    return self.test_function


def _make_predict_function(self: Any, force: bool = False) -> Any:
    if not is_on_ipu(self):
        return _stock["make_predict_function"](self, force)
    make = execution.make_predict_function
    self.predict_function = _cached(self, "predict", _execution_shape(self), force, self.predict_function, make)
    return self.predict_function


def _execution_shape(model: Any, **training: Any) -> execution.Shape:
    reduction = ReplicatedMetricReductionMethod.NONE if pipelines.is_pipelined(model) else options_of(model).metrics
    return execution.Shape(
        _steps_per_execution(model),
        local_replicas(model),
        metrics=reduction.name,
        generation=random_numbers.generation(),
        members=instances.members(),
        **training,
    )


def _cached(model: Any, name: str, shape: execution.Shape, force: bool, present: Any, make: Callable[..., Any]) -> Any:
    """Returns the present function while it fits. `compile` drops it, as does another shape of the execution."""
    shapes = vars(model).setdefault(_SHAPES, {})
    if present is None or force or shapes.get(name) != shape:
        shapes[name] = shape
        return make(model, shape)
    return present


@dataclasses.dataclass(frozen=True)
class _Dealt:
    """A dataset of micro batches, and how many steps each local replica takes of it."""

    dataset: Any
    steps: int
    total: int


def _deal(
    model: Any,
    x: Any,
    y: Any,
    sample_weight: Any,
    batch_size: Optional[int],
    steps: Optional[int],
    shuffle: Any = False,
    class_weight: Any = None,
) -> _Dealt:
    """Deals micro batches to the local replicas. `steps` counts those of all of them, the result those of one."""
    adapters = _data_adapter()
    dataset = _as_dataset(adapters, x, y, sample_weight, batch_size, shuffle)
    if class_weight:
        dataset = dataset.map(adapters._make_class_weight_map_fn(class_weight))
    if any(spec.dtype == tf.float64 for spec in tf.nest.flatten(dataset.element_spec)):
        dataset = _map(dataset, _to_float32)
    ipu_infeed_queue.check_dataset(dataset)
    pipelines.prepare(model, _input_specs(dataset))
    replicas = local_replicas(model)

    length = int(dataset.cardinality().numpy())
    if steps is None and length == tf.data.INFINITE_CARDINALITY:
        raise ValueError("The dataset has no end: give the number of steps.")
    if steps is None and length == tf.data.UNKNOWN_CARDINALITY:
        raise ValueError("The length of the dataset is not known: give the number of steps.")
    total = length if steps is None else steps
    per_replica, rest = divmod(total, replicas)
    if not per_replica:
        raise ValueError(f"{total} steps are not enough for one step on each of {replicas} replicas.")
    if rest and steps is None:
        logging.getLogger("tensorflow").warning(
            "The last %d of %d micro batches are left out: they do not fill a step of %d replicas.",
            rest,
            total,
            replicas,
        )
    if steps is not None and 0 <= length < per_replica:
        raise ValueError(f"The dataset has {length} elements, which is not enough for {per_replica} steps per replica.")
    per_execution = min(_steps_per_execution(model), per_replica)
    if per_replica % per_execution:
        raise ValueError(f"{per_replica} steps per replica are not a multiple of steps_per_execution={per_execution}.")
    if total == length:
        # Every epoch begins at the beginning, although Keras, which counts steps per replica, sees a longer dataset.
        dataset = dataset.take(per_replica * replicas).repeat()
    return _Dealt(dataset, per_replica, total)


def _as_dataset(adapters: Any, x: Any, y: Any, sample_weight: Any, batch_size: Optional[int], shuffle: Any) -> Any:
    if isinstance(x, tf.data.Dataset):
        return x
    if isinstance(x, (collections.abc.Iterator, tf.keras.utils.Sequence)) or callable(x):
        raise ValueError(
            "Python generators and Sequences cannot be used with an IPU strategy: use a tf.data.Dataset, whose length "
            "and shapes are known."
        )
    batch = batch_size or 32
    kind = adapters.select_data_adapter(x, y)
    if kind is adapters.ListsOfScalarsDataAdapter:
        x, y, sample_weight = (None if part is None else np.asarray(part) for part in (x, y, sample_weight))
        kind = adapters.select_data_adapter(x, y)
    samples = {int(tensor.shape[0]) for tensor in tf.nest.flatten((x, y, sample_weight)) if tensor is not None}
    if len(samples) == 1 and next(iter(samples)) % batch:
        raise ValueError(
            f"{next(iter(samples))} samples do not fill batches of {batch}: the last batch would be a partial one."
        )
    adapter = kind(
        x, y, batch_size=batch, epochs=1, sample_weights=sample_weight, shuffle=shuffle,
        distribution_strategy=tf.distribute.get_strategy(),
    )  # fmt: skip
    dataset = adapter.get_dataset()
    dataset = _map(dataset, lambda tensor: tf.ensure_shape(tensor, [batch, *tensor.shape[1:]]))
    count = next(iter(samples)) // batch
    return dataset.apply(tf.data.experimental.assert_cardinality(count))


def _check_model(model: Any, training: bool) -> None:
    if model.run_eagerly:
        raise RuntimeError("run_eagerly=True cannot be used with an IPU strategy.")
    for name in _OVERRIDES:
        own = getattr(type(model), name)
        if own is not getattr(tf.keras.Model, name):
            raise RuntimeError(f"{type(model).__name__} overrides {name}, which an IPU strategy does not support.")
    if training and (pipelines.is_pipelined(model) or options_of(model).accumulation > 1):
        minimize = getattr(type(model.optimizer), "minimize", None)
        if minimize is not None and minimize.__module__.split(".")[0] not in ("keras", "tensorflow", "tf_ipu_dp"):
            raise ValueError(
                f"{type(model.optimizer).__name__} overrides minimize, which cannot be used with accumulated gradients."
            )
    pipelines.check_before_run(model, training)


def _check_pipeline(model: Any, dealt: _Dealt, training: bool) -> None:
    """What the SDK finds out only when it compiles."""
    pipelines.check_before_run(model, training, _steps_per_execution(model), _input_specs(dealt.dataset))


def _input_specs(dataset: Any) -> Any:
    element = dataset.element_spec
    return element[0] if isinstance(element, tuple) else element


def _check_accumulation(steps_per_execution: int, accumulation: int) -> None:
    if steps_per_execution % accumulation:
        raise RuntimeError(
            f"steps_per_execution={steps_per_execution} is not a multiple of "
            f"gradient_accumulation_steps_per_replica={accumulation}."
        )


def _steps_per_execution(model: Any) -> int:
    variable = model._steps_per_execution
    return 1 if variable is None else int(variable.numpy())


class _cut_execution:  # noqa: N801
    """Holds the device while a loop runs, and cuts the execution to the steps there are."""

    def __init__(self, model: Any, steps: int) -> None:
        self._model, self._steps, self._before = model, steps, _steps_per_execution(model)
        self._host: Any = ipu_infeed_queue.on_host()

    def __enter__(self) -> None:
        ipu_config.configured_system().attach()
        self._host.__enter__()
        if self._before > self._steps:
            logging.getLogger("tensorflow").warning(
                "steps_per_execution=%d is larger than the %d steps per replica and is cut to that.",
                self._before,
                self._steps,
            )
            self._model._steps_per_execution.assign(self._steps)

    def __exit__(self, *raised: Any) -> None:
        self._host.__exit__(*raised)
        if self._before > self._steps:
            self._model._steps_per_execution.assign(self._before)
        _let_go_of_iterators()


def _let_go_of_iterators() -> None:
    """Deletes iterators in the background: tf.data may take seconds for it, waiting for its tuning thread."""
    iterators = list(execution.in_use)
    execution.in_use.clear()
    threading.Thread(target=iterators.clear, daemon=True).start()


def _bind(name: str, model: Any, *args: Any, **kwargs: Any) -> Dict[str, Any]:
    """Returns all arguments of one of Keras' methods by name, with its own defaults."""
    import inspect

    bound = inspect.signature(_stock[name]).bind(model, *args, **kwargs)
    bound.apply_defaults()
    given: Dict[str, Any] = dict(bound.arguments)
    del given["self"]
    given.update(given.pop("kwargs", {}))
    return given


def _data_adapter() -> Any:
    """Returns Keras' module of data adapters, wherever this release has it."""
    return sys.modules[tf.keras.Model.__module__].data_adapter


def _map(dataset: Any, change: Callable[[tf.Tensor], tf.Tensor]) -> Any:
    """Changes every tensor of every element. A tuple's parts arrive as arguments of their own."""
    is_tuple = isinstance(dataset.element_spec, tuple)
    return dataset.map(lambda *element: tf.nest.map_structure(change, element if is_tuple else element[0]))


def _to_float32(tensor: tf.Tensor) -> tf.Tensor:
    return tf.cast(tensor, tf.float32) if tensor.dtype == tf.float64 else tensor


__all__: Tuple[str, ...] = ("extend_keras", "is_on_ipu", "local_replicas", "options_of")
