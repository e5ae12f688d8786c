"""The shape of one execution of a Keras model: steps, replicas, accumulation."""

from __future__ import annotations

import dataclasses
from typing import FrozenSet, Optional


@dataclasses.dataclass(frozen=True)
class Shape:
    """S micro batches on each of L local replicas. Everything in it is known before tracing."""

    steps: int
    replicas: int
    accumulation: int = 1
    mean: bool = False  # of the accumulated micro batches, in place of their sum
    metrics: str = "NONE"  # how the replicas' metrics are reduced
    each_step: bool = False  # whether the host gets the metrics of every step
    configuration: int = 0  # the number of the device's configuration
    generation: int = 0  # of the random numbers
    members: Optional[FrozenSet[int]] = None  # the instances that collectives are confined to
