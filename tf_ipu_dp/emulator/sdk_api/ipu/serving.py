"""`tensorflow.python.ipu.serving`: a function or a Keras model as a SavedModel with fixed shapes.

The SDK saves a compiled program. Here the function itself is saved, its variables frozen into constants: the same
signature, and it loads in a process without the emulator. Pre- and postprocessing steps keep their variables. The
number of iterations of an execution is only checked by the SDK's rules.
"""

from __future__ import annotations

import inspect
import numbers
import shutil
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import convert_to_constants

from tf_ipu_dp.emulator.keras import model_options, pipelines
from tf_ipu_dp.emulator.runtime import pipeline_layout
from tf_ipu_dp.emulator.sdk_api.ipu import config as ipu_config
from tf_ipu_dp.emulator.sdk_api.ipu.ipu_outfeed_queue import check_feed_type


def export_single_step(  # noqa: PLR0913, PLR0917 the SDK's arguments
    predict_step: Callable[..., Any],
    export_dir: str,
    iterations: int,
    predict_step_signature: Any = None,
    input_dataset: Any = None,
    output_names: Any = None,
    preprocessing_step: Optional[Callable[..., Any]] = None,
    preprocessing_step_signature: Any = None,
    postprocessing_step: Optional[Callable[..., Any]] = None,
    postprocessing_step_signature: Any = None,
    purge_export_dir: bool = False,
) -> Any:
    """Saves a function of one step. Returns the `tf.function` that was saved."""
    _as_count("iterations", iterations)
    _refuse_replicas(ipus_per_replica=1)
    before = _Step("preprocessing_step", preprocessing_step, preprocessing_step_signature)
    after = _Step("postprocessing_step", postprocessing_step, postprocessing_step_signature)
    _check_names(output_names)
    names = _argument_names(predict_step)
    predict_step, signature = _with_signature(predict_step, names, predict_step_signature, input_dataset, before)
    return _export(predict_step, signature, export_dir, output_names, before, after, purge_export_dir)


def export_pipeline(  # noqa: PLR0913, PLR0917 the SDK's arguments
    computational_stages: Sequence[Any],
    export_dir: str,
    iterations: int,
    inputs: Any = None,
    device_mapping: Optional[Sequence[int]] = None,
    pipeline_schedule: Any = None,
    poplar_options: Any = None,
    name: Optional[str] = None,
    predict_step_signature: Any = None,
    input_dataset: Any = None,
    output_names: Any = None,
    preprocessing_step: Optional[Callable[..., Any]] = None,
    preprocessing_step_signature: Any = None,
    postprocessing_step: Optional[Callable[..., Any]] = None,
    postprocessing_step_signature: Any = None,
    purge_export_dir: bool = False,
) -> Any:
    """Saves the stages of a pipeline as one function that runs them one after the other.

    `inputs` are the first stage's arguments before those of the signature. Returns the `tf.function` that was saved.
    """
    del name
    iterations = _as_count("iterations", iterations)
    stages = list(computational_stages)
    schedule = pipeline_layout.PipelineSchedule(pipeline_schedule or pipeline_layout.PipelineSchedule.Grouped)
    devices = list(range(len(stages))) if device_mapping is None else device_mapping
    pipeline_layout.check_layout(len(stages), devices, schedule, False, poplar_options)
    pipeline_layout.check_iterations(iterations, len(stages), schedule, training=False)
    _refuse_replicas(pipeline_layout.ipus_for(devices))
    constants = [] if inputs is None else list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]
    first = stages[0][0] if isinstance(stages[0], (list, tuple)) else stages[0]
    names = _argument_names(first)[len(constants) :]

    def predict_step(*args: Any, **kwargs: Any) -> Any:
        value = _run_stage(stages[0], [*constants, *args], kwargs)
        for stage in stages[1:]:
            value = _spread(value, lambda *given, stage=stage, **named: _run_stage(stage, given, named))
        return value

    before = _Step("preprocessing_step", preprocessing_step, preprocessing_step_signature)
    after = _Step("postprocessing_step", postprocessing_step, postprocessing_step_signature)
    _check_names(output_names)
    step, signature = _with_signature(predict_step, names, predict_step_signature, input_dataset, before)
    return _export(step, signature, export_dir, output_names, before, after, purge_export_dir)


def export_keras(  # noqa: PLR0913, PLR0917 the SDK's arguments
    model: Any,
    export_dir: str,
    batch_size: Optional[int] = None,
    output_names: Any = None,
    preprocessing_step: Optional[Callable[..., Any]] = None,
    preprocessing_step_signature: Any = None,
    postprocessing_step: Optional[Callable[..., Any]] = None,
    postprocessing_step_signature: Any = None,
    purge_export_dir: bool = False,
) -> Any:
    """Saves a Keras model's forward pass for batches of one size. Returns the `tf.function` that was saved."""
    if not model_options.is_on_ipu(model):
        raise ValueError("The model was not made in the scope of an IPU strategy.")
    return export_model(
        model,
        export_dir,
        batch_size,
        output_names,
        preprocessing_step,
        preprocessing_step_signature,
        postprocessing_step,
        postprocessing_step_signature,
        purge_export_dir,
    )


def export_model(  # noqa: PLR0913, PLR0917 the SDK's arguments
    model: Any,
    export_dir: str,
    batch_size: Optional[int] = None,
    output_names: Any = None,
    preprocessing_step: Optional[Callable[..., Any]] = None,
    preprocessing_step_signature: Any = None,
    postprocessing_step: Optional[Callable[..., Any]] = None,
    postprocessing_step_signature: Any = None,
    purge_export_dir: bool = False,
) -> Any:
    """`model.export_for_ipu_serving`: saves the forward pass for batches of one size."""
    before = _Step("preprocessing_step", preprocessing_step, preprocessing_step_signature)
    after = _Step("postprocessing_step", postprocessing_step, postprocessing_step_signature)
    _check_names(output_names)
    signature = _model_signature(model, batch_size)
    structure = _model_inputs(model)
    steps = getattr(model, "_steps_per_execution", None)
    pipelines.check_before_run(model, training=False, steps_per_execution=1 if steps is None else int(steps.numpy()))

    _refuse_replicas(pipelines.ipus_per_replica(model))

    def predict_step(*inputs: Any) -> Any:
        return model(tf.nest.pack_sequence_as(structure, list(inputs)), training=False)

    return _export(predict_step, signature, export_dir, output_names, before, after, purge_export_dir)


def _refuse_replicas(ipus_per_replica: int) -> None:
    """Refuses an export for several replicas: a compiled program takes the input of all that are configured."""
    ipus = ipu_config.ipus_of_first_device()
    if ipus > ipus_per_replica:
        raise NotImplementedError(
            f"The device has {ipus} IPUs, so {ipus // ipus_per_replica} replicas, but the emulator exports programs of "
            f"one replica only. Configure auto_select_ipus={ipus_per_replica} before the export."
        )


class _Step:
    """A function that runs on the host before or after the exported one, and its signature."""

    def __init__(self, name: str, function: Optional[Callable[..., Any]], signature: Any) -> None:
        _check_signature(f"{name}_signature", signature)
        self.name, self.function = name, function
        self.signature: List[Any] = []
        if function is None:
            return
        found = _input_signature(function) if signature is None else signature
        if found is None:
            raise ValueError(f"{name}_signature is needed: {name} is not a tf.function with an input_signature.")
        self.signature = _named(found, _argument_names(function))


def _export(
    predict_step: Callable[..., Any],
    signature: Optional[List[Any]],
    export_dir: str,
    output_names: Any,
    before: _Step,
    after: _Step,
    purge: bool,
) -> Any:
    """Joins the steps and saves them. Everything is checked before anything is written."""
    entries = _entries(export_dir)
    if entries and not purge:
        raise ValueError(f"{export_dir} is not empty; with purge_export_dir=True it is emptied first.")
    if before.function is None:
        assert signature is not None
        frozen = _Frozen(predict_step, signature)
    else:
        arriving = tf.function(before.function, input_signature=before.signature).get_concrete_function()
        given = _specs(arriving.structured_outputs)
        if signature is not None:
            _check_fit("predict_step", signature, "preprocessing_step", given)
        frozen = _Frozen(_spreading(predict_step, arriving.structured_outputs), signature or given)
    if after.function is not None:
        _check_fit("postprocessing_step", after.signature, "predict_step", _specs(frozen.outputs))

    def serve(*inputs: Any) -> Any:
        arrived = inputs if before.function is None else tf.nest.flatten(before.function(*inputs))
        outputs = frozen(*arrived)
        if after.function is not None:
            outputs = _spread(outputs, after.function)
        return outputs if output_names is None else _as_dict(outputs, output_names)

    specs = signature if before.function is None else before.signature
    served = tf.function(serve, input_signature=specs)
    concrete = served.get_concrete_function()
    for entry in entries:
        shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    module = tf.Module()
    module.serve = served
    module.kept = [*concrete.variables, *_trackables(before.function), *_trackables(after.function)]
    tf.saved_model.save(module, str(export_dir), signatures=concrete)
    return served


class _Frozen:
    """A function whose variables are frozen to their current values."""

    def __init__(self, function: Callable[..., Any], signature: Sequence[Any]) -> None:
        for spec in signature:
            if not spec.shape.is_fully_defined():
                raise ValueError(f"The input {spec.name or ''} has shape {spec.shape}, but shapes must be known.")
            check_feed_type(spec.dtype, "An exported function")
        self._signature = list(signature)
        concrete = tf.function(function, input_signature=self._signature).get_concrete_function()
        self.outputs = concrete.structured_outputs
        if self.outputs is None or not tf.nest.flatten(self.outputs):
            raise ValueError("An exported function must return at least one tensor.")
        self._constant = convert_to_constants.convert_variables_to_constants_v2(concrete)

    def __call__(self, *inputs: Any) -> Any:
        fixed = [tf.ensure_shape(tensor, spec.shape) for tensor, spec in zip(inputs, self._signature)]
        flat = self._constant(*fixed)
        return tf.nest.pack_sequence_as(self.outputs, tf.nest.flatten(flat))


def _with_signature(
    predict_step: Callable[..., Any], names: List[str], signature: Any, dataset: Any, before: _Step
) -> Tuple[Callable[..., Any], Optional[List[Any]]]:
    """Returns a step and the specs of its arguments; None for the specs if the preprocessing step determines them."""
    _check_signature("predict_step_signature", signature)
    if dataset is not None and not isinstance(dataset, tf.data.Dataset):
        raise TypeError(f"input_dataset must be a tf.data.Dataset, not {type(dataset).__name__}.")
    if signature is not None and dataset is not None:
        raise ValueError("Only one of predict_step_signature and input_dataset can be given.")
    if dataset is not None:
        spec = dataset.element_spec
        if isinstance(spec, dict):
            return _spreading(predict_step, spec), _named(tf.nest.flatten(spec), sorted(spec))
        found = list(spec) if isinstance(spec, (list, tuple)) else [spec]
        _check_signature("the element_spec of input_dataset", found)
        return predict_step, _named(found, names)
    found = _input_signature(predict_step) if signature is None else signature
    if found is not None:
        return predict_step, _named(found, names)
    if before.function is None:
        raise ValueError(
            "One of predict_step_signature and input_dataset is needed: predict_step is not a tf.function with an "
            "input_signature."
        )
    return predict_step, None


def _model_inputs(model: Any) -> Any:
    """Returns the specs of a model's inputs in the structure that the model is called with."""
    if getattr(model, "inputs", None):
        structure = getattr(model, "_nested_inputs", None)
        return model.inputs if structure is None else structure
    spec = model.save_spec() if hasattr(model, "save_spec") else None
    if spec is None:
        raise ValueError(f"The model {model.name!r} has no known inputs: build it or call it before the export.")
    return spec[0][0]


def _model_signature(model: Any, batch_size: Any) -> List[Any]:
    batch_size = None if batch_size is None else _as_count("batch_size", batch_size)
    specs = []
    for number, tensor in enumerate(tf.nest.flatten(_model_inputs(model))):
        shape = tensor.shape.as_list()
        if shape[0] is None and batch_size is None:
            raise ValueError("batch_size is needed: the model does not define one.")
        if batch_size is not None and shape[0] not in (None, batch_size):
            raise ValueError(
                f"batch_size={batch_size} does not fit the model, which is made for batches of {shape[0]}."
            )
        names = getattr(model, "input_names", None) or []
        name = names[number] if number < len(names) else f"input_{number + 1}"
        specs.append(tf.TensorSpec([batch_size or shape[0], *shape[1:]], tensor.dtype, name=name))
    return specs


def _run_stage(stage: Any, args: Sequence[Any], kwargs: Dict[str, Any]) -> Any:
    """Runs a stage. A list of functions is a group of parallel stages, whose outputs are joined."""
    if callable(stage):
        return stage(*args, **kwargs)
    return [output for function in stage for output in tf.nest.flatten(function(*args, **kwargs))]


def _spread(value: Any, function: Callable[..., Any]) -> Any:
    """Calls a function with what another returned: a tensor, several, or named ones."""
    if isinstance(value, dict):
        return function(**value)
    return function(*value) if isinstance(value, (list, tuple)) else function(value)


def _spreading(function: Callable[..., Any], structure: Any) -> Callable[..., Any]:
    return lambda *flat: _spread(tf.nest.pack_sequence_as(structure, list(flat)), function)


def _as_dict(outputs: Any, output_names: Any) -> Dict[str, Any]:
    names = [output_names] if isinstance(output_names, str) else output_names
    flat = tf.nest.flatten(outputs)
    if len(flat) != len(names):
        raise ValueError(f"{len(names)} output_names are given for {len(flat)} outputs.")
    return dict(zip(names, flat))


def _specs(outputs: Any) -> List[Any]:
    return [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tf.nest.flatten(outputs)]


def _check_fit(consumer: str, wanted: Sequence[Any], producer: str, given: Sequence[Any]) -> None:
    if len(wanted) != len(given):
        raise ValueError(f"{consumer} takes {len(wanted)} tensors, but {producer} returns {len(given)}.")
    for number, (one, other) in enumerate(zip(wanted, given)):
        if one.dtype != other.dtype or not one.shape.is_compatible_with(other.shape):
            raise ValueError(
                f"Argument {number} of {consumer} is {one.dtype.name} of shape {one.shape}, but {producer} returns "
                f"{other.dtype.name} of shape {other.shape}."
            )


def _check_signature(name: str, signature: Any) -> None:
    if signature is None:
        return
    if not isinstance(signature, (list, tuple)) or not all(isinstance(spec, tf.TensorSpec) for spec in signature):
        raise TypeError(f"{name} must be a list or tuple of tf.TensorSpec, not {signature!r}.")
    if not signature:
        raise ValueError(f"{name} is empty.")


def _check_names(output_names: Any) -> None:
    if output_names is not None and not isinstance(output_names, (str, list)):
        raise TypeError(f"output_names must be a str or a list, not {type(output_names).__name__}.")


def _as_count(name: str, value: Any) -> int:
    """Returns a number of 1 or more, which may be given as a tensor or a variable."""
    if isinstance(value, tf.Variable):
        value = value.value()
    known = tf.get_static_value(value) if tf.is_tensor(value) else value
    if isinstance(known, np.ndarray) and known.ndim == 0:
        known = known[()]
    if not isinstance(known, numbers.Integral) or known < 1:
        raise ValueError(f"{name} must be an int of 1 or more, not {value!r}.")
    return int(known)


def _input_signature(function: Any) -> Any:
    """Returns the input_signature of a tf.function that has one."""
    return getattr(function, "input_signature", None)


def _argument_names(function: Any) -> List[str]:
    python_function = getattr(function, "python_function", function)
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, entry in inspect.signature(python_function).parameters.items() if entry.kind in kinds]


def _named(signature: Sequence[Any], names: Sequence[str]) -> List[Any]:
    """Gives specs without a name that of the function's argument, as TensorFlow would."""
    return [
        tf.TensorSpec(spec.shape, spec.dtype, spec.name or (names[number] if number < len(names) else f"arg_{number}"))
        for number, spec in enumerate(signature)
    ]


def _entries(export_dir: str) -> List[Path]:
    path = Path(export_dir)
    if path.exists() and not path.is_dir():
        raise ValueError(f"{export_dir} is not a directory.")
    return list(path.iterdir()) if path.exists() else []


def _trackables(function: Any) -> List[Any]:
    """Returns the objects that a step on the host uses and a SavedModel must include: tables, modules, layers."""
    function = getattr(function, "python_function", function)
    if function is None:
        return []
    referenced = [getattr(function, "__self__", None)]
    try:
        found = inspect.getclosurevars(function)
        referenced += [*found.nonlocals.values(), *found.globals.values()]
    except TypeError:
        referenced.append(function)
    kind = tf.__internal__.tracking.Trackable
    return [value for value in referenced if isinstance(value, kind) and not isinstance(value, tf.Variable)]


__all__ = ["export_keras", "export_model", "export_pipeline", "export_single_step"]
