"""`ipu_tensorflow_addons.keras`: layers and optimizers."""

from __future__ import annotations

from tf_ipu_dp.emulator.sdk_api.addons.keras import layers, optimizers

__all__ = ["layers", "optimizers"]
