"""`keras.ipu.layers`: layers whose gradients automatic loss scaling looks at. Going forward they change nothing.

The gradients are seen while one of `keras.ipu.optimizers`' ALS optimizers computes gradients (`minimize`, `fit`). With
another optimizer, or with a tape of your own, the layers do nothing at all.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Callable, Dict, Iterator, Optional

import tensorflow as tf

_recording = threading.local()


@contextlib.contextmanager
def recording(record: Callable[[Any], None]) -> Iterator[None]:
    """Hands the gradients that come by while it is open to a function."""
    before = getattr(_recording, "record", None)
    _recording.record = record
    try:
        yield
    finally:
        _recording.record = before


@tf.keras.utils.register_keras_serializable(package="keras.ipu")
class CaptureUpstreamGradients(tf.keras.layers.Wrapper):  # type: ignore[misc]
    """Wraps a layer; the gradients with respect to its outputs are captured."""

    def __init__(self, layer: Any, tag: Optional[str] = None, **kwargs: Any) -> None:
        super().__init__(layer, **kwargs)
        self.tag = tag

    def call(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls the wrapped layer."""
        return tf.nest.map_structure(_captured, self.layer(inputs, *args, **kwargs))

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Returns the wrapped layer's."""
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
        self.layer.activation = lambda value: activation(_captured(value))
        try:
            return self.layer(inputs, *args, **kwargs)
        finally:
            self.layer.activation = activation


@tf.custom_gradient
def _captured(value: Any) -> Any:
    def upstream(gradient: Any) -> Any:
        record = getattr(_recording, "record", None)
        if record is not None:
            record(gradient)
        return gradient

    return tf.identity(value), upstream


__all__ = ["CaptureActivationGradients", "CaptureUpstreamGradients"]
