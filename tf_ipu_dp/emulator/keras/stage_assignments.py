"""The pipeline stage of every layer of a model: the SDK's assignment classes, and the assignments in force.

A stage comes from `set_pipeline_stage_assignment`, or from a `PipelineStage` in which a layer was called or, failing
that, made. Plain TensorFlow operations between the layers of a `Model` subclass have no stage. A subclass that is a
layer of a functional or sequential model counts as one layer.
"""

from __future__ import annotations

import copy
from typing import Any, List, Optional, Sequence

import tensorflow as tf

from tf_ipu_dp.emulator.keras import stages
from tf_ipu_dp.emulator.keras.model_options import pipeline_state_of

SEQUENTIAL = tf.keras.Sequential
FUNCTIONAL = tf.keras.Sequential.__mro__[1]


class PipelineAssignmentError(ValueError, RuntimeError):
    """An assignment that cannot be used, where it is not known which of the two types the SDK raises."""


class LayerAssignment:
    """The stage of a layer."""

    def __init__(self, layer: Any, pipeline_stage: Optional[int]) -> None:
        self._layer = layer
        self._pipeline_stage = pipeline_stage

    @property
    def is_nested_model(self) -> bool:
        """Always False: this is the assignment of a layer."""
        return False

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
        return f"<{type(self).__name__} {title_of(self)}: {self.pipeline_stage}>"


class SequentialLayerPipelineStageAssignment(LayerAssignment):
    """The stage of a layer of a `Sequential` model."""

    def __init__(self, layer: Any, pipeline_stage: Optional[int] = None) -> None:
        super().__init__(layer, pipeline_stage)


class _OneCall:
    """The part of an assignment that identifies one call of a layer. A layer can be called several times."""

    layer: Any
    _node_index: int
    _inbound: Optional[List[Any]] = None  # of a subclass; a functional model has it in its nodes

    @property
    def node_index(self) -> int:
        """Which of the layer's calls it is."""
        return self._node_index

    @property
    def inbound_layers(self) -> List[Any]:
        """The layers whose outputs the call gets."""
        if self._inbound is not None:
            return list(self._inbound)
        return stages.inbound_layers(self.layer, self._node_index)


class FunctionalLayerPipelineStageAssignment(LayerAssignment, _OneCall):
    """The stage of one call of a layer of a functional model."""

    def __init__(self, layer: Any, node_index: int, pipeline_stage: Optional[int] = None) -> None:
        super().__init__(layer, pipeline_stage)
        self._node_index = node_index


class ModelLayerPipelineStageAssignment(LayerAssignment, _OneCall):
    """The stage of one call of a layer of a `Model` subclass."""

    def __init__(self, layer: Any, node_index: int, pipeline_stage: Optional[int] = None) -> None:
        super().__init__(layer, pipeline_stage)
        self._node_index = node_index


class NestedAssignment:
    """The stages of the layers of a model that is a layer of another one."""

    def __init__(self, nested_model: Any, assignments: Optional[List[Any]]) -> None:
        self._nested_model = nested_model
        self._assignments = copy_assignments(current_assignments(nested_model)) if assignments is None else assignments

    @property
    def is_nested_model(self) -> bool:
        """Always True."""
        return True

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
        used = set(stages_in(self._assignments))
        return used.pop() if len(used) == 1 else None

    @pipeline_stage.setter
    def pipeline_stage(self, value: Optional[int]) -> None:
        for assignment in self._assignments:
            assignment.pipeline_stage = value

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {title_of(self)}: {self._assignments}>"


class SequentialNestedModelPipelineStageAssignment(NestedAssignment):
    """The stages of a model inside a `Sequential` model."""

    def __init__(self, nested_model: Any, pipeline_stage_assignments: Optional[List[Any]] = None) -> None:
        super().__init__(nested_model, pipeline_stage_assignments)


class FunctionalNestedModelPipelineStageAssignment(NestedAssignment, _OneCall):
    """The stages of one call of a model inside a functional model. Each call has separate stages."""

    def __init__(
        self, nested_model: Any, node_index: int, pipeline_stage_assignments: Optional[List[Any]] = None
    ) -> None:
        super().__init__(nested_model, pipeline_stage_assignments)
        self._node_index = node_index


class NestedModelPipelineStageAssignment(NestedAssignment, _OneCall):
    """The stages of one call of a model inside a `Model` subclass. Each call has separate stages."""

    def __init__(
        self, nested_model: Any, node_index: int, pipeline_stage_assignments: Optional[List[Any]] = None
    ) -> None:
        super().__init__(nested_model, pipeline_stage_assignments)
        self._node_index = node_index


def title_of(entry: Any) -> str:
    """Returns the title of an assignment's layer for tables and messages."""
    title = f"{entry.layer.name} ({type(entry.layer).__name__})"
    return f"{title} ({entry.node_index})" if hasattr(entry, "node_index") else title


def stages_in(entries: Sequence[Any]) -> List[Any]:
    """Returns all stages in order, those of nested models in their place."""
    found: List[Any] = []
    for entry in entries:
        nested = isinstance(entry, NestedAssignment)
        found += stages_in(entry.pipeline_stage_assignments) if nested else [entry.pipeline_stage]
    return found


def is_subclass(model: Any) -> bool:
    """Whether a model is neither functional nor sequential, so that its calls are known only by tracing it."""
    return not isinstance(model, FUNCTIONAL)


def current_assignments(model: Any) -> List[Any]:
    """Returns the assignments in force."""
    state = pipeline_state_of(model)
    if state.assignment is None or is_stale(model):
        return default_assignments(model, state.scopes)
    return state.assignment


def is_stale(model: Any) -> bool:
    """Whether layers were added or removed after stages were assigned."""
    state = pipeline_state_of(model)
    return state.assignment is not None and not _same_calls(state.assignment, default_assignments(model, scopes=False))


def default_assignments(model: Any, scopes: bool) -> List[Any]:
    """Returns assignments without those that were set: with the stages of PipelineStage scopes, or with none."""
    if isinstance(model, SEQUENTIAL):
        entries = [_sequential_entry(layer) for layer in model.layers]
    elif not is_subclass(model):
        entries = [_functional_entry(node) for node in stages.nodes_of(model)]
    else:
        trace = trace_calls(model)
        if trace is None:
            raise PipelineAssignmentError(
                f"{type(model).__name__} has not been built, so its calls of layers are not known: call build() first."
            )
        entries = [_model_entry(call) for call in trace.calls]
    if not scopes:
        for entry in entries:
            entry.pipeline_stage = None
    return entries


def copy_assignments(entries: Sequence[Any]) -> List[Any]:
    """Returns copies that can be changed."""
    copies = []
    for entry in entries:
        own = copy.copy(entry)
        if isinstance(entry, NestedAssignment):
            own._assignments = copy_assignments(entry.pipeline_stage_assignments)
        copies.append(own)
    return copies


def check_assignment(given: Any, pattern: Any) -> Any:
    """Returns what was given for a layer as an assignment like the pattern; ValueError if it does not match."""
    if type(given) is int and isinstance(pattern, SequentialLayerPipelineStageAssignment):
        return SequentialLayerPipelineStageAssignment(pattern.layer, given)
    if type(given) is not type(pattern):
        raise ValueError(
            f"{pattern.layer.name} needs a {type(pattern).__name__}, but was given a {type(given).__name__}."
        )
    if given.layer is not pattern.layer or getattr(given, "node_index", 0) != getattr(pattern, "node_index", 0):
        raise ValueError(f"The assignment of {title_of(given)} is given in place of {title_of(pattern)}.")
    if isinstance(pattern, NestedAssignment):
        inner, patterns = given.pipeline_stage_assignments, pattern.pipeline_stage_assignments
        if not isinstance(inner, list) or len(inner) != len(patterns):
            raise ValueError(f"The nested model {pattern.layer.name} needs a list of {len(patterns)} assignments.")
        inner[:] = [check_assignment(one, other) for one, other in zip(inner, patterns)]
    return given


def trace_calls(model: Any, inputs: Any = None) -> Optional[stages.Call]:
    """Returns the calls of a `Model` subclass; None if its inputs are not known yet."""
    state = pipeline_state_of(model)
    if state.trace is not None:
        return state.trace
    spec = _input_spec(model) if model.built else None
    guessed = spec is not None and model._saved_model_inputs_spec is None
    spec = inputs if spec is None else spec
    if spec is None:
        return None
    state.trace = stages.trace(model, tf.nest.map_structure(lambda one: tf.TensorSpec(one.shape, one.dtype), spec))
    if guessed:
        # The types were guessed from build(); what is saved must come from the first real call.
        model._saved_model_inputs_spec = model._saved_model_arg_spec = None
    return state.trace


def _sequential_entry(layer: Any) -> Any:
    called_in = map(stages.stage_of, layer._inbound_nodes)
    called = next((stage for stage in called_in if stage is not None), None)
    if isinstance(layer, FUNCTIONAL):
        inner = _for_one_call(current_assignments(layer), layer, called)
        return SequentialNestedModelPipelineStageAssignment(layer, inner)
    # Keras calls the layers when the model is assembled, so the stage in which a layer was made takes precedence.
    made = stages.stage_of(layer)
    return SequentialLayerPipelineStageAssignment(layer, called if made is None else made)


def _functional_entry(node: Any) -> Any:
    layer, called = node.layer, stages.stage_of(node)
    index = next(number for number, one in enumerate(layer._inbound_nodes) if one is node)
    if isinstance(layer, FUNCTIONAL):
        inner = _for_one_call(current_assignments(layer), layer, called)
        return FunctionalNestedModelPipelineStageAssignment(layer, index, inner)
    return FunctionalLayerPipelineStageAssignment(layer, index, _stage_of_call(layer, called))


def _model_entry(call: stages.Call) -> Any:
    layer = call.layer
    entry: Any
    if isinstance(layer, FUNCTIONAL) or (isinstance(layer, tf.keras.Model) and call.calls):
        functional = isinstance(layer, FUNCTIONAL)
        entries = current_assignments(layer) if functional else [_model_entry(one) for one in call.calls]
        inner = _for_one_call(entries, layer, call.stage)
        entry = NestedModelPipelineStageAssignment(layer, call.index, inner)
    else:
        entry = ModelLayerPipelineStageAssignment(layer, call.index, _stage_of_call(layer, call.stage))
    entry._inbound = [source.layer for source in call.sources]
    return entry


def _stage_of_call(layer: Any, called: Optional[int]) -> Optional[int]:
    """Returns the stage that a layer was called in, or else the one that it was made in."""
    return stages.stage_of(layer) if called is None else called


def _for_one_call(entries: Sequence[Any], layer: Any, called: Optional[int]) -> List[Any]:
    """Returns a nested model's assignments for one of its calls: in the stage of the call, if it has one."""
    own = copy_assignments(entries)
    for entry in own if called is not None else ():
        entry.pipeline_stage = called
    _fill_unassigned(own, stages.stage_of(layer))
    return own


def _fill_unassigned(entries: Sequence[Any], stage: Optional[int]) -> None:
    for entry in entries:
        if isinstance(entry, NestedAssignment):
            _fill_unassigned(entry.pipeline_stage_assignments, stage)
        elif entry.pipeline_stage is None:
            entry.pipeline_stage = stage


def _same_calls(left: Sequence[Any], right: Sequence[Any]) -> bool:
    """Whether two lists describe the same calls of the same layers."""
    return len(left) == len(right) and all(
        type(one) is type(other)
        and one.layer is other.layer
        and getattr(one, "node_index", None) == getattr(other, "node_index", None)
        and (
            not isinstance(one, NestedAssignment)
            or _same_calls(one.pipeline_stage_assignments, other.pipeline_stage_assignments)
        )
        for one, other in zip(left, right)
    )


def _input_spec(model: Any) -> Any:
    """Returns the specs that a subclass was called with, or those of build(), with float32 inputs as in Keras."""
    called = model._saved_model_inputs_spec
    if called is not None:
        return called
    shape = pipeline_state_of(model).build_shape
    if shape is None:
        return None
    if isinstance(shape, dict):
        return {name: tf.TensorSpec(one, tf.float32) for name, one in shape.items()}
    if isinstance(shape, list) and not all(one is None or isinstance(one, int) for one in shape):
        return [tf.TensorSpec(one, tf.float32) for one in shape]
    return tf.TensorSpec(shape, tf.float32)
