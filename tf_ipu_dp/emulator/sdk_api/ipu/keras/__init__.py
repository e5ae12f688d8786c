"""`tensorflow.python.ipu.keras` of releases up to 3.0: what is now in `ipu_tensorflow_addons` and `keras.ipu`."""

from __future__ import annotations

from tf_ipu_dp.emulator.sdk_api.ipu.keras import layers, optimizers
from tf_ipu_dp.emulator.sdk_api.keras_ipu import PipelineStage, extensions

__all__ = ["PipelineStage", "extensions", "layers", "optimizers"]
