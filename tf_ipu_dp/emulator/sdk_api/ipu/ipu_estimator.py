"""`tensorflow.python.ipu.ipu_estimator`: refused."""

from __future__ import annotations

from tf_ipu_dp.emulator.refusal import refused

_WHY = "TensorFlow's Estimators are deprecated, and the emulator runs Keras models and functions only"

IPUEstimator = refused("ipu.ipu_estimator.IPUEstimator", _WHY)
IPUEstimatorSpec = refused("ipu.ipu_estimator.IPUEstimatorSpec", _WHY)

__all__ = [
    "IPUEstimator",
    "IPUEstimatorSpec",
]
