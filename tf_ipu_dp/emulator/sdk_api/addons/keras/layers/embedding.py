"""The embedding whose gradient is dense, as the IPU's optimizers need it."""

from __future__ import annotations

from typing import Any, Dict, Optional

import tensorflow as tf

from tf_ipu_dp.emulator.sdk_api.addons.keras.layers.ipu_layer import IPULayer
from tf_ipu_dp.emulator.sdk_api.ipu.ops import embedding_ops


class Embedding(IPULayer):
    """Looks rows up in a table of `input_dim` x `output_dim`."""

    def __init__(  # noqa: PLR0913, PLR0917 the SDK's signature
        self,
        input_dim: int,
        output_dim: int,
        embeddings_initializer: Any = "uniform",
        embeddings_regularizer: Any = None,
        activity_regularizer: Any = None,
        embeddings_constraint: Any = None,
        mask_zero: bool = False,
        input_length: Optional[int] = None,
        serialization_factor: int = 1,
        **kwargs: Any,
    ) -> None:
        # Ids must not be cast to the layer's float type.
        kwargs.setdefault("autocast", False)
        super().__init__(**kwargs)
        self._refuse_arguments(
            embeddings_regularizer=embeddings_regularizer,
            activity_regularizer=activity_regularizer,
            embeddings_constraint=embeddings_constraint,
            mask_zero=mask_zero,
            input_length=input_length,
        )
        self.input_dim = input_dim
        self.output_dim = output_dim
        self.embeddings_initializer = tf.keras.initializers.get(embeddings_initializer)
        self.serialization_factor = serialization_factor

    def build(self, input_shape: Any) -> None:
        """Makes the table."""
        shape = tf.TensorShape(input_shape)
        if shape.rank != 2:
            raise ValueError(f"{self.name}: the input must have rank 2, but its shape is {shape}.")
        self.embeddings = self.add_weight(
            "embeddings", [self.input_dim, self.output_dim], initializer=self.embeddings_initializer
        )
        super().build(input_shape)

    def call(self, inputs: Any, inputs_are_sorted: bool = False, training: Any = None) -> Any:
        """Returns the rows that the ids name: `[batch, length, output_dim]`."""
        del training
        if inputs.shape.rank != 2:
            raise ValueError(f"{self.name}: the input must have rank 2, but its shape is {inputs.shape}.")
        rows = embedding_ops.embedding_lookup(
            self.embeddings, tf.cast(inputs, tf.int32), self.serialization_factor, inputs_are_sorted
        )
        return tf.cast(rows, self.compute_dtype)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Returns the shape of the input with a dimension added."""
        return tf.TensorShape([*tf.TensorShape(input_shape).as_list(), self.output_dim])

    def get_config(self) -> Dict[str, Any]:
        """Returns the arguments."""
        return {
            **super().get_config(),
            "input_dim": self.input_dim,
            "output_dim": self.output_dim,
            "embeddings_initializer": tf.keras.initializers.serialize(self.embeddings_initializer),
            "embeddings_regularizer": None,
            "activity_regularizer": None,
            "embeddings_constraint": None,
            "mask_zero": False,
            "input_length": None,
            "serialization_factor": self.serialization_factor,
        }
