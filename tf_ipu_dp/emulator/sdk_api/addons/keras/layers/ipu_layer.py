"""`ipu_tensorflow_addons.keras.layers.ipu_layer`: what the addons' layers have in common."""

from __future__ import annotations

from typing import Any, List

import tensorflow as tf


class IPULayer(tf.keras.layers.Layer):  # type: ignore[misc]
    """Base class of the layers. Here it is a Keras layer: they also run outside the scope of an IPU strategy."""

    def _refuse_arguments(self, **arguments: Any) -> None:
        """Raises for arguments that stock Keras supports and the IPU's layer does not."""
        for name, value in arguments.items():
            if value:
                raise NotImplementedError(f"{type(self).__name__} does not support {name} (given: {value!r}).")


def input_shapes(given: Any) -> List[tf.TensorShape]:
    """Returns the shape of each input. What Keras gives `build` may be one shape, as a list too, or a list of them."""
    several = isinstance(given, (list, tuple)) and any(size is not None and not isinstance(size, int) for size in given)
    return [tf.TensorShape(shape) for shape in (given if several else [given])]
