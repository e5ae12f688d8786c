"""Layers that are hints for the IPU's compiler and return their inputs."""

from __future__ import annotations

from typing import Any, Dict

import tensorflow as tf

from tf_ipu_dp.emulator.sdk_api.addons.keras.layers.ipu_layer import IPULayer


class RecomputationCheckpoint(IPULayer):
    """Marks where a pipeline stage may be split for recomputation. Returns its inputs."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.supports_masking = True

    def call(self, inputs: Any) -> Any:
        """Returns the inputs, a tensor or any nest of tensors."""
        return tf.nest.map_structure(tf.identity, inputs)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Returns the shape of the input."""
        return input_shape

    def get_config(self) -> Dict[str, Any]:
        """Returns the arguments of the base class: there are no others."""
        return dict(super().get_config())


class AssumeEqualAcrossReplicas(IPULayer):
    """Promises the compiler that its inputs are the same on all replicas. Returns its inputs."""

    def __init__(self, inplace: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.inplace = inplace
        self.supports_masking = True

    def call(self, inputs: Any) -> Any:
        """Returns the inputs, a tensor or any nest of tensors."""
        return tf.nest.map_structure(tf.identity, inputs)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Returns the shape of the input."""
        return input_shape

    def get_config(self) -> Dict[str, Any]:
        """Returns the arguments."""
        return {**super().get_config(), "inplace": self.inplace}
