"""`tensorflow.python.ipu.ipu_pipeline_estimator`: refused."""

from __future__ import annotations

from tf_ipu_dp.emulator.refusal import refused

_WHY = "TensorFlow's Estimators are deprecated, and the emulator runs Keras models and functions only"

IPUPipelineEstimator = refused("ipu.ipu_pipeline_estimator.IPUPipelineEstimator", _WHY)
IPUPipelineEstimatorSpec = refused("ipu.ipu_pipeline_estimator.IPUPipelineEstimatorSpec", _WHY)

__all__ = [
    "IPUPipelineEstimator",
    "IPUPipelineEstimatorSpec",
]
