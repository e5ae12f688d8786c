"""Gradient reduction: packing of tensors, and contributions to the all-reduce."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tf_ipu_dp.emulator.runtime import gradient_reduction
from tf_ipu_dp.emulator.sdk_api.ipu.ops import replication_ops

SHAPES = st.lists(st.integers(0, 4), max_size=3)
DTYPES = st.sampled_from(["float32", "float16", "int32"])


def make(shapes_and_dtypes):
    return [
        tf.constant(np.random.RandomState(number).randint(0, 100, shape).astype(dtype))
        for number, (shape, dtype) in enumerate(shapes_and_dtypes)
    ]


@given(st.lists(st.tuples(SHAPES, DTYPES), max_size=8))
def test_what_is_packed_comes_back_as_it_was_in_one_vector_for_each_type(shapes_and_dtypes):
    tensors = make(shapes_and_dtypes)
    layout = gradient_reduction.Packing(tensors)
    packed = layout.pack(tensors)
    assert len(packed) == len({dtype for _, dtype in shapes_and_dtypes})
    assert all(vector.shape.rank == 1 for vector in packed)
    for tensor, back in zip(tensors, layout.unpack(packed)):
        assert back.dtype == tensor.dtype and back.shape == tensor.shape
        np.testing.assert_array_equal(back, tensor)
    for zeros, vector in zip(layout.zeros(), packed):
        assert zeros.dtype == vector.dtype and zeros.shape == vector.shape and not np.any(zeros)


@pytest.mark.parametrize("places", [[0], [1], [2], [0, 2]])
def test_large_ones_stay_alone_and_are_not_copied(places):
    shapes = [(256, 256) if place in places else (3, 2) for place in range(3)]
    tensors = make([(shape, "float32") for shape in shapes])
    layout = gradient_reduction.Packing(tensors)
    packed = layout.pack(tensors)
    alone = packed[-len(places) :]
    assert [id(tensor) for tensor in alone] == [id(tensors[place]) for place in places]
    assert [each.shape for each in layout.zeros()] == [each.shape for each in packed]
    for tensor, back in zip(tensors, layout.unpack(packed)):
        np.testing.assert_array_equal(back, tensor)


def test_variables_say_how_they_are_packed():
    variables = [tf.Variable([[1.0, 2.0]]), tf.Variable(3.0), tf.Variable([4, 5])]
    layout = gradient_reduction.Packing(variables)
    packed = layout.pack([variable.value() for variable in variables])
    assert [each.numpy().tolist() for each in packed] == [[1.0, 2.0, 3.0], [4, 5]]


def test_zeros_may_be_of_other_types():
    layout = gradient_reduction.Packing([tf.zeros([2]), tf.zeros([3], tf.int32)])
    assert layout.dtypes() == [tf.float32, tf.int32]
    assert [each.dtype for each in layout.zeros([tf.float64, tf.int32])] == [tf.float64, tf.int32]


@pytest.mark.parametrize("replicas", [1, 4])
def test_contributions_are_combined_over_concurrent_replicas_each_in_its_own_way(scope, replicas):
    strategy = scope(replicas)
    with strategy.scope():
        model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(1,))])

    def program():
        number = tf.cast(replication_ops.replication_index(), tf.float32)
        contributions = [
            gradient_reduction.Contribution([number + 1, 2 * number]),
            gradient_reduction.Contribution([]),
            gradient_reduction.Contribution([number], tf.stack),
        ]
        sums, nothing, stacked = gradient_reduction.all_reduce(model, replicas > 1, "test", contributions)
        assert nothing == []
        return sums, stacked[0]

    (first, second), stacked = strategy.run(tf.function(program, autograph=False))
    assert float(first) == replicas * (replicas + 1) / 2 and float(second) == replicas * (replicas - 1)
    assert np.ravel(stacked).tolist() == list(range(replicas))


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize(("replicas", "accumulation"), [(1, 3), (2, 1), (2, 3)])
def test_accumulated_gradients_are_summed_over_replicas_and_averaged_over_micro_batches_if_asked(
    scope, replicas, accumulation, mean
):
    x = np.random.RandomState(0).randn(24, 2).astype("float32")
    with scope(replicas).scope():
        model = tf.keras.Sequential([tf.keras.layers.Dense(1, kernel_initializer="ones", input_shape=(2,))])
        model.compile(tf.keras.optimizers.SGD(1.0), "mse", steps_per_execution=accumulation)
        model.set_gradient_accumulation_options(accumulation, "mean" if mean else "sum")
        model.fit(x, x[:, :1], batch_size=2, steps_per_epoch=replicas * accumulation, shuffle=False, verbose=0)
    used = x[: 2 * replicas * accumulation]
    error = used @ np.ones([2, 1], "float32") - used[:, :1]
    gradient = used.T @ (2 * error / 2) / (accumulation if mean else 1)  # of the mean over the 2 samples of each batch
    np.testing.assert_allclose(model.get_weights()[0], 1 - gradient, rtol=1e-4, atol=1e-5)
