"""`tensorflow.python.ipu.ops.f8_ops`: 8-bit floating point, as tensors of bytes beside a byte of metadata.

A number is `(-1)^sign * 2^(exponent - bias) * 1.mantissa`, times 2 to the power of the metadata's scale, with
subnormal numbers for the exponent 0. F143 has 4 bits of exponent, 3 of mantissa and the bias 8; F152 has 5, 2 and 16.
There are no infinities and no negative zero: its code, 0x80, is NaN. Conversion goes through float16 and rounds to the
nearest number, in the middle of two to the one with an even mantissa. What is too large becomes the largest number, or
NaN if the IPUs are configured with `floating_point_behaviour.nanoo`. Products are summed in float32 and come back in
float16. Nothing here has a gradient.
"""

from __future__ import annotations

import enum
from typing import Any, Callable, NamedTuple, Optional, Tuple

import numpy as np
import tensorflow as tf

from tf_ipu_dp.emulator.sdk_api.ipu import config as ipu_config

__all__ = [
    "Format",
    "QuarterTensor",
    "convert_from_f8",
    "convert_to_f8",
    "create_metadata",
    "f8_conv_1d",
    "f8_conv_2d",
    "f8_conv_3d",
    "f8_matmul",
]

_NAN = 0x80
_LOWEST_SCALE, _HIGHEST_SCALE = -32, 31
# The format is the highest bit of the metadata, the scale the lowest six. An IPU's own layout is not documented.
_FORMAT_BIT, _SCALES = 128, 64


class Format(enum.Enum):
    """The two formats, by their bits of sign, exponent and mantissa."""

    F143 = 1
    F152 = 0


class QuarterTensor(NamedTuple):
    """A tensor of 8-bit floats: their codes as uint8, and the metadata that they share."""

    data: Any
    metadata: Any

    def numpy(self) -> Any:
        """Returns codes and metadata as arrays."""
        return [self.data.numpy(), self.metadata.numpy()]


def _magnitudes(exponent_bits: int, mantissa_bits: int, bias: int) -> Any:
    """Returns the numbers that the codes 0 to 127 stand for, which are in ascending order."""
    assert exponent_bits + mantissa_bits == 7
    exponent, mantissa = np.divmod(np.arange(128), 2**mantissa_bits)
    fraction = mantissa / 2.0**mantissa_bits
    return np.where(exponent == 0, np.ldexp(fraction, 1 - bias), np.ldexp(1 + fraction, exponent - bias))


# By the format's bit. All of these numbers are exact in float32, and so are the middles between them.
_NUMBERS = np.stack([_magnitudes(5, 2, 16), _magnitudes(4, 3, 8)]).astype(np.float32)
_MIDDLES = (_NUMBERS[:, 1:] + _NUMBERS[:, :-1]) / 2
_OVERFLOWS = _NUMBERS[:, -1] + (_NUMBERS[:, -1] - _MIDDLES[:, -1])  # what would be rounded to the next number
_CODED = np.concatenate([_NUMBERS, -_NUMBERS], axis=1)
_CODED[:, _NAN] = np.nan
_POWERS = np.ldexp(np.float32(1), np.arange(_LOWEST_SCALE, _HIGHEST_SCALE + 1))


def create_metadata(fmt: Format, scale: int = 0) -> Any:
    """Returns the metadata of a format and a scale: numbers are multiplied by 2 to the power of the scale."""
    if not isinstance(fmt, Format):
        raise TypeError(f"fmt must be a Format, not {fmt!r}.")
    if not _LOWEST_SCALE <= scale <= _HIGHEST_SCALE:
        raise ValueError(f"scale={scale} is not in [{_LOWEST_SCALE}, {_HIGHEST_SCALE}].")
    return tf.constant(fmt.value * _FORMAT_BIT + scale % _SCALES, tf.uint8)


def convert_to_f8(values: Any, metadata: Any, name: Optional[str] = None) -> QuarterTensor:
    """Returns the nearest 8-bit floats. Infinities and NaN become NaN."""
    with tf.name_scope(name or "convert_to_f8"):
        metadata = tf.convert_to_tensor(metadata, tf.uint8)
        values = tf.cast(tf.convert_to_tensor(values), tf.float32)
        fmt, power = _read(metadata)
        magnitudes = tf.abs(tf.cast(_cast(values, tf.float16), tf.float32)) / power
        defined = tf.math.is_finite(magnitudes)
        if _overflow_is_nan():
            defined &= magnitudes < tf.gather(_OVERFLOWS, fmt)
        flat, middles = tf.reshape(magnitudes, [-1]), tf.gather(_MIDDLES, fmt)
        below = tf.searchsorted(middles, flat, side="left")
        above = tf.searchsorted(middles, flat, side="right")
        # They differ in the middle of two numbers only. Of two neighbouring codes one is even.
        codes = tf.reshape(tf.where(below % 2 == 0, below, above), tf.shape(values))
        codes = tf.where((values < 0) & (codes > 0), codes + _NAN, codes)
        return QuarterTensor(tf.cast(tf.where(defined, codes, _NAN), tf.uint8), metadata)


def convert_from_f8(packed_input: Any, dtype: Any = tf.float16, name: Optional[str] = None) -> Any:
    """Returns the numbers of a `QuarterTensor`, or of a pair of codes and metadata, in another type."""
    with tf.name_scope(name or "convert_from_f8"):
        return _cast(_numbers(packed_input), tf.as_dtype(dtype))


def f8_matmul(lhs: Any, rhs: Any, name: str = "f8_matmul") -> Any:
    """Returns the matrix product of two tensors of 8-bit floats, in float16."""
    return _in_float16(tf.matmul, lhs, rhs, name=name)


def f8_conv_1d(
    inputs: Any,
    filters: Any,
    strides: Any,
    padding: Any,
    data_format: str = "NWC",
    dilations: Any = None,
    name: Optional[str] = None,
) -> Any:
    """Returns the convolution `tf.nn.conv1d` of 8-bit floats, in float16."""
    return _in_float16(tf.nn.conv1d, inputs, filters, strides, padding, data_format, dilations, name=name)


def f8_conv_2d(
    inputs: Any,
    filters: Any,
    strides: Any,
    padding: Any,
    data_format: str = "NHWC",
    dilations: Any = None,
    name: Optional[str] = None,
) -> Any:
    """Returns the convolution `tf.nn.conv2d` of 8-bit floats, in float16."""
    return _in_float16(tf.nn.conv2d, inputs, filters, strides, padding, data_format, dilations, name=name)


def f8_conv_3d(
    inputs: Any,
    filters: Any,
    strides: Any,
    padding: Any,
    data_format: str = "NDHWC",
    dilations: Any = None,
    name: Optional[str] = None,
) -> Any:
    """Returns the convolution `tf.nn.conv3d` of 8-bit floats, in float16."""
    return _in_float16(tf.nn.conv3d, inputs, filters, strides, padding, data_format, dilations, name=name)


def _in_float16(product: Callable[..., Any], left: Any, right: Any, *settings: Any, name: Optional[str]) -> Any:
    return _cast(product(_numbers(left), _numbers(right), *settings, name=name), tf.float16)


def _numbers(packed: Any) -> Any:
    if not isinstance(packed, (tuple, list)) or len(packed) != 2:
        raise TypeError(f"8-bit floats come as a QuarterTensor, not as {type(packed).__name__}.")
    data, metadata = (tf.convert_to_tensor(part) for part in packed)
    if data.dtype != tf.uint8 or metadata.dtype != tf.uint8:
        raise TypeError(f"8-bit floats and their metadata are uint8, not {data.dtype.name} and {metadata.dtype.name}.")
    fmt, power = _read(metadata)
    return tf.gather(tf.gather(_CODED, fmt), tf.cast(data, tf.int32)) * power


def _read(metadata: Any) -> Tuple[Any, Any]:
    """Returns the format's bit, and 2 to the power of the scale."""
    bits = tf.reshape(tf.cast(metadata, tf.int32), [])
    # The scale is in two's complement, and the first of the powers is that of the lowest one.
    return bits // _FORMAT_BIT, tf.gather(_POWERS, (bits - _LOWEST_SCALE) % _SCALES)


def _cast(values: Any, dtype: Any) -> Any:
    """Converts to another type, in which a finite number must not become infinite."""
    result = tf.cast(values, dtype)
    if not dtype.is_floating:
        return result
    instead = float("nan") if _overflow_is_nan() else tf.sign(values) * tf.cast(dtype.max, values.dtype)
    overflow = tf.math.is_inf(result) & tf.math.is_finite(values)
    return tf.where(overflow, tf.cast(instead, dtype), result)


def _overflow_is_nan() -> bool:
    try:
        behaviour = ipu_config.get_ipu_config()[0].floating_point_behaviour
    except RuntimeError:  # nothing is configured
        return False
    return bool(behaviour.nanoo or behaviour.set_all)
