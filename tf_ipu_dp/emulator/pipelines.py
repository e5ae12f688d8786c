"""Pipelined Keras models: which stage every layer belongs to, and the SDK's rules for that.

Stages change no number, because a pipeline computes what the layers one after the other compute; so they are kept,
checked, shown and saved here, and the model runs as any other. A stage comes from `set_pipeline_stage_assignment`, or
from a `PipelineStage` in which a layer was called or, failing that, made. The calls of a functional model are Keras'
nodes. Those of a `Model` subclass are found by tracing it once; plain TensorFlow operations between its layers have no
entry. A subclass that is a layer of a functional or sequential model counts as one layer.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import importlib
import json
import logging
import numbers
import threading
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import tensorflow as tf

from tf_ipu_dp.emulator.ipu.gradient_accumulation import GradientAccumulationReductionMethod as Method
from tf_ipu_dp.emulator.ipu.ops import pipelining_ops
from tf_ipu_dp.emulator.ipu.ops.pipelining_ops import PipelineSchedule

_STATE = "_ipu_emulator_pipeline"
_STAGE = "_ipu_emulator_stage"
_CONFIG = "ipu_pipelining"
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
_open = threading.local()


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


class _LayerAssignment:
    """The stage of a layer."""

    def __init__(self, layer: Any, pipeline_stage: Optional[int]) -> None:
        self._layer = layer
        self._pipeline_stage = pipeline_stage

    @property
    def layer(self) -> Any:
        return self._layer

    @property
    def pipeline_stage(self) -> Optional[int]:
        """The stage; None if there is none."""
        return self._pipeline_stage

    @pipeline_stage.setter
    def pipeline_stage(self, value: Optional[int]) -> None:
        self._pipeline_stage = value

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {_title(self)}: {self.pipeline_stage}>"


class SequentialLayerPipelineStageAssignment(_LayerAssignment):
    """The stage of a layer of a `Sequential` model."""

    def __init__(self, layer: Any, pipeline_stage: Optional[int] = None) -> None:
        super().__init__(layer, pipeline_stage)


class FunctionalLayerPipelineStageAssignment(_LayerAssignment):
    """The stage of one call of a layer of a functional model. A layer can be called several times."""

    def __init__(self, layer: Any, node_index: int, pipeline_stage: Optional[int] = None) -> None:
        super().__init__(layer, pipeline_stage)
        self._node_index = node_index

    @property
    def node_index(self) -> int:
        """Which of the layer's calls it is."""
        return self._node_index

    @property
    def inbound_layers(self) -> List[Any]:
        """The layers whose outputs the call gets."""
        return _inbound_layers(self._layer, self._node_index)


class ModelLayerPipelineStageAssignment(_LayerAssignment):
    """The stage of one call of a layer of a `Model` subclass. A layer can be called several times."""

    def __init__(self, layer: Any, node_index: int, pipeline_stage: Optional[int] = None) -> None:
        super().__init__(layer, pipeline_stage)
        self._node_index = node_index
        self._inbound: List[Any] = []

    @property
    def node_index(self) -> int:
        """Which of the layer's calls it is."""
        return self._node_index

    @property
    def inbound_layers(self) -> List[Any]:
        """The layers whose outputs the call gets."""
        return list(self._inbound)


class _NestedAssignment:
    """The stages of the layers of a model that is a layer of another one."""

    def __init__(self, nested_model: Any, assignments: Optional[List[Any]]) -> None:
        self._nested_model = nested_model
        self._assignments = _copies(_current(nested_model), None) if assignments is None else assignments

    @property
    def nested_model(self) -> Any:
        return self._nested_model

    @property
    def layer(self) -> Any:
        """The nested model, which is a layer too."""
        return self._nested_model

    @property
    def pipeline_stage_assignments(self) -> List[Any]:
        """The assignments of the nested model's layers."""
        return self._assignments

    @property
    def pipeline_stage(self) -> Optional[int]:
        """The stage that all layers of the nested model have in common; None if there is none. Setting it sets all."""
        stages = set(_stages(self._assignments))
        return stages.pop() if len(stages) == 1 else None

    @pipeline_stage.setter
    def pipeline_stage(self, value: Optional[int]) -> None:
        for assignment in self._assignments:
            assignment.pipeline_stage = value

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {_title(self)}: {self._assignments}>"


class SequentialNestedModelPipelineStageAssignment(_NestedAssignment):
    """The stages of a model inside a `Sequential` model."""

    def __init__(self, nested_model: Any, pipeline_stage_assignments: Optional[List[Any]] = None) -> None:
        super().__init__(nested_model, pipeline_stage_assignments)


class FunctionalNestedModelPipelineStageAssignment(_NestedAssignment):
    """The stages of one call of a model inside a functional model. Each call has stages of its own."""

    def __init__(
        self, nested_model: Any, node_index: int, pipeline_stage_assignments: Optional[List[Any]] = None
    ) -> None:
        super().__init__(nested_model, pipeline_stage_assignments)
        self._node_index = node_index

    @property
    def node_index(self) -> int:
        """Which of the nested model's calls it is."""
        return self._node_index

    @property
    def inbound_layers(self) -> List[Any]:
        """The layers whose outputs the call gets."""
        return _inbound_layers(self._nested_model, self._node_index)


class NestedModelPipelineStageAssignment(_NestedAssignment):
    """The stages of one call of a model inside a `Model` subclass. Each call has stages of its own."""

    def __init__(
        self, nested_model: Any, node_index: int, pipeline_stage_assignments: Optional[List[Any]] = None
    ) -> None:
        super().__init__(nested_model, pipeline_stage_assignments)
        self._node_index = node_index
        self._inbound: List[Any] = []

    @property
    def node_index(self) -> int:
        """Which of the nested model's calls it is."""
        return self._node_index

    @property
    def inbound_layers(self) -> List[Any]:
        """The layers whose outputs the call gets."""
        return list(self._inbound)


class PipelineStage:
    """Layers that are called, or made, inside belong to a stage."""

    def __init__(self, stage: int) -> None:
        if isinstance(stage, bool) or not isinstance(stage, numbers.Integral):
            raise TypeError(f"A pipeline stage is an int, not {stage!r}.")
        if stage < 0:
            raise ValueError(f"A pipeline stage is 0 or more, not {stage}.")
        self._stage: int = int(stage)

    def __enter__(self) -> PipelineStage:
        from tf_ipu_dp.emulator.ipu import ipu_strategy

        if _open_stage() is not None:
            raise RuntimeError(f"PipelineStage({self._stage}) stands inside PipelineStage({_open_stage()}).")
        if not isinstance(tf.distribute.get_strategy(), ipu_strategy.IPUStrategyV1):
            raise RuntimeError("PipelineStage can be used in the scope of an IPUStrategy only.")
        _hooks.hold()
        _open.stage = self._stage
        return self

    def __exit__(self, *_: Any) -> None:
        _open.stage = None
        _hooks.release()


def attach() -> None:
    """Gives Keras models these methods, and keeps stages in their configurations. Doing it twice is harmless."""
    model = tf.keras.Model
    if hasattr(model, "set_pipelining_options"):
        return
    for method in (
        get_pipeline_stage_assignment,
        set_pipeline_stage_assignment,
        reset_pipeline_stage_assignment,
        print_pipeline_stage_assignment_summary,
        set_pipelining_options,
    ):
        setattr(model, method.__name__, method)
    _remember_build_shapes(model)
    for kind in (_SEQUENTIAL, _FUNCTIONAL, model):
        if kind is not model:
            _keep_in_config(kind)
        if "from_config" in vars(kind):
            _restore_from_config(kind)
    _restore_from_saved_model()


def get_pipeline_stage_assignment(self: Any) -> List[Any]:
    """Returns an assignment for every layer, or for every call of one. A `Model` subclass must have been built."""
    _require_ipu(self, "get_pipeline_stage_assignment")
    return list(_current(self))


def set_pipeline_stage_assignment(self: Any, pipeline_stage_assignment: List[Any]) -> None:
    """Assigns a stage to every layer, or to every call of one.

    A `Sequential` model takes ints as well; in the list they are replaced by assignments.
    """
    _require_ipu(self, "set_pipeline_stage_assignment")
    given = pipeline_stage_assignment
    if not isinstance(given, list):
        raise ValueError(f"The pipeline stage assignment must be a list, not {type(given).__name__}.")
    unassigned = _fresh(self, scopes=False)
    if len(given) != len(unassigned):
        what = "layers" if isinstance(self, _SEQUENTIAL) else "calls of layers"
        raise ValueError(f"There are {len(given)} pipeline stage assignments for {len(unassigned)} {what}.")
    entries = [_as_assignment(one, pattern) for one, pattern in zip(given, unassigned)]
    for stage in _stages(entries):
        if stage is None:
            raise PipelineAssignmentError("Some layers are not assigned to a pipeline stage, but all must be.")
        if type(stage) is not int or stage < 0:
            raise ValueError(f"A pipeline stage is an int of 0 or more, not {stage!r}.")
    _check_flow(self, entries)
    if isinstance(self, _SEQUENTIAL) and _missing_stages(entries):
        raise ValueError(
            f"The pipeline stages {_stages(entries)} must begin with 0, and each must be the one before or the next."
        )
    given[:] = entries
    state = _state_of(self)
    state.assignment = list(entries)


def reset_pipeline_stage_assignment(self: Any) -> None:
    """Forgets all stages; the model is no pipeline any more."""
    _require_ipu(self, "reset_pipeline_stage_assignment")
    state = _state_of(self)
    state.assignment = None
    state.scopes = False


def print_pipeline_stage_assignment_summary(
    self: Any, line_length: Optional[int] = None, print_fn: Optional[Callable[[str], Any]] = None
) -> None:
    """Prints a table of the layers and their stages, as `summary()` prints one."""
    _require_ipu(self, "print_pipeline_stage_assignment_summary")
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
    _require_ipu(self, "set_pipelining_options")
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


def is_pipelined(model: Any) -> bool:
    """Whether a layer belongs to a stage. For a subclass that has not been built: whether one was made in one."""
    if not _is_on_ipu(model):
        return False
    if _is_subclass(model) and _state_of(model).trace is None:
        if not _may_be_pipelined(model):
            return False
        if _trace(model) is None:
            return any(_STAGE in vars(layer) for layer in model.submodules)
    return any(stage is not None for stage in _stages(_current(model)))


def stage_count(model: Any) -> int:
    """Returns the number of stages; 0 for a model that is no pipeline."""
    return len({stage for stage in _stages(_current(model)) if stage is not None}) if is_pipelined(model) else 0


def ipus_per_replica(model: Any) -> int:
    """Returns the IPUs that one copy of the model occupies."""
    if not is_pipelined(model):
        return 1
    return pipelining_ops.ipus_for(_devices(model))


def check_before_run(model: Any, training: bool, steps_per_execution: Optional[int] = None, inputs: Any = None) -> None:
    """Raises what the SDK raises when a pipelined model is run that cannot be; other models pass.

    `inputs` are the specs of the model's inputs, which a subclass needs that has not been built. The number of
    iterations is checked if `steps_per_execution` is given: the SDK finds it out last, when it compiles.
    """
    if not _is_on_ipu(model):
        return
    if _is_subclass(model) and inputs is not None and _may_be_pipelined(model):
        _trace(model, inputs)
    if _is_stale(model):
        raise PipelineAssignmentError(
            "Layers were added or removed after the pipeline stages were assigned: assign or reset them again."
        )
    if not is_pipelined(model):
        return
    if not _is_subclass(model) and type(model).call not in (_SEQUENTIAL.call, _FUNCTIONAL.call):
        raise RuntimeError(f"{type(model).__name__} overrides call, which a pipelined model cannot do.")
    entries = _current(model)
    stages = _stages(entries)
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
    if training and any(isinstance(layer, tf.keras.layers.BatchNormalization) for layer in model.submodules):
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
        nested = isinstance(entry, _NestedAssignment)
        stage = "" if nested else "-" if entry.pipeline_stage is None else str(entry.pipeline_stage)
        title = indent + _title(entry)
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


def _title(entry: Any) -> str:
    title = f"{entry.layer.name} ({type(entry.layer).__name__})"
    return f"{title} ({entry.node_index})" if hasattr(entry, "node_index") else title


@dataclasses.dataclass
class _State:
    """What is kept for one model."""

    options: PipeliningOptions = dataclasses.field(default_factory=PipeliningOptions)
    options_set: bool = False
    assignment: Optional[List[Any]] = None
    scopes: bool = True  # whether stages come from PipelineStage when none were assigned
    build_shape: Any = None
    trace: Optional[_Call] = None


def _state_of(model: Any) -> _State:
    found: _State = vars(model).setdefault(_STATE, _State())
    return found


def _is_on_ipu(model: Any) -> bool:
    from tf_ipu_dp.emulator import keras_models

    return keras_models.is_on_ipu(model)


def _require_ipu(model: Any, name: str) -> None:
    if not _is_on_ipu(model):
        raise AttributeError(f"{name} is for models made in the scope of an IPU strategy.")


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
            not isinstance(one, _NestedAssignment)
            or _alike(one.pipeline_stage_assignments, other.pipeline_stage_assignments)
        )
        for one, other in zip(left, right)
    )


def _fresh(model: Any, scopes: bool) -> List[Any]:
    """Returns assignments as nobody has set them: with the stages of the scopes, or with none."""
    if isinstance(model, _SEQUENTIAL):
        entries = [_sequential_entry(layer) for layer in model.layers]
    elif not _is_subclass(model):
        entries = [_functional_entry(node) for node in _nodes(model)]
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
    called = [vars(node)[_STAGE] for node in layer._inbound_nodes if _STAGE in vars(node)]
    stage = called[0] if called else vars(layer).get(_STAGE)
    if isinstance(layer, _FUNCTIONAL):
        return SequentialNestedModelPipelineStageAssignment(layer, _copies(_current(layer), stage))
    return SequentialLayerPipelineStageAssignment(layer, stage)


def _functional_entry(node: Any) -> Any:
    layer = node.layer
    index = next(number for number, one in enumerate(layer._inbound_nodes) if one is node)
    stage = vars(node).get(_STAGE, vars(layer).get(_STAGE))
    if isinstance(layer, _FUNCTIONAL):
        return FunctionalNestedModelPipelineStageAssignment(layer, index, _copies(_current(layer), stage))
    return FunctionalLayerPipelineStageAssignment(layer, index, stage)


def _model_entry(call: _Call) -> Any:
    layer = call.layer
    stage = vars(layer).get(_STAGE) if call.stage is None else call.stage
    entry: Any
    if isinstance(layer, _FUNCTIONAL):
        entry = NestedModelPipelineStageAssignment(layer, call.index, _copies(_current(layer), stage))
    elif isinstance(layer, tf.keras.Model) and call.calls:
        inner = _copies([_model_entry(one) for one in call.calls], stage)
        entry = NestedModelPipelineStageAssignment(layer, call.index, inner)
    else:
        entry = ModelLayerPipelineStageAssignment(layer, call.index, stage)
    entry._inbound = [source.layer for source in call.sources]
    return entry


def _copies(entries: Sequence[Any], stage: Optional[int]) -> List[Any]:
    """Returns assignments of their own for one call of a nested model. Where there is no stage, the call's is taken."""
    copies = []
    for entry in entries:
        own = copy.copy(entry)
        if isinstance(entry, _NestedAssignment):
            own._assignments = _copies(entry.pipeline_stage_assignments, stage)
        elif own.pipeline_stage is None:
            own.pipeline_stage = stage
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
        raise ValueError(f"The assignment of {_title(given)} stands in the place of {_title(pattern)}.")
    if isinstance(pattern, _NestedAssignment):
        inner, patterns = given.pipeline_stage_assignments, pattern.pipeline_stage_assignments
        if not isinstance(inner, list) or len(inner) != len(patterns):
            raise ValueError(f"The nested model {pattern.layer.name} needs a list of {len(patterns)} assignments.")
        inner[:] = [_as_assignment(one, other) for one, other in zip(inner, patterns)]
    return given


def _stages(entries: Sequence[Any]) -> List[Any]:
    """Returns all stages in order, those of nested models in their place."""
    stages: List[Any] = []
    for entry in entries:
        stages += _stages(entry.pipeline_stage_assignments) if isinstance(entry, _NestedAssignment) else [
            entry.pipeline_stage
        ]  # fmt: skip
    return stages


def _missing_stages(entries: Sequence[Any]) -> List[int]:
    stages = set(_stages(entries))
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
    for node, entry in zip(_nodes(model), entries):
        outputs = tf.nest.flatten(node.outputs)
        passed = _pass(entry, [at.get(id(tensor), _NOWHERE) for tensor in node.keras_inputs])
        at.update(zip(map(id, outputs), _spread(passed, len(outputs))))
    return [at.get(id(tensor), _NOWHERE) for tensor in tf.nest.flatten(model.outputs)]


def _flow_of_calls(calls: Sequence[_Call], entries: Sequence[Any], given: List[int]) -> List[int]:
    at: Dict[int, int] = {}
    for call, entry in zip(calls, entries):
        arrived = [at[id(source)] for source in call.sources] or given
        if isinstance(entry, _NestedAssignment) and _is_subclass(call.layer):
            passed = _flow_of_calls(call.calls, entry.pipeline_stage_assignments, arrived)
        else:
            passed = _pass(entry, arrived)
        at[id(call)] = max(passed)
    return [max(at.values(), default=_NOWHERE)]


def _pass(entry: Any, arrived: List[int]) -> List[int]:
    if isinstance(entry, _NestedAssignment):
        return _flow(entry.nested_model, entry.pipeline_stage_assignments, arrived or [_NOWHERE])
    latest = max(arrived, default=_NOWHERE)
    if entry.pipeline_stage < latest:
        raise ValueError(
            f"{_title(entry)} in the pipeline stage {entry.pipeline_stage} needs data of the later stage {latest}."
        )
    return [entry.pipeline_stage]


def _spread(stages: List[int], count: int) -> List[int]:
    return stages if len(stages) == count else [max(stages, default=_NOWHERE)] * count


def _nodes(model: Any) -> List[Any]:
    """Returns a functional model's calls in post-order: each after those that it depends on. Inputs are left out."""
    by_depth = model._nodes_by_depth
    inside = [node for depth in sorted(by_depth, reverse=True) for node in by_depth[depth]]
    unseen = {id(node) for node in inside}
    order: List[Any] = []

    def visit(root: Any) -> None:
        stack = [(root, iter(root.parent_nodes))]
        unseen.discard(id(root))
        while stack:
            node, parents = stack[-1]
            parent = next((one for one in parents if id(one) in unseen), None)
            if parent is None:
                order.append(node)
                stack.pop()
            else:
                unseen.discard(id(parent))
                stack.append((parent, iter(parent.parent_nodes)))

    ends = [_node_of(tensor) for tensor in tf.nest.flatten(model.outputs)]
    for node in (*ends, *inside):  # the second for what no output needs, like losses
        if id(node) in unseen:
            visit(node)
    return [node for node in order if not node.is_input]


def _node_of(tensor: Any) -> Any:
    layer, index, _ = tensor._keras_history
    return layer._inbound_nodes[index]


def _inbound_layers(layer: Any, node_index: int) -> List[Any]:
    return [tensor._keras_history.layer for tensor in layer._inbound_nodes[node_index].keras_inputs]


@dataclasses.dataclass(eq=False)
class _Call:
    """One call of a layer in a traced `Model` subclass, and the calls that it made itself."""

    layer: Any
    index: int = 0
    stage: Optional[int] = None
    inputs: List[Any] = dataclasses.field(default_factory=list)
    sources: List[_Call] = dataclasses.field(default_factory=list)
    calls: List[_Call] = dataclasses.field(default_factory=list)
    makers: Dict[int, _Call] = dataclasses.field(default_factory=dict)  # of tensors, by id


class _Recorder:
    """Takes down which layers a model calls while it is traced."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._stack: List[_Call] = []
        self.root = _Call(model)

    def call(self, layer: Any, stock: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls a layer and notes it below the one that is being called."""
        inputs = _tensors((args, kwargs))
        if not self._stack and layer is not self._model:
            return stock(layer, *args, **kwargs)
        if not self._stack:
            call = self.root = _Call(layer, inputs=inputs)
        else:
            parent = self._stack[-1]
            earlier = sum(one.layer is layer for one in parent.calls)
            call = _Call(layer, earlier, _open_stage(), inputs, _sources(inputs, parent))
            parent.calls.append(call)
        self._stack.append(call)
        try:
            outputs = stock(layer, *args, **kwargs)
        finally:
            self._stack.pop()
        if self._stack:
            self._stack[-1].makers.update({id(tensor): call for tensor in _tensors(outputs)})
        return outputs


def _sources(tensors: Sequence[Any], parent: _Call) -> List[_Call]:
    """Returns the calls that the tensors come from, through whatever operations stand between."""
    ends = {id(tensor) for tensor in parent.inputs}
    found: List[_Call] = []
    seen = set()
    queue = list(tensors)
    while queue:
        tensor = queue.pop(0)
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        maker = parent.makers.get(id(tensor))
        if maker is not None:
            found += [maker] if maker not in found else []
        elif id(tensor) not in ends:
            queue += tensor.op.inputs
    return found


def _tensors(nest: Any) -> List[Any]:
    """Returns the tensors of a graph in a nest."""
    flat = tf.nest.flatten(nest, expand_composites=True)
    return [one for one in flat if isinstance(one, tf.Tensor) and hasattr(one, "graph") and not hasattr(one, "numpy")]


def _may_be_pipelined(model: Any) -> bool:
    """Whether it is worth tracing a subclass to see its stages."""
    if _state_of(model).options_set or any(_STAGE in vars(layer) for layer in model.submodules):
        return True
    classes = type(model).__mro__[: type(model).__mro__.index(tf.keras.Model)]
    functions = [value for kind in classes for value in vars(kind).values() if hasattr(value, "__code__")]
    return any("PipelineStage" in function.__code__.co_names for function in functions)


def _trace(model: Any, inputs: Any = None) -> Optional[_Call]:
    """Returns what a `Model` subclass calls; None if its inputs are not known yet."""
    state = _state_of(model)
    if state.trace is not None:
        return state.trace
    spec = _input_spec(model) if model.built else None
    spec = inputs if spec is None else spec
    if spec is None:
        return None
    recorder = _Recorder(model)
    saved = model._saved_model_inputs_spec
    specs = tf.nest.map_structure(lambda one: tf.TensorSpec(one.shape, one.dtype), spec)
    with model.distribute_strategy.scope(), _recording(recorder):
        tf.function(model.__call__, autograph=False).get_concrete_function(specs)
    if saved is None and model.built and inputs is None:
        # The dtype was a guess, as Keras' own in build(); the first true call shall say what is saved.
        model._saved_model_inputs_spec = model._saved_model_arg_spec = None
    state.trace = recorder.root
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


def _open_stage() -> Optional[int]:
    stage: Optional[int] = getattr(_open, "stage", None)
    return stage


@contextlib.contextmanager
def _recording(recorder: _Recorder) -> Iterator[None]:
    before, stage = getattr(_open, "recorder", None), _open_stage()
    _hooks.hold()
    _open.recorder, _open.stage = recorder, None
    try:
        yield
    finally:
        _open.recorder, _open.stage = before, stage
        _hooks.release()


class _Hooks:
    """Keras' `Layer`, listened to while somebody holds on. Afterwards it is as it was."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders = 0
        self._stock: Dict[str, Any] = {}
        self._ours: Dict[str, Any] = {}

    def hold(self) -> None:
        """Starts to listen, if nobody does."""
        with self._lock:
            self._holders += 1
            if self._holders == 1:
                layer = tf.keras.layers.Layer
                self._stock = {name: vars(layer)[name] for name in ("__init__", "__call__")}
                self._ours = {"__init__": _made(self._stock["__init__"]), "__call__": _called(self._stock["__call__"])}
                for name, hook in self._ours.items():
                    setattr(layer, name, hook)

    def release(self) -> None:
        """Stops listening, if nobody else does."""
        with self._lock:
            self._holders -= 1
            if self._holders == 0:
                for name, hook in self._ours.items():
                    if vars(tf.keras.layers.Layer)[name] is hook:
                        setattr(tf.keras.layers.Layer, name, self._stock[name])


_hooks = _Hooks()


def _made(stock: Callable[..., Any]) -> Callable[..., Any]:
    # With the names of the stock constructor: Keras reads them to guess a layer's configuration.
    @functools.wraps(stock)
    def __init__(  # noqa: N807
        self: Any, trainable: Any = True, name: Any = None, dtype: Any = None, dynamic: Any = False, **kwargs: Any
    ) -> None:
        stock(self, trainable=trainable, name=name, dtype=dtype, dynamic=dynamic, **kwargs)
        if _open_stage() is not None:
            vars(self)[_STAGE] = _open_stage()

    return __init__


def _called(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        recorder = getattr(_open, "recorder", None)
        if recorder is not None:
            return recorder.call(self, stock, args, kwargs)
        stage = _open_stage()
        if stage is None:
            return stock(self, *args, **kwargs)
        known = len(self._inbound_nodes)
        outputs = stock(self, *args, **kwargs)
        for node in self._inbound_nodes[known:]:
            vars(node)[_STAGE] = stage
        return outputs

    return __call__


def config_of(model: Any) -> Optional[Dict[str, Any]]:
    """Returns what is saved with a model: its stages and the options that the SDK saves. None if there is nothing."""
    if not _is_on_ipu(model) or not (_state_of(model).options_set or is_pipelined(model)):
        return None
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
        _nested_stages(one.pipeline_stage_assignments) if isinstance(one, _NestedAssignment) else one.pipeline_stage
        for one in entries
    ]


def _fill(entries: Sequence[Any], stages: Sequence[Any]) -> None:
    for entry, stage in zip(entries, stages):
        if isinstance(entry, _NestedAssignment):
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
    "FunctionalLayerPipelineStageAssignment",
    "FunctionalNestedModelPipelineStageAssignment",
    "ModelLayerPipelineStageAssignment",
    "NestedModelPipelineStageAssignment",
    "PipelineAssignmentError",
    "PipelineStage",
    "PipeliningOptions",
    "SequentialLayerPipelineStageAssignment",
    "SequentialNestedModelPipelineStageAssignment",
    "attach",
    "check_before_run",
    "config_of",
    "get_pipeline_stage_assignment",
    "ipus_per_replica",
    "is_pipelined",
    "pipelining_of",
    "print_pipeline_stage_assignment_summary",
    "render_summary",
    "reset_pipeline_stage_assignment",
    "restore_config",
    "set_pipeline_stage_assignment",
    "set_pipelining_options",
    "stage_count",
)
