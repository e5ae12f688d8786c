"""The transformer layer that packs padded sequences on the IPU. Not emulated."""

from __future__ import annotations

from tf_ipu_dp.emulator.refusal import refused

EffectiveTransformer = refused(
    "ipu_tensorflow_addons.keras.layers.EffectiveTransformer",
    "it packs sequences for the IPU's memory; use tf.keras.layers.MultiHeadAttention",
)
