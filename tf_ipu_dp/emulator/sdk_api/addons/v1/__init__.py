"""`ipu_tensorflow_addons.v1`: layers for TF1 graphs. It has no optimizers."""

from __future__ import annotations

from tf_ipu_dp.emulator.sdk_api.addons.v1 import layers, optimizers

__all__ = ["layers", "optimizers"]
