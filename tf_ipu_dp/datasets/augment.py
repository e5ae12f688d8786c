"""Preparation of images on the host: augmentation, resizing, normalisation.

Augmentation takes random numbers from the caller, so that it depends on the sample and not on the instance.
Images stay 8-bit numbers until they are normalised: a run with --eight_bit_io sees the same images as one without.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tf_ipu_dp.datasets.info import DatasetInfo

# Random numbers that each augmentation takes per sample.
RANDOM_NUMBERS = {"none": 0, "crop": 2, "crop_flip": 3, "imagenet": 5}

_MAX_SHIFT = 4
_MIN_AREA = 0.08
_MAX_RATIO = 4 / 3
# Share of the shorter side that is kept when an image of any size is validated.
_CENTRE_SHARE = 0.875


class Normaliser:
    """Resizes images, uint8 [n, h, w, c], to the size of the run and normalises them, unless they stay 8-bit."""

    def __init__(self, facts: DatasetInfo, eight_bit_io: bool, dtype: str) -> None:
        self.height, self.width, self.channels = facts.height, facts.width, facts.channels
        self.dtype = tf.uint8 if eight_bit_io else tf.as_dtype(dtype)
        # One factor for each pixel: Eigen is three times slower when it repeats one for each channel.
        mean, deviation = (np.tile(numbers, facts.height * facts.width) for numbers in (facts.mean, facts.deviation))
        self._factor: Any = (1 / (255 * deviation)).astype(np.float32)
        self._offset: Any = (-mean / deviation).astype(np.float32)

    @property
    def sample_bytes(self) -> int:
        return int(self.height * self.width * self.channels * self.dtype.size)

    def __call__(self, images: Any) -> Any:
        images = resize(images, self.height, self.width)
        if self.dtype == tf.uint8:
            return images
        flat = tf.cast(tf.reshape(images, [-1, self._factor.size]), tf.float32) * self._factor + self._offset
        return tf.cast(tf.reshape(flat, [-1, self.height, self.width, self.channels]), self.dtype)


def augment_batch(images: Any, random: Any, augment: str, height: int, width: int) -> Any:
    """Returns images [n, h, w, c] of one size, changed by their random numbers [n, ...].

    Crops and flips keep the size; a random part of an image is resized to the given one.
    """
    if augment == "none":
        return images
    if augment == "imagenet":
        return _cut_random_parts(images, random, height, width)
    span = 2 * _MAX_SHIFT + 1
    shifts = tf.minimum(tf.cast(random[:, :2] * span, tf.int32), span - 1)
    rows, columns = tf.range(images.shape[1]) + shifts[:, :1], tf.range(images.shape[2]) + shifts[:, 1:]
    if augment == "crop_flip":
        columns = tf.where(random[:, 2:] < 0.5, columns, columns[:, ::-1])
    margin = [_MAX_SHIFT, _MAX_SHIFT]
    padded = tf.pad(images, [[0, 0], margin, margin, [0, 0]])
    return tf.gather(tf.gather(padded, rows, batch_dims=1), columns, axis=2, batch_dims=1)


def resize(images: Any, height: int, width: int) -> Any:
    """Returns images [n, h, w, c] in another size, as 8-bit numbers."""
    if tuple(images.shape[1:3]) == (height, width):
        return images
    return _round_to_8_bit(tf.image.resize(images, [height, width]))


def random_box(random: Any, height: Any, width: Any) -> Any:
    """Returns top, left, height and width, whole numbers, of a random part of an image, from numbers [..., 5]."""
    area = height * width * (_MIN_AREA + (1 - _MIN_AREA) * random[..., 0])
    ratio = tf.exp((2 * random[..., 1] - 1) * np.log(_MAX_RATIO).astype(np.float32))
    box_height = tf.clip_by_value(tf.round(tf.sqrt(area / ratio)), 1, height)
    box_width = tf.clip_by_value(tf.round(tf.sqrt(area * ratio)), 1, width)
    top = tf.minimum(tf.floor(random[..., 2] * (height - box_height + 1)), height - box_height)
    left = tf.minimum(tf.floor(random[..., 3] * (width - box_width + 1)), width - box_width)
    return tf.stack([top, left, box_height, box_width], -1)


def centre_box(image_height: Any, image_width: Any, height: int, width: int) -> Any:
    """Returns top, left, height and width, whole numbers, of the middle of an image, in the proportions of a size."""
    scale = _CENTRE_SHARE * tf.minimum(image_height / height, image_width / width)
    size = tf.maximum(tf.round([scale * height, scale * width]), 1)
    return tf.concat([tf.floor(([image_height, image_width] - size) / 2), size], 0)


def is_mirrored(random: Any) -> Any:
    """Whether the random part of an image is mirrored, from its numbers [..., 5]."""
    return random[..., 4] >= 0.5


def _cut_random_parts(images: Any, random: Any, height: int, width: int) -> Any:
    """Returns a random part of each image, sometimes mirrored, in another size."""
    image_height, image_width = float(images.shape[1]), float(images.shape[2])
    top, left, box_height, box_width = tf.unstack(random_box(random, image_height, image_width), axis=-1)
    left, right = left / (image_width - 1), (left + box_width - 1) / (image_width - 1)
    mirrored = is_mirrored(random)
    boxes = tf.stack(
        [
            top / (image_height - 1),
            tf.where(mirrored, right, left),
            (top + box_height - 1) / (image_height - 1),
            tf.where(mirrored, left, right),
        ],
        -1,
    )
    parts = tf.image.crop_and_resize(images, boxes, tf.range(tf.shape(images)[0]), [height, width])
    return _round_to_8_bit(parts)


def _round_to_8_bit(images: Any) -> Any:
    return tf.cast(tf.round(images), tf.uint8)
