"""8-bit floats: every code of both formats, rounding of every float16, and products of the numbers."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tf_ipu_dp.emulator.sdk_api.ipu import config as ipu_config
from tf_ipu_dp.emulator.sdk_api.ipu.ops import f8_ops
from tf_ipu_dp.emulator.sdk_api.ipu.ops.f8_ops import Format

RNG = np.random.RandomState(0)
CODES = np.arange(256, dtype=np.uint8)


def number(code, fmt):
    """Returns what a code stands for, bit by bit."""
    mantissa_bits, bias = {Format.F143: (3, 8), Format.F152: (2, 16)}[fmt]
    if code == 0x80:
        return float("nan")
    exponent, mantissa = (code & 0x7F) >> mantissa_bits, code & (2**mantissa_bits - 1)
    fraction = mantissa / 2**mantissa_bits
    magnitude = 2.0 ** (exponent - bias) * (1 + fraction) if exponent else 2.0 ** (1 - bias) * fraction
    return -magnitude if code & 0x80 else magnitude


def quarter(values, fmt=Format.F143, scale=0):
    return f8_ops.convert_to_f8(values, f8_ops.create_metadata(fmt, scale))


@pytest.mark.parametrize("scale", [-32, -1, 0, 5, 31])
@pytest.mark.parametrize("fmt", Format)
def test_every_code_is_its_number_and_comes_back_as_the_same_code(fmt, scale):
    packed = f8_ops.QuarterTensor(tf.constant(CODES), f8_ops.create_metadata(fmt, scale))
    numbers = f8_ops.convert_from_f8(packed, tf.float32)
    np.testing.assert_array_equal(numbers, [number(int(code), fmt) * 2.0**scale for code in CODES])
    finite = np.nan_to_num(numbers)
    exact = finite == np.clip(finite, tf.float16.min, tf.float16.max).astype("float16")  # the way leads through these
    again = quarter(numbers, fmt, scale)
    np.testing.assert_array_equal(again.data.numpy()[exact], CODES[exact])
    assert (again.data.dtype, int(again.metadata)) == (tf.uint8, int(packed.metadata))


@pytest.mark.parametrize(("fmt", "largest", "smallest"), [(Format.F143, 240, 2**-10), (Format.F152, 57344, 2**-17)])
def test_the_range_of_a_format_is_that_of_its_definition(fmt, largest, smallest):
    numbers = f8_ops.convert_from_f8(f8_ops.QuarterTensor(CODES[:128], f8_ops.create_metadata(fmt)), tf.float32).numpy()
    assert (numbers.max(), numbers[numbers > 0].min(), numbers[0x40]) == (largest, smallest, 1)
    assert (np.diff(numbers) > 0).all()


@pytest.mark.parametrize("scale", [0, 3])
@pytest.mark.parametrize("fmt", Format)
def test_every_float16_is_rounded_to_the_nearest_number_or_to_the_even_code(fmt, scale):
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16)
    found = quarter(halves, fmt, scale).data.numpy()
    numbers = np.array([number(code, fmt) * 2.0**scale for code in range(128)])
    finite = np.isfinite(halves)
    distances = np.abs(np.abs(halves[finite].astype("float64"))[:, np.newaxis] - numbers)
    best = distances.min(axis=1, keepdims=True) == distances
    chosen = found[finite] & 0x7F
    assert best[np.arange(len(chosen)), chosen].all()
    assert (chosen[best.sum(axis=1) == 2] % 2 == 0).all() and (best.sum(axis=1) == 2).any()
    np.testing.assert_array_equal(found[finite] >= 0x80, (halves[finite] < 0) & (chosen > 0))
    assert set(found[~finite]) == {0x80}


def test_numbers_that_are_too_large_become_the_largest():
    assert f8_ops.convert_from_f8(quarter([1e30, -1e30, 241.0])).numpy().tolist() == [240, -240, 240]
    assert f8_ops.convert_from_f8(quarter([1e30], Format.F152)).numpy().tolist() == [57344]
    packed = f8_ops.QuarterTensor(tf.constant([0x7F], tf.uint8), f8_ops.create_metadata(Format.F152, 9))
    assert f8_ops.convert_from_f8(packed).numpy().tolist() == [tf.float16.max]
    assert f8_ops.convert_from_f8(packed, tf.float32).numpy().tolist() == [57344 * 512]


def test_numbers_that_are_too_large_become_nan_if_the_ipus_are_configured_so(emulator_dir):
    config = ipu_config.IPUConfig()
    config.floating_point_behaviour.nanoo = True
    config.configure_ipu_system()
    try:
        codes = quarter([240.0, 247.0, 248.0, -1e30, -3.0]).data.numpy().tolist()
        assert codes == [0x7F, 0x7F, 0x80, 0x80, 0xCC]
        packed = f8_ops.QuarterTensor(tf.constant([0x7F, 0x40], tf.uint8), f8_ops.create_metadata(Format.F152, 9))
        np.testing.assert_array_equal(f8_ops.convert_from_f8(packed), [float("nan"), 512])
        row, column = quarter([[240.0, 240.0]]), quarter([[240.0], [240.0]])
        assert np.isnan(f8_ops.f8_matmul(row, column).numpy()).all()
    finally:
        ipu_config.reset_ipu_configuration()
    assert f8_ops.f8_matmul(row, column).numpy().tolist() == [[tf.float16.max]]


@pytest.mark.parametrize("formats", [(Format.F143, Format.F143), (Format.F143, Format.F152)])
def test_products_and_convolutions_are_those_of_the_numbers(formats):
    def check(compute, stock, *shapes):
        packed = [quarter(RNG.randn(*shape), fmt, scale) for shape, fmt, scale in zip(shapes, formats, (1, -2))]
        result = compute(*packed)
        assert result.dtype == tf.float16
        expected = stock(*(f8_ops.convert_from_f8(one, tf.float32) for one in packed))
        np.testing.assert_array_equal(result, tf.cast(expected, tf.float16))

    check(f8_ops.f8_matmul, tf.matmul, (3, 4), (4, 5))
    check(f8_ops.f8_matmul, tf.matmul, (2, 3, 4), (2, 4, 5))
    check(
        lambda x, w: f8_ops.f8_conv_1d(x, w, 2, "SAME"),
        lambda x, w: tf.nn.conv1d(x, w, 2, "SAME"),
        (2, 8, 3),
        (3, 3, 4),
    )
    check(
        lambda x, w: f8_ops.f8_conv_2d(x, w, strides=1, padding="VALID", dilations=2),
        lambda x, w: tf.nn.conv2d(x, w, 1, "VALID", dilations=2),
        (2, 8, 8, 3),
        (3, 3, 3, 4),
    )
    ones = [1] * 5
    check(
        lambda x, w: f8_ops.f8_conv_3d(x, w, ones, "SAME"),
        lambda x, w: tf.nn.conv3d(x, w, ones, "SAME"),
        (1, 4, 4, 4, 2),
        (3, 3, 3, 2, 2),
    )


def test_they_are_computed_and_returned_by_programs_of_the_device(scope):
    strategy = scope(2)

    @tf.function
    def program(x, w, metadata):
        packed = f8_ops.convert_to_f8(x, metadata)
        return packed, f8_ops.f8_matmul(packed, f8_ops.convert_to_f8(w, metadata))

    arguments = [tf.constant([[1.0, 2.0]]), tf.constant([[3.0], [0.5]]), f8_ops.create_metadata(Format.F143, -1)]
    packed, product = strategy.run(program, args=arguments)
    assert isinstance(packed, f8_ops.QuarterTensor) and product.numpy().tolist() == [[4]]
    data, metadata = packed.numpy()
    assert data.tolist() == [[0x48, 0x50]] and metadata == arguments[2].numpy()


def test_what_is_not_8_bit_floats_is_refused():
    for scale in (-33, 32):
        with pytest.raises(ValueError, match=rf"scale={scale} is not in \[-32, 31\]"):
            f8_ops.create_metadata(Format.F143, scale)
    with pytest.raises(TypeError, match="fmt must be a Format"):
        f8_ops.create_metadata("F143")
    with pytest.raises(TypeError, match="come as a QuarterTensor"):
        f8_ops.f8_matmul(tf.ones([2, 2]), quarter(tf.ones([2, 2])))
    with pytest.raises(TypeError, match="are uint8, not float32"):
        f8_ops.convert_from_f8([tf.ones([2]), f8_ops.create_metadata(Format.F143)])
