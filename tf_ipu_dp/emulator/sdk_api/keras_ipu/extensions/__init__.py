"""`keras.ipu.extensions`: the names of `keras.ipu`, and classes that a model on an IPU counts as an instance of."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_ipu_dp.emulator.keras import model_options
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
]


class _Extension(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, tf.keras.Model) and model_options.is_on_ipu(instance) and cls._extends(instance)

    def _extends(cls, model: Any) -> bool:
        raise NotImplementedError


class ModelExtension(metaclass=_Extension):
    """Any model on an IPU."""

    @classmethod
    def _extends(cls, model: Any) -> bool:
        return True


class SequentialExtension(ModelExtension):
    """A `Sequential` model on an IPU."""

    @classmethod
    def _extends(cls, model: Any) -> bool:
        return isinstance(model, tf.keras.Sequential)


class FunctionalExtension(ModelExtension):
    """A functional model on an IPU."""

    @classmethod
    def _extends(cls, model: Any) -> bool:
        functional = tf.keras.Sequential.__mro__[1]
        return isinstance(model, functional) and not isinstance(model, tf.keras.Sequential)
