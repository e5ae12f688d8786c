"""`tensorflow.python.ipu.ops.normalization_ops`: group, layer and instance normalisation with TF1 variables.

Statistics are those of the current input, both in training and in inference, and are computed in float32.
"""

from __future__ import annotations

import logging
from typing import Any, Dict, List, Optional

import tensorflow as tf

__all__ = ["group_norm", "instance_norm", "layer_norm", "normalise_groups"]

_EPSILON = 1.53e-5


def group_norm(  # noqa: PLR0913, PLR0917 the SDK's signature
    inputs: Any,
    groups: int = 2,
    channels_axis: int = -1,
    center: bool = True,
    scale: bool = True,
    epsilon: float = _EPSILON,
    param_initializers: Optional[Dict[str, Any]] = None,
    reuse: Any = None,
    variables_collections: Any = None,
    training: bool = True,
    trainable: bool = True,
    scope: Any = None,
    strided_channel_grouping: bool = True,
) -> tf.Tensor:
    """Returns the input normalised over all but the batch within each group of channels, scaled and shifted."""
    del training
    inputs = tf.convert_to_tensor(inputs)
    channels = inputs.shape[check_channels_axis(inputs, channels_axis)]
    check_groups(groups, channels)
    if epsilon < _EPSILON:
        logging.getLogger("tensorflow").warning("epsilon=%g is small for an IPU: use %g or more.", epsilon, _EPSILON)
    initializers = param_initializers or {}
    with tf.compat.v1.variable_scope(scope, "GroupNorm", [inputs], reuse=reuse):

        def parameter(name: str, initializer: Any) -> Any:
            return tf.compat.v1.get_variable(
                name,
                shape=[channels],
                dtype=inputs.dtype,
                initializer=initializers.get(name) or initializer,
                collections=_collections(variables_collections, name),
                trainable=trainable,
            )

        beta = parameter("beta", tf.zeros_initializer()) if center else None
        gamma = parameter("gamma", tf.ones_initializer()) if scale else None
        return normalise_groups(inputs, gamma, beta, groups, channels_axis, epsilon, strided_channel_grouping)


def layer_norm(  # noqa: PLR0913, PLR0917 the SDK's signature
    inputs: Any,
    channels_axis: int = -1,
    center: bool = True,
    scale: bool = True,
    epsilon: float = _EPSILON,
    param_initializers: Optional[Dict[str, Any]] = None,
    reuse: Any = None,
    variables_collections: Any = None,
    training: bool = True,
    trainable: bool = True,
    scope: Any = None,
) -> tf.Tensor:
    """Returns the input normalised over all dimensions but the batch; scale and shift are per channel."""
    return group_norm(
        inputs, 1, channels_axis, center, scale, epsilon, param_initializers, reuse, variables_collections, training,
        trainable, scope,
    )  # fmt: skip


def instance_norm(  # noqa: PLR0913, PLR0917 the SDK's signature
    inputs: Any,
    channels_axis: int = -1,
    center: bool = True,
    scale: bool = True,
    epsilon: float = _EPSILON,
    param_initializers: Optional[Dict[str, Any]] = None,
    reuse: Any = None,
    variables_collections: Any = None,
    training: bool = True,
    trainable: bool = True,
    scope: Any = None,
) -> tf.Tensor:
    """Returns the input normalised over space for each sample and channel, scaled and shifted."""
    inputs = tf.convert_to_tensor(inputs)
    groups = inputs.shape[check_channels_axis(inputs, channels_axis)]
    return group_norm(
        inputs, groups, channels_axis, center, scale, epsilon, param_initializers, reuse, variables_collections,
        training, trainable, scope,
    )  # fmt: skip


def normalise_groups(
    inputs: tf.Tensor,
    gamma: Any,
    beta: Any,
    groups: int,
    channels_axis: int,
    epsilon: float,
    strided_channel_grouping: bool,
) -> tf.Tensor:
    """Returns group normalisation with given parameters `[channels]`, or None for none. Not a function of the SDK.

    Strided: channel c is in group c mod groups. Otherwise a group is a run of neighbouring channels.
    """
    axis = check_channels_axis(inputs, channels_axis)
    channels = int(inputs.shape[axis])
    check_groups(groups, channels)
    shape = [tf.shape(inputs)[i] if size is None else size for i, size in enumerate(inputs.shape)]
    members = channels // groups
    split = [members, groups] if strided_channel_grouping else [groups, members]
    grouped = tf.reshape(tf.cast(inputs, tf.float32), [*shape[:axis], *split, *shape[axis + 1 :]])
    group_axis = axis + 1 if strided_channel_grouping else axis
    over = [i for i in range(1, len(shape) + 1) if i != group_axis]
    mean, variance = tf.nn.moments(grouped, over, keepdims=True)
    result = tf.reshape((grouped - mean) * tf.math.rsqrt(variance + epsilon), shape)

    per_channel = [channels if i == axis else 1 for i in range(len(shape))]
    if gamma is not None:
        result *= tf.reshape(tf.cast(gamma, tf.float32), per_channel)
    if beta is not None:
        result += tf.reshape(tf.cast(beta, tf.float32), per_channel)
    result = tf.cast(result, inputs.dtype)
    result.set_shape(inputs.shape)
    return result


def check_channels_axis(inputs: tf.Tensor, channels_axis: int) -> int:
    """Returns the axis counted from the front; it must be 1 or the last, and its size known."""
    rank = inputs.shape.rank
    if rank is None or rank < 2:
        raise ValueError(f"Normalisation needs inputs of a known rank of at least 2, not shape {inputs.shape}.")
    axis = channels_axis + rank if channels_axis < 0 else channels_axis
    if axis not in (1, rank - 1):
        raise ValueError(f"channels_axis={channels_axis} must be 1 or the last of {rank} dimensions.")
    if inputs.shape[axis] is None:
        raise ValueError(f"The channels in dimension {axis} of shape {inputs.shape} must be known.")
    return axis


def check_groups(groups: int, channels: int) -> None:
    """Refuses groups that the channels cannot be divided into."""
    if groups < 1 or groups > channels or channels % groups:
        raise ValueError(f"{channels} channels cannot be divided into {groups} groups.")


def _collections(given: Any, name: str) -> Optional[List[Any]]:
    """Returns the collections of one variable: `given` is a list for all or a dict of lists by name."""
    names = given.get(name) if isinstance(given, dict) else given
    return [tf.compat.v1.GraphKeys.GLOBAL_VARIABLES, *names] if names else None
