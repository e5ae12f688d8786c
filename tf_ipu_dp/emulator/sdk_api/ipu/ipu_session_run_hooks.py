"""`tensorflow.python.ipu.ipu_session_run_hooks`: hooks of Estimators, refused."""

from __future__ import annotations

from tf_ipu_dp.emulator.refusal import refused

_WHY = "TensorFlow's Estimators are deprecated, and the emulator runs Keras models and functions only"

IPULoggingTensorHook = refused("ipu.ipu_session_run_hooks.IPULoggingTensorHook", _WHY)

__all__ = [
    "IPULoggingTensorHook",
]
