"""Dropout with the IPU's rules for the seed and the shape of the noise."""

from __future__ import annotations

from typing import Any, Dict, Optional

import tensorflow as tf

from tf_ipu_dp.emulator.sdk_api.addons.keras.layers.ipu_layer import IPULayer
from tf_ipu_dp.emulator.sdk_api.ipu.ops import rand_ops


class Dropout(IPULayer):
    """Sets a share of the inputs to zero in training. With a seed, a pair of int32, the mask is always the same."""

    def __init__(
        self, rate: float, noise_shape: Optional[Any] = None, seed: Optional[Any] = None, **kwargs: Any
    ) -> None:
        kwargs.pop("ref", None)  # selects the reference implementation, which draws other numbers on the IPU
        super().__init__(**kwargs)
        self.rate = rate
        self.noise_shape = noise_shape
        self.seed = seed
        self.supports_masking = True

    def call(self, inputs: Any, training: Any = None) -> Any:
        """Returns the inputs, in training with some of them set to zero and the rest scaled up."""
        if training is None:
            training = tf.keras.backend.learning_phase()
        if tf.is_tensor(training):
            noisy = rand_ops.dropout(inputs, self.rate, self.noise_shape, self.seed)
            return tf.where(tf.cast(training, tf.bool), noisy, inputs)
        return rand_ops.dropout(inputs, self.rate, self.noise_shape, self.seed) if training else tf.identity(inputs)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Returns the shape of the input."""
        return input_shape

    def get_config(self) -> Dict[str, Any]:
        """Returns the arguments."""
        noise_shape = None if self.noise_shape is None else list(self.noise_shape)
        seed = None if self.seed is None else [int(part) for part in self.seed]
        return {**super().get_config(), "rate": self.rate, "noise_shape": noise_shape, "seed": seed}
