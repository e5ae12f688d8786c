"""What importing `tensorflow.python.ipu` changes in Keras and TensorFlow; `patches.PATCHES` lists it."""

from __future__ import annotations

from tf_ipu_dp.emulator.devices import device_lists, device_scopes
from tf_ipu_dp.emulator.keras import names
from tf_ipu_dp.emulator.sdk_api import keras_ipu
from tf_ipu_dp.emulator.sdk_api.ipu import config as ipu_config


def apply_patches() -> None:
    """Sets `keras.ipu`, makes Keras' optimizers accept programs for Keras 2.6, and knows IPUs as devices."""
    names.add_to_keras(keras_ipu)
    device_lists.add_to_tensorflow(ipu_config.count_devices)
    device_scopes.add_to_tensorflow()
