"""`tensorflow.python.ipu.ops.image_ops`: prepares images for the first convolution."""

from __future__ import annotations

from typing import Any, Optional

import tensorflow as tf

__all__ = ["normalise_image"]


def normalise_image(
    image: Any, channel_offsets: Any, channel_scales: Any, scale: float = 1, name: Optional[str] = None
) -> tf.Tensor:
    """Returns `(image * scale - channel_offsets) * channel_scales` with a fourth channel of zeros.

    An image of uint8 gives float16; float16 and float32 are kept.
    """
    image = tf.convert_to_tensor(image)
    if image.dtype not in (tf.uint8, tf.float16, tf.float32):
        raise TypeError(f"normalise_image takes uint8, float16 or float32, not {image.dtype.name}.")
    if image.shape.rank in (None, 0) or image.shape[-1] != 3:
        raise tf.errors.InvalidArgumentError(
            None, None, f"normalise_image needs 3 channels in the last dimension, but the shape is {image.shape}."
        )
    offsets, scales = (tf.cast(tf.convert_to_tensor(part), tf.float32) for part in (channel_offsets, channel_scales))
    for label, part in (("channel_offsets", offsets), ("channel_scales", scales)):
        if part.shape != [3]:
            raise tf.errors.InvalidArgumentError(
                None, None, f"normalise_image: {label} needs 3 numbers, but the shape is {part.shape}."
            )
    with tf.name_scope(name or "normalise_image"):
        normalised = (tf.cast(image, tf.float32) * tf.cast(scale, tf.float32) - offsets) * scales
        normalised = tf.cast(normalised, tf.float16 if image.dtype == tf.uint8 else image.dtype)
        return tf.pad(normalised, [[0, 0]] * (image.shape.rank - 1) + [[0, 1]])
