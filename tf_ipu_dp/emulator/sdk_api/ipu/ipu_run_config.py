"""`tensorflow.python.ipu.ipu_run_config`: the configuration of Estimators, refused."""

from __future__ import annotations

from tf_ipu_dp.emulator.refusal import refused

_WHY = "TensorFlow's Estimators are deprecated, and the emulator runs Keras models and functions only"

IPURunConfig = refused("ipu.ipu_run_config.IPURunConfig", _WHY)
RunConfig = refused("ipu.ipu_run_config.RunConfig", _WHY)

__all__ = [
    "IPURunConfig",
    "RunConfig",
]
