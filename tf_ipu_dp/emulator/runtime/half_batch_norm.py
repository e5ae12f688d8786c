"""Batch normalisation whose scale, offset and statistics are float16, as 16.16 training has them on the device.

TensorFlow's kernel takes these in float32 only. So they are converted around it, which is also how the device computes
statistics of float16 inputs.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.ops import gen_nn_ops

from tf_ipu_dp.emulator import patches

_PATCH = "half batch norm"
_NAME = "fused_batch_norm_v3"


def extend_tensorflow() -> None:
    """Makes the fused batch normalisation accept float16. Calling it twice is harmless."""
    if patches.is_applied(_PATCH):
        return
    stock = getattr(gen_nn_ops, _NAME)

    def fused_batch_norm_v3(x: Any, scale: Any, offset: Any, mean: Any, variance: Any, **options: Any) -> Any:
        if tf.convert_to_tensor(scale).dtype != tf.float16:
            return stock(x, scale, offset, mean, variance, **options)
        wide = [tf.cast(each, tf.float32) for each in (scale, offset, mean, variance)]
        result = stock(x, *wide, **options)
        return result._replace(
            batch_mean=tf.cast(result.batch_mean, tf.float16), batch_variance=tf.cast(result.batch_variance, tf.float16)
        )

    patches.set_attribute(_PATCH, gen_nn_ops, _NAME, fused_batch_norm_v3)
