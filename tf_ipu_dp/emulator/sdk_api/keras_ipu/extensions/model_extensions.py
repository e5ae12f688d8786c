"""`keras.ipu.extensions.model_extensions`."""

from __future__ import annotations

from tf_ipu_dp.emulator.sdk_api.keras_ipu.extensions.extensions_base import KerasExtensionBase


class ModelExtension(KerasExtensionBase):
    """Any model on an IPU."""
