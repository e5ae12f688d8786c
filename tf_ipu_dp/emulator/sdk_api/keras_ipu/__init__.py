"""`keras.ipu`: stages of pipelined models, and how metrics of replicas are reduced."""

from __future__ import annotations

import importlib
from typing import Any

from tf_ipu_dp.emulator.keras.model_options import ReplicatedMetricReductionMethod
from tf_ipu_dp.emulator.keras.stage_assignments import (
    FunctionalLayerPipelineStageAssignment,
    FunctionalNestedModelPipelineStageAssignment,
    ModelLayerPipelineStageAssignment,
    NestedModelPipelineStageAssignment,
    SequentialLayerPipelineStageAssignment,
    SequentialNestedModelPipelineStageAssignment,
)
from tf_ipu_dp.emulator.keras.stages import PipelineStage

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


def __getattr__(name: str) -> Any:
    if name in ("extensions", "layers", "optimizers"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module 'keras.ipu' has no attribute {name!r}")
