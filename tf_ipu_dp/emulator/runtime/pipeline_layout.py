"""Schedules and device mappings of pipelines, and the SDK's rules for them. They do not affect results."""

from __future__ import annotations

import enum
from typing import Any, Dict, List, Optional, Sequence, Union

import tensorflow as tf

from tf_ipu_dp.emulator.devices import device_scopes
from tf_ipu_dp.emulator.runtime import poplar_options, replicas
from tf_ipu_dp.emulator.sdk_api.ipu import config as ipu_config
from tf_ipu_dp.emulator.sdk_api.ipu.gradient_accumulation import GradientAccumulationReductionMethod as Method


class PipelineSchedule(enum.IntEnum):
    """The order in which the stages of several micro batches would be executed."""

    Grouped = 0
    Interleaved = 1
    Sequential = 2


class RecomputationMode(enum.Enum):
    """When activations would be computed again for the backward pass."""

    Auto = 1
    RecomputeThenBackpropagate = 2
    RecomputeAndBackpropagateInterleaved = 3


class PipelineStageOptions:
    """Poplar's options for the convolutions, matrix multiplications and slices of one stage."""

    def __init__(
        self,
        convolution_options: Optional[Dict[str, str]] = None,
        matmul_options: Optional[Dict[str, str]] = None,
        slice_options: Optional[Dict[str, str]] = None,
    ) -> None:
        self.convolution_options = _poplar_options("convolution_options", convolution_options)
        self.matmul_options = _poplar_options("matmul_options", matmul_options)
        self.slice_options = _poplar_options("slice_options", slice_options)


def check_options(**options: Any) -> None:
    """Raises TypeError for an option of a wrong type. Keras models have the same options."""
    for name, value in options.items():
        if value is None:
            continue
        if name in ("pipeline_schedule", "recomputation_mode", "weight_update_poplar_options"):
            kind = {"pipeline_schedule": PipelineSchedule, "recomputation_mode": RecomputationMode}.get(
                name, PipelineStageOptions
            )
            if not isinstance(value, kind):
                raise TypeError(f"{name} must be a {kind.__name__}, not {value!r}.")
        elif name.endswith("_stages_poplar_options"):
            if not isinstance(value, list) or not all(isinstance(one, PipelineStageOptions) for one in value):
                raise TypeError(f"{name} must be a list of PipelineStageOptions.")
        elif name in ("gradient_accumulation_dtype", "accumulate_outfeed_dtype"):
            if not callable(value):
                tf.as_dtype(value)
        elif name == "name":
            if not isinstance(value, str):
                raise TypeError(f"name must be a str, not {value!r}.")
        elif not isinstance(value, bool):
            raise TypeError(f"{name} must be a bool, not {value!r}.")
        elif name == "continuous_weight_updates" and value:
            raise NotImplementedError("continuous_weight_updates is not supported.")


def check_layout(
    stages: int,
    devices: Sequence[Any],
    schedule: PipelineSchedule,
    training: bool,
    *stage_options: Optional[Sequence[Any]],
    weight_update: Optional[PipelineStageOptions] = None,
) -> None:
    """Raises for too few stages, for lists of a wrong length, and for an unsupported device mapping."""
    if stages < 2:
        raise ValueError(f"Pipeline requires at least two computational stages. There is {stages}.")
    if len(devices) != stages:
        raise ValueError(f"device_mapping has {len(devices)} entries for {stages} stages.")
    for options in stage_options:
        if options is not None and len(options) != stages:
            raise ValueError(f"There are Poplar options for {len(options)} stages, but {stages} stages.")
        for stage, own in enumerate(options or ()):
            for name, value in vars(own).items():
                poplar_options.check(f"{name} of stage {stage}", value)
    for name, value in vars(weight_update).items() if weight_update is not None else ():
        poplar_options.check(f"{name} of the weight update", value)
    used = flat(devices)
    if training and schedule == PipelineSchedule.Interleaved and len(set(used)) != len(used):
        raise NotImplementedError("Training with the Interleaved schedule needs a separate device for every stage.")


def check_iterations(iterations: int, stages: int, schedule: PipelineSchedule, training: bool) -> None:
    """Raises FailedPreconditionError, as the SDK's compiler does, for a number that does not fill the schedule."""
    multiple = 1
    if schedule == PipelineSchedule.Grouped:
        multiple = 2 * stages if training else stages
    elif schedule == PipelineSchedule.Interleaved:
        multiple = stages
    tiles = ipu_config.configured_system().config.io_tiles
    if schedule == PipelineSchedule.Grouped and tiles.num_io_tiles and tiles.place_ops_on_io_tiles:
        if iterations < multiple + 2:
            raise tf.errors.FailedPreconditionError(
                None,
                None,
                f"The number of iterations of the pipeline must be at least {multiple + 2} with I/O tiles, "
                f"but it is {iterations}.",
            )
    elif iterations < multiple or iterations % multiple:
        raise tf.errors.FailedPreconditionError(
            None,
            None,
            f"The number of iterations of the pipeline must be a multiple of {multiple} for {stages} stages and the "
            f"schedule {schedule.name}, but it is {iterations}.",
        )


def ipus_for(devices: Sequence[Any]) -> int:
    """Returns the IPUs that one replica occupies: the power of two that holds its devices."""
    return 1 << max(flat(devices), default=0).bit_length()


def replicas_for(ipus: int, needed: int) -> int:
    """Returns how many replicas of `needed` IPUs each a device of `ipus` holds."""
    if ipus % needed:
        raise tf.errors.InternalError(
            None, None, f"One replica needs {needed} IPUs, and the device's {ipus} IPUs are not a multiple of that."
        )
    return ipus // needed


def check_replicas_fit(devices: Sequence[Any]) -> None:
    """Raises if the program is traced for another number of replicas than the device holds.

    A pipeline takes several IPUs, so there are fewer replicas than IPUs.
    """
    needed = ipus_for(devices)
    program = replicas.current()
    if program is not None:
        program.ipus_per_replica = max(program.ipus_per_replica, needed)
        if program.in_session:
            return
    allowed = replicas_for(_ipus_of_device(), needed)
    if program is not None and program.replicas != allowed:
        _trace_again(program, allowed, needed)


def check_shards_fit(indices: Sequence[int]) -> None:
    """Raises if a shard does not fit into the IPUs that a replica of the program has.

    A Keras model is divided into pipeline stages and not into shards, so for its replicas shards have no effect.
    """
    program = replicas.current()
    needed = ipus_for(indices)
    if program is None or needed <= program.ipus_per_replica:
        return
    program.ipus_per_replica = needed
    if program.in_session or (program.replicas > 1 and not program.concurrent):
        return
    allowed = replicas_for(_ipus_of_device(), needed)
    if program.replicas > allowed:
        _trace_again(program, allowed, needed)


def _ipus_of_device() -> int:
    strategy = tf.distribute.get_strategy()
    return strategy.ipus() if hasattr(strategy, "ipus") else ipu_config.ipus_of_device(device_scopes.current_ordinal())


def _trace_again(program: replicas.Program, allowed: int, needed: int) -> None:
    # For the code that traces the program: autograph does not pass on exceptions of our own class.
    program.fitting_replicas = allowed
    raise RuntimeError(
        f"The program was traced for {program.replicas} replicas, but the device holds {allowed} of {needed} IPUs."
    )


def check_serialization(iterations: int, schedule: PipelineSchedule, devices: Sequence[Any], method: Method) -> None:
    """Raises for batch serialisation, which the SDK restricts and the emulator does not have."""
    if iterations == 1:
        return
    if method is Method.MEAN:
        raise ValueError("batch_serialization_iterations cannot be used with the reduction method MEAN.")
    if schedule != PipelineSchedule.Sequential or len(set(flat(devices))) > 1:
        raise NotImplementedError(
            "batch_serialization_iterations is supported with the Sequential schedule on one IPU only."
        )
    raise NotImplementedError("The emulator has no batch serialisation: use micro batches of that size instead.")


def _poplar_options(name: str, options: Optional[Dict[str, str]]) -> Dict[str, str]:
    if options is None:
        return {}
    if not isinstance(options, dict):
        raise TypeError(f"{name} must be a dict, not {type(options).__name__}.")
    for key, value in options.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(f"{name}: {key!r}: {value!r}, but names and values must be str.")
    return options


def flat(nested: Sequence[Union[Any, Sequence[Any]]]) -> List[Any]:
    """Returns the entries, with nested lists flattened."""
    return [one for entry in nested for one in (entry if isinstance(entry, (list, tuple)) else [entry])]
