"""Gradients captured in the backward pass: tapes, contexts, layers, pipelines, and what loss scaling counts of them."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tf_ipu_dp.emulator.sdk_api.ipu import ipu_infeed_queue, ipu_outfeed_queue
from tf_ipu_dp.emulator.sdk_api.ipu.eager.backprop import GradientCaptureContext, GradientCaptureTape
from tf_ipu_dp.emulator.sdk_api.ipu.ops import pipelining_ops
from tf_ipu_dp.emulator.sdk_api.ipu.ops.grad_util_ops import capture_upstream_gradients
from tf_ipu_dp.emulator.sdk_api.keras_ipu import layers as ipu_layers
from tf_ipu_dp.emulator.sdk_api.keras_ipu import optimizers as keras_optimizers

v2 = getattr(tf.keras.optimizers, "legacy", tf.keras.optimizers)
X = np.random.RandomState(0).randn(16, 2).astype("float32")


def as_lists(captured):
    return {tag: tf.nest.map_structure(lambda one: one.numpy().tolist(), value) for tag, value in captured.items()}


@pytest.mark.parametrize("compile_it", [lambda function: function, tf.function], ids=["eager", "traced"])
def test_a_tape_captures_by_tag_in_the_structure_of_the_tensors(compile_it):
    @compile_it
    def gradients(x):
        with GradientCaptureTape() as tape:
            tape.watch(x)
            first, second = capture_upstream_gradients((x, x * 2), tag="pair")
            one = capture_upstream_gradients(first * 3 + second, tag="one")
            loss = tf.reduce_sum(one**2)
        return tape.gradient(loss, x), tape.captured_gradients

    gradient, captured = gradients(tf.constant([1.0, 2.0]))
    assert gradient.numpy().tolist() == [50, 100]
    assert as_lists(captured) == {"one": [10, 20], "pair": ([30, 60], [10, 20])}


def test_a_tape_captures_anew_with_each_gradient_and_forgets_when_reset():
    x = tf.Variable(2.0)
    with GradientCaptureTape(persistent=True) as tape:
        square = capture_upstream_gradients(x * x, tag="square")
        both = [square * 3, square * 5]
    assert tape.captured_gradients == {}
    for target, expected in zip(both, (3, 5)):
        assert tape.gradient(target, x).numpy() == 4 * expected
        assert as_lists(tape.captured_gradients) == {"square": expected}
    with tape:
        tape.reset()
    assert tape.captured_gradients == {}
    with GradientCaptureTape(watch_accessed_variables=False) as tape:
        square = capture_upstream_gradients(x * x)
    assert tape.gradient(square, x) is None


def test_a_context_captures_what_is_computed_inside_it_by_any_tape():
    x = tf.Variable(3.0)
    with tf.GradientTape(persistent=True) as tape:
        y = capture_upstream_gradients(x * 2, tag="y") * 5
    with GradientCaptureContext() as outer, GradientCaptureContext() as inner:
        tape.gradient(y, x)
    assert as_lists(outer.captured_gradients) == as_lists(inner.captured_gradients) == {"y": 5}
    with pytest.raises(RuntimeError, match=r"tag 'y'.*GradientCaptureTape"):
        tape.gradient(y, x)


def test_a_context_captures_in_a_graph_of_tf1():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        x = tf.constant([1.0, 2.0])
        loss = tf.reduce_sum(capture_upstream_gradients(x, tag="x") ** 2)
        with GradientCaptureContext() as context:
            gradient = tf.gradients(loss, [x])[0]
        np.testing.assert_array_equal(*session.run([gradient, context.captured_gradients["x"]]))


def test_a_tag_that_is_used_twice_or_not_at_all_loses_nothing():
    x = tf.Variable(1.0)
    with GradientCaptureTape() as tape:
        y = sum(
            capture_upstream_gradients(x, tag) * scale for tag, scale in (("", 2.0), ("a", 3.0), ("", 4.0), ("a", 5.0))
        )
    assert tape.gradient(y, x).numpy() == 14
    captured = as_lists(tape.captured_gradients)
    assert set(captured) == {"captured_0", "captured_1", "a", "a_1"}
    assert sorted(captured.values()) == [2, 3, 4, 5]


def test_a_custom_loop_sends_captured_gradients_of_every_replica(scope):
    strategy = scope(2)
    with strategy.scope():
        weight = tf.Variable(1.0)
        queue = ipu_outfeed_queue.IPUOutfeedQueue()
        elements = iter(tf.data.Dataset.from_tensor_slices(X[:, 0]))

    @tf.function
    def loop(elements):
        for _ in tf.range(4):
            x = next(elements)
            with GradientCaptureTape() as tape:
                loss = capture_upstream_gradients(weight * 2, tag="doubled") * x
            tape.gradient(loss, weight)
            queue.enqueue(tape.captured_gradients)

    strategy.run(loop, args=[elements])
    np.testing.assert_allclose(queue.dequeue()["doubled"], X[:8, 0].reshape(4, 2), rtol=1e-6)


# Layers


def make_model(layer=ipu_layers.CaptureUpstreamGradients, dtype="float32"):
    dense = [
        tf.keras.layers.Dense(3, activation="tanh", dtype=dtype, name="hidden"),
        tf.keras.layers.Dense(1, dtype=dtype),
    ]
    model = tf.keras.Sequential([tf.keras.Input((2,), dtype=dtype), layer(dense[0]), dense[1]])
    rng = np.random.RandomState(1)
    model.set_weights([rng.uniform(-1, 1, weight.shape) for weight in model.get_weights()])
    return model


@pytest.mark.parametrize("layer", [ipu_layers.CaptureUpstreamGradients, ipu_layers.CaptureActivationGradients])
def test_layers_capture_the_gradient_after_or_before_the_activation(layer):
    model = make_model(layer)
    hidden, last = model.layers[0].layer, model.layers[1]
    with GradientCaptureTape() as tape:
        loss = tf.reduce_sum(model(X))
    tape.gradient(loss, model.trainable_variables)
    upstream = np.tile(last.kernel.numpy().T, (16, 1))
    slope = 1 - np.tanh(X @ hidden.kernel.numpy() + hidden.bias.numpy()) ** 2
    expected = upstream if layer is ipu_layers.CaptureUpstreamGradients else upstream * slope
    np.testing.assert_allclose(tape.captured_gradients["hidden_grad"], expected, atol=1e-6)
    with tf.GradientTape() as plain:
        loss = tf.reduce_sum(model(X))
    with pytest.raises(RuntimeError, match="hidden_grad"):
        plain.gradient(loss, model.trainable_variables)


@pytest.mark.parametrize(("replicas", "accumulation"), [(1, 1), (2, 2)])
def test_fit_trains_a_model_with_such_layers_whatever_the_optimizer(scope, replicas, accumulation):
    def trained(layer):
        with scope(replicas).scope():
            model = make_model(layer)
            model.set_gradient_accumulation_options(accumulation)
            model.compile(v2.SGD(0.1), "mse", steps_per_execution=2)
            model.fit(X, X[:, :1], batch_size=2, shuffle=False, verbose=0)
        return model.get_weights()

    for ours, plain in zip(trained(ipu_layers.CaptureUpstreamGradients), trained(lambda layer: layer)):
        np.testing.assert_allclose(ours, plain, rtol=1e-5)  # only one of them is computed in fused passes


# Loss scaling


def test_captured_gradients_given_to_apply_gradients_are_counted():
    half = lambda *values: tf.constant(values, tf.float16)  # noqa: E731
    variable = tf.Variable(np.ones(2, "float16"))
    captured = {"a": half(1.0, 9000.0), "b": [half(9000.0), half(1.0)], "c": tf.constant([9000.0])}
    for only, expected in ((False, [4, 2]), (True, [2, 2])):
        als = keras_optimizers.ALSOptimizer(v2.SGD(0.1), update_frequency=100, captured_grads_only=only)
        als.apply_gradients([(half(1.0, 2.0), variable)], captured)
        np.testing.assert_array_equal(als.histogram.numpy(), expected)
        als.apply_gradients([(half(1.0, 2.0), variable)])
        np.testing.assert_array_equal(als.histogram.numpy(), [expected[0] + (0 if only else 2), expected[1]])


def test_captured_gradients_given_with_every_micro_batch_are_counted():
    als = keras_optimizers.ALSOptimizer(v2.SGD(0.1), update_frequency=100, captured_grads_only=True)
    wrapper = keras_optimizers.ALSGradientAccumulationOptimizer(als, 2)
    variable, step = tf.Variable([1.0]), tf.Variable(0, dtype=tf.int64)
    for number in range(4):
        captured = {"a": tf.constant([1.0, 9000.0], tf.float16)}
        wrapper.apply_gradients([(tf.ones(1), variable)], captured_grads=captured, global_step=step)
        np.testing.assert_array_equal(wrapper.histogram.numpy(), [number + 1, number + 1])
    assert step.numpy() == 2


def test_minimize_counts_what_a_capturing_tape_captures_and_the_tape_returns_it():
    model = make_model(dtype="float16")
    als = keras_optimizers.ALSOptimizer(v2.SGD(0.1), update_frequency=100, captured_grads_only=True)
    with GradientCaptureTape() as tape:
        loss = tf.reduce_mean(model(X.astype("float16")))
        scaled = als.get_scaled_loss(loss)
    als.minimize(scaled, model.trainable_variables, tape=tape)
    assert tape.captured_gradients["hidden_grad"].shape == (16, 3)
    np.testing.assert_array_equal(als.histogram.numpy(), [48, 0])


@pytest.mark.parametrize(("replicas", "accumulation"), [(1, 1), (1, 4), (2, 2)])
def test_fit_counts_the_captured_gradients_of_all_micro_batches_and_replicas(scope, replicas, accumulation):
    with scope(replicas).scope():
        model = make_model(dtype="float16")
        als = keras_optimizers.ALSOptimizer(v2.SGD(0.01), update_frequency=100, captured_grads_only=True)
        model.set_gradient_accumulation_options(accumulation)
        model.compile(als, "mse", steps_per_execution=4)
        model.fit(X.astype("float16"), X[:, :1].astype("float16"), batch_size=2, verbose=0)
    np.testing.assert_array_equal(als.histogram.numpy(), [16 * 3, 0])
    assert als.update_counter.numpy() == 8 // replicas // accumulation


def test_a_global_step_counts_the_updates():
    step = tf.Variable(5, dtype=tf.int64)
    variable = tf.Variable([1.0])
    als = keras_optimizers.ALSOptimizer(v2.SGD(0.1), initial_loss_scaling_factor=2)
    for _ in range(3):
        als.apply_gradients([(tf.ones(1), variable)], None, step, "update")
    assert step.numpy() == 8
    np.testing.assert_allclose(variable.numpy(), [1 - 3 * 0.1 / 2], rtol=1e-6)


# Pipelines


@pytest.mark.parametrize("accumulated", [True, False])
@pytest.mark.parametrize("how", ["context", "tape"])
def test_a_pipeline_sends_captured_gradients_with_every_update(scope, accumulated, how):
    scope(1)
    weight = tf.Variable([1.0, 1.0])
    optimizer = v2.SGD(0.1)
    queue, losses = ipu_outfeed_queue.IPUOutfeedQueue(), ipu_outfeed_queue.IPUOutfeedQueue()
    infeed = ipu_infeed_queue.IPUInfeedQueue(tf.data.Dataset.from_tensor_slices(X).repeat())
    infeed.initializer  # noqa: B018 reading it makes the iterator
    tapes = []

    def first(x):
        if how == "tape":
            tapes.append(GradientCaptureTape())
            tapes[-1].__enter__()
        return x, capture_upstream_gradients(weight * 2, tag="doubled")

    def second(x, doubled):
        return tf.reduce_sum(x * doubled)

    def optimize(loss):
        given = {"variables": [weight], "gradient_capture_context": GradientCaptureContext()}
        if how == "tape":
            tapes[-1].__exit__(None, None, None)
            given = {"tape": tapes[-1]}
        return pipelining_ops.OptimizerFunctionOutput(optimizer, loss, captured_gradient_outfeed=queue, **given)

    @tf.function(autograph=False)
    def program():
        pipelining_ops.pipeline(
            [first, second], 4, repeat_count=2, infeed_queue=infeed, outfeed_queue=losses, optimizer_function=optimize,
            outfeed_loss=True, pipeline_schedule=pipelining_ops.PipelineSchedule.Sequential, device_mapping=[0, 0],
            gradient_accumulation_for_captured_grads=accumulated,
        )  # fmt: skip

    program()
    windows = X[:8].reshape(2, 4, 2)
    expected = windows.sum(axis=1) if accumulated else windows[:, -1]
    np.testing.assert_allclose(queue.dequeue()["doubled"], expected, rtol=1e-5)
    np.testing.assert_allclose(weight.numpy(), 1 - 0.1 * 2 * X[:8].sum(axis=0), rtol=1e-5)


def test_a_pipelines_loss_scaling_counts_captured_gradients(scope):
    scope(1)
    weight = tf.Variable(np.ones(2, "float16"))
    als = keras_optimizers.ALSOptimizer(v2.SGD(0.0), update_frequency=100, captured_grads_only=True)
    losses = ipu_outfeed_queue.IPUOutfeedQueue()
    infeed = ipu_infeed_queue.IPUInfeedQueue(tf.data.Dataset.from_tensor_slices(X.astype("float16")).repeat())
    infeed.initializer  # noqa: B018 reading it makes the iterator

    def optimize(loss):
        return pipelining_ops.OptimizerFunctionOutput(
            als, loss, variables=[weight], gradient_capture_context=GradientCaptureContext()
        )

    @tf.function(autograph=False)
    def program():
        pipelining_ops.pipeline(
            [lambda x: (x, capture_upstream_gradients(weight * 2, tag="a")), lambda x, y: tf.reduce_sum(x * y)], 4,
            infeed_queue=infeed, outfeed_queue=losses, optimizer_function=optimize,
            pipeline_schedule=pipelining_ops.PipelineSchedule.Sequential, device_mapping=[0, 0],
        )  # fmt: skip

    program()
    assert als.histogram.numpy().sum() == 2


def test_what_cannot_capture_is_refused():
    loss, optimizer = tf.constant(1.0), v2.SGD(0.1)
    with pytest.raises(TypeError, match="gradient_capture_context"):
        pipelining_ops.OptimizerFunctionOutput(optimizer, loss, gradient_capture_context=tf.GradientTape())
    with pytest.raises(TypeError, match="captured_gradient_outfeed"):
        pipelining_ops.OptimizerFunctionOutput(optimizer, loss, captured_gradient_outfeed=[])


def test_a_pipeline_that_captures_nothing_has_nothing_to_send(scope):
    scope(1)
    weight = tf.Variable(1.0)
    captured, losses = ipu_outfeed_queue.IPUOutfeedQueue(), ipu_outfeed_queue.IPUOutfeedQueue()

    def optimize(loss):
        return pipelining_ops.OptimizerFunctionOutput(
            v2.SGD(0.1), loss, variables=[weight], captured_gradient_outfeed=captured
        )

    @tf.function(autograph=False)
    def program():
        pipelining_ops.pipeline(
            [lambda: weight * 2, lambda x: x * x], 4, outfeed_queue=losses, optimizer_function=optimize,
            pipeline_schedule=pipelining_ops.PipelineSchedule.Sequential, device_mapping=[0, 0],
        )  # fmt: skip

    with pytest.raises(ValueError, match="captured_gradient_outfeed has nothing to send"):
        program()
