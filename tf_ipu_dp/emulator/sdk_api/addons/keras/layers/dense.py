"""Dense layers: one whose product the IPU computes in parts, and one that multiplies 8-bit floats if given them."""

from __future__ import annotations

from typing import Any, Dict, Optional

import tensorflow as tf

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
    """Keras' Dense. If its input is a list, from `ConvertToF8`, it multiplies 8-bit floats and returns float16.

    Then the kernel is 8-bit floats as well, of `kernel_format` and `kernel_scale`, and is not trained. It comes from
    `kernel_data_initializer`, which makes codes, or from `kernel_initializer`, whose numbers are converted.
    """

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
        self.input_spec = None  # a list has two shapes
        self.kernel_format = f8_ops.Format[kernel_format] if isinstance(kernel_format, str) else kernel_format
        self.kernel_scale = kernel_scale
        self.kernel_data_initializer = tf.keras.initializers.get(kernel_data_initializer)

    def build(self, input_shape: Any) -> None:
        """Makes the weights: those of Keras' Dense, or a kernel of 8-bit floats with its metadata."""
        shapes = input_shapes(input_shape)
        if len(shapes) == 1:
            super().build(input_shape)
            return
        self.kernel = self.add_weight(
            "kernel", [shapes[0][-1], self.units], tf.uint8, self._initial_codes, trainable=False
        )
        self.kernel_metadata = self.add_weight(
            "kernel_metadata", [], tf.uint8, lambda *_, **__: self._initial_metadata(), trainable=False
        )
        self.bias = None
        if self.use_bias:
            self.bias = self.add_weight(
                "bias",
                [self.units],
                None,
                self.bias_initializer,
                self.bias_regularizer,
                constraint=self.bias_constraint,
            )
        self.built = True

    def call(self, inputs: Any) -> Any:
        """Returns `activation(inputs . kernel + bias)`."""
        if not isinstance(inputs, (list, tuple)):
            return super().call(inputs)
        data, metadata = inputs
        rows = f8_ops.QuarterTensor(tf.reshape(data, [-1, data.shape[-1]]), metadata)
        outputs = f8_ops.f8_matmul(rows, f8_ops.QuarterTensor(self.kernel, self.kernel_metadata))
        outputs = tf.reshape(outputs, tf.concat([tf.shape(data)[:-1], [self.units]], axis=0))
        outputs.set_shape([*data.shape[:-1], self.units])
        if self.use_bias:
            outputs = tf.nn.bias_add(outputs, tf.cast(self.bias, outputs.dtype))
        return outputs if self.activation is None else self.activation(outputs)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Returns the shape of the input with the units as its last dimension."""
        return super().compute_output_shape(input_shapes(input_shape)[0])

    def get_config(self) -> Dict[str, Any]:
        """Returns the arguments."""
        codes = self.kernel_data_initializer
        return {
            **super().get_config(),
            "kernel_format": self.kernel_format.name,
            "kernel_scale": self.kernel_scale,
            "kernel_data_initializer": None if codes is None else tf.keras.initializers.serialize(codes),
        }

    def _initial_metadata(self) -> Any:
        return f8_ops.create_metadata(self.kernel_format, self.kernel_scale)

    def _initial_codes(self, shape: Any, dtype: Any = None, **_: Any) -> Any:
        if self.kernel_data_initializer is not None:
            return tf.cast(self.kernel_data_initializer(shape, dtype), tf.uint8)
        return f8_ops.convert_to_f8(self.kernel_initializer(shape, tf.float32), self._initial_metadata()).data
