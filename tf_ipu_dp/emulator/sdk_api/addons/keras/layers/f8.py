"""Conversions to and from 8-bit floats as layers. Between layers these are lists of codes and metadata."""

from __future__ import annotations

from typing import Any, Dict, List

import tensorflow as tf

from tf_ipu_dp.emulator.sdk_api.addons.keras.layers.ipu_layer import IPULayer
from tf_ipu_dp.emulator.sdk_api.ipu.ops import f8_ops


class ConvertToF8(IPULayer):
    """Converts a list of numbers and metadata, see `f8_ops.create_metadata`, to a list of codes and metadata."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)

    def call(self, inputs: Any) -> List[Any]:
        """Returns the codes as uint8, and the metadata."""
        values, metadata = inputs
        return list(f8_ops.convert_to_f8(values, metadata))

    def get_config(self) -> Dict[str, Any]:
        """Returns the arguments of the base class: there are no others."""
        return dict(super().get_config())


class ConvertFromF8(IPULayer):
    """Converts a list of codes and metadata to numbers of the layer's type."""

    def __init__(self, dtype: Any = tf.half, **kwargs: Any) -> None:
        super().__init__(dtype=dtype, **kwargs)

    def call(self, inputs: Any) -> Any:
        """Returns the numbers."""
        return f8_ops.convert_from_f8(inputs, self.compute_dtype)

    def get_config(self) -> Dict[str, Any]:
        """Returns the arguments of the base class, the type among them."""
        return dict(super().get_config())
