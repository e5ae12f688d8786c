"""The transformer layer that packs padded sequences on the IPU. Not emulated."""

from __future__ import annotations

from typing import Any


class EffectiveTransformer:
    """Not emulated."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("EffectiveTransformer is not emulated; use tf.keras.layers.MultiHeadAttention.")
