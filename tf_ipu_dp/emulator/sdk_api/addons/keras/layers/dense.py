"""Dense layers: one whose product the IPU computes in parts, and the stock one under the name of the FP8 layer.

Stock TensorFlow computes nothing in FP8, so `ConvertToF8`, `ConvertFromF8` and FP8 inputs of `Dense` are refused.
"""

from __future__ import annotations

from typing import Any, Dict, Optional

import tensorflow as tf

from tf_ipu_dp.emulator.refusal import refused
from tf_ipu_dp.emulator.sdk_api.addons.keras.layers.ipu_layer import IPULayer, input_shapes
from tf_ipu_dp.emulator.sdk_api.ipu.ops import f8_ops, math_ops

_DIMENSIONS = {
    "input_columns": "a_columns",
    "input_rows_kernel_columns": "a_rows_b_columns",
    "kernel_rows": "b_rows",
}


class SerialDense(IPULayer, tf.keras.layers.Dense):  # type: ignore[misc]
    """Keras' Dense. The factor, which saves memory on the IPU, must divide the serialised dimension."""

    def __init__(  # noqa: PLR0913, PLR0917 the SDK's signature
        self,
        units: int,
        serialization_factor: int,
        serialization_dimension: str,
        activation: Any = None,
        use_bias: bool = True,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        kernel_regularizer: Any = None,
        bias_regularizer: Any = None,
        activity_regularizer: Any = None,
        kernel_constraint: Any = None,
        bias_constraint: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            units,
            activation=activation,
            use_bias=use_bias,
            kernel_initializer=kernel_initializer,
            bias_initializer=bias_initializer,
            kernel_regularizer=kernel_regularizer,
            bias_regularizer=bias_regularizer,
            activity_regularizer=activity_regularizer,
            kernel_constraint=kernel_constraint,
            bias_constraint=bias_constraint,
            **kwargs,
        )
        if serialization_dimension not in _DIMENSIONS:
            raise ValueError(
                f"serialization_dimension={serialization_dimension!r} is not one of {', '.join(_DIMENSIONS)}."
            )
        self.serialization_factor = serialization_factor
        self.serialization_dimension = serialization_dimension

    def call(self, inputs: Any) -> Any:
        """Returns `activation(inputs . kernel + bias)`."""
        inputs = tf.cast(inputs, self.compute_dtype)
        rows = tf.reshape(inputs, [-1, inputs.shape[-1]])
        if inputs.shape.is_fully_defined():
            rows.set_shape([inputs.shape.num_elements() // inputs.shape[-1], inputs.shape[-1]])
        outputs = math_ops.serialized_matmul(
            rows, self.kernel, self.serialization_factor, _DIMENSIONS[self.serialization_dimension]
        )
        if inputs.shape.rank != 2:
            outputs = tf.reshape(outputs, tf.concat([tf.shape(inputs)[:-1], [self.units]], axis=0))
            outputs.set_shape([*inputs.shape[:-1], self.units])
        if self.use_bias:
            outputs = tf.nn.bias_add(outputs, self.bias)
        return outputs if self.activation is None else self.activation(outputs)

    def get_config(self) -> Dict[str, Any]:
        """Returns the arguments."""
        return {
            **super().get_config(),
            "serialization_factor": self.serialization_factor,
            "serialization_dimension": self.serialization_dimension,
        }


class Dense(IPULayer, tf.keras.layers.Dense):  # type: ignore[misc]
    """Keras' Dense. Inputs in FP8, which come as a list of data and metadata, are refused."""

    def __init__(
        self,
        units: int,
        kernel_format: Any = f8_ops.Format.F143,
        kernel_scale: int = 0,
        kernel_data_initializer: Optional[Any] = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(units, **kwargs)
        if not -32 <= kernel_scale <= 31:
            raise ValueError(f"kernel_scale={kernel_scale} is not in [-32, 31].")
        self.input_spec = None  # so that a list reaches `build`, which refuses it with a clear message
        self.kernel_format = f8_ops.Format[kernel_format] if isinstance(kernel_format, str) else kernel_format
        self.kernel_scale = kernel_scale
        self.kernel_data_initializer = kernel_data_initializer

    def build(self, input_shape: Any) -> None:
        """Makes the weights of Keras' Dense."""
        if len(input_shapes(input_shape)) > 1:
            raise NotImplementedError(f"{self.name}: the emulator has no FP8 arithmetic; give one ordinary tensor.")
        super().build(input_shape)

    def get_config(self) -> Dict[str, Any]:
        """Returns the arguments."""
        return {
            **super().get_config(),
            "kernel_format": self.kernel_format.name,
            "kernel_scale": self.kernel_scale,
            "kernel_data_initializer": self.kernel_data_initializer,
        }


_NO_F8 = "stock TensorFlow does not compute with 8-bit floats"
ConvertToF8 = refused("ipu_tensorflow_addons.keras.layers.ConvertToF8", _NO_F8)
ConvertFromF8 = refused("ipu_tensorflow_addons.keras.layers.ConvertFromF8", _NO_F8)
