"""`keras.ipu.layers`: layers whose gradients are captured. The forward pass is not changed.

Automatic loss scaling counts them, and a `GradientCaptureTape` or `GradientCaptureContext` returns them by tag. A model
on the device can be fitted with any optimizer; a backward pass of your own needs one of the two.
"""

from __future__ import annotations

from typing import Any, Dict, Optional

import tensorflow as tf

from tf_ipu_dp.emulator.runtime.gradient_capture import capture_upstream_gradients


@tf.keras.utils.register_keras_serializable(package="keras.ipu")
class CaptureUpstreamGradients(tf.keras.layers.Wrapper):  # type: ignore[misc]
    """Wraps a layer; the gradients with respect to its outputs are captured.

    The tag is that of the layer's name with `_grad` if none is given.
    """

    def __init__(self, layer: Any, tag: Optional[str] = None, **kwargs: Any) -> None:
        super().__init__(layer, **kwargs)
        self.tag = tag or f"{layer.name}_grad"

    def call(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls the wrapped layer."""
        return capture_upstream_gradients(self.layer(inputs, *args, **kwargs), self.tag)

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
        self.layer.activation = lambda value: activation(capture_upstream_gradients(value, self.tag))
        try:
            return self.layer(inputs, *args, **kwargs)
        finally:
            self.layer.activation = activation


__all__ = ["CaptureActivationGradients", "CaptureUpstreamGradients"]
