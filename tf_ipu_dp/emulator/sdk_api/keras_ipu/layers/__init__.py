"""`keras.ipu.layers`: layers whose gradients automatic loss scaling observes. The forward pass is not changed.

The gradients are recorded while one of `keras.ipu.optimizers`' ALS optimizers computes gradients (`minimize`, `fit`).
With another optimizer, or with your own tape, the layers do nothing.
"""

from __future__ import annotations

from typing import Any, Dict, Optional

import tensorflow as tf

from tf_ipu_dp.emulator.keras.gradient_capture import captured


@tf.keras.utils.register_keras_serializable(package="keras.ipu")
class CaptureUpstreamGradients(tf.keras.layers.Wrapper):  # type: ignore[misc]
    """Wraps a layer; the gradients with respect to its outputs are captured."""

    def __init__(self, layer: Any, tag: Optional[str] = None, **kwargs: Any) -> None:
        super().__init__(layer, **kwargs)
        self.tag = tag

    def call(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls the wrapped layer."""
        return tf.nest.map_structure(captured, self.layer(inputs, *args, **kwargs))

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Returns the output shape of the wrapped layer."""
        return self.layer.compute_output_shape(input_shape)

    def get_config(self) -> Dict[str, Any]:
        """Returns the arguments that make the same layer."""
        return {**super().get_config(), "tag": self.tag}


@tf.keras.utils.register_keras_serializable(package="keras.ipu")
class CaptureActivationGradients(CaptureUpstreamGradients):
    """Wraps a layer; the gradients with respect to what goes into its activation function are captured."""

    def __init__(self, layer: Any, tag: Optional[str] = None, **kwargs: Any) -> None:
        if getattr(layer, "activation", None) is None:
            raise ValueError(f"The layer {layer.name!r} has no activation whose gradients could be captured.")
        super().__init__(layer, tag, **kwargs)

    def call(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls the wrapped layer."""
        activation = self.layer.activation
        self.layer.activation = lambda value: activation(captured(value))
        try:
            return self.layer(inputs, *args, **kwargs)
        finally:
            self.layer.activation = activation


__all__ = ["CaptureActivationGradients", "CaptureUpstreamGradients"]
