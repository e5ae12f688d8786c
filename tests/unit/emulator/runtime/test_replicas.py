"""Replicas of programs: collectives, the sum of gradients, variables of their own, random numbers."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tf_ipu_dp.emulator.sdk_api import on_import
from tf_ipu_dp.emulator.sdk_api.ipu import ipu_outfeed_queue, ipu_strategy, utils
from tf_ipu_dp.emulator.sdk_api.ipu.ops import all_to_all_op, cross_replica_ops, reduce_scatter_op, replication_ops

on_import.apply_patches()
X = np.random.RandomState(1).randn(48, 3).astype("float32")
Y = (X @ [[1.0], [2.0], [-1.0]] + 0.5).astype("float32")


def data(micro=2):
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(micro, drop_remainder=True).repeat()


@pytest.fixture
def collect(scope):
    """Runs a function on so many replicas and returns what each of them computes."""

    def run(replicas, function):
        strategy, queue = scope(replicas), ipu_outfeed_queue.IPUOutfeedQueue()

        def program():
            queue.enqueue(function())

        strategy.run(tf.function(program, autograph=False))  # which would turn a LookupError into something else
        return tf.nest.map_structure(lambda tensor: tensor.numpy()[0], queue.dequeue())

    return run


def number():
    return tf.cast(replication_ops.replication_index(), tf.float32)


def test_a_function_that_programs_call_is_that_of_their_replicas(scope):
    @tf.function
    def inner(value):
        return cross_replica_ops.cross_replica_sum(value)

    def program(value):
        for _ in tf.range(2):
            value = 1 + 2 * inner(value)
        return value

    assert inner(tf.constant(1.0)).numpy() == 1
    for replicas in (1, 2, 4, 2):
        strategy = scope(replicas)
        assert strategy.run(tf.function(program), args=[tf.constant(1.0)]).numpy() == 1 + 2 * replicas * (
            1 + 2 * replicas
        )
    assert inner.experimental_get_tracing_count() == 5  # a device that is configured again compiles again


def test_a_function_may_run_on_devices_of_different_size_in_turn(scope):
    scope([1, 2])
    function = tf.function(lambda: cross_replica_ops.cross_replica_sum(1.0))
    small, large = (ipu_strategy.IPUStrategy(f"/device:IPU:{number}") for number in range(2))
    assert [strategy.run(function).numpy() for strategy in (large, small, large, small)] == [2, 1, 2, 1]


@pytest.mark.parametrize("replicas", [1, 4])
def test_a_run_inside_a_function_trains_as_a_run_of_the_function(scope, replicas):
    strategy = scope(replicas)

    def make():
        with strategy.scope():
            layer = tf.keras.layers.Dense(1, kernel_initializer="ones")
            normal = tf.keras.layers.BatchNormalization()
            model = tf.keras.Sequential([tf.keras.Input([3]), layer, normal])
            optimizer = tf.keras.optimizers.SGD(0.02, momentum=0.5)
            feed, queue = iter(data()), ipu_outfeed_queue.IPUOutfeedQueue()

        def program(steps):
            for _ in tf.range(steps):
                x, y = next(feed)
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
                gradients = tape.gradient(loss, model.trainable_variables)
                optimizer.apply_gradients(zip(gradients, model.trainable_variables))
                queue.enqueue(loss)
            return {"last": loss, "name": None}

        return model, queue, program

    steps = tf.constant(3)
    model, queue, program = make()
    inside = tf.function(lambda: strategy.run(program, args=(steps,)))
    other_model, other_queue, other_program = make()
    whole = tf.function(other_program)
    for _ in range(3):
        found, expected = inside(), strategy.run(whole, args=(steps,))
        assert found["name"] is None
        np.testing.assert_allclose(found["last"], expected["last"], rtol=1e-5)
    np.testing.assert_allclose(queue.dequeue(), other_queue.dequeue(), rtol=1e-4)
    for own, other in zip(model.variables, other_model.variables):
        np.testing.assert_allclose(own, other, rtol=1e-4)


def test_a_run_inside_a_function_happens_even_if_it_returns_nothing(scope):
    strategy, variable, queue = scope(4), tf.Variable(0.0), ipu_outfeed_queue.IPUOutfeedQueue()

    def program():
        variable.assign_add(number() + 1)
        return queue.enqueue(number())

    def twice(run):
        if run:
            assert strategy.run(program) is None
            strategy.run(lambda: variable.assign_add(10.0))

    function = tf.function(twice)
    function(False)
    for _ in range(3):
        function(True)
    assert variable.numpy() == 33 and queue.dequeue().numpy().tolist() == [[0, 1, 2, 3]] * 3


def test_a_run_inside_a_function_that_fails_leaves_nothing_behind(scope):
    strategy, is_wrong = scope(4), tf.Variable(0.0)

    def program(value):
        total = cross_replica_ops.cross_replica_sum(value)
        tf.debugging.assert_less(number() * is_wrong, 2.5)
        return cross_replica_ops.cross_replica_sum(total + number())

    function = tf.function(lambda value: strategy.run(program, args=(value,)))
    assert function(1.0) == 22
    is_wrong.assign(1.0)
    with pytest.raises(tf.errors.InvalidArgumentError):
        function(2.0)
    is_wrong.assign(0.0)
    assert [float(function(value)) for value in (1.0, 2.0, 3.0)] == [22, 38, 54]


def test_sums_means_and_gathers_are_the_same_on_every_replica(collect):
    found = collect(
        4,
        lambda: {
            "sum": cross_replica_ops.cross_replica_sum(number() + 1),
            "mean": cross_replica_ops.cross_replica_mean(number()),
            "gathered": all_to_all_op.all_gather(tf.stack([number(), -number()]), 4),
        },
    )
    np.testing.assert_array_equal(found["sum"], [10.0] * 4)
    np.testing.assert_array_equal(found["mean"], [1.5] * 4)
    np.testing.assert_array_equal(found["gathered"], [[[n, -n] for n in range(4)]] * 4)


def test_parts_are_exchanged_and_scattered(collect):
    found = collect(
        2,
        lambda: {
            "exchanged": all_to_all_op.all_to_all(10 * number() + tf.constant([0.0, 1.0]), 0, 0, 2),
            "scattered": reduce_scatter_op.reduce_scatter(number() + tf.constant([1.0, 2.0, 3.0]), 2),
        },
    )
    np.testing.assert_array_equal(found["exchanged"], [[0, 10], [1, 11]])
    np.testing.assert_array_equal(found["scattered"], [[3, 5], [7, 0]])


def test_the_gradient_of_a_sum_is_the_sum_of_the_gradients_and_a_mean_has_none(collect):
    def of_sum():
        x = number() + 1
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = cross_replica_ops.cross_replica_sum(x * x)
        return tape.gradient(loss, x)

    np.testing.assert_array_equal(collect(2, of_sum), [4.0, 8.0])

    def of_mean():
        x = tf.constant(1.0)
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = cross_replica_ops.cross_replica_mean(x)
        return tape.gradient(loss, x)

    with pytest.raises(LookupError):
        collect(2, of_mean)


def trained_by_hand(replicas, steps, rate=0.01):
    weights, bias = np.zeros((3, 1), "float32"), np.zeros(1, "float32")
    for step in range(steps):
        total_w, total_b = 0, 0
        for replica in range(replicas):
            at = (step * replicas + replica) * 2 % 48
            x, y = X[at : at + 2], Y[at : at + 2]
            error = 2 * (x @ weights + bias - y) / len(x)
            total_w, total_b = total_w + x.T @ error, total_b + error.sum(axis=0)
        weights, bias = weights - rate * total_w, bias - rate * total_b
    return weights, bias


@pytest.mark.parametrize("replicas", [1, 4])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_training_loop_sums_gradients_over_replicas(scope, replicas, compiled):
    strategy, losses = scope(replicas), ipu_outfeed_queue.IPUOutfeedQueue()

    @tf.function(jit_compile=True if compiled else None)
    def loop(iterator, steps, model, optimizer):
        for _ in tf.range(steps):
            x, y = next(iterator)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            losses.enqueue(loss)

    with strategy.scope():
        model = tf.keras.Sequential([tf.keras.layers.Dense(1, kernel_initializer="zeros")])
        optimizer, iterator = tf.keras.optimizers.SGD(0.01), iter(data())
        for _ in range(2):
            strategy.run(loop, args=[iterator, 3, model, optimizer])
    for ours, by_hand in zip(model.get_weights(), trained_by_hand(replicas, 6)):
        np.testing.assert_allclose(ours, by_hand, rtol=1e-4, atol=1e-6)
    assert int(optimizer.iterations) == 6
    assert list(losses.dequeue().shape) == ([6] if replicas == 1 else [6, replicas])


def test_every_replica_has_variables_of_its_own_and_the_host_sees_the_first(scope):
    strategy, seen = scope(4), ipu_outfeed_queue.IPUOutfeedQueue()
    with strategy.scope():
        variable = tf.Variable(0.0)

    @tf.function
    def program():
        variable.assign_add(number() + 1)
        seen.enqueue(variable.read_value())

    for _ in range(2):
        strategy.run(program)
    assert float(variable) == 2.0
    variable.assign(100.0)  # what the host writes, all replicas get
    strategy.run(program)
    np.testing.assert_array_equal(seen.dequeue(), [[1, 2, 3, 4], [2, 4, 6, 8], [101, 102, 103, 104]])


def test_a_function_shared_by_two_programs_has_collectives_in_both(scope):
    strategy = scope(2)

    @tf.function
    def shared(x):
        return cross_replica_ops.cross_replica_sum(x + number())

    one, other = tf.function(lambda: shared(tf.constant(1.0))), tf.function(lambda: 2 * shared(tf.constant(1.0)))
    assert [float(strategy.run(program)) for program in (one, other, one)] == [3.0, 6.0, 3.0]


def test_a_loss_that_needs_the_other_replicas_makes_fit_run_them_concurrently(scope):
    class Shared(tf.keras.losses.Loss):
        def call(self, y_true, y_pred):
            own = tf.reduce_mean(tf.square(y_true - y_pred), axis=-1)
            return own + tf.stop_gradient(cross_replica_ops.cross_replica_sum(tf.reduce_mean(own)))

    def train(loss):
        with scope(2).scope():
            model = tf.keras.Sequential([tf.keras.layers.Dense(1, kernel_initializer="zeros", input_shape=(3,))])
            model.compile(tf.keras.optimizers.SGD(0.01), loss, steps_per_execution=2)
            model.set_gradient_accumulation_options(2, "mean")
            model.set_replication_options("LIST")
            history = model.fit(data(), steps_per_epoch=8, verbose=0)
            return model.get_weights(), history.history["loss"][0], model.predict(X, batch_size=2, verbose=0)

    concurrent, sliced = train(Shared()), train("mse")
    for one, other in zip(concurrent[0], sliced[0]):
        np.testing.assert_allclose(one, other, rtol=1e-5)
    np.testing.assert_allclose(concurrent[1], sliced[1] + sliced[1].sum(), rtol=1e-5)
    np.testing.assert_allclose(concurrent[2], sliced[2], rtol=1e-5)


def test_reset_ipu_seed_repeats_the_numbers_and_replicas_differ_unless_asked(scope):
    strategy, queue = scope(2), ipu_outfeed_queue.IPUOutfeedQueue()

    @tf.function
    def program():
        for _ in tf.range(3):
            queue.enqueue(tf.random.uniform([4]))

    def draw(**arguments):
        utils.reset_ipu_seed(7, **arguments)
        for _ in range(2):
            strategy.run(program)
        return queue.dequeue().numpy()

    first = draw()
    assert first.shape == (6, 2, 4) and len(np.unique(first)) == first.size
    np.testing.assert_array_equal(first, draw())
    same = draw(experimental_identical_replicas=True)
    np.testing.assert_array_equal(same[:, 0], same[:, 1])
    assert len(np.unique(same)) == same.size // 2


def test_dropout_in_fit_differs_between_replicas_and_depends_on_the_seed_alone(scope):
    queue = ipu_outfeed_queue.IPUOutfeedQueue()

    class Kept(tf.keras.layers.Dropout):
        def call(self, inputs, training=None):
            outputs = super().call(tf.ones_like(inputs), training=training)
            if not queue.enqueued:
                queue.enqueue(outputs)
            return outputs

    def masks():
        tf.random.set_seed(3)
        with scope(2).scope():
            model = tf.keras.Sequential([Kept(0.5, input_shape=(3,)), tf.keras.layers.Dense(1)])
            model.compile("sgd", "mse", steps_per_execution=2)
            model.fit(data(8), steps_per_epoch=4, verbose=0)
        return queue.dequeue().numpy()

    first = masks()
    assert first.shape == (2, 2, 8, 3)
    assert len({mask.tobytes() for mask in first.reshape(4, -1)}) == 4
    np.testing.assert_array_equal(first, masks())


def test_legacy_optimizers_are_for_the_device_and_for_subclasses(scope):
    legacy = getattr(tf.keras.optimizers, "legacy", tf.keras.optimizers)

    class Own(tf.keras.optimizers.Optimizer):
        def _resource_apply_dense(self, grad, var, apply_state=None):
            return var.assign_sub(0.1 * grad)

        def get_config(self):
            return super().get_config()

    assert isinstance(Own("own"), tf.keras.optimizers.Optimizer)
    outside = tf.keras.optimizers.Adam(0.1)
    with scope(1).scope():
        inside = tf.keras.optimizers.Adam(0.1)
    assert isinstance(inside, legacy.Adam) and isinstance(outside, tf.keras.optimizers.Adam)
    assert isinstance(tf.keras.optimizers.SGD(0.1, gradient_transformers=[lambda pairs: pairs]), legacy.SGD)
    if legacy is not tf.keras.optimizers:
        assert not isinstance(outside, legacy.Adam)


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_a_concrete_function_runs_on_all_replicas_although_it_was_made_without_them(scope, replicas):
    strategy = scope(replicas)
    with strategy.scope():
        total = tf.Variable(0.0)

    @tf.function
    def program(value):
        total.assign_add(cross_replica_ops.cross_replica_sum(value))
        return tf.identity(total)

    concrete = program.get_concrete_function(tf.TensorSpec([]))
    assert float(strategy.run(concrete, args=[tf.constant(3.0)])) == 3 * replicas
    assert float(tf.function(lambda: strategy.run(concrete, args=[tf.constant(1.0)]))()) == 4 * replicas
