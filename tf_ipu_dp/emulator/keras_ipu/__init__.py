"""`keras.ipu`: stages of pipelined models, and how metrics of replicas are reduced."""

from __future__ import annotations

import enum

from tf_ipu_dp.emulator.layer_calls import (
    FunctionalLayerPipelineStageAssignment,
    FunctionalNestedModelPipelineStageAssignment,
    ModelLayerPipelineStageAssignment,
    NestedModelPipelineStageAssignment,
    PipelineStage,
    SequentialLayerPipelineStageAssignment,
    SequentialNestedModelPipelineStageAssignment,
)

__all__ = [
    "FunctionalLayerPipelineStageAssignment",
    "FunctionalNestedModelPipelineStageAssignment",
    "ModelLayerPipelineStageAssignment",
    "NestedModelPipelineStageAssignment",
    "PipelineStage",
    "ReplicatedMetricReductionMethod",
    "SequentialLayerPipelineStageAssignment",
    "SequentialNestedModelPipelineStageAssignment",
    "__ipu__built__",
]

__ipu__built__ = "1"


class ReplicatedMetricReductionMethod(enum.Enum):
    """What the logs of a replicated model hold: the last replica's values, all of them, their sum or their mean."""

    NONE = "NONE"
    LIST = "LIST"
    SUM = "SUM"
    MEAN = "MEAN"
