"""An emulation of `ipu_tensorflow_addons`: its Keras layers and optimizers and its TF1 layers on stock TensorFlow."""

from __future__ import annotations

from tf_ipu_dp.emulator.sdk_api.addons import keras, v1

__all__ = ["keras", "v1"]
