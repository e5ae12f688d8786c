"""The SDK's activations, losses, products and lookups, against stock TensorFlow and by hand."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_ipu_dp.emulator.sdk_api.ipu.ops import embedding_ops, math_ops, nn_ops

RNG = np.random.RandomState(0)
HALF_AND_SINGLE = pytest.mark.parametrize("dtype", [tf.float16, tf.float32])


def normal(*shape, dtype=tf.float32):
    return tf.constant(RNG.randn(*shape), dtype)


def value_and_gradients(function, *tensors, traced=False):
    """The function's value and the gradients of its sum of squares."""

    def compute(*inputs):
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            value = function(*inputs)
            loss = tf.reduce_sum(tf.square(tf.cast(value, tf.float32)))
        return [value, *tape.gradient(loss, inputs)]

    return (tf.function(compute) if traced else compute)(*tensors)


def assert_same(left, right, tolerance=1e-6):
    assert len(left) == len(right)
    for one, other in zip(left, right):
        assert isinstance(one, tf.Tensor)
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=tolerance, atol=tolerance)


@HALF_AND_SINGLE
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize(
    ("ours", "stock"),
    [
        (nn_ops.gelu, lambda x: tf.nn.gelu(x, approximate=True)),
        (lambda x: nn_ops.gelu(x, approximate=False), tf.nn.gelu),
        (nn_ops.swish, lambda x: x * tf.sigmoid(x)),
        (nn_ops.hard_sigmoid, tf.keras.activations.hard_sigmoid),
        (lambda x: nn_ops.softmax(x, stable=True), tf.nn.softmax),
    ],
    ids=["gelu", "exact gelu", "swish", "hard_sigmoid", "softmax"],
)
def test_activations_are_the_stock_ones(ours, stock, dtype, traced):
    x = normal(3, 5, dtype=dtype) * 3
    tolerance = 1e-6 if dtype == tf.float32 else 4e-3
    assert_same(value_and_gradients(ours, x, traced=traced), value_and_gradients(stock, x), tolerance)


def test_multi_conv_calls_its_function_with_or_without_options():
    @nn_ops.multi_conv
    def double(x):
        return x * 2, [x]

    @nn_ops.multi_conv(options={"perConvReservedTiles": "50"})
    def triple(x):
        return x * 3

    doubled, (kept,) = double(tf.constant([1.0]))
    assert (doubled.numpy(), kept.numpy(), tf.function(triple)(tf.constant([1.0])).numpy()) == (2, 1, 3)
    with pytest.raises(TypeError):
        double(x=tf.constant([1.0]))
    with pytest.raises(TypeError):
        nn_ops.multi_conv(double, options="perConvReservedTiles")


@HALF_AND_SINGLE
@pytest.mark.parametrize("name", ["sampled_softmax_loss", "nce_loss"])
def test_sampled_losses_are_the_stock_ones_with_dense_gradients(name, dtype):
    weights, biases, inputs = normal(20, 4, dtype=dtype), normal(20, dtype=dtype), normal(3, 4, dtype=dtype)
    labels = tf.constant([[1], [7], [19]])
    sampled = (tf.constant([2, 3, 5, 11], tf.int64), tf.fill([3, 1], 0.4), tf.fill([4], 0.3))

    def loss(where):
        return lambda *tensors: getattr(where, name)(tensors[0], tensors[1], labels, tensors[2], 4, 20, 1, sampled)

    found = value_and_gradients(loss(nn_ops), weights, biases, inputs, traced=True)
    single = [tf.cast(tensor, tf.float32) for tensor in (weights, biases, inputs)]
    expected = [tf.cast(tf.convert_to_tensor(one), dtype) for one in value_and_gradients(loss(tf.nn), *single)]
    assert found[0].shape == [3]
    assert_same(found, expected, 1e-6 if dtype == tf.float32 else 2e-2)


def test_sampled_losses_draw_their_own_classes():
    inputs = (normal(20, 4), normal(20), tf.constant([[1], [7]]), normal(2, 4), 5, 20)
    assert nn_ops.nce_loss(*inputs).shape == [2]
    seeded = tf.function(lambda: nn_ops.sampled_softmax_loss(*inputs, seed=3))
    assert np.all(np.isfinite(seeded().numpy()))


LABELS = tf.constant([[1, 2, 2], [3, 1, 0]])
LABEL_LENGTH, LOGIT_LENGTH = tf.constant([3, 2]), tf.constant([7, 5])


@pytest.mark.parametrize("blank", [0, 4])
def test_ctc_loss_is_the_stock_one_for_logits_and_for_log_probabilities(blank):
    logits = normal(7, 2, 5)
    labels = LABELS + 1 if blank == 0 else LABELS

    def stock(x):
        return tf.nn.ctc_loss(labels, x, LABEL_LENGTH, LOGIT_LENGTH, blank_index=blank)

    def ours(x):
        return nn_ops.ctc_loss_v2(labels, x, LABEL_LENGTH, LOGIT_LENGTH, blank)

    def of_probabilities(x):
        return nn_ops.ctc_loss_with_log_probs(labels, tf.nn.log_softmax(x), LABEL_LENGTH, LOGIT_LENGTH, blank)

    expected = value_and_gradients(stock, logits)
    assert_same(value_and_gradients(ours, logits, traced=True), expected, 1e-5)
    assert_same(value_and_gradients(of_probabilities, logits, traced=True), expected, 1e-4)


def test_the_gradient_of_ctc_loss_by_log_probabilities_is_minus_each_class_share_of_the_paths():
    # One frame, one label: the loss is minus its log probability.
    log_probs = tf.math.log([[[0.2, 0.3, 0.5]]])
    with tf.GradientTape() as tape:
        tape.watch(log_probs)
        loss = nn_ops.ctc_loss_with_log_probs([[1]], log_probs, [1], [1], 0)
    np.testing.assert_allclose(loss.numpy(), [-np.log(0.3)], rtol=1e-5)
    np.testing.assert_allclose(tape.gradient(loss, log_probs).numpy(), [[[0, -1, 0]]], atol=1e-5)


def test_ctc_loss_has_the_type_that_is_asked_for_but_none_that_loses_precision():
    half = normal(7, 2, 5, dtype=tf.float16)
    assert nn_ops.ctc_loss_v2(LABELS, half, LABEL_LENGTH, LOGIT_LENGTH, 4).dtype == tf.float16
    assert nn_ops.ctc_loss_v2(LABELS, half, LABEL_LENGTH, LOGIT_LENGTH, 4, tf.float32).dtype == tf.float32
    with pytest.raises(ValueError, match="out_dtype"):
        nn_ops.ctc_loss_v2(LABELS, tf.cast(half, tf.float32), LABEL_LENGTH, LOGIT_LENGTH, 4, tf.float16)


@pytest.mark.parametrize("blank", [0, 2, -1])
def test_the_beam_search_finds_the_stock_paths_for_any_blank(blank):
    stock_logits = normal(6, 2, 5)
    place = blank % 5
    order = [*range(place), 4, *range(place, 4)]
    logits = tf.gather(stock_logits, order, axis=2)
    paths, expected = tf.nn.ctc_beam_search_decoder(stock_logits, [6, 4], beam_width=10, top_paths=3)

    decode = tf.function(lambda x: nn_ops.ctc_beam_search_decoder(x, [6, 4], 10, 3, blank))
    probabilities, lengths, labels = decode(logits)
    assert labels.shape == [2, 3, 6]
    np.testing.assert_allclose(probabilities.numpy(), expected.numpy(), rtol=1e-5)
    for number, path in enumerate(paths):
        dense = tf.sparse.to_dense(path, default_value=4).numpy()
        for sample in range(2):
            length = lengths.numpy()[sample, number]
            wanted = [order.index(label) for label in dense[sample] if label != 4]
            assert labels.numpy()[sample, number].tolist() == wanted + [place] * (6 - length)

    of_log_probs = nn_ops.ctc_beam_search_decoder_with_log_probs(tf.nn.log_softmax(logits), [6, 4], 10, 3, blank)
    np.testing.assert_allclose(of_log_probs[0].numpy(), expected.numpy(), rtol=1e-4)
    assert np.array_equal(of_log_probs[2].numpy(), labels.numpy())


@settings(max_examples=40)
@given(st.data())
def test_a_serialised_product_is_the_product_when_the_factor_divides_and_refused_when_not(data):
    m, k, n = (data.draw(st.integers(1, 6)) for _ in range(3))
    batch = data.draw(st.sampled_from([[], [2]]))
    transpose_a, transpose_b = data.draw(st.booleans()), data.draw(st.booleans())
    dimension, factor = (
        data.draw(st.sampled_from(["a_columns", "a_rows_b_columns", "b_rows"])),
        data.draw(st.integers(1, 4)),
    )
    a = normal(*batch, *((k, m) if transpose_a else (m, k)))
    b = normal(*batch, *((n, k) if transpose_b else (k, n)))
    size = {"a_columns": m, "a_rows_b_columns": k, "b_rows": n}[dimension]
    arguments = (factor, dimension, transpose_a, transpose_b)
    if size % factor:
        with pytest.raises(ValueError, match="does not divide"):
            math_ops.serialized_matmul(a, b, *arguments)
        return
    found = value_and_gradients(lambda x, y: math_ops.serialized_matmul(x, y, *arguments), a, b)
    stock = value_and_gradients(lambda x, y: tf.matmul(x, y, transpose_a=transpose_a, transpose_b=transpose_b), a, b)
    assert_same(found, stock)


@pytest.mark.parametrize(
    ("shape", "factor", "dimension"), [([2, 2], 1, "rows"), ([2, 2], 0, "b_rows"), ([2], 1, "b_rows")]
)
def test_a_serialised_product_refuses_unknown_dimensions_factors_and_vectors(shape, factor, dimension):
    with pytest.raises(ValueError):
        math_ops.serialized_matmul(tf.ones(shape), tf.ones([2, 2]), factor, dimension)


@HALF_AND_SINGLE
def test_segments_are_added_up(dtype):
    data = normal(4, 3, dtype=dtype)
    found = value_and_gradients(lambda x: math_ops.segment_sum(x, [0, 0, 2, 2], 4), data, traced=True)
    assert_same(found, value_and_gradients(lambda x: tf.math.unsorted_segment_sum(x, [0, 0, 2, 2], 4), data))
    for ids, count in (([0, 0, 1], 2), ([0, 0, 1, 1], 0)):
        with pytest.raises(ValueError):
            math_ops.segment_sum(data, ids, count)


@HALF_AND_SINGLE
@pytest.mark.parametrize("traced", [False, True])
def test_a_lookup_has_the_stock_rows_and_a_dense_gradient(dtype, traced):
    ids = tf.constant([[1, 1], [5, 0]])
    table = tf.Variable(normal(6, 3, dtype=dtype))

    def gradient():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(embedding_ops.embedding_lookup(table, ids, serialization_factor=3)))
        return tape.gradient(loss, table)

    found = (tf.function(gradient) if traced else gradient)()
    stock = value_and_gradients(lambda x: tf.gather(x, ids), tf.convert_to_tensor(table))
    assert_same([embedding_ops.embedding_lookup(table, ids), found], [stock[0], tf.convert_to_tensor(stock[1])])


def test_a_lookup_understands_the_argument_order_of_sdk_2_6_and_checks_the_factor():
    table, ids = normal(6, 3), tf.constant([4])
    for arguments in (("name",), (None, 2), ("name", 3), (2, True, "name")):
        assert_same([embedding_ops.embedding_lookup(table, ids, *arguments)], [table[4:5]])
    for arguments in ((0,), (4,), ("name", 4)):
        with pytest.raises(ValueError, match="serialization_factor"):
            embedding_ops.embedding_lookup(table, ids, *arguments)
