"""`ipu_tensorflow_addons.keras.layers.ipu_layer`: what the addons' layers have in common."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class IPULayer(tf.keras.layers.Layer):  # type: ignore[misc]
    """Base class of the layers. Here it is a Keras layer: they also run outside the scope of an IPU strategy."""

    def _refuse_arguments(self, **arguments: Any) -> None:
        """Raises for arguments that stock Keras knows and the IPU's layer does not."""
        for name, value in arguments.items():
            if value:
                raise NotImplementedError(f"{type(self).__name__} does not support {name} (given: {value!r}).")
