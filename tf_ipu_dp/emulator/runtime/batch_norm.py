"""Fused batch normalisation, which `tf.nn.fused_batch_norm` and Keras' layer on images use, as the device has it.

- In training, groups of replicas share their batch statistics, as `distributed_batch_norm_replica_group_size` asks.
  Groups of consecutive replicas may reach over instances. Without groups nothing changes.
- Scale, offset and statistics may be float16, as 16.16 training has them. TensorFlow's kernel takes these in float32
  only. So they are converted around it, which is also how the device computes statistics of float16 inputs.
"""

from __future__ import annotations

from typing import Any, Callable, List, Tuple

import tensorflow as tf
from tensorflow.python.ops import gen_nn_ops

from tf_ipu_dp.emulator import patches
from tf_ipu_dp.emulator.runtime import collectives, replicas
from tf_ipu_dp.emulator.sdk_api.ipu import config as ipu_config

_PATCH = "batch normalisation"
_SETTING = "norms.experimental.distributed_batch_norm_replica_group_size"
_stock: List[Callable[..., Any]] = []


def extend_tensorflow() -> None:
    """Makes fused batch normalisation share its statistics in programs of the device. Calling it twice is harmless."""
    if not patches.is_applied(_PATCH):
        _stock[:] = [gen_nn_ops.fused_batch_norm_v3]
        patches.set_attribute(_PATCH, gen_nn_ops, "fused_batch_norm_v3", _fused_batch_norm)


def refuse_pipeline() -> None:
    """Refuses to run a pipeline whose replicas would share statistics, which the SDK does not support."""
    group = _group_size()
    if group > 1:
        raise tf.errors.InvalidArgumentError(
            None, None, f"{_SETTING}={group} cannot be used with pipelining. Set it to 1."
        )


def _group_size() -> int:
    norms = ipu_config.configured_system().config.norms
    return int(norms.experimental.distributed_batch_norm_replica_group_size)


def _fused_batch_norm(  # noqa: PLR0913, PLR0917 the arguments of the stock operation
    x: Any,
    scale: Any,
    offset: Any,
    mean: Any,
    variance: Any,
    epsilon: float = 0.0001,
    exponential_avg_factor: float = 1,
    data_format: str = "NHWC",
    is_training: bool = True,
    name: Any = None,
) -> Any:
    if tf.convert_to_tensor(scale).dtype == tf.float16:
        scale, offset, mean, variance = (tf.cast(each, tf.float32) for each in (scale, offset, mean, variance))
        y, batch_mean, batch_variance, *others = _fused_batch_norm(
            x, scale, offset, mean, variance, epsilon, exponential_avg_factor, data_format, is_training, name
        )
        return y, tf.cast(batch_mean, tf.float16), tf.cast(batch_variance, tf.float16), *others
    group = _group_size() if replicas.current() is not None else 1
    if group == 1 or not is_training:
        return _stock[0](x, scale, offset, mean, variance, epsilon, exponential_avg_factor, data_format, is_training,
                         name)  # fmt: skip
    if collectives.count() % group:
        raise tf.errors.InvalidArgumentError(
            None, None, f"{_SETTING}={group} does not divide the {collectives.count()} replicas."
        )
    scale, offset, mean, variance = (tf.convert_to_tensor(each) for each in (scale, offset, mean, variance))
    y, batch_mean, batch_variance = _normalise(x, scale, offset, epsilon, data_format, group)
    if exponential_avg_factor != 1:
        batch_mean = (1 - exponential_avg_factor) * mean + exponential_avg_factor * batch_mean
        batch_variance = (1 - exponential_avg_factor) * variance + exponential_avg_factor * batch_variance
    # The last three are for the stock gradient, which is not used.
    return y, batch_mean, batch_variance, batch_mean, batch_variance, batch_variance


def _normalise(x: Any, scale: Any, offset: Any, epsilon: float, data_format: str, group: int) -> Tuple[Any, Any, Any]:
    channels = data_format.index("C")
    axes = [axis for axis in range(len(data_format)) if axis != channels]

    def along_channels(vector: Any) -> Any:
        return tf.reshape(vector, [-1 if axis == channels else 1 for axis in range(len(data_format))])

    @tf.custom_gradient
    def normalise(x: Any, scale: Any, offset: Any) -> Any:
        values = tf.cast(x, scale.dtype)
        own_mean, own_variance = tf.nn.moments(values, axes)
        mean, variance = tf.unstack(_combine_in_group(tf.stack([own_mean, own_variance]), group, _join_moments))
        deviation = tf.sqrt(variance + epsilon)
        normalised = (values - along_channels(mean)) / along_channels(deviation)
        y = normalised * along_channels(scale) + along_channels(offset)
        own_count = tf.cast(tf.size(x) / tf.size(scale), scale.dtype)

        def gradient(dy: Any, *unused: Any) -> Tuple[Any, Any, Any]:
            dy = tf.cast(dy, scale.dtype)
            for_scale, for_offset = tf.reduce_sum(dy * normalised, axes), tf.reduce_sum(dy, axes)
            sums = _combine_in_group(tf.stack([for_scale, for_offset]), group, lambda each: tf.reduce_sum(each, axis=0))
            means = tf.unstack(sums / (own_count * group))
            dx = dy - along_channels(means[1]) - normalised * along_channels(means[0])
            dx *= along_channels(scale / deviation)
            return tf.cast(dx, x.dtype), for_scale, for_offset

        # As in the compiled operation, the correction for the sample's size counts this replica's values.
        corrected = variance * own_count / tf.maximum(own_count - 1, 1)
        return (tf.cast(y, x.dtype), tf.stop_gradient(mean), tf.stop_gradient(corrected)), gradient

    y, mean, variance = normalise(x, scale, offset)
    return y, mean, variance


def _join_moments(of_replicas: Any) -> Any:
    """Returns the mean and variance of all values, from those of equally many values on each replica."""
    means, variances = tf.unstack(of_replicas, axis=1)
    mean = tf.reduce_mean(means, axis=0)
    return tf.stack([mean, tf.reduce_mean(variances + tf.math.squared_difference(means, mean), axis=0)])


def _combine_in_group(tensor: Any, group: int, combine: Callable[[Any], Any]) -> Any:
    """Returns what a function makes of the stacked values of this replica's group."""

    def combine_groups(values: List[Any]) -> Any:
        return tf.stack([combine(tf.stack(values[at : at + group])) for at in range(0, len(values), group)])

    of_groups = collectives.all_reduce([tensor], combine_groups)[0]
    return of_groups[collectives.index() // group]
