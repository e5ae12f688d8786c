"""Pipelined Keras models: which stage every layer belongs to, and the SDK's rules for that.

Stages change no number, because a pipeline computes what the layers one after the other compute; so they are kept,
checked, shown and saved here, and the model runs as any other. A stage comes from `set_pipeline_stage_assignment`, or
from a `PipelineStage` in which a layer was called or, failing that, made. Plain TensorFlow operations between the
layers of a `Model` subclass have no stage. A subclass that is a layer of a functional or sequential model counts as one
layer.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import importlib
import json
import logging
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import tensorflow as tf

from tf_ipu_dp.emulator.keras import layer_calls
from tf_ipu_dp.emulator.keras.layer_calls import (
    FunctionalLayerPipelineStageAssignment,
    FunctionalNestedModelPipelineStageAssignment,
    ModelLayerPipelineStageAssignment,
    NestedAssignment,
    NestedModelPipelineStageAssignment,
    SequentialLayerPipelineStageAssignment,
    SequentialNestedModelPipelineStageAssignment,
    stages_in,
    title_of,
)
from tf_ipu_dp.emulator.sdk_api.ipu.gradient_accumulation import GradientAccumulationReductionMethod as Method
from tf_ipu_dp.emulator.sdk_api.ipu.ops import pipelining_ops
from tf_ipu_dp.emulator.sdk_api.ipu.ops.pipelining_ops import PipelineSchedule

_STATE = "_ipu_emulator_pipeline"
_CONFIG = "ipu_options"
_NOWHERE = -1

_ACCEPTED = (
    "accumulate_outfeed_dtype",
    "backward_propagation_stages_poplar_options",
    "continuous_weight_updates",
    "forward_propagation_stages_poplar_options",
    "gradient_accumulation_dtype",
    "gradient_accumulation_for_captured_grads",
    "name",
    "offload_activations",
    "offload_gradient_accumulation_buffers",
    "offload_weight_update_variables",
    "offload_weights",
    "pipeline_schedule",
    "recomputation_mode",
    "replicated_optimizer_state_sharding",
    "replicated_weight_sharding",
    "weight_update_poplar_options",
)
_REFUSED = (
    "batch_serialization_iterations",
    "computational_stages",
    "gradient_accumulation_count",
    "infeed_queue",
    "inputs",
    "optimizer_function",
    "outfeed_loss",
    "outfeed_mask",
    "outfeed_queue",
    "repeat_count",
)

_SEQUENTIAL = tf.keras.Sequential
_FUNCTIONAL = tf.keras.Sequential.__mro__[1]
_BATCH_NORM = tf.keras.layers.BatchNormalization


class PipelineAssignmentError(ValueError, RuntimeError):
    """An assignment that cannot be used, where it is not known which of the two types the SDK raises."""


@dataclasses.dataclass
class PipeliningOptions:
    """What `set_pipelining_options` has set."""

    accumulation: Optional[int] = None
    method: Method = Method.SUM
    schedule: PipelineSchedule = PipelineSchedule.Grouped
    device_mapping: Optional[List[int]] = None
    accumulate_outfeed: bool = False
    others: Dict[str, Any] = dataclasses.field(default_factory=dict)


def attach(as_method: Callable[[Callable[..., Any]], Any]) -> None:
    """Gives Keras models these methods, and keeps stages in their configurations. To be done once."""
    model = tf.keras.Model
    for method in (
        get_pipeline_stage_assignment,
        set_pipeline_stage_assignment,
        reset_pipeline_stage_assignment,
        print_pipeline_stage_assignment_summary,
        set_pipelining_options,
    ):
        setattr(model, method.__name__, as_method(method))
    _remember_build_shapes(model)
    for kind in (_SEQUENTIAL, _FUNCTIONAL, model):
        if kind is not model:
            _keep_in_config(kind)
        if "from_config" in vars(kind):
            _restore_from_config(kind)
    _restore_from_saved_model()


def get_pipeline_stage_assignment(self: Any) -> List[Any]:
    """Returns an assignment for every layer, or for every call of one. A `Model` subclass must have been built."""
    return list(_current(self))


def set_pipeline_stage_assignment(self: Any, pipeline_stage_assignment: List[Any]) -> None:
    """Assigns a stage to every layer, or to every call of one.

    A `Sequential` model takes ints as well; in the list they are replaced by assignments.
    """
    given = pipeline_stage_assignment
    if not isinstance(given, list):
        raise ValueError(f"The pipeline stage assignment must be a list, not {type(given).__name__}.")
    unassigned = _fresh(self, scopes=False)
    if len(given) != len(unassigned):
        what = "layers" if isinstance(self, _SEQUENTIAL) else "calls of layers"
        raise ValueError(f"There are {len(given)} pipeline stage assignments for {len(unassigned)} {what}.")
    entries = [_as_assignment(one, pattern) for one, pattern in zip(given, unassigned)]
    for stage in stages_in(entries):
        if stage is None:
            raise PipelineAssignmentError("Some layers are not assigned to a pipeline stage, but all must be.")
        if type(stage) is not int or stage < 0:
            raise ValueError(f"A pipeline stage is an int of 0 or more, not {stage!r}.")
    _check_flow(self, entries)
    if isinstance(self, _SEQUENTIAL) and _missing_stages(entries):
        raise ValueError(
            f"The pipeline stages {stages_in(entries)} must begin with 0, and each must be the one before or the next."
        )
    given[:] = entries
    state = _state_of(self)
    state.assignment = list(entries)


def reset_pipeline_stage_assignment(self: Any) -> None:
    """Forgets all stages; the model is no pipeline any more."""
    state = _state_of(self)
    state.assignment = None
    state.scopes = False


def print_pipeline_stage_assignment_summary(
    self: Any, line_length: Optional[int] = None, print_fn: Optional[Callable[[str], Any]] = None
) -> None:
    """Prints a table of the layers and their stages, as `summary()` prints one."""
    for line in render_summary(self, line_length):
        (print_fn or print)(line)


def set_pipelining_options(
    self: Any,
    gradient_accumulation_steps_per_replica: Optional[int] = None,
    device_mapping: Optional[List[int]] = None,
    accumulate_outfeed: Optional[bool] = None,
    gradient_accumulation_reduction_method: Any = "sum",
    **pipelining_kwargs: Any,
) -> None:
    """Sets how a pipelined model is executed. What is None stays as it was."""
    steps = gradient_accumulation_steps_per_replica
    if steps is not None and (type(steps) is not int or steps < 1):
        raise ValueError(f"gradient_accumulation_steps_per_replica must be an int of 1 or more, not {steps!r}.")
    if device_mapping is not None and (
        not isinstance(device_mapping, list) or any(type(one) is not int or one < 0 for one in device_mapping)
    ):
        raise ValueError(f"device_mapping must be a list of int of 0 or more, not {device_mapping!r}.")
    if accumulate_outfeed is not None and not isinstance(accumulate_outfeed, bool):
        raise ValueError(f"accumulate_outfeed must be a bool, not {accumulate_outfeed!r}.")
    method = Method.parse(gradient_accumulation_reduction_method)
    for name in pipelining_kwargs:
        if name in _REFUSED:
            raise ValueError(f"{name} cannot be set for a Keras model: the model determines it.")
        if name not in _ACCEPTED:
            raise TypeError(f"set_pipelining_options() got an unexpected keyword argument {name!r}.")
    pipelining_ops.check_options(**pipelining_kwargs)

    options = pipelining_of(self)
    if steps is not None:
        options.accumulation = steps
    if device_mapping is not None:
        options.device_mapping = list(device_mapping)
    if accumulate_outfeed is not None:
        options.accumulate_outfeed = accumulate_outfeed
    options.method = method
    options.schedule = pipelining_kwargs.pop("pipeline_schedule", None) or PipelineSchedule.Grouped
    options.others = pipelining_kwargs
    _state_of(self).options_set = True


def pipelining_of(model: Any) -> PipeliningOptions:
    """Returns a model's options for pipelining; they are made on first use."""
    return _state_of(model).options


def prepare(model: Any, inputs: Any) -> None:
    """Finds the stages of a `Model` subclass that has not been built, from the specs of its inputs."""
    if _is_on_ipu(model) and _is_subclass(model) and _may_be_pipelined(model):
        _trace(model, inputs)


def is_pipelined(model: Any) -> bool:
    """Whether a layer belongs to a stage."""
    return any(stage is not None for stage in _known_stages(model))


def stage_count(model: Any) -> int:
    """Returns the number of stages; 0 for a model that is no pipeline."""
    return len({stage for stage in _known_stages(model) if stage is not None})


def _known_stages(model: Any) -> List[Any]:
    """Returns the stages in order. Of a subclass that has not been built, those that layers were made in are known."""
    if not _is_on_ipu(model):
        return []
    state = _state_of(model)
    if _is_subclass(model) and state.assignment is None:
        if state.trace is None and not _may_be_pipelined(model):
            return []
        if _trace(model) is None:
            return [layer_calls.stage_of(layer) for layer in _inner_layers(model)]
    return stages_in(_current(model))


def ipus_per_replica(model: Any) -> int:
    """Returns the IPUs that one copy of the model occupies."""
    if not is_pipelined(model):
        return 1
    return pipelining_ops.ipus_for(_devices(model))


def check_before_run(model: Any, training: bool, steps_per_execution: Optional[int] = None, inputs: Any = None) -> None:
    """Raises what the SDK raises when a pipelined model is run that cannot be; other models pass.

    `inputs` are for `prepare`; a subclass that has not been built passes without them. The number of iterations is
    checked if `steps_per_execution` is given: the SDK finds it out last, when it compiles.
    """
    if inputs is not None:
        prepare(model, inputs)
    if not is_pipelined(model) and not (_is_on_ipu(model) and _is_stale(model)):
        return
    if _is_subclass(model) and _trace(model) is None:
        return
    if _is_stale(model):
        raise PipelineAssignmentError(
            "Layers were added or removed after the pipeline stages were assigned: assign or reset them again."
        )
    if not _is_subclass(model) and type(model).call not in (_SEQUENTIAL.call, _FUNCTIONAL.call):
        raise RuntimeError(f"{type(model).__name__} overrides call, which a pipelined model cannot do.")
    entries = _current(model)
    stages = stages_in(entries)
    if None in stages:
        raise PipelineAssignmentError(
            f"{stages.count(None)} of {len(stages)} layers are not assigned to a pipeline stage: "
            "all layers of a pipelined model must be."
        )
    missing = _missing_stages(entries)
    if missing:
        raise RuntimeError(f"The pipeline stages {sorted(set(stages))} are not contiguous: {missing} have no layers.")
    _check_flow(model, entries)
    _check_options(model, training)
    if steps_per_execution is not None:
        options = pipelining_of(model)
        iterations = options.accumulation if training else steps_per_execution
        assert iterations is not None
        pipelining_ops.check_iterations(iterations, len(set(stages)), options.schedule, training)


def _check_options(model: Any, training: bool) -> None:
    options, stages = pipelining_of(model), stage_count(model)
    lists = [options.others.get(f"{way}_propagation_stages_poplar_options") for way in ("forward", "backward")]
    if training and stages > 1 and options.accumulation is None:
        raise ValueError(
            "A pipelined model cannot be trained before set_pipelining_options has set "
            "gradient_accumulation_steps_per_replica."
        )
    pipelining_ops.check_layout(stages, _devices(model), options.schedule, training, *lists)
    state = _state_of(model)
    if training and not state.warned and any(isinstance(layer, _BATCH_NORM) for layer in _inner_layers(model)):
        state.warned = True
        logging.getLogger("tensorflow").warning(
            "The moving statistics of batch normalisation are not updated properly when a model is pipelined."
        )


def render_summary(model: Any, line_length: Optional[int] = None) -> List[str]:
    """Returns the lines of the summary. They are as long as they must be, if no length is given."""
    if isinstance(model, _SEQUENTIAL):
        header = ["Layer (type)", "Pipeline Stage"]
    else:
        header = ["Layer (type) (node index)", "Input Layers", "Pipeline Stage"]
    rows = list(_rows(_current(model), len(header), indent=""))
    widths = [max(len(line[column]) for row in [[header], *rows] for line in row) + 2 for column in range(len(header))]
    length = line_length or max(65, sum(widths))
    # The stage comes last and is short; the first column gets what is left over, or gives what is missing.
    widths[0] += length - sum(widths)
    lines = [f'Model: "{model.name}"', "_" * length, _line(header, widths), "=" * length]
    for number, row in enumerate(rows):
        lines += ["_" * length] if number else []
        lines += [_line(line, widths) for line in row]
    return [*lines, "=" * length]


def _rows(entries: Sequence[Any], columns: int, indent: str) -> Iterator[List[List[str]]]:
    """Yields for every entry the lines of its row: a second line has one more input layer."""
    for entry in entries:
        nested = isinstance(entry, NestedAssignment)
        stage = "" if nested else "-" if entry.pipeline_stage is None else str(entry.pipeline_stage)
        title = indent + title_of(entry)
        if columns == 2:
            yield [[title, stage]]
        else:
            names = [layer.name for layer in getattr(entry, "inbound_layers", [])] or [""]
            yield [[title, names[0], stage], *(["", name, ""] for name in names[1:])]
        if nested:
            yield from _rows(entry.pipeline_stage_assignments, columns, indent + "  ")


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    cut = [cell[: max(width - 1, 0)].ljust(max(width, 0)) for cell, width in zip(cells, widths)]
    return "".join(cut).rstrip()


@dataclasses.dataclass
class _State:
    """What is kept for one model."""

    options: PipeliningOptions = dataclasses.field(default_factory=PipeliningOptions)
    options_set: bool = False
    assignment: Optional[List[Any]] = None
    scopes: bool = True  # whether stages come from PipelineStage when none were assigned
    warned: bool = False
    build_shape: Any = None
    trace: Optional[layer_calls.Call] = None


def _state_of(model: Any) -> _State:
    found: _State = vars(model).setdefault(_STATE, _State())
    return found


def _is_on_ipu(model: Any) -> bool:
    from tf_ipu_dp.emulator.keras import models

    return models.is_on_ipu(model)


def _is_subclass(model: Any) -> bool:
    return not isinstance(model, _FUNCTIONAL)


def _devices(model: Any) -> List[int]:
    mapping = pipelining_of(model).device_mapping
    return list(range(stage_count(model))) if mapping is None else mapping


def _current(model: Any) -> List[Any]:
    """Returns the assignments in force."""
    state = _state_of(model)
    if state.assignment is None or _is_stale(model):
        return _fresh(model, state.scopes)
    return state.assignment


def _is_stale(model: Any) -> bool:
    """Whether layers have come or gone since stages were assigned."""
    state = _state_of(model)
    return state.assignment is not None and not _alike(state.assignment, _fresh(model, scopes=False))


def _alike(left: Sequence[Any], right: Sequence[Any]) -> bool:
    """Whether two lists are about the same calls of the same layers."""
    return len(left) == len(right) and all(
        type(one) is type(other)
        and one.layer is other.layer
        and getattr(one, "node_index", None) == getattr(other, "node_index", None)
        and (
            not isinstance(one, NestedAssignment)
            or _alike(one.pipeline_stage_assignments, other.pipeline_stage_assignments)
        )
        for one, other in zip(left, right)
    )


def _fresh(model: Any, scopes: bool) -> List[Any]:
    """Returns assignments as nobody has set them: with the stages of the scopes, or with none."""
    if isinstance(model, _SEQUENTIAL):
        entries = [_sequential_entry(layer) for layer in model.layers]
    elif not _is_subclass(model):
        entries = [_functional_entry(node) for node in layer_calls.nodes_of(model)]
    else:
        trace = _trace(model)
        if trace is None:
            raise PipelineAssignmentError(
                f"{type(model).__name__} has not been built, so its calls of layers are not known: call build() first."
            )
        entries = [_model_entry(call) for call in trace.calls]
    if not scopes:
        for entry in entries:
            entry.pipeline_stage = None
    return entries


def _sequential_entry(layer: Any) -> Any:
    stages = map(layer_calls.stage_of, layer._inbound_nodes)
    called = next((stage for stage in stages if stage is not None), None)
    if isinstance(layer, _FUNCTIONAL):
        return SequentialNestedModelPipelineStageAssignment(layer, _for_one_call(_current(layer), layer, called))
    # Keras calls the layers when the model is put together, so where a layer was made says more.
    made = layer_calls.stage_of(layer)
    return SequentialLayerPipelineStageAssignment(layer, called if made is None else made)


def _functional_entry(node: Any) -> Any:
    layer, called = node.layer, layer_calls.stage_of(node)
    index = next(number for number, one in enumerate(layer._inbound_nodes) if one is node)
    if isinstance(layer, _FUNCTIONAL):
        inner = _for_one_call(_current(layer), layer, called)
        return FunctionalNestedModelPipelineStageAssignment(layer, index, inner)
    return FunctionalLayerPipelineStageAssignment(layer, index, _stage_of_call(layer, called))


def _model_entry(call: layer_calls.Call) -> Any:
    layer = call.layer
    entry: Any
    if isinstance(layer, _FUNCTIONAL) or (isinstance(layer, tf.keras.Model) and call.calls):
        entries = _current(layer) if isinstance(layer, _FUNCTIONAL) else [_model_entry(one) for one in call.calls]
        inner = _for_one_call(entries, layer, call.stage)
        entry = NestedModelPipelineStageAssignment(layer, call.index, inner)
    else:
        entry = ModelLayerPipelineStageAssignment(layer, call.index, _stage_of_call(layer, call.stage))
    entry._inbound = [source.layer for source in call.sources]
    return entry


def _stage_of_call(layer: Any, called: Optional[int]) -> Optional[int]:
    """Returns the stage that a layer was called in, or else the one that it was made in."""
    return layer_calls.stage_of(layer) if called is None else called


def _for_one_call(entries: Sequence[Any], layer: Any, called: Optional[int]) -> List[Any]:
    """Returns a nested model's assignments for one of its calls: in the stage of the call, if it has one."""
    own = _copies(entries)
    for entry in own if called is not None else ():
        entry.pipeline_stage = called
    _fill_in(own, layer_calls.stage_of(layer))
    return own


def _fill_in(entries: Sequence[Any], stage: Optional[int]) -> None:
    for entry in entries:
        if isinstance(entry, NestedAssignment):
            _fill_in(entry.pipeline_stage_assignments, stage)
        elif entry.pipeline_stage is None:
            entry.pipeline_stage = stage


def assignments_of(model: Any) -> List[Any]:
    """Returns the assignments in force, as copies that can be changed."""
    return _copies(_current(model))


def _copies(entries: Sequence[Any]) -> List[Any]:
    copies = []
    for entry in entries:
        own = copy.copy(entry)
        if isinstance(entry, NestedAssignment):
            own._assignments = _copies(entry.pipeline_stage_assignments)
        copies.append(own)
    return copies


def _as_assignment(given: Any, pattern: Any) -> Any:
    """Returns what was given for a layer as an assignment like the pattern."""
    if type(given) is int and isinstance(pattern, SequentialLayerPipelineStageAssignment):
        return SequentialLayerPipelineStageAssignment(pattern.layer, given)
    if type(given) is not type(pattern):
        raise ValueError(
            f"{pattern.layer.name} needs a {type(pattern).__name__}, but was given a {type(given).__name__}."
        )
    if given.layer is not pattern.layer or getattr(given, "node_index", 0) != getattr(pattern, "node_index", 0):
        raise ValueError(f"The assignment of {title_of(given)} stands in the place of {title_of(pattern)}.")
    if isinstance(pattern, NestedAssignment):
        inner, patterns = given.pipeline_stage_assignments, pattern.pipeline_stage_assignments
        if not isinstance(inner, list) or len(inner) != len(patterns):
            raise ValueError(f"The nested model {pattern.layer.name} needs a list of {len(patterns)} assignments.")
        inner[:] = [_as_assignment(one, other) for one, other in zip(inner, patterns)]
    return given


def _missing_stages(entries: Sequence[Any]) -> List[int]:
    stages = set(stages_in(entries))
    return sorted(set(range(max(stages, default=0) + 1)) - stages)


def _check_flow(model: Any, entries: Sequence[Any]) -> None:
    """Raises ValueError if a call needs data of a later stage."""
    _flow(model, entries, [_NOWHERE])


def _flow(model: Any, entries: Sequence[Any], given: List[int]) -> List[int]:
    """Follows the data through a model: the stages where its inputs come from in, those of its outputs out."""
    if isinstance(model, _SEQUENTIAL):
        for entry in entries:
            given = [max(_pass(entry, given))]
        return given
    if _is_subclass(model):
        trace = _trace(model)
        assert trace is not None
        return _flow_of_calls(trace.calls, entries, given)
    inputs = tf.nest.flatten(model.inputs)
    at = dict(zip(map(id, inputs), _spread(given, len(inputs))))
    for node, entry in zip(layer_calls.nodes_of(model), entries):
        outputs = tf.nest.flatten(node.outputs)
        passed = _pass(entry, [at.get(id(tensor), _NOWHERE) for tensor in node.keras_inputs])
        at.update(zip(map(id, outputs), _spread(passed, len(outputs))))
    return [at.get(id(tensor), _NOWHERE) for tensor in tf.nest.flatten(model.outputs)]


def _flow_of_calls(calls: Sequence[layer_calls.Call], entries: Sequence[Any], given: List[int]) -> List[int]:
    at: Dict[int, int] = {}
    for call, entry in zip(calls, entries):
        arrived = [at[id(source)] for source in call.sources] or given
        if isinstance(entry, NestedAssignment) and _is_subclass(call.layer):
            passed = _flow_of_calls(call.calls, entry.pipeline_stage_assignments, arrived)
        else:
            passed = _pass(entry, arrived)
        at[id(call)] = max(passed)
    return [max(at.values(), default=_NOWHERE)]


def _pass(entry: Any, arrived: List[int]) -> List[int]:
    if isinstance(entry, NestedAssignment):
        return _flow(entry.nested_model, entry.pipeline_stage_assignments, arrived or [_NOWHERE])
    latest = max(arrived, default=_NOWHERE)
    if entry.pipeline_stage < latest:
        raise ValueError(
            f"{title_of(entry)} in the pipeline stage {entry.pipeline_stage} needs data of the later stage {latest}."
        )
    return [entry.pipeline_stage]


def _spread(stages: List[int], count: int) -> List[int]:
    return stages if len(stages) == count else [max(stages, default=_NOWHERE)] * count


def _has_staged_layers(model: Any) -> bool:
    return any(layer_calls.stage_of(layer) is not None for layer in _inner_layers(model))


def _inner_layers(model: Any) -> Iterator[Any]:
    layers: Iterator[Any] = model._flatten_layers(include_self=False)
    return layers


def _may_be_pipelined(model: Any) -> bool:
    """Whether it is worth tracing a subclass to see its stages."""
    if _state_of(model).options_set or _has_staged_layers(model):
        return True
    classes = type(model).__mro__[: type(model).__mro__.index(tf.keras.Model)]
    functions = [value for kind in classes for value in vars(kind).values() if hasattr(value, "__code__")]
    return any("PipelineStage" in function.__code__.co_names for function in functions)


def _trace(model: Any, inputs: Any = None) -> Optional[layer_calls.Call]:
    """Returns what a `Model` subclass calls; None if its inputs are not known yet."""
    state = _state_of(model)
    if state.trace is not None:
        return state.trace
    spec = _input_spec(model) if model.built else None
    guessed = spec is not None and model._saved_model_inputs_spec is None
    spec = inputs if spec is None else spec
    if spec is None:
        return None
    state.trace = layer_calls.trace(model, tf.nest.map_structure(lambda one: tf.TensorSpec(one.shape, one.dtype), spec))
    if guessed:
        # The types were build()'s guess; the first true call shall say what is saved.
        model._saved_model_inputs_spec = model._saved_model_arg_spec = None
    return state.trace


def _input_spec(model: Any) -> Any:
    """Returns the specs that a subclass was called with, or those of build(), which takes floats as Keras does."""
    called = model._saved_model_inputs_spec
    if called is not None:
        return called
    shape = _state_of(model).build_shape
    if shape is None:
        return None
    if isinstance(shape, dict):
        return {name: tf.TensorSpec(one, tf.float32) for name, one in shape.items()}
    if isinstance(shape, list) and not all(one is None or isinstance(one, int) for one in shape):
        return [tf.TensorSpec(one, tf.float32) for one in shape]
    return tf.TensorSpec(shape, tf.float32)


def config_of(model: Any) -> Optional[Dict[str, Any]]:
    """Returns what is saved with a model: its stages and the options that the SDK saves. None if there is nothing."""
    if not _is_on_ipu(model):
        return None
    from tf_ipu_dp.emulator.keras import models

    general = models.options_of(model)
    kept: Dict[str, Any] = {} if general == models.Options() else {"general": general.as_config()}
    if _state_of(model).options_set or is_pipelined(model):
        kept["pipelining"] = _pipelining_config(model)
    return kept or None


def _pipelining_config(model: Any) -> Dict[str, Any]:
    options = pipelining_of(model)
    return {
        "stages": _nested_stages(_current(model)) if is_pipelined(model) else None,
        "gradient_accumulation_steps_per_replica": options.accumulation,
        "gradient_accumulation_reduction_method": options.method.name,
        "device_mapping": options.device_mapping,
        "accumulate_outfeed": options.accumulate_outfeed,
    }


def restore_config(model: Any, config: Optional[Dict[str, Any]]) -> None:
    """Gives a loaded model the stages and options that were saved with it, if it is on an IPU."""
    if not config or not _is_on_ipu(model):
        return
    from tf_ipu_dp.emulator.keras import models

    if "general" in config:
        vars(model)[models.OPTIONS] = models.Options.from_config(config["general"])
    if "pipelining" in config:
        _restore_pipelining(model, config["pipelining"])


def _restore_pipelining(model: Any, config: Dict[str, Any]) -> None:
    set_pipelining_options(
        model,
        config["gradient_accumulation_steps_per_replica"],
        config["device_mapping"],
        config["accumulate_outfeed"],
        config["gradient_accumulation_reduction_method"],
    )
    if config["stages"] is not None:
        entries = _fresh(model, scopes=False)
        _fill(entries, config["stages"])
        _state_of(model).assignment = entries


def _nested_stages(entries: Sequence[Any]) -> List[Any]:
    return [
        _nested_stages(one.pipeline_stage_assignments) if isinstance(one, NestedAssignment) else one.pipeline_stage
        for one in entries
    ]


def _fill(entries: Sequence[Any], stages: Sequence[Any]) -> None:
    for entry, stage in zip(entries, stages):
        if isinstance(entry, NestedAssignment):
            _fill(entry.pipeline_stage_assignments, stage)
        else:
            entry.pipeline_stage = stage


def _remember_build_shapes(model_class: Any) -> None:
    """Notes the shape that a subclass is built with: one of the two Keras releases forgets it."""
    stock = model_class.build

    @functools.wraps(stock)
    def build(self: Any, input_shape: Any) -> Any:
        result = stock(self, input_shape)
        if _is_subclass(self):
            _state_of(self).build_shape = input_shape
        return result

    model_class.build = build


def _keep_in_config(kind: Any) -> None:
    stock = vars(kind)["get_config"]

    @functools.wraps(stock)
    def get_config(self: Any) -> Any:
        config = stock(self)
        # Keras ignores what it does not know beside the list of layers; other configurations are arguments of a class.
        kept = config_of(self) if "layers" in config and not _is_subclass(self) else None
        if kept is not None:
            config[_CONFIG] = kept
        return config

    kind.get_config = get_config


def _restore_from_config(kind: Any) -> None:
    stock = vars(kind)["from_config"].__func__

    @functools.wraps(stock)
    def from_config(cls: Any, config: Any, custom_objects: Any = None) -> Any:
        kept = None
        if isinstance(config, dict) and _CONFIG in config:
            config = dict(config)
            kept = config.pop(_CONFIG)
        model = stock(cls, config, custom_objects=custom_objects)
        restore_config(model, kept)
        return model

    kind.from_config = classmethod(from_config)


def _restore_from_saved_model() -> None:
    """Does the same for Keras' loader of SavedModels, which puts models together by itself."""
    loader = _saved_model_loader()
    stock = loader._reconstruct_model

    @functools.wraps(stock)
    def _reconstruct_model(self: Any, model_id: Any, model: Any, layers: Any) -> Any:
        result = stock(self, model_id, model, layers)
        config = json.loads(self._metadata[model_id].metadata)["config"]
        restore_config(model, config.get(_CONFIG))
        return result

    loader._reconstruct_model = _reconstruct_model


def _saved_model_loader() -> Any:
    """Returns the class of the loader, wherever this release has it."""
    root = tf.keras.Model.__module__.split(".engine", 1)[0]
    for place in ("saving.saved_model.load", "saving.legacy.saved_model.load"):
        with contextlib.suppress(ImportError):
            return importlib.import_module(f"{root}.{place}").KerasObjectLoader
    raise ImportError("Keras' loader of SavedModels was not found.")


__all__: Tuple[str, ...] = (
    "PipelineAssignmentError",
    "PipeliningOptions",
    "assignments_of",
    "attach",
    "check_before_run",
    "config_of",
    "get_pipeline_stage_assignment",
    "ipus_per_replica",
    "is_pipelined",
    "pipelining_of",
    "prepare",
    "print_pipeline_stage_assignment_summary",
    "render_summary",
    "reset_pipeline_stage_assignment",
    "restore_config",
    "set_pipeline_stage_assignment",
    "set_pipelining_options",
    "stage_count",
)
