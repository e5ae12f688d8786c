"""A functional model of several inputs and outputs on two replicas: dicts, weights, own losses and metrics.

Everything is compared with stock Keras, which gets the micro batches of both replicas as one batch.
"""

import numpy as np
import tensorflow as tf
from tensorflow import keras
from tensorflow.python import ipu

REPLICAS = 2
MICRO_BATCH = 4
SAMPLES = 64
RATE = 0.05

rng = np.random.RandomState(1)
features = {
    "user": rng.randint(0, 10, (SAMPLES, 1)).astype("int32"),
    "image": rng.randn(SAMPLES, 6).astype("float32"),
}
targets = {
    "rating": rng.randn(SAMPLES, 1).astype("float32"),
    "kind": rng.randint(0, 3, (SAMPLES, 1)).astype("int32"),
}
weights = {
    "rating": rng.uniform(0.5, 1.5, SAMPLES).astype("float32"),
    "kind": rng.uniform(0.5, 1.5, SAMPLES).astype("float32"),
}


def pinball_loss(y_true, y_pred):
    error = y_true - y_pred
    return tf.reduce_mean(tf.where(error > 0, 0.8 * error, -0.2 * error), axis=-1)


class Share(keras.metrics.Metric):
    """The share of predictions above a bound, which Python code decides with autograph."""

    def __init__(self, bound, name="share", **kwargs):
        super().__init__(name=name, **kwargs)
        self.bound = bound
        self.above = self.add_weight(name="above", initializer="zeros")
        self.count = self.add_weight(name="count", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.above.assign_add(tf.reduce_sum(tf.cast(y_pred > self.bound, tf.float32)))
        self.count.assign_add(tf.cast(tf.size(y_pred), tf.float32))

    def result(self):
        return tf.math.divide_no_nan(self.above, self.count)


def make_model():
    user = keras.Input((1,), name="user", dtype=tf.int32)
    image = keras.Input((6,), name="image")
    embedded = keras.layers.Flatten()(keras.layers.Embedding(10, 4)(user))
    merged = keras.layers.Concatenate()([embedded, keras.layers.Dense(5, activation="tanh")(image)])
    merged = keras.layers.Dense(8, activation="relu", kernel_regularizer=keras.regularizers.l2(1e-2))(merged)
    rating = keras.layers.Dense(1, name="rating")(merged)
    kind = keras.layers.Dense(3, name="kind")(merged)
    model = keras.Model({"user": user, "image": image}, {"rating": rating, "kind": kind})
    model.add_loss(1e-3 * tf.reduce_mean(tf.square(merged)))
    model.add_metric(tf.reduce_max(merged), name="largest", aggregation="mean")
    return model


def compile_model(model, gradients_over=1, **kwargs):
    """A sum over replicas is what a mean over the larger batch is not: so `gradients_over` multiplies it again."""

    def scale(grads_and_vars):
        return [(gradients_over * tf.convert_to_tensor(gradient), variable) for gradient, variable in grads_and_vars]

    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([3], [RATE, RATE / 10])
    model.compile(
        optimizer=keras.optimizers.SGD(schedule, momentum=0.9, gradient_transformers=[scale]),
        loss={"rating": pinball_loss, "kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True)},
        loss_weights={"rating": 2.0, "kind": 0.5},
        metrics={"rating": [keras.metrics.MeanAbsoluteError(name="mae"), Share(0.0)]},
        weighted_metrics={"kind": ["accuracy"]},
        **kwargs,
    )


def dataset(batch):
    return tf.data.Dataset.from_tensor_slices((features, targets, weights)).batch(batch, drop_remainder=True)


config = ipu.config.IPUConfig()
config.auto_select_ipus = REPLICAS
config.configure_ipu_system()
strategy = ipu.ipu_strategy.IPUStrategyV1()

expected = make_model()
with strategy.scope():
    model = make_model()
    model.set_weights(expected.get_weights())
    model.set_replication_options("mean")
    compile_model(model, steps_per_execution=4)
    history = model.fit(dataset(MICRO_BATCH), epochs=2, verbose=0)
    print("logs:", " ".join(sorted(history.history)))
    results = model.evaluate(dataset(MICRO_BATCH), return_dict=True, verbose=0)
    model.set_replication_options()  # which would reduce the predictions too
    predictions = model.predict(features, batch_size=MICRO_BATCH)

# Stock Keras with the larger batch: its mean over both replicas' samples, twice, is the sum of their means.
compile_model(expected, gradients_over=REPLICAS)
stock_history = expected.fit(dataset(MICRO_BATCH * REPLICAS), epochs=2, verbose=0)
for ours, stock in zip(model.get_weights(), expected.get_weights()):
    np.testing.assert_allclose(ours, stock, atol=1e-5)
assert set(history.history) == set(stock_history.history), set(history.history) ^ set(stock_history.history)
for name in ("loss", "rating_loss", "kind_loss", "rating_mae", "rating_share"):
    np.testing.assert_allclose(history.history[name], stock_history.history[name], rtol=1e-4, err_msg=name)
stock_results = expected.evaluate(dataset(MICRO_BATCH), return_dict=True, verbose=0)
for name in ("loss", "rating_mae", "rating_share", "largest"):
    np.testing.assert_allclose(results[name], stock_results[name], rtol=1e-4, err_msg=name)
stock_predictions = expected.predict(features, verbose=0)
assert set(predictions) == {"rating", "kind"} and predictions["kind"].shape == (SAMPLES, 3)
for name, values in predictions.items():
    np.testing.assert_allclose(values, stock_predictions[name], atol=1e-4)
print(f"updates: {model.optimizer.iterations.numpy()}")

# Class weights and sample weights of arrays, with one output.
with strategy.scope():
    plain = keras.Sequential([keras.layers.Dense(3, input_shape=(6,), activation="softmax")])
    first = plain.get_weights()
    plain.compile(keras.optimizers.SGD(RATE), "sparse_categorical_crossentropy")
    balance = {0: 1.0, 1: 2.0, 2: 0.5}
    plain.fit(
        features["image"],
        targets["kind"],
        batch_size=MICRO_BATCH,
        class_weight=balance,
        sample_weight=weights["kind"],
        shuffle=False,
        verbose=0,
    )
by_hand = keras.Sequential([keras.layers.Dense(3, input_shape=(6,), activation="softmax")])
by_hand.set_weights(first)
by_hand.compile(keras.optimizers.SGD(RATE * REPLICAS), "sparse_categorical_crossentropy")
total_weight = np.vectorize(balance.get)(targets["kind"][:, 0]) * weights["kind"]
by_hand.fit(
    features["image"],
    targets["kind"],
    batch_size=MICRO_BATCH * REPLICAS,
    sample_weight=total_weight.astype("float32"),
    shuffle=False,
    verbose=0,
)
for ours, stock in zip(plain.get_weights(), by_hand.get_weights()):
    np.testing.assert_allclose(ours, stock, atol=1e-5)
print("class and sample weights agree with stock Keras")
