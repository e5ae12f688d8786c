"""Keras models on the emulated device: the SDK's arithmetic and its rules, against stock Keras and by hand."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import tensorflow as tf

from tf_ipu_dp.emulator.keras import model_options
from tf_ipu_dp.emulator.runtime import execution
from tf_ipu_dp.emulator.sdk_api.ipu import config as ipu_config
from tf_ipu_dp.emulator.sdk_api.ipu import ipu_strategy
from tf_ipu_dp.emulator.sdk_api.ipu.ops import cross_replica_ops

RNG = np.random.RandomState(0)
X = RNG.randn(64, 4).astype("float32")
Y = RNG.randint(0, 3, 64).astype("int32")
MICRO = 4


def make_model(norm=False):
    layers = [tf.keras.layers.Dense(8, activation="relu", input_shape=(4,))]
    layers += [tf.keras.layers.BatchNormalization()] if norm else []
    return tf.keras.Sequential([*layers, tf.keras.layers.Dense(3)])


def compile_model(model, optimizer=None, **kwargs):
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer or tf.keras.optimizers.SGD(0.1), loss, metrics=["accuracy"], **kwargs)
    return model


def dataset(elements=16, micro=MICRO):
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(micro, drop_remainder=True).take(elements)


def trained_by_hand(weights, replicas, accumulation, method, epochs=1):
    """Plain SGD on the micro batches: gradients summed over replicas, and summed or averaged over the accumulation."""
    model = make_model()
    model.set_weights(weights)
    loss_function = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    for _ in range(epochs):
        batches = iter(dataset())
        for _ in range(16 // (replicas * accumulation)):
            total = [np.zeros(variable.shape, "float32") for variable in model.trainable_variables]
            for _ in range(replicas * accumulation):
                x, y = next(batches)
                with tf.GradientTape() as tape:
                    loss = loss_function(y, model(x))
                share = 1 if method == "sum" else accumulation
                gradients = tape.gradient(loss, model.trainable_variables)
                total = [before + gradient.numpy() / share for before, gradient in zip(total, gradients)]
            for variable, gradient in zip(model.trainable_variables, total):
                variable.assign_sub(0.1 * gradient)
    return model.get_weights()


def assert_same(left, right, tolerance=2e-6):
    for one, other in zip(left, right):
        np.testing.assert_allclose(one, other, atol=tolerance)


@pytest.mark.parametrize("steps_per_execution", [1, 4])
def test_one_replica_without_accumulation_gives_the_weights_of_stock_keras_to_the_bit(scope, steps_per_execution):
    stock = make_model(norm=True)
    weights = stock.get_weights()
    history = compile_model(stock).fit(dataset(), epochs=2, verbose=0, validation_data=dataset())
    with scope(1).scope():
        model = make_model(norm=True)
        model.set_weights(weights)
        compile_model(model, steps_per_execution=steps_per_execution)
        ours = model.fit(dataset(), epochs=2, verbose=0, validation_data=dataset())
    assert_same(stock.get_weights(), model.get_weights(), 0.0)
    assert ours.history == history.history


@pytest.mark.parametrize(
    ("replicas", "accumulation", "method"),
    [(1, 4, "mean"), (4, 1, "sum"), (2, 4, "sum"), (2, 4, "mean"), (2, 4, "running_mean")],
)
def test_gradients_are_summed_over_replicas_and_reduced_over_the_accumulation_as_asked(
    scope, replicas, accumulation, method
):
    with scope(replicas).scope():
        model = make_model()
        weights = model.get_weights()
        compile_model(model, steps_per_execution=accumulation)
        model.set_gradient_accumulation_options(accumulation, method)
        model.fit(dataset(), epochs=2, verbose=0)
    assert_same(model.get_weights(), trained_by_hand(weights, replicas, accumulation, method, epochs=2))


@pytest.mark.parametrize("optimizer", ["Adam", "RMSprop"])
def test_other_optimizers_get_the_summed_gradients_too(scope, optimizer):
    legacy = getattr(tf.keras.optimizers, "legacy", tf.keras.optimizers)  # which a name means on the device
    stock = make_model()
    weights = stock.get_weights()
    # The sum over 4 replicas of mean losses is 4 times the mean loss of the joined batch.
    stock.compile(
        getattr(legacy, optimizer)(),
        lambda y, p: 4 * tf.keras.losses.sparse_categorical_crossentropy(y, p, from_logits=True),
    )
    stock.fit(dataset(4, 4 * MICRO), verbose=0)
    with scope(4).scope():
        model = make_model()
        model.set_weights(weights)
        compile_model(model, optimizer.lower()).fit(dataset(), verbose=0)
    assert isinstance(model.optimizer, getattr(legacy, optimizer))
    assert_same(stock.get_weights(), model.get_weights(), 2e-5)


def test_moving_statistics_advance_once_per_step_with_the_mean_of_the_replicas(scope):
    with scope(4).scope():
        model = make_model(norm=True)
        compile_model(model, tf.keras.optimizers.SGD(0.0)).fit(dataset(4), verbose=0)
        norm = model.layers[1]
    inputs = model.layers[0](X[:16]).numpy().reshape(4, MICRO, 8)
    np.testing.assert_allclose(norm.moving_mean.numpy(), 0.01 * inputs.mean(axis=1).mean(axis=0), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("replicas", "steps_per_execution"), [(1, 1), (1, 2), (4, 2)])
def test_evaluate_and_predict_cover_every_sample_in_order(scope, replicas, steps_per_execution):
    stock = compile_model(make_model())
    expected = stock.evaluate(dataset(), verbose=0)
    with scope(replicas).scope():
        model = make_model()
        model.set_weights(stock.get_weights())
        compile_model(model, steps_per_execution=steps_per_execution)
        model.set_replication_options("MEAN")
        np.testing.assert_allclose(model.evaluate(dataset(), verbose=0), expected, rtol=1e-5)
        model.set_replication_options("NONE")
        np.testing.assert_allclose(model.predict(X, batch_size=MICRO, verbose=0), stock(X).numpy(), atol=1e-6)


def identity_model():
    return tf.keras.Sequential([tf.keras.layers.Activation("linear", input_shape=(1,))])


def gathering_model():
    """A model whose replicas run concurrently, because they exchange values."""
    add_nothing = tf.keras.layers.Lambda(lambda x: x + 0 * cross_replica_ops.cross_replica_sum(x))
    return tf.keras.Sequential([tf.keras.layers.InputLayer((1,)), add_nothing])


@pytest.mark.parametrize("make", [identity_model, gathering_model])
@pytest.mark.parametrize("steps_per_execution", [1, 2])
@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("NONE", [0, 1, 2, 3, 4, 5, 6, 7]),
        ("SUM", [1, 1, 5, 5, 9, 9, 13, 13]),
        ("MEAN", [0.5, 0.5, 2.5, 2.5, 4.5, 4.5, 6.5, 6.5]),
        ("LIST", [0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5, 6, 7, 6, 7]),
    ],
)
def test_predictions_are_reduced_over_the_replicas_like_metrics(scope, make, steps_per_execution, method, expected):
    inputs = np.arange(8, dtype="float32")[:, np.newaxis]
    with scope(2).scope():
        model = make()
        model.compile(steps_per_execution=steps_per_execution)
        model.set_replication_options(method)
        outputs = model.predict(inputs, batch_size=1, verbose=0)
    np.testing.assert_array_equal(np.ravel(outputs), expected)


def test_predictions_of_a_pipeline_are_not_reduced_over_the_replicas(scope):
    inputs = np.arange(8, dtype="float32")[:, np.newaxis]
    with scope(4).scope():
        layers = [tf.keras.layers.Activation("linear", input_shape=(1,)), tf.keras.layers.Activation("linear")]
        model = tf.keras.Sequential(layers)
        model.set_pipeline_stage_assignment([0, 1])
        model.set_pipelining_options(gradient_accumulation_steps_per_replica=4)
        model.compile(steps_per_execution=2)
        model.set_replication_options("MEAN")
        np.testing.assert_array_equal(model.predict(inputs, batch_size=1, verbose=0), inputs)


def losses_of_replicas(model, replicas):
    """The mean loss of each replica's micro batches: every so many-th of them."""
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    losses = [loss(Y[n : n + MICRO], model(X[n : n + MICRO])).numpy() for n in range(0, 64, MICRO)]
    return np.reshape(losses, [-1, replicas]).mean(axis=0)


@pytest.mark.parametrize(
    ("method", "steps_per_execution"), [("NONE", 1), ("NONE", 4), ("LIST", 4), ("SUM", 1), ("MEAN", 4)]
)
def test_metrics_are_those_of_the_last_replica_or_reduced_as_asked(scope, method, steps_per_execution):
    stock = make_model()
    losses = losses_of_replicas(stock, 4)
    with scope(4).scope():
        model = make_model()
        model.set_weights(stock.get_weights())
        compile_model(model, tf.keras.optimizers.SGD(0.0), steps_per_execution=steps_per_execution)
        model.set_replication_options(method)
        expected = {"NONE": losses[-1], "LIST": losses, "SUM": losses.sum(), "MEAN": losses.mean()}[method]
        for _ in range(2):
            np.testing.assert_allclose(model.evaluate(dataset(), verbose=0)[0], expected, rtol=1e-5)
            np.testing.assert_allclose(model.fit(dataset(), verbose=0).history["loss"][0], expected, rtol=1e-5)


def test_arrays_validation_split_and_weights_are_taken_as_by_stock_keras(scope):
    stock = make_model()
    weights = stock.get_weights()
    arguments = {
        "x": X, "y": Y, "batch_size": MICRO, "shuffle": False, "verbose": 0, "validation_split": 0.25,
        "sample_weight": np.linspace(0.5, 1.5, 64).astype("float32"), "class_weight": {0: 1.0, 1: 2.0, 2: 0.5},
    }  # fmt: skip
    history = compile_model(stock).fit(**arguments)
    with scope(1).scope():
        model = make_model()
        model.set_weights(weights)
        ours = compile_model(model).fit(**arguments)
    assert_same(stock.get_weights(), model.get_weights(), 1e-6)
    assert ours.history.keys() == history.history.keys()
    np.testing.assert_allclose(ours.history["val_loss"], history.history["val_loss"], rtol=1e-5)


def unbuilt_sequential():
    return tf.keras.Sequential([tf.keras.layers.Dense(8, activation="relu"), tf.keras.layers.Dense(3)])


def features_of(model):
    return tf.keras.Model(model.input, model.layers[0].output)


@pytest.mark.parametrize("make", [
    lambda: compile_model(make_model()),
    lambda: compile_model(unbuilt_sequential()),
    make_model,
    unbuilt_sequential,
    lambda: features_of(make_model()),
], ids=["compiled", "compiled and unbuilt", "never compiled", "never compiled or built", "features"])  # fmt: skip
def test_a_model_may_predict_before_anything_else(scope, make):
    with scope(2).scope():
        model = make()
        np.testing.assert_allclose(model.predict(X, batch_size=MICRO, verbose=0), model(X), atol=1e-6)


class Least(tf.keras.metrics.Metric):
    """The least that a model has put out."""

    def __init__(self):
        super().__init__("least")
        self.value = self.add_weight("value", initializer=tf.keras.initializers.Constant(np.inf))

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(tf.minimum(self.value, tf.reduce_min(y_pred)))

    def result(self):
        return tf.identity(self.value)

    def reset_state(self):
        self.value.assign(np.inf)

    reset_states = reset_state  # its name in Keras 2.4


def test_a_metric_begins_on_every_replica_where_its_reset_puts_it(scope):
    with scope(2).scope():
        model = make_model()
        model.compile(loss="mse", metrics=[Least()], steps_per_execution=2)
        model.set_replication_options("MEAN")
        outputs = model(X).numpy().reshape(-1, 2, MICRO, 3)
        for _ in range(2):
            _, found = model.evaluate(X, model(X), batch_size=MICRO, verbose=0)
            np.testing.assert_allclose(found, outputs.min(axis=(0, 2, 3)).mean(), rtol=1e-6)


def test_callbacks_are_called_once_per_execution_with_the_steps_of_one_replica(scope):
    calls = []

    class Recorder(tf.keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            calls.append(("begin", batch))

        def on_train_batch_end(self, batch, logs=None):
            calls.append(("end", batch, sorted(logs)))

    with scope(2).scope():
        model = compile_model(make_model(), steps_per_execution=4)
        recorder = Recorder()
        model.fit(dataset(), verbose=0, callbacks=[recorder])
    assert recorder.params["steps"] == 8
    logs = ["accuracy", "loss"]
    assert calls == [("begin", 0), ("end", 3, logs), ("begin", 4), ("end", 7, logs)]


def refuse(scope, error, match, *, ipus=2, accumulation=1, run=None, **compile_arguments):
    with scope(ipus).scope():
        model = compile_model(make_model(), **compile_arguments)
        model.set_gradient_accumulation_options(accumulation)
        with pytest.raises(error, match=match):
            (run or (lambda model: model.fit(dataset(), verbose=0)))(model)


def test_a_prediction_in_a_callback_leaves_the_iterator_of_fit_to_the_end_of_fit(scope):
    """Else `fit` itself would delete it, and wait for seconds for the threads of tf.data."""
    found = []

    def predict(epoch, logs):
        training = list(execution.in_use)
        model.predict(X, batch_size=MICRO)
        found.append(len(training) == 1 and execution.in_use[0] is training[0])

    with scope(2).scope():
        model = compile_model(make_model())
        model.fit(dataset(), epochs=2, verbose=0, callbacks=[tf.keras.callbacks.LambdaCallback(on_epoch_end=predict)])
    assert found == [True, True] and not execution.in_use


def test_steps_that_are_no_multiple_of_the_execution_are_a_value_error(scope):
    refuse(scope, ValueError, "not a multiple of steps_per_execution", steps_per_execution=3)


def test_an_execution_that_is_no_multiple_of_the_accumulation_is_a_runtime_error(scope):
    refuse(scope, RuntimeError, "gradient_accumulation_steps_per_replica", steps_per_execution=4, accumulation=3)


def test_a_cut_execution_is_checked_against_the_accumulation_again(scope):
    run = lambda model: model.fit(dataset(6), verbose=0)  # noqa: E731
    refuse(scope, RuntimeError, "steps_per_execution=3", steps_per_execution=4, accumulation=4, run=run)


def test_an_execution_longer_than_the_epoch_is_cut_with_a_warning(scope, caplog):
    with scope(2).scope():
        model = compile_model(make_model(), steps_per_execution=32)
        logging.getLogger("tensorflow").propagate = True
        with caplog.at_level(logging.WARNING, logger="tensorflow"):
            model.fit(dataset(), verbose=0)
    assert "is reduced to that" in caplog.text


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (lambda: dataset().repeat(), "no end"),
        (lambda: dataset().filter(lambda x, y: True), "not known"),
        (lambda: tf.data.Dataset.from_tensor_slices((X, Y)).batch(4), "drop_remainder=True"),
        (lambda: iter([(X[:4], Y[:4])]), "generators"),
        (lambda: dataset(1), "not enough"),
    ],
    ids=["endless", "of unknown length", "of unknown shape", "a generator", "too short"],
)
def test_data_that_cannot_be_dealt_are_a_value_error(scope, data, match):
    refuse(scope, ValueError, match, run=lambda model: model.fit(data(), verbose=0))


def test_a_partial_batch_of_arrays_is_a_value_error(scope):
    refuse(scope, ValueError, "partial", run=lambda model: model.fit(X[:63], Y[:63], batch_size=4, verbose=0))


def test_running_eagerly_and_overriding_the_step_are_runtime_errors(scope):
    refuse(scope, RuntimeError, "run_eagerly", run_eagerly=True)

    class Own(tf.keras.Sequential):
        def train_step(self, data):
            return {}

    with scope(1).scope():
        model = Own([tf.keras.layers.Dense(3, input_shape=(4,))])
        compile_model(model)
        with pytest.raises(RuntimeError, match="overrides train_step"):
            model.fit(dataset(), verbose=0)


@pytest.mark.parametrize("steps", [0, -1, 1.5, "2", True])
def test_an_impossible_accumulation_is_a_value_error(scope, steps):
    with scope(1).scope():
        with pytest.raises(ValueError, match="gradient_accumulation_steps_per_replica"):
            make_model().set_gradient_accumulation_options(steps)
        with pytest.raises(ValueError, match="not a reduction method"):
            make_model().set_gradient_accumulation_options(2, "median")


def test_more_ipus_than_one_do_not_change_num_replicas_in_sync(scope):
    assert scope(4).num_replicas_in_sync == 1


def test_run_takes_a_traced_function_only(scope):
    strategy = scope(1)
    assert strategy.run(tf.function(lambda x: x + 1), args=[tf.constant(1)]).numpy() == 2
    with pytest.raises(ValueError, match=r"tf\.function"):
        strategy.run(lambda: 1)


def test_models_outside_a_scope_are_those_of_stock_keras(scope):
    scope(4)
    model = compile_model(make_model(), steps_per_execution=3)
    model.fit(X[:63], Y[:63], batch_size=4, verbose=0)
    assert model.optimizer.iterations.numpy() == 16
    with pytest.raises(AttributeError, match="IPU strategy"):
        model.set_gradient_accumulation_options(2)


def test_plain_models_have_no_methods_for_the_ipu(scope):
    scope(1)
    assert not hasattr(make_model(), "set_pipelining_options")
    with scope(1).scope():
        assert hasattr(make_model(), "set_pipelining_options")


def test_lists_of_numbers_are_data_too(scope):
    with scope(2).scope():
        model = compile_model(make_model())
        model.fit(X.tolist(), Y.astype("float32").tolist(), batch_size=MICRO, verbose=0)
        assert model.predict(X.tolist(), batch_size=MICRO, verbose=0).shape == (64, 3)


def test_a_sequence_of_python_is_refused_as_a_generator_is(scope):
    class Batches(tf.keras.utils.Sequence):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return X[:MICRO], Y[:MICRO]

    refuse(scope, ValueError, "Sequences", run=lambda model: model.fit(Batches(), verbose=0))


def test_data_that_end_too_early_for_all_replicas_are_an_error_and_not_a_short_epoch(scope):
    run = lambda model: model.fit(dataset(6), steps_per_epoch=8, verbose=0)  # noqa: E731
    refuse(scope, ValueError, "ended in the middle", run=run)


def test_integers_of_64_bits_cannot_be_fed(scope):
    run = lambda model: model.fit(X, Y.astype("int64"), batch_size=MICRO, verbose=0)  # noqa: E731
    refuse(scope, tf.errors.FailedPreconditionError, "int64", run=run)


@pytest.mark.parametrize("replicas", [1, 2])
def test_predictions_of_64_bits_cannot_be_fed_either(scope, replicas):
    inputs = tf.keras.Input([4])
    with scope(replicas).scope():
        model = tf.keras.Model(inputs, tf.argmax(tf.keras.layers.Dense(3)(inputs), -1))
        with pytest.raises(tf.errors.FailedPreconditionError, match="A prediction cannot carry int64"):
            model.predict(X, batch_size=MICRO, verbose=0)


@pytest.mark.parametrize("format", ["h5", "tf"])
def test_options_are_saved_with_a_model(scope, tmp_path, format):
    path = str(tmp_path / f"model.{format}")
    with scope(2).scope():
        model = compile_model(make_model())
        model.set_gradient_accumulation_options(2, "mean")
        model.set_replication_options("LIST")
        model.save(path, save_format=format)
        loaded = tf.keras.models.load_model(path)
    assert model_options.options_of(loaded) == model_options.options_of(model) != model_options.Options()
    plain = tf.keras.models.load_model(path)  # outside a scope it is a plain model
    assert_same(plain.get_weights(), model.get_weights(), 0.0)


def test_a_strategy_has_the_ipus_of_its_device(scope):
    scope(1)
    config = ipu_config.IPUConfig()
    config.auto_select_ipus = [2, 4]
    config.configure_ipu_system()
    recorder = tf.keras.callbacks.Callback()
    with ipu_strategy.IPUStrategy("/device:IPU:1").scope():
        compile_model(make_model()).fit(dataset(), verbose=0, callbacks=[recorder])
    assert recorder.params["steps"] == 4
    with ipu_strategy.IPUStrategy("/device:IPU:2").scope(), pytest.raises(tf.errors.InvalidArgumentError):
        compile_model(make_model()).fit(dataset(), verbose=0)


@pytest.mark.parametrize("replicas", [1, 2])
def test_asynchronous_callbacks_come_for_every_step_of_every_replica(scope, replicas):
    steps = []

    class Recorder(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            steps.append((batch, sorted(logs)))

        on_test_batch_end = on_train_batch_end

    with scope(replicas).scope():
        model = compile_model(make_model(), steps_per_execution=4)
        model.set_asynchronous_callbacks(True)
        data = dataset(8 * replicas)
        model.fit(data, verbose=0, callbacks=[Recorder()], validation_data=data)
        model.evaluate(data, verbose=0, callbacks=[Recorder()])
    assert steps == 3 * [(step, ["accuracy", "loss"]) for step in range(8) for _ in range(replicas)]


@pytest.mark.parametrize("replicas", [1, 2])
def test_asynchronous_callbacks_get_the_predictions_of_every_step_of_every_replica(scope, replicas):
    told = []
    tell = tf.keras.callbacks.LambdaCallback()
    tell.on_predict_batch_end = lambda batch, logs: told.append((batch, logs["outputs"]))
    with scope(replicas).scope():
        model = compile_model(make_model(), steps_per_execution=4)
        model.set_asynchronous_callbacks(True)
        outputs = model.predict(X, batch_size=MICRO, callbacks=[tell], verbose=0)
    assert [batch for batch, _ in told] == [step for step in range(16 // replicas) for _ in range(replicas)]
    np.testing.assert_array_equal(np.concatenate([part for _, part in told]), outputs)


def test_one_batch_is_for_one_replica_that_takes_one_step(scope):
    def results(model):
        compile_model(model, "sgd")
        return [model.train_on_batch(X[:4], Y[:4]), model.test_on_batch(X[:4], Y[:4]), model.predict_on_batch(X[:4])]

    stock = make_model()
    weights = stock.get_weights()
    expected = results(stock)
    with scope(1).scope():
        model = make_model()
        model.set_weights(weights)
        for ours, theirs in zip(results(model), expected):
            np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    refuse(scope, ValueError, "one batch", run=lambda model: model.train_on_batch(X[:4], Y[:4]))


class Unbuilt(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = tf.keras.layers.Dense(8, activation="relu"), tf.keras.layers.Dense(3)

    def call(self, inputs):
        return self.out(self.hidden(inputs))


@pytest.mark.parametrize(("replicas", "accumulation"), [(1, 1), (1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize("make", [Unbuilt, unbuilt_sequential])
def test_a_model_without_a_known_input_is_built_by_its_data(scope, make, replicas, accumulation):
    with scope(replicas).scope():
        model = compile_model(make(), steps_per_execution=2)
        model.set_gradient_accumulation_options(accumulation)
        before = model.fit(dataset(), epochs=1, verbose=0).history["loss"][0]
        assert model.fit(dataset(), epochs=5, verbose=0).history["loss"][-1] < before


def test_losses_and_metrics_of_named_outputs_meet_their_own_targets(scope):
    with scope(2).scope():
        given = tf.keras.Input((3,))
        # Not in the order of the alphabet.
        price = tf.keras.layers.Dense(1, kernel_initializer="ones", name="price")(given)
        high = tf.keras.layers.Dense(1, kernel_initializer="zeros", name="high")(given)
        model = tf.keras.Model(given, [price, high])
        losses, metrics = {"price": "mse", "high": "mae"}, {"price": ["mae"], "high": ["mse"]}
        model.compile(tf.keras.optimizers.SGD(0.0), losses, metrics=metrics)
        targets = {"price": np.full([8, 1], 5, "float32"), "high": np.full([8, 1], -7, "float32")}
        dataset = tf.data.Dataset.from_tensor_slices((np.ones([8, 3], "float32"), targets))
        logs = model.fit(dataset.batch(4, drop_remainder=True), verbose=0).history
    expected = {"loss": 11.0, "price_loss": 4.0, "high_loss": 7.0, "price_mae": 2.0, "high_mse": 49.0}
    assert {name: values[-1] for name, values in logs.items()} == expected
