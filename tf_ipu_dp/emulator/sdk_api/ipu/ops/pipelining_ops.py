"""`tensorflow.python.ipu.ops.pipelining_ops`: pipelines of functions, and the types that describe any pipeline.

A pipeline's weights do not change while micro batches are in flight, so its results are those of the stages run one
after the other. The emulator runs them so: one loop of the graph, one micro batch per iteration, one update per count.
Schedules, device mappings, recomputation and offloading are checked as in the SDK and do not affect results. Batch
serialisation is refused.
"""

from __future__ import annotations

import contextlib
import inspect
import numbers
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import tensorflow as tf

from tf_ipu_dp.emulator.runtime import batch_norm
from tf_ipu_dp.emulator.runtime.gradient_capture import GradientCaptureContext
from tf_ipu_dp.emulator.runtime.pipeline_accumulation import SUMMABLE, GradientAccumulation, OutfeedSums, empty_vectors
from tf_ipu_dp.emulator.runtime.pipeline_layout import (
    PipelineSchedule,
    PipelineStageOptions,
    RecomputationMode,
    check_iterations,
    check_layout,
    check_options,
    check_replicas_fit,
    check_serialization,
    flat,
)
from tf_ipu_dp.emulator.sdk_api.ipu.gradient_accumulation import GradientAccumulationReductionMethod as Method

__all__ = [
    "OptimizerFunctionOutput",
    "PipelineSchedule",
    "PipelineStageOptions",
    "RecomputationMode",
    "pipeline",
    "recomputation_checkpoint",
]


class OptimizerFunctionOutput:
    """What an optimizer function returns: the loss, and how its gradients are computed and applied.

    Captured gradients come from `gradient_capture_context` or from a `tape` that captures. An optimizer that takes
    `captured_grads` gets them with each update, and so does `captured_gradient_outfeed`.
    """

    def __init__(  # noqa: PLR0913, PLR0917 the SDK's signature
        self,
        opt: Any,
        loss: Any,
        compute_gradients_args: Optional[Tuple[Any, ...]] = None,
        compute_gradients_kwargs: Optional[Dict[str, Any]] = None,
        apply_gradients_args: Optional[Tuple[Any, ...]] = None,
        apply_gradients_kwargs: Optional[Dict[str, Any]] = None,
        variables: Optional[Sequence[Any]] = None,
        tape: Any = None,
        gradient_capture_context: Any = None,
        captured_gradient_outfeed: Any = None,
    ) -> None:
        if not isinstance(opt, (tf.compat.v1.train.Optimizer, *_keras_optimizers())):
            raise TypeError(f"opt must be an optimizer, not {type(opt).__name__}.")
        if not tf.is_tensor(loss):
            raise TypeError(f"loss must be a tensor, not {type(loss).__name__}.")
        for name, value, kind in (
            ("compute_gradients_args", compute_gradients_args, tuple),
            ("compute_gradients_kwargs", compute_gradients_kwargs, dict),
            ("apply_gradients_args", apply_gradients_args, tuple),
            ("apply_gradients_kwargs", apply_gradients_kwargs, dict),
            ("variables", variables, (list, tuple)),
            ("tape", tape, tf.GradientTape),
            ("gradient_capture_context", gradient_capture_context, GradientCaptureContext),
        ):
            if value is not None and not isinstance(value, kind):
                raise TypeError(f"{name} has the type {type(value).__name__}, which is not supported.")
        if isinstance(opt, tf.compat.v1.train.Optimizer):
            if variables is not None or tape is not None:
                raise ValueError("variables and tape are for Keras optimizers; a TF1 optimizer takes var_list.")
        elif compute_gradients_args is not None or compute_gradients_kwargs is not None:
            raise ValueError("compute_gradients_args and compute_gradients_kwargs are for TF1 optimizers.")
        if variables is not None and tape is not None:
            raise ValueError("Give one of variables and tape, not both.")
        if captured_gradient_outfeed is not None and not hasattr(captured_gradient_outfeed, "enqueue"):
            raise TypeError(f"captured_gradient_outfeed is {captured_gradient_outfeed!r}, not an outfeed queue.")
        self.opt, self.loss, self.variables, self.tape = opt, loss, variables, tape
        self.compute_gradients_args = compute_gradients_args or ()
        self.compute_gradients_kwargs = compute_gradients_kwargs or {}
        self.apply_gradients_args = apply_gradients_args or ()
        self.apply_gradients_kwargs = apply_gradients_kwargs or {}
        self.gradient_capture_context = gradient_capture_context
        self.captured_gradient_outfeed = captured_gradient_outfeed


def recomputation_checkpoint(tensors: Any, name: Optional[str] = None) -> Any:
    """Returns the tensors: nothing is recomputed here."""
    with tf.name_scope(name or "recomputation_checkpoint"):
        return tf.nest.map_structure(tf.identity, tensors)


@tf.autograph.experimental.do_not_convert
def pipeline(  # noqa: PLR0913, PLR0915, PLR0917 the SDK's signature, and one rule after the other
    computational_stages: Sequence[Any],
    gradient_accumulation_count: Any = None,
    gradient_accumulation_dtype: Any = None,
    gradient_accumulation_for_captured_grads: bool = True,
    repeat_count: int = 1,
    batch_serialization_iterations: int = 1,
    inputs: Any = None,
    infeed_queue: Any = None,
    outfeed_queue: Any = None,
    optimizer_function: Optional[Callable[..., OptimizerFunctionOutput]] = None,
    device_mapping: Optional[List[Any]] = None,
    pipeline_schedule: Optional[PipelineSchedule] = None,
    recomputation_mode: Optional[RecomputationMode] = None,
    forward_propagation_stages_poplar_options: Optional[List[PipelineStageOptions]] = None,
    backward_propagation_stages_poplar_options: Optional[List[PipelineStageOptions]] = None,
    weight_update_poplar_options: Optional[PipelineStageOptions] = None,
    offload_weight_update_variables: Optional[bool] = None,
    replicated_optimizer_state_sharding: bool = False,
    offload_activations: Optional[bool] = None,
    offload_gradient_accumulation_buffers: Optional[bool] = None,
    replicated_weight_sharding: Optional[bool] = None,
    offload_weights: Optional[bool] = None,
    continuous_weight_updates: bool = False,
    outfeed_loss: bool = False,
    accumulate_outfeed: bool = False,
    accumulate_outfeed_dtype: Any = None,
    outfeed_mask: Optional[List[bool]] = None,
    reduction_method: Any = Method.SUM,
    name: Optional[str] = None,
) -> Any:
    """Runs `repeat_count` times: `gradient_accumulation_count` micro batches through all stages, then one update.

    Returns the operation that does it. Captured gradients are accumulated like those of variables; without
    `gradient_accumulation_for_captured_grads` they are those of the last micro batch.
    """
    training = optimizer_function is not None
    stages = _stage_functions(computational_stages)
    count = _count(gradient_accumulation_count)
    schedule = PipelineSchedule.Grouped if pipeline_schedule is None else pipeline_schedule
    method = Method.parse(reduction_method)
    check_options(
        pipeline_schedule=pipeline_schedule,
        recomputation_mode=recomputation_mode,
        forward_propagation_stages_poplar_options=forward_propagation_stages_poplar_options,
        backward_propagation_stages_poplar_options=backward_propagation_stages_poplar_options,
        weight_update_poplar_options=weight_update_poplar_options,
        offload_weight_update_variables=offload_weight_update_variables,
        replicated_optimizer_state_sharding=replicated_optimizer_state_sharding,
        offload_activations=offload_activations,
        offload_gradient_accumulation_buffers=offload_gradient_accumulation_buffers,
        replicated_weight_sharding=replicated_weight_sharding,
        offload_weights=offload_weights,
        continuous_weight_updates=continuous_weight_updates,
    )
    if not isinstance(repeat_count, numbers.Integral) or isinstance(repeat_count, bool):
        raise TypeError(f"repeat_count must be an int, not {repeat_count!r}.")
    for queue, method_name in ((infeed_queue, "_dequeue"), (outfeed_queue, "enqueue")):
        if queue is not None and not hasattr(queue, method_name):
            raise TypeError(f"{queue!r} is not a queue of the right kind.")
    if (outfeed_mask is not None or outfeed_loss) and not training:
        raise ValueError("outfeed_mask and outfeed_loss need an optimizer_function.")
    if outfeed_mask is not None and outfeed_loss:
        raise ValueError("Only one of outfeed_mask and outfeed_loss can be given.")
    if accumulate_outfeed and getattr(getattr(outfeed_queue, "_mode", None), "name", None) != "ALL":
        raise ValueError("accumulate_outfeed needs an outfeed_queue of the mode IPUOutfeedMode.ALL.")
    batch_norm.refuse_pipeline()
    devices = _devices(stages, device_mapping)
    check_layout(
        len(stages), devices, schedule, training,
        forward_propagation_stages_poplar_options, backward_propagation_stages_poplar_options,
        weight_update=weight_update_poplar_options,
    )  # fmt: skip
    check_serialization(batch_serialization_iterations, schedule, devices, method)
    check_iterations(count, len(stages), schedule, training)
    check_replicas_fit(devices)
    if tf.executing_eagerly():
        raise RuntimeError("A pipeline is part of a program: call it in the tf.function that strategy.run() gets.")

    given = [tf.convert_to_tensor(value) for value in _as_list(inputs)]
    accumulation = GradientAccumulation(count, method, gradient_accumulation_dtype)
    sums = OutfeedSums(count, accumulate_outfeed_dtype) if accumulate_outfeed else None

    def micro_batch(number: Any, accumulated: List[Any], summed: List[Any]) -> Any:
        position = tf.math.floormod(number, count)
        element = () if infeed_queue is None else infeed_queue._dequeue()
        with _refuse_captures_except(given):
            outputs = _run_stages(stages, given, element)
        effects = []
        loss = None
        if optimizer_function is not None:
            result = _call(optimizer_function, outputs)
            if not isinstance(result, OptimizerFunctionOutput):
                raise TypeError(f"optimizer_function returned {result!r}, not an OptimizerFunctionOutput.")
            loss = result.loss
            pairs, captured = _gradients(result)
            flat_captured = tf.nest.flatten(captured)

            def apply(pairs: List[Any], accumulated: List[Any]) -> Any:
                leaves = accumulated if gradient_accumulation_for_captured_grads else flat_captured
                return _apply_gradients(result, pairs, tf.nest.pack_sequence_as(captured, leaves))

            to_accumulate = flat_captured if gradient_accumulation_for_captured_grads else []
            accumulated, updated = accumulation.add(accumulated, position, pairs, to_accumulate, apply)
            effects.append(updated)
        feed = _to_outfeed(outputs, loss, outfeed_loss, outfeed_mask, training)
        if feed is not None:
            if outfeed_queue is None:
                raise ValueError("The last stage has outputs, but there is no outfeed_queue for them.")
            if sums is None:
                effects.append(outfeed_queue.enqueue(feed))
            else:
                summed, enqueued = sums.add(summed, position, feed, outfeed_queue.enqueue)
                effects.append(enqueued)
        with tf.control_dependencies([effect for effect in effects if effect is not None]):
            return number + 1, accumulated, summed

    vectors = [tf.TensorShape([None])] * len(SUMMABLE)
    with tf.name_scope(name or "pipeline"):
        finished = tf.while_loop(
            lambda number, *_: tf.less(number, int(repeat_count) * count),
            micro_batch,
            (tf.constant(0), empty_vectors(), empty_vectors()),
            shape_invariants=(tf.TensorShape([]), vectors, list(vectors)),
            parallel_iterations=1,
        )
        return tf.group(finished[0])


def _gradients(output: OptimizerFunctionOutput) -> Tuple[List[Tuple[Any, Any]], Dict[str, Any]]:
    """Returns pairs of gradient and variable, and the captured gradients by tag."""
    context = output.gradient_capture_context
    with contextlib.nullcontext() if context is None else context:
        pairs = _compute_gradients(output)
    captured = {} if context is None else context.captured_gradients
    return pairs, {**captured, **getattr(output.tape, "captured_gradients", {})}


def _compute_gradients(output: OptimizerFunctionOutput) -> List[Tuple[Any, Any]]:
    if isinstance(output.opt, tf.compat.v1.train.Optimizer):
        return list(
            output.opt.compute_gradients(output.loss, *output.compute_gradients_args, **output.compute_gradients_kwargs)
        )
    if output.tape is not None:
        variables = output.tape.watched_variables()
        return list(zip(output.tape.gradient(output.loss, variables), variables))
    if output.variables is None:
        raise RuntimeError("A Keras optimizer needs `variables` or `tape` in OptimizerFunctionOutput.")
    compute = getattr(output.opt, "get_gradients", tf.gradients)
    return list(zip(compute(output.loss, list(output.variables)), output.variables))


def _apply_gradients(output: OptimizerFunctionOutput, pairs: List[Any], captured: Dict[str, Any]) -> Any:
    takes_captured = "captured_grads" in inspect.signature(output.opt.apply_gradients).parameters
    kwargs = {"captured_grads": captured} if captured and takes_captured else {}
    applied = output.opt.apply_gradients(
        pairs, *output.apply_gradients_args, **{**kwargs, **output.apply_gradients_kwargs}
    )
    if output.captured_gradient_outfeed is None:
        return applied
    if not captured:
        raise ValueError(
            "captured_gradient_outfeed has nothing to send: no gradients were captured by gradient_capture_context "
            "or by a GradientCaptureTape."
        )
    enqueued = output.captured_gradient_outfeed.enqueue(captured)
    return tf.group(*(one for one in (applied, enqueued) if one is not None))


def _keras_optimizers() -> Tuple[type, ...]:
    """Keras' base classes of optimizers: the two of tf.keras, and the one inside TensorFlow."""
    from tensorflow.python.keras.optimizer_v2 import optimizer_v2

    legacy = getattr(tf.keras.optimizers, "legacy", tf.keras.optimizers)
    return (tf.keras.optimizers.Optimizer, legacy.Optimizer, optimizer_v2.OptimizerV2)


def _stage_functions(stages: Any) -> List[Any]:
    if not isinstance(stages, (list, tuple)):
        raise TypeError(f"computational_stages must be a list of functions, not {type(stages).__name__}.")
    for stage in flat(stages):
        if not callable(stage):
            raise TypeError(f"{stage!r} is not a function, so it cannot be a stage.")
    return list(stages)


def _count(given: Any) -> int:
    if given is None:
        raise ValueError("gradient_accumulation_count must be given.")
    count = tf.get_static_value(given) if tf.is_tensor(given) else given
    if count is None or isinstance(count, bool) or not isinstance(count, numbers.Integral):
        raise TypeError(f"gradient_accumulation_count must be an int, or a constant, not {given!r}.")
    if count < 1:
        raise ValueError(f"gradient_accumulation_count must be 1 or more, not {count}.")
    return int(count)


def _devices(stages: List[Any], mapping: Any) -> List[Any]:
    """Returns the device of each stage; parallel stages have a list of them."""
    if mapping is None:
        free: Iterator[Any] = iter(range(len(flat(stages))))
        return [[next(free) for _ in stage] if isinstance(stage, (list, tuple)) else next(free) for stage in stages]
    if not isinstance(mapping, (list, tuple)):
        raise TypeError(f"device_mapping must be a list of int, not {mapping!r}.")
    for device in flat(mapping):
        if isinstance(device, bool) or not isinstance(device, numbers.Integral):
            raise TypeError(f"device_mapping has an entry {device!r}, which is not an int.")
        if device < 0:
            raise ValueError(f"device_mapping has an entry {device}, which is less than 0.")
    return list(mapping)


def _run_stages(stages: List[Any], given: List[Any], element: Any) -> Any:
    """Returns what the last stage returns. The inputs and the data's element go to the first."""
    if isinstance(element, dict) and all(isinstance(key, str) for key in element):
        outputs = _run_stage(stages[0], given, element)
    else:
        outputs = _run_stage(stages[0], [*given, *_as_list(element)], {})
    for stage in stages[1:]:
        args, kwargs = ([], outputs) if isinstance(outputs, dict) else (_as_list(outputs), {})
        outputs = _run_stage(stage, args, kwargs)
    return outputs


def _run_stage(stage: Any, args: List[Any], kwargs: Dict[str, Any]) -> Any:
    if isinstance(stage, (list, tuple)):
        return [output for function in stage for output in _as_list(_tensors(function(*args, **kwargs)))]
    return _tensors(stage(*args, **kwargs))


def _tensors(outputs: Any) -> Any:
    if outputs is None:
        return []
    return tf.nest.map_structure(
        lambda value: value if isinstance(value, tf.Operation) else tf.convert_to_tensor(value), outputs
    )


def _call(function: Callable[..., Any], outputs: Any) -> Any:
    return function(**outputs) if isinstance(outputs, dict) else function(*_as_list(outputs))


def _to_outfeed(outputs: Any, loss: Any, only_loss: bool, mask: Optional[List[bool]], training: bool) -> Any:
    """Returns what is enqueued, in the SDK's structure; None if nothing is."""
    if only_loss:
        return loss
    if not training and (isinstance(outputs, dict) or tf.is_tensor(outputs)):
        return outputs or None if isinstance(outputs, dict) else outputs
    flat = [one for one in tf.nest.flatten(outputs) if not isinstance(one, tf.Operation)]
    if mask is not None:
        if len(mask) != len(flat):
            raise ValueError(f"outfeed_mask has {len(mask)} entries for {len(flat)} outputs of the last stage.")
        flat = [output for output, masked in zip(flat, mask) if not masked]
    return flat or None


@contextlib.contextmanager
def _refuse_captures_except(allowed: Sequence[Any]) -> Iterator[None]:
    """Refuses stages that use a tensor from outside. Variables and other resources are allowed."""
    graph = tf.compat.v1.get_default_graph()
    known = {id(tensor) for tensor in (*allowed, *getattr(graph, "external_captures", ()))}
    yield
    for tensor in getattr(graph, "external_captures", ()):
        if id(tensor) not in known and tensor.dtype not in (tf.resource, tf.variant):
            raise ValueError(
                f"A stage uses {tensor!r}, which is neither its input nor a variable: "
                "pass it in `inputs` or through the infeed_queue."
            )


def _as_list(values: Any) -> List[Any]:
    if values is None:
        return []
    return list(values) if isinstance(values, (list, tuple)) else [values]
