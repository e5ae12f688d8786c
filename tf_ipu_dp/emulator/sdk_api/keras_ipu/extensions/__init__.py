"""`keras.ipu.extensions`: the names of `keras.ipu`, and classes that a model on an IPU counts as an instance of."""

from tf_ipu_dp.emulator.sdk_api.keras_ipu import (
    FunctionalLayerPipelineStageAssignment,
    FunctionalNestedModelPipelineStageAssignment,
    ModelLayerPipelineStageAssignment,
    NestedModelPipelineStageAssignment,
    PipelineStage,
    ReplicatedMetricReductionMethod,
    SequentialLayerPipelineStageAssignment,
    SequentialNestedModelPipelineStageAssignment,
)
from tf_ipu_dp.emulator.sdk_api.keras_ipu.extensions import data_adapter, extensions_base, pipeline_stage_assignment
from tf_ipu_dp.emulator.sdk_api.keras_ipu.extensions.functional_extensions import FunctionalExtension
from tf_ipu_dp.emulator.sdk_api.keras_ipu.extensions.model_extensions import ModelExtension
from tf_ipu_dp.emulator.sdk_api.keras_ipu.extensions.sequential_extensions import SequentialExtension

__all__ = [
    "FunctionalExtension",
    "FunctionalLayerPipelineStageAssignment",
    "FunctionalNestedModelPipelineStageAssignment",
    "ModelExtension",
    "ModelLayerPipelineStageAssignment",
    "NestedModelPipelineStageAssignment",
    "PipelineStage",
    "ReplicatedMetricReductionMethod",
    "SequentialExtension",
    "SequentialLayerPipelineStageAssignment",
    "SequentialNestedModelPipelineStageAssignment",
    "data_adapter",
    "extensions_base",
    "pipeline_stage_assignment",
]
