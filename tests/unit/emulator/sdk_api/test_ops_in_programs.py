"""The SDK's ops around the arithmetic: functions, state, statistics, slices, shards, hooks and refusals."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_ipu_dp.emulator.sdk_api.ipu import ops
from tf_ipu_dp.emulator.sdk_api.ipu.ops import (
    control_flow_ops,
    custom_ops,
    functional_ops,
    internal_ops,
    slicing_ops,
    statistics_ops,
    within_replica_ops,
)

ROWS = st.integers(0, 6)


def test_an_outlined_function_is_called_with_its_closure_its_branches_and_its_gradients():
    weight = tf.Variable(3.0)

    @functional_ops.outlined_function
    def scaled(x, more):
        if x > 0:
            return {"product": x * weight, "rest": [more, 1]}
        return {"product": x, "rest": [more, 1]}

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            result = scaled(x, tf.constant(7))
        return result, tape.gradient(result["product"], weight)

    result, gradient = step(tf.constant(2.0))
    assert (result["product"].numpy(), result["rest"][0].numpy(), gradient.numpy()) == (6, 7, 2)
    assert tf.is_tensor(result["rest"][1])
    assert step(tf.constant(-2.0))[0]["product"].numpy() == -2


def test_an_outlined_function_takes_positional_tensors_and_returns_at_least_one():
    @functional_ops.outlined_function(unique_sharding=True, keep_input_layouts=False, name="none")
    def nothing():
        return None

    named = functional_ops.outlined_function(lambda: 5)
    assert named().numpy() == 5
    with pytest.raises(TypeError):
        named(x=1)
    with pytest.raises(ValueError, match="at least one tensor"):
        nothing()


def test_barrier_and_remap_change_nothing():
    nest = {"a": tf.constant(1.0), "b": (tf.constant(2), np.float16(3))}
    found = tf.function(lambda: control_flow_ops.barrier(nest, insert_barrier_for_gradients=True))()
    assert tf.nest.map_structure(float, found) == {"a": 1.0, "b": (2.0, 3.0)}
    x = tf.constant([1.0, 2.0])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = internal_ops.remap_deduce(internal_ops.remap(control_flow_ops.barrier(x))) * 2
    assert tape.gradient(y, x).numpy().tolist() == [2, 2]


def test_a_printed_tensor_is_on_stderr_with_its_name(capfd):
    @tf.function
    def program(x):
        assert isinstance(internal_ops.print_tensor(x, "weights"), tf.Operation)
        internal_ops.print_tensor(x * 2)

    program(tf.range(8))
    assert capfd.readouterr().err == "weights: [0 1 2 3 4 5 6 7]\n[0 2 4 6 8 10 12 14]\n"


@pytest.mark.parametrize("depth", [1, 3])
def test_a_fifo_returns_the_value_of_some_steps_ago_over_all_runs_of_a_program(depth):
    @tf.function
    def program(start):
        seen = tf.TensorArray(tf.float32, 4)
        for step in tf.range(4):
            x = tf.cast([start + step, 10 * (start + step)], tf.float32)
            seen = seen.write(step, internal_ops.fifo(x, depth))
        return seen.stack()

    found = np.concatenate([program(tf.constant(1)).numpy(), program(tf.constant(5)).numpy()])
    expected = [[x, 10 * x] for x in [0] * depth + list(range(1, 9 - depth))]
    assert found.tolist() == expected
    assert internal_ops.fifo([1.0, 2.0], depth).numpy().tolist() == [0, 0]
    with pytest.raises(ValueError, match="depth"):
        internal_ops.fifo([1.0], 0)


def test_the_iteration_counter_counts_the_loop_around_it():
    @tf.function
    def program():
        seen = tf.TensorArray(tf.int32, 3)
        for step in tf.range(3):
            count = tf.constant(10)
            if step > 0:
                count = internal_ops.get_current_iteration_counter()
            seen = seen.write(step, count)
        return seen.stack()

    assert program().numpy().tolist() == [10, 1, 2]
    with pytest.raises(tf.errors.FailedPreconditionError):
        internal_ops.get_current_iteration_counter()
    with pytest.raises(tf.errors.FailedPreconditionError):
        tf.function(internal_ops.get_current_iteration_counter)()


@settings(max_examples=40)
@given(
    inputs=st.lists(st.integers(-8, 8), max_size=20),
    levels=st.lists(st.integers(-8, 8), min_size=1, max_size=5, unique=True).map(sorted),
    absolute=st.booleans(),
    dtype=st.sampled_from(["float16", "float32"]),
)
def test_a_histogram_counts_as_numpy_does(inputs, levels, absolute, dtype):
    inputs, levels = np.array(inputs, dtype), np.array(levels, dtype)
    values = np.abs(inputs) if absolute else inputs
    counts = np.histogram(values, [-np.inf, *levels, np.inf])[0]
    found = statistics_ops.histogram(inputs, levels, absolute_of_input=absolute)
    assert found.dtype == tf.float32
    assert found.numpy().tolist() == counts.tolist()
    assert statistics_ops.histogram_update(found, inputs, levels, absolute).numpy().tolist() == (2 * counts).tolist()


def test_histograms_are_normalised_and_levels_spread_over_the_inputs():
    levels = tf.function(lambda x: statistics_ops.fixed_width_bins(x, 4))(tf.constant([5.0, 1.0, 9.0]))
    assert levels.numpy().tolist() == [1, 5, 9]
    assert statistics_ops.histogram_normalize([1.0, 3.0]).numpy().tolist() == [0.25, 0.75]


@pytest.mark.parametrize(
    "call",
    [
        lambda: statistics_ops.histogram([[1.0]], [1.0]),
        lambda: statistics_ops.histogram([1.0], [[1.0]]),
        lambda: statistics_ops.histogram([1], [1.0]),
        lambda: statistics_ops.histogram([1.0], tf.constant([1.0], tf.float16)),
        lambda: statistics_ops.histogram_update([0.0, 0.0, 0.0], [1.0], [1.0]),
        lambda: statistics_ops.histogram_update(tf.zeros([2], tf.float16), [1.0], [1.0]),
        lambda: statistics_ops.fixed_width_bins([[1.0]], 3),
        lambda: statistics_ops.histogram_normalize([[1.0]]),
    ],
)
def test_statistics_refuse_wrong_ranks_types_and_sizes(call):
    with pytest.raises(ValueError):
        call()


def copied_by_hand(dst, src, counts, from_rows, to_rows, zero):
    result = np.zeros_like(dst) if zero else dst.copy()
    for count, start, target in zip(counts, from_rows, to_rows):
        result[target : target + count] = src[start : start + count]
    return result


@settings(max_examples=40)
@given(st.data())
def test_sequence_slices_are_copies_of_runs_of_rows(data):
    shape = data.draw(st.sampled_from([[], [2], [2, 3]]))
    dst = -np.arange(1, 1 + 6 * np.prod(shape, dtype=int)).reshape(6, *shape).astype("float32")
    src = np.arange(1, 1 + 8 * np.prod(shape, dtype=int)).reshape(8, *shape).astype("float32")
    runs = data.draw(st.lists(st.tuples(st.integers(0, 6), ROWS, ROWS), max_size=4))
    counts = [min(count, 6 - target, 8 - start) for count, start, target in runs]
    from_rows, to_rows = [run[1] for run in runs], [run[2] for run in runs]
    zero = data.draw(st.booleans())
    indices = [np.array(part, "int32") for part in (counts, from_rows, to_rows)]
    found = slicing_ops.sequence_slice(dst, src, *indices, zero)
    assert found.numpy().tolist() == copied_by_hand(dst, src, counts, from_rows, to_rows, zero).tolist()


def test_sequences_are_unpacked_and_packed_again_with_gradients():
    packed = tf.reshape(tf.range(12.0), [6, 2])

    @tf.function
    def program(src):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(src)
            rows = slicing_ops.sequence_slice_unpack(src, [2, 1], [3, 0], 4)
            back = slicing_ops.sequence_slice_pack(src, rows, [2, 1], [1, 5], False)
        return rows, back, tape.gradient(rows, src), tape.gradient(back, src)

    rows, back, of_rows, of_back = (tensor.numpy()[:, 0].tolist() for tensor in program(packed))
    assert rows == [6, 8, 0, 0]
    assert back == [0, 6, 8, 6, 8, 0]
    assert of_rows == [1, 0, 0, 1, 1, 0]
    assert of_back == [2, 0, 0, 2, 2, 0]


@pytest.mark.parametrize(
    ("dst", "src", "counts", "offsets"),
    [
        (tf.zeros([4, 2]), tf.zeros([4, 3]), [1], [0]),
        (tf.zeros([4, 2]), tf.zeros([4]), [1], [0]),
        (tf.zeros([4]), tf.zeros([4], tf.float16), [1], [0]),
        (tf.zeros([4]), tf.zeros([4]), [1], [0, 1]),
        (tf.zeros([4]), tf.zeros([4]), [[1]], [[0]]),
    ],
)
def test_sequence_slices_refuse_what_does_not_fit(dst, src, counts, offsets):
    with pytest.raises(ValueError):
        slicing_ops.sequence_slice(dst, src, counts, offsets, offsets, True)


def test_collectives_between_shards_are_arithmetic_on_a_list():
    shards = [tf.constant([1.0, 2.0, 3.0]), tf.constant([4.0, 5.0, 6.0])]

    def as_lists(tensors):
        return [tensor.numpy().tolist() for tensor in tensors]

    assert as_lists(within_replica_ops.all_gather(shards)) == [[1, 2, 3, 4, 5, 6]] * 2
    assert as_lists(within_replica_ops.all_reduce(shards, "COLLECTIVE_OP_ADD")) == [[5, 7, 9]] * 2
    assert as_lists(within_replica_ops.all_reduce(shards, "COLLECTIVE_OP_MEAN")) == [[2.5, 3.5, 4.5]] * 2
    assert as_lists(within_replica_ops.all_reduce(shards, "COLLECTIVE_OP_SQUARE_ADD")) == [[17, 29, 45]] * 2
    assert as_lists(within_replica_ops.reduce_scatter(shards, "COLLECTIVE_OP_MAX")) == [[4, 5], [6, 0]]
    assert as_lists(within_replica_ops.reduce_scatter(shards, "COLLECTIVE_OP_LOCAL")) == [[1, 2], [6, 0]]
    for given_shards, op in (
        ([], "COLLECTIVE_OP_ADD"),
        (shards, "add"),
        ([*shards, tf.ones([2])], "COLLECTIVE_OP_ADD"),
    ):
        with pytest.raises(ValueError):
            within_replica_ops.all_reduce(given_shards, op)


OUTS = {"output_types": [tf.float32], "output_shapes": [tf.TensorShape([2])]}


def test_a_user_op_is_refused_in_a_sentence_that_names_the_hook():
    for call in (custom_ops.precompiled_user_op, custom_ops.cpu_user_operation):
        with pytest.raises(NotImplementedError, match=r"libmissing.*custom_ops\.register_replacement"):
            call([tf.ones([2])], "lib/libmissing.so", outs=OUTS)
        for attributes in ({"attributes": 3}, {"gradient_attributes": {"a": 1}}):
            with pytest.raises(ValueError, match="str"):
                call([tf.ones([2])], "lib/libmissing.so", outs=OUTS, **attributes)


def test_a_registered_function_replaces_a_user_op_with_its_gradients():
    def scaled(inputs, attributes):
        return inputs[0] * inputs[1] * float(attributes or 1)

    custom_ops.register_replacement("libscaled.so", scaled)
    custom_ops.register_replacement("libscaled.so", lambda inputs, _: [inputs[0], inputs[1]], op_name="Both")

    @tf.function
    def program(x, y):
        with tf.GradientTape() as tape:
            tape.watch([x, y])
            (product,) = custom_ops.precompiled_user_op(
                [x, y], "build/libscaled.so", "scaled.gp", outs=OUTS, attributes="3", inputs_with_gradients=[0]
            )
        return product, *tape.gradient(product, [x, y], unconnected_gradients="zero")

    product, *gradients = program(tf.constant([1.0, 2.0]), tf.constant([5.0, 7.0]))
    assert product.numpy().tolist() == [15, 42]
    assert [gradient.numpy().tolist() for gradient in gradients] == [[15, 21], [0, 0]]
    with pytest.raises(ValueError, match="outs specifies"):
        custom_ops.cpu_user_operation([1.0, 2.0], "libscaled.so", outs=OUTS, op_name="Both")


def test_a_codelet_expression_is_its_function_without_a_gradient():
    x = tf.constant([1.0, 2.0])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = custom_ops.codelet_expression_op(lambda a, b: a * b + 1, x, x)
    assert y.numpy().tolist() == [2, 5]
    assert tape.gradient(y, x) is None


@pytest.mark.parametrize(
    "name",
    [
        "application_compile_op.experimental_application_compile_op",
        "embedded_runtime.embedded_runtime_start",
        "embedded_runtime.embedded_runtime_call",
        "embedded_runtime.embedded_runtime_stop",
        "embedded_runtime.embedded_runtime_start_and_call",
        "experimental.popfloat_cast_to_gfloat.cast_native_to_gfloat",
    ],
)
def test_what_needs_poplar_can_be_imported_and_is_refused_by_name(name):
    module, function = name.rsplit(".", 1)
    refused = getattr(importlib.import_module(f"{ops.__name__}.{module}"), function)
    with pytest.raises(NotImplementedError, match=function):
        refused(1, name="x")
