"""Methods of models and optimizers that programs override, and optimizers of other kinds than Keras'."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tf_ipu_dp.emulator.sdk_api.ipu.ops import cross_replica_ops

v2 = getattr(tf.keras.optimizers, "legacy", tf.keras.optimizers)
RNG = np.random.RandomState(2)
X = RNG.randn(32, 4).astype("float32")
Y = RNG.randn(32, 1).astype("float32")
START = [RNG.randn(4, 1).astype("float32"), np.zeros(1, "float32")]
MICRO = 4
RATE, DECAY = 0.05, 0.1


def dataset(micro=MICRO):
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(micro, drop_remainder=True)


class WeightDecay:
    """A mixin that overrides `minimize`, as the usual extension for decoupled weight decay does."""

    def minimize(self, loss, var_list, grad_loss=None, name=None, decay_var_list=None, tape=None):
        minimized.append(type(self).__name__)
        return super().minimize(loss, var_list, grad_loss=grad_loss, name=name, tape=tape)

    def apply_gradients(self, grads_and_vars, name=None, decay_var_list=None, **kwargs):
        return super().apply_gradients(grads_and_vars, name=name, **kwargs)

    def _resource_apply_dense(self, grad, var, apply_state=None):
        with tf.control_dependencies([var.assign_sub(DECAY * var)]):
            return super()._resource_apply_dense(grad, var, apply_state=apply_state)


class SGDW(WeightDecay, v2.SGD):
    pass


class Halved(v2.SGD):
    """Halves the gradients before it applies them."""

    def minimize(self, loss, var_list, grad_loss=None, name=None, tape=None):
        pairs = self._compute_gradients(loss, var_list, grad_loss=grad_loss, tape=tape)
        return self.apply_gradients([(gradient / 2, variable) for gradient, variable in pairs], name=name)


class HalvedByInheritance(Halved):
    pass


minimized = []


def fit(strategy, optimizer, accumulation=1):
    with strategy.scope():
        model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(4,))])
        model.set_weights(START)
        model.set_gradient_accumulation_options(accumulation, "mean")
        model.compile(optimizer(), "mse", steps_per_execution=4)
        model.fit(dataset(), verbose=0)
    return model


def by_hand(updates, scale=1.0, decay=0.0):
    """Returns the weights after gradient descent with the mean gradients of equal parts of the data."""
    weights, bias = START
    for x, y in zip(np.split(X, updates), np.split(Y, updates)):
        error = 2 * (x @ weights + bias - y) / len(x)
        slope, offset = x.T @ error, error.sum(axis=0)
        weights = weights - decay * weights - RATE * scale * slope
        bias = bias - decay * bias - RATE * scale * offset
    return [weights, bias]


def assert_same(left, right):
    for one, other in zip(left, right):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize(("replicas", "accumulation"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_an_optimizer_that_inherits_minimize_is_accepted(scope, replicas, accumulation):
    minimized.clear()
    model = fit(scope(replicas), lambda: SGDW(RATE), accumulation)
    assert_same(model.get_weights(), by_hand(8 // replicas // accumulation, scale=replicas, decay=DECAY))
    assert model.optimizer.iterations.numpy() == 8 // replicas // accumulation
    # Accumulated gradients are not computed by the program's `minimize`; others are.
    assert bool(minimized) == (accumulation == 1)


def test_an_inherited_minimize_that_changes_gradients_does_so_unless_they_are_accumulated(scope):
    assert_same(fit(scope(2), lambda: Halved(RATE)).get_weights(), by_hand(4, scale=2 / 2))
    assert_same(fit(scope(1), lambda: HalvedByInheritance(RATE)).get_weights(), by_hand(8, scale=1 / 2))
    assert_same(fit(scope(1), lambda: HalvedByInheritance(RATE), accumulation=2).get_weights(), by_hand(4))


@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, tf.keras.mixed_precision.LossScaleOptimizer])
def test_an_optimizer_that_overrides_minimize_itself_cannot_accumulate(scope, wrap):
    with pytest.raises(ValueError, match="Halved overrides minimize"):
        fit(scope(1), lambda: wrap(Halved(RATE)), accumulation=2)
    # The wrapper has another `minimize` than its base, but it is the wrapped optimizer that counts.
    fit(scope(1), lambda: wrap(SGDW(RATE)), accumulation=2)


@pytest.mark.parametrize(("replicas", "accumulation"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_an_optimizer_of_tf1_trains_a_keras_model(scope, replicas, accumulation):
    model = fit(scope(replicas), lambda: tf.compat.v1.train.GradientDescentOptimizer(RATE), accumulation)
    updates = 8 // replicas // accumulation
    assert_same(model.get_weights(), by_hand(updates, scale=replicas))
    assert model.optimizer.iterations.numpy() == updates


def test_an_optimizer_of_tf1_with_slots_trains_like_keras(scope):
    tf1 = fit(scope(2), lambda: tf.compat.v1.train.MomentumOptimizer(RATE, 0.9), accumulation=2)
    keras = fit(scope(2), lambda: v2.SGD(RATE, momentum=0.9), accumulation=2)
    assert_same(tf1.get_weights(), keras.get_weights())


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_model_may_override_how_it_evaluates_and_predicts(scope, replicas):
    class Own(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = tf.keras.layers.Dense(1)

        def call(self, inputs):
            return self.dense(inputs)

        def test_step(self, data):
            x, y = data
            self.compiled_loss(y, self(x, training=False) + 1.0)
            return {metric.name: metric.result() for metric in self.metrics}

        def predict_step(self, data):
            return -super().predict_step(data)

    with scope(replicas).scope():
        model = Own()
        model.compile(v2.SGD(RATE), "mse", steps_per_execution=2)
        model.fit(dataset(), verbose=0)
        weights, bias = model.get_weights()
        model.set_replication_options("MEAN")
        loss = model.evaluate(dataset(), verbose=0)
        model.set_replication_options("NONE")
        outputs = model.predict(X, batch_size=MICRO, verbose=0)
    predicted = X @ weights + bias
    np.testing.assert_allclose(loss, np.mean((predicted + 1.0 - Y) ** 2), rtol=1e-5)
    np.testing.assert_allclose(outputs, -predicted, atol=1e-5)


@pytest.mark.parametrize(("replicas", "method"), [(1, "NONE"), (2, "NONE"), (2, "SUM"), (2, "MEAN"), (2, "LIST")])
def test_what_an_own_test_step_returns_need_not_be_a_metric(scope, replicas, method):
    class Own(tf.keras.Sequential):
        def test_step(self, data):
            x, y = data
            return {"first": y[0, 0], "largest": tf.reduce_max(x)}

    with scope(replicas).scope():
        model = Own([tf.keras.layers.Dense(1, input_shape=(4,))])
        model.compile("sgd", "mse", steps_per_execution=2)
        model.set_replication_options(method)
        logs = model.evaluate(dataset(), verbose=0, return_dict=True)
    ends = range(8 - replicas, 8)  # the last micro batch of each replica
    reduced = {"NONE": lambda values: values[-1], "SUM": sum, "MEAN": np.mean, "LIST": list}[method]
    np.testing.assert_allclose(logs["first"], reduced([Y[MICRO * end, 0] for end in ends]), rtol=1e-6)
    largest = [X[MICRO * end : MICRO * (end + 1)].max() for end in ends]
    np.testing.assert_allclose(logs["largest"], reduced(largest), rtol=1e-6)


def test_an_own_test_step_may_use_values_of_the_other_replicas(scope):
    class Own(tf.keras.Sequential):
        def test_step(self, data):
            first = data[1][0, 0]
            return {"sum": cross_replica_ops.cross_replica_sum(first), "first": first}

    with scope(2).scope():
        model = Own([tf.keras.layers.Dense(1, input_shape=(4,))])
        model.compile("sgd", "mse", steps_per_execution=2)
        model.set_replication_options("MEAN")
        logs = model.evaluate(dataset(), verbose=0, return_dict=True)
    last = Y[[MICRO * 6, MICRO * 7], 0]
    np.testing.assert_allclose([logs["sum"], logs["first"]], [last.sum(), last.mean()], rtol=1e-5)


@pytest.mark.parametrize("replicas", [1, 2])
def test_asynchronous_callbacks_get_what_an_own_test_step_returns(scope, replicas):
    class Own(tf.keras.Sequential):
        def test_step(self, data):
            return {"first": data[1][0, 0]}

    told = []
    tell = tf.keras.callbacks.LambdaCallback()
    tell.on_test_batch_end = lambda batch, logs: told.append((batch, logs["first"]))
    with scope(replicas).scope():
        model = Own([tf.keras.layers.Dense(1, input_shape=(4,))])
        model.compile("sgd", "mse", steps_per_execution=4)
        model.set_asynchronous_callbacks(True)
        model.evaluate(dataset(), verbose=0, callbacks=[tell])
    assert [batch for batch, _ in told] == [step for step in range(8 // replicas) for _ in range(replicas)]
    np.testing.assert_allclose([first for _, first in told], Y[::MICRO, 0], rtol=1e-6)


def test_a_minimize_that_does_not_apply_through_the_optimizer_is_refused_on_several_replicas(scope):
    class Direct(v2.SGD):
        def minimize(self, loss, var_list, grad_loss=None, name=None, tape=None):
            return super().apply_gradients(self._compute_gradients(loss, var_list, tape=tape))

    assert_same(fit(scope(1), lambda: Direct(RATE)).get_weights(), by_hand(8))
    with pytest.raises(NotImplementedError, match=r"Direct\.minimize does not call self\.apply_gradients"):
        fit(scope(2), lambda: Direct(RATE))


@pytest.mark.parametrize("name", ["train_step", "make_train_function", "make_test_function", "make_predict_function"])
def test_a_model_may_not_override_what_the_sdk_replaces(scope, name):
    base = type("Base", (tf.keras.Sequential,), {name: lambda self, *args: getattr(tf.keras.Sequential, name)(self)})
    own = type("Own", (base,), {})
    with scope(1).scope():
        model = own([tf.keras.layers.Dense(1, input_shape=(4,))])
        model.compile("sgd", "mse")
        with pytest.raises(RuntimeError, match=f"Own overrides {name}"):
            model.fit(dataset(), verbose=0)
