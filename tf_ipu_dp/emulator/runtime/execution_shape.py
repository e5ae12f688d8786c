"""The shape of one execution of a Keras model: steps, replicas, accumulation."""

from __future__ import annotations

import dataclasses
from typing import Any, FrozenSet, Optional

from tf_ipu_dp.emulator.sdk_api.ipu.gradient_accumulation import GradientAccumulationReductionMethod as Method


@dataclasses.dataclass(frozen=True)
class Shape:
    """S micro batches on each of L local replicas. Everything in it is known before tracing."""

    steps: int
    replicas: int
    accumulation: int = 1
    method: Method = Method.SUM  # how the gradients of accumulated micro batches are reduced
    accumulator_dtype: Any = None  # None for the variable's, a type, or a function of the variable
    metrics: str = "NONE"  # how the replicas' metrics are reduced
    each_step: bool = False  # whether the host gets the metrics of every step
    configuration: int = 0  # the number of the device's configuration
    generation: int = 0  # of the random numbers
    members: Optional[FrozenSet[int]] = None  # the instances that collectives are confined to
