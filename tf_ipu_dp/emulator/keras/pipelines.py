"""Pipelined Keras models: the SDK's methods for stages and options, and the rules that it checks.

Stages do not affect results, because a pipeline computes the same as its layers run in sequence. So they are stored,
checked, shown and saved, and the model runs like any other.
"""

from __future__ import annotations

import logging
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence

import tensorflow as tf

from tf_ipu_dp.emulator.keras import pipeline_summary, stages
from tf_ipu_dp.emulator.keras.model_options import is_on_ipu, pipeline_state_of, pipelining_of
from tf_ipu_dp.emulator.keras.stage_assignments import (
    FUNCTIONAL,
    SEQUENTIAL,
    NestedAssignment,
    PipelineAssignmentError,
    check_assignment,
    current_assignments,
    default_assignments,
    is_stale,
    is_subclass,
    stages_in,
    title_of,
    trace_calls,
)
from tf_ipu_dp.emulator.runtime import model_strategy, pipeline_layout
from tf_ipu_dp.emulator.runtime.pipeline_layout import PipelineSchedule
from tf_ipu_dp.emulator.sdk_api.ipu.gradient_accumulation import GradientAccumulationReductionMethod as Method

_NO_STAGE = -1
_BATCH_NORM = tf.keras.layers.BatchNormalization
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
_SHARDING = ("replicated_optimizer_state_sharding", "replicated_weight_sharding")
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


def get_pipeline_stage_assignment(self: Any) -> List[Any]:
    """Returns an assignment for every layer, or for every call of one. A `Model` subclass must have been built."""
    return list(current_assignments(self))


def set_pipeline_stage_assignment(self: Any, pipeline_stage_assignment: List[Any]) -> None:
    """Assigns a stage to every layer, or to every call of one.

    A `Sequential` model takes ints as well; in the list they are replaced by assignments.
    """
    given = pipeline_stage_assignment
    if not isinstance(given, list):
        raise ValueError(f"The pipeline stage assignment must be a list, not {type(given).__name__}.")
    patterns = default_assignments(self, scopes=False)
    if len(given) != len(patterns):
        what = "layers" if isinstance(self, SEQUENTIAL) else "calls of layers"
        raise ValueError(f"There are {len(given)} pipeline stage assignments for {len(patterns)} {what}.")
    entries = [check_assignment(one, pattern) for one, pattern in zip(given, patterns)]
    for stage in stages_in(entries):
        if stage is None:
            raise PipelineAssignmentError("Some layers are not assigned to a pipeline stage, but all must be.")
        if type(stage) is not int or stage < 0:
            raise ValueError(f"A pipeline stage is an int of 0 or more, not {stage!r}.")
    _check_flow(self, entries)
    if isinstance(self, SEQUENTIAL) and _missing_stages(entries):
        raise ValueError(
            f"The pipeline stages {stages_in(entries)} must begin with 0, and each must be the one before or the next."
        )
    given[:] = entries
    state = pipeline_state_of(self)
    state.assignment = list(entries)


def reset_pipeline_stage_assignment(self: Any) -> None:
    """Drops all stages: the model is no longer pipelined."""
    state = pipeline_state_of(self)
    state.assignment = None
    state.scopes = False


def print_pipeline_stage_assignment_summary(
    self: Any, line_length: Optional[int] = None, print_fn: Optional[Callable[[str], Any]] = None
) -> None:
    """Prints a table of the layers and their stages, as `summary()` prints one."""
    for line in pipeline_summary.render_summary(self, line_length):
        (print_fn or print)(line)


def set_pipelining_options(
    self: Any,
    gradient_accumulation_steps_per_replica: Optional[int] = None,
    device_mapping: Optional[List[int]] = None,
    accumulate_outfeed: Optional[bool] = None,
    gradient_accumulation_reduction_method: Any = "sum",
    **pipelining_kwargs: Any,
) -> None:
    """Sets how a pipelined model is executed. Options that are None are not changed."""
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
    pipeline_layout.check_options(**pipelining_kwargs)
    sharding = {name: pipelining_kwargs.get(name) for name in _SHARDING}
    model_strategy.refuse_tensor_sharding(self.distribute_strategy, **sharding)

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
    pipeline_state_of(self).options_set = True


def prepare(model: Any, inputs: Any) -> None:
    """Finds the stages of a `Model` subclass that has not been built, from the specs of its inputs."""
    if is_on_ipu(model) and is_subclass(model) and _may_be_pipelined(model):
        trace_calls(model, inputs)


def is_pipelined(model: Any) -> bool:
    """Whether a layer belongs to a stage."""
    return any(stage is not None for stage in _known_stages(model))


def stage_count(model: Any) -> int:
    """Returns the number of stages; 0 for a model that is not pipelined."""
    return len({stage for stage in _known_stages(model) if stage is not None})


def ipus_per_replica(model: Any) -> int:
    """Returns the IPUs that one copy of the model occupies."""
    if not is_pipelined(model):
        return 1
    return pipeline_layout.ipus_for(_devices(model))


def check_before_run(model: Any, training: bool, steps_per_execution: Optional[int] = None, inputs: Any = None) -> None:
    """Raises what the SDK raises for a pipelined model that cannot be run; other models are accepted.

    `inputs` are for `prepare`; without them a subclass that has not been built is accepted. The number of iterations is
    checked if `steps_per_execution` is given: the SDK checks it last, when it compiles.
    """
    if inputs is not None:
        prepare(model, inputs)
    if not is_pipelined(model) and not (is_on_ipu(model) and is_stale(model)):
        return
    if is_subclass(model) and trace_calls(model) is None:
        return
    if is_stale(model):
        raise PipelineAssignmentError(
            "Layers were added or removed after the pipeline stages were assigned: assign or reset them again."
        )
    if not is_subclass(model) and type(model).call not in (SEQUENTIAL.call, FUNCTIONAL.call):
        raise RuntimeError(f"{type(model).__name__} overrides call, which a pipelined model cannot do.")
    entries = current_assignments(model)
    used = stages_in(entries)
    if None in used:
        raise PipelineAssignmentError(
            f"{used.count(None)} of {len(used)} layers are not assigned to a pipeline stage: "
            "all layers of a pipelined model must be."
        )
    missing = _missing_stages(entries)
    if missing:
        raise RuntimeError(f"The pipeline stages {sorted(set(used))} are not contiguous: {missing} have no layers.")
    _check_flow(model, entries)
    _check_options(model, training)
    if steps_per_execution is not None:
        options = pipelining_of(model)
        iterations = options.accumulation if training else steps_per_execution
        assert iterations is not None
        pipeline_layout.check_iterations(iterations, len(set(used)), options.schedule, training)


def _check_options(model: Any, training: bool) -> None:
    options, count = pipelining_of(model), stage_count(model)
    lists = [options.others.get(f"{way}_propagation_stages_poplar_options") for way in ("forward", "backward")]
    if training and count > 1 and options.accumulation is None:
        raise ValueError(
            "A pipelined model cannot be trained before set_pipelining_options has set "
            "gradient_accumulation_steps_per_replica."
        )
    pipeline_layout.check_layout(
        count, _devices(model), options.schedule, training, *lists,
        weight_update=options.others.get("weight_update_poplar_options"),
    )  # fmt: skip
    state = pipeline_state_of(model)
    if training and not state.warned and any(isinstance(layer, _BATCH_NORM) for layer in _inner_layers(model)):
        state.warned = True
        logging.getLogger("tensorflow").warning(
            "The moving statistics of batch normalisation are not updated properly when a model is pipelined."
        )


def _known_stages(model: Any) -> List[Any]:
    """Returns the stages in order. For a subclass that has not been built, those in which its layers were made."""
    if not is_on_ipu(model):
        return []
    state = pipeline_state_of(model)
    if is_subclass(model) and state.assignment is None:
        if state.trace is None and not _may_be_pipelined(model):
            return []
        if trace_calls(model) is None:
            return [stages.stage_of(layer) for layer in _inner_layers(model)]
    return stages_in(current_assignments(model))


def _devices(model: Any) -> List[int]:
    mapping = pipelining_of(model).device_mapping
    return list(range(stage_count(model))) if mapping is None else mapping


def _may_be_pipelined(model: Any) -> bool:
    """Whether a subclass may have stages, so that it must be traced to find them."""
    if pipeline_state_of(model).options_set or _has_staged_layers(model):
        return True
    classes = type(model).__mro__[: type(model).__mro__.index(tf.keras.Model)]
    functions = [value for kind in classes for value in vars(kind).values() if hasattr(value, "__code__")]
    return any("PipelineStage" in function.__code__.co_names for function in functions)


def _has_staged_layers(model: Any) -> bool:
    return any(stages.stage_of(layer) is not None for layer in _inner_layers(model))


def _inner_layers(model: Any) -> Iterator[Any]:
    layers: Iterator[Any] = model._flatten_layers(include_self=False)
    return layers


def _missing_stages(entries: Sequence[Any]) -> List[int]:
    used = set(stages_in(entries))
    return sorted(set(range(max(used, default=0) + 1)) - used)


def _check_flow(model: Any, entries: Sequence[Any]) -> None:
    """Raises ValueError if a call needs data of a later stage."""
    _follow_data(model, entries, [_NO_STAGE])


def _follow_data(model: Any, entries: Sequence[Any], given: List[int]) -> List[int]:
    """Returns the stages that a model's outputs come from, given those that its inputs come from."""
    if isinstance(model, SEQUENTIAL):
        for entry in entries:
            given = [max(_stages_after(entry, given))]
        return given
    if is_subclass(model):
        trace = trace_calls(model)
        assert trace is not None
        return _follow_calls(trace.calls, entries, given)
    inputs = tf.nest.flatten(model.inputs)
    at = dict(zip(map(id, inputs), _spread(given, len(inputs))))
    for node, entry in zip(stages.nodes_of(model), entries):
        outputs = tf.nest.flatten(node.outputs)
        passed = _stages_after(entry, [at.get(id(tensor), _NO_STAGE) for tensor in node.keras_inputs])
        at.update(zip(map(id, outputs), _spread(passed, len(outputs))))
    return [at.get(id(tensor), _NO_STAGE) for tensor in tf.nest.flatten(model.outputs)]


def _follow_calls(calls: Sequence[stages.Call], entries: Sequence[Any], given: List[int]) -> List[int]:
    at: Dict[int, int] = {}
    for call, entry in zip(calls, entries):
        arrived = [at[id(source)] for source in call.sources] or given
        if isinstance(entry, NestedAssignment) and is_subclass(call.layer):
            passed = _follow_calls(call.calls, entry.pipeline_stage_assignments, arrived)
        else:
            passed = _stages_after(entry, arrived)
        at[id(call)] = max(passed)
    return [max(at.values(), default=_NO_STAGE)]


def _stages_after(entry: Any, arrived: List[int]) -> List[int]:
    if isinstance(entry, NestedAssignment):
        return _follow_data(entry.nested_model, entry.pipeline_stage_assignments, arrived or [_NO_STAGE])
    latest = max(arrived, default=_NO_STAGE)
    if entry.pipeline_stage < latest:
        raise ValueError(
            f"{title_of(entry)} in the pipeline stage {entry.pipeline_stage} needs data of the later stage {latest}."
        )
    return [entry.pipeline_stage]


def _spread(arrived: List[int], count: int) -> List[int]:
    return arrived if len(arrived) == count else [max(arrived, default=_NO_STAGE)] * count
