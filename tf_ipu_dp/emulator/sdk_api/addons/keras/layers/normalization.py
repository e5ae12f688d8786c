"""Group, instance and layer normalisation. They work the same in training and in inference.

float16 inputs are normalised in float32 and returned as float16.
"""

from __future__ import annotations

import logging
from typing import Any, Dict, List, Optional, Sequence, Union

import tensorflow as tf

from tf_ipu_dp.emulator.sdk_api.addons.keras.layers.ipu_layer import IPULayer
from tf_ipu_dp.emulator.sdk_api.ipu.ops import normalization_ops

_SMALLEST_EPSILON = 1.53e-5  # that is useful with float16 on the IPU


class _Normalization(IPULayer):
    """Keeps the shape of its input."""

    def _add_parameter(self, name: str, shape: List[int], initializer: Any) -> Any:
        # Read in its own precision: the result is rounded to float16 only at the end.
        return self.add_weight(name, shape, initializer=initializer, experimental_autocast=False)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Returns the shape of the input."""
        return input_shape


class GroupNormalization(_Normalization):
    """Normalises each sample over space and the channels of a group.

    With `strided_channel_grouping` channel c is in group c mod groups, otherwise groups are neighbouring channels.
    An initializer that is None is Keras' default for weights, glorot_uniform, for gamma as for beta.
    """

    def __init__(  # noqa: PLR0913, PLR0917 the SDK's signature
        self,
        groups: int = 2,
        channels_axis: int = -1,
        center: bool = True,
        scale: bool = True,
        epsilon: float = 1e-3,
        beta_initializer: Any = None,
        gamma_initializer: Any = None,
        strided_channel_grouping: bool = True,
        trainable: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(trainable=trainable, **kwargs)
        self.groups = groups
        self.channels_axis = channels_axis
        self.center = center
        self.scale = scale
        self.epsilon = epsilon
        self.beta_initializer = _initializer(beta_initializer)
        self.gamma_initializer = _initializer(gamma_initializer)
        self.strided_channel_grouping = strided_channel_grouping
        self.gamma: Any = None
        self.beta: Any = None
        if epsilon < _SMALLEST_EPSILON:
            logging.getLogger("tensorflow").warning(
                "%s: epsilon=%s is smaller than %s, which float16 may need.",
                type(self).__name__,
                epsilon,
                _SMALLEST_EPSILON,
            )

    def build(self, input_shape: Any) -> None:
        """Checks the channels against the groups and makes gamma and beta, one number per channel."""
        spec = tf.TensorSpec(input_shape)
        channels = spec.shape[normalization_ops.check_channels_axis(spec, self.channels_axis)]
        normalization_ops.check_groups(self._groups(channels), channels)
        if self.scale:
            self.gamma = self._add_parameter("gamma", [channels], self.gamma_initializer)
        if self.center:
            self.beta = self._add_parameter("beta", [channels], self.beta_initializer)
        super().build(input_shape)

    def call(self, inputs: Any, training: Any = None) -> Any:
        """Returns the inputs normalised, scaled and shifted."""
        del training
        channels = inputs.shape[normalization_ops.check_channels_axis(inputs, self.channels_axis)]
        return normalization_ops.normalise_groups(
            inputs,
            self.gamma,
            self.beta,
            self._groups(channels),
            self.channels_axis,
            self.epsilon,
            self.strided_channel_grouping,
        )

    def get_config(self) -> Dict[str, Any]:
        """Returns the arguments."""
        return {
            **super().get_config(),
            "groups": self.groups,
            "channels_axis": self.channels_axis,
            "center": self.center,
            "scale": self.scale,
            "epsilon": self.epsilon,
            "beta_initializer": _serialized(self.beta_initializer),
            "gamma_initializer": _serialized(self.gamma_initializer),
            "strided_channel_grouping": self.strided_channel_grouping,
        }

    def _groups(self, channels: int) -> int:
        del channels
        return self.groups


class InstanceNormalization(GroupNormalization):
    """Normalises each channel of each sample by itself."""

    def __init__(
        self,
        channels_axis: int = -1,
        center: bool = True,
        scale: bool = True,
        epsilon: float = 1e-3,
        beta_initializer: Any = None,
        gamma_initializer: Any = None,
        trainable: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            channels_axis=channels_axis,
            center=center,
            scale=scale,
            epsilon=epsilon,
            beta_initializer=beta_initializer,
            gamma_initializer=gamma_initializer,
            trainable=trainable,
            **kwargs,
        )

    def get_config(self) -> Dict[str, Any]:
        """Returns the arguments."""
        config = super().get_config()
        return {name: value for name, value in config.items() if name not in ("groups", "strided_channel_grouping")}

    def _groups(self, channels: int) -> int:
        return channels


class LayerNormalization(_Normalization):
    """Keras' layer normalisation, for inputs whose shape is known in full, the batch included."""

    def __init__(  # noqa: PLR0913, PLR0917 the SDK's signature
        self,
        axis: Union[int, Sequence[int]] = -1,
        epsilon: float = 1e-3,
        center: bool = True,
        scale: bool = True,
        beta_initializer: Any = "zeros",
        gamma_initializer: Any = "ones",
        beta_regularizer: Any = None,
        gamma_regularizer: Any = None,
        beta_constraint: Any = None,
        gamma_constraint: Any = None,
        trainable: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(trainable=trainable, **kwargs)
        self._refuse_arguments(
            beta_regularizer=beta_regularizer,
            gamma_regularizer=gamma_regularizer,
            beta_constraint=beta_constraint,
            gamma_constraint=gamma_constraint,
        )
        if not isinstance(axis, (int, list, tuple)):
            raise TypeError(f"axis must be an int or a list of ints, not {axis!r}.")
        self.axis = axis if isinstance(axis, int) else list(axis)
        self.epsilon = epsilon
        self.center = center
        self.scale = scale
        self.beta_initializer = tf.keras.initializers.get(beta_initializer)
        self.gamma_initializer = tf.keras.initializers.get(gamma_initializer)
        self.gamma: Any = None
        self.beta: Any = None
        self.supports_masking = True

    def build(self, input_shape: Any) -> None:
        """Checks the axes and makes gamma and beta with the shape of the axes."""
        shape = tf.TensorShape(input_shape)
        if shape.rank is None:
            raise ValueError(f"{self.name}: the rank of the input is not known.")
        sizes = [shape[axis] for axis in self._axes(shape.rank)]
        if None in sizes:
            raise ValueError(f"{self.name}: the axes to normalise must have a known size (input shape {shape}).")
        if self.scale:
            self.gamma = self._add_parameter("gamma", sizes, self.gamma_initializer)
        if self.center:
            self.beta = self._add_parameter("beta", sizes, self.beta_initializer)
        super().build(input_shape)

    def call(self, inputs: Any, training: Any = None) -> Any:
        """Returns the inputs normalised over the axes, scaled and shifted."""
        del training
        if not inputs.shape.is_fully_defined():
            raise ValueError(
                f"{self.name}: the input has shape {inputs.shape}, but every dimension must be known, the batch "
                "included: give the model's inputs a batch_size and batch datasets with drop_remainder=True."
            )
        axes = self._axes(inputs.shape.rank)
        values = tf.cast(inputs, tf.float32)
        mean, variance = tf.nn.moments(values, axes, keepdims=True)
        outputs = (values - mean) * tf.math.rsqrt(variance + self.epsilon)
        if self.gamma is not None:
            outputs *= _broadcast(self.gamma, axes, inputs.shape)
        if self.beta is not None:
            outputs += _broadcast(self.beta, axes, inputs.shape)
        return tf.cast(outputs, inputs.dtype)

    def get_config(self) -> Dict[str, Any]:
        """Returns the arguments."""
        return {
            **super().get_config(),
            "axis": self.axis if isinstance(self.axis, int) else list(self.axis),
            "epsilon": self.epsilon,
            "center": self.center,
            "scale": self.scale,
            "beta_initializer": tf.keras.initializers.serialize(self.beta_initializer),
            "gamma_initializer": tf.keras.initializers.serialize(self.gamma_initializer),
            "beta_regularizer": None,
            "gamma_regularizer": None,
            "beta_constraint": None,
            "gamma_constraint": None,
        }

    def _axes(self, rank: int) -> List[int]:
        given = [self.axis] if isinstance(self.axis, int) else list(self.axis)
        axes = [axis + rank if axis < 0 else axis for axis in given]
        if not all(0 <= axis < rank for axis in axes):
            raise ValueError(f"{self.name}: axis={self.axis} is not an axis of an input of rank {rank}.")
        if len(set(axes)) != len(axes):
            raise ValueError(f"{self.name}: axis={self.axis} names an axis twice.")
        return axes


GroupNorm = GroupNormalization
InstanceNorm = InstanceNormalization
LayerNorm = LayerNormalization


def _initializer(given: Any) -> Optional[Any]:
    return None if given is None else tf.keras.initializers.get(given)


def _serialized(initializer: Optional[Any]) -> Any:
    return None if initializer is None else tf.keras.initializers.serialize(initializer)


def _broadcast(weight: Any, axes: Sequence[int], shape: Any) -> Any:
    sizes = [1] * shape.rank
    for axis in axes:
        sizes[axis] = shape[axis]
    # Keras' own layer reshapes without sorting too, so axes out of order mean the same in both.
    return tf.reshape(tf.cast(weight, tf.float32), sizes)
