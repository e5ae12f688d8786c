"""`tensorflow.python.ipu.ops.rand_ops`: dropout.

Without a seed the mask comes from TensorFlow's own stateful generator, so that it differs from call to call; with a
seed it depends on the seed alone.
"""

from __future__ import annotations

from typing import Any, Optional, Sequence

import tensorflow as tf

__all__ = ["dropout"]


def dropout(
    x: Any,
    rate: float = 0.5,
    noise_shape: Optional[Sequence[int]] = None,
    seed: Any = None,
    name: Optional[str] = None,
    ref: Any = None,
) -> tf.Tensor:
    """Returns `x` with a share `rate` of its elements set to zero and the others divided by `1 - rate`.

    An empty `noise_shape` is the same as none. `seed` is a pair of int32. `ref` identifies the mask if the IPU computes
    it twice; here it is computed once.
    """
    del ref
    x = tf.convert_to_tensor(x)
    if not 0 <= rate < 1:
        raise ValueError(f"dropout: rate={rate} is not in [0, 1).")
    shape = _mask_shape(x, noise_shape)
    if seed is not None:
        seed = tf.convert_to_tensor(seed)
        if seed.shape != [2]:
            raise ValueError(f"dropout: seed must be a pair of int32, but its shape is {seed.shape}.")
    with tf.name_scope(name or "dropout"):
        if seed is None:
            drawn = tf.random.uniform(shape, dtype=tf.float32)
        else:
            drawn = tf.random.stateless_uniform(shape, tf.cast(seed, tf.int32), dtype=tf.float32)
        kept = tf.broadcast_to(drawn >= rate, tf.shape(x))
        return tf.where(kept, x * tf.cast(1 / (1 - rate), x.dtype), tf.zeros_like(x))


def _mask_shape(x: tf.Tensor, noise_shape: Optional[Sequence[int]]) -> Any:
    shape = tf.TensorShape([] if noise_shape is None else noise_shape)
    if shape.rank == 0:
        return tf.shape(x)
    assert noise_shape is not None
    if shape.rank != x.shape.rank:
        raise ValueError(f"dropout: noise_shape={list(noise_shape)} does not have the rank of x with shape {x.shape}.")
    for noise, size in zip(shape, x.shape):
        if noise not in (1, None) and size not in (noise, None):
            raise ValueError(
                f"dropout: each of noise_shape={list(noise_shape)} must be 1 or as in x with shape {x.shape}."
            )
    present = tf.shape(x)
    return tf.stack([present[axis] if noise is None else noise for axis, noise in enumerate(shape)])
