"""Regression and a yes-or-no question from two inputs, with an own loss that returns one number for a batch."""

import numpy as np
import tensorflow as tf

import tf_ipu_dp


def load():
    random = np.random.RandomState(3)

    def make(n):
        a, b = random.normal(size=(n, 5)), random.normal(size=(n, 3)).astype(np.float32)
        price = 2 * a[:, 0] + b[:, 1]
        return {"a": a, "b": b}, {"price": price.astype(np.float32), "high": (price > 0).astype(np.int64)}

    return make(1000), make(203)


def absolute_error(targets, outputs):
    return tf.reduce_mean(tf.abs(targets - outputs))


def build(input_shape):
    inputs = {name: tf.keras.Input(shape, name=name) for name, shape in input_shape.items()}
    x = tf.keras.layers.Concatenate()(list(inputs.values()))
    x = tf.keras.layers.Dense(32, activation="relu", name="hidden")(x)
    price = tf.keras.layers.Dense(1, name="price")(x)
    high = tf.keras.layers.Dense(1, activation="sigmoid", name="high")(x)
    return tf_ipu_dp.Task(
        tf.keras.Model(inputs, [price, high]),
        loss={"price": absolute_error, "high": "binary_crossentropy"},
        loss_weights={"high": 0.5},
        metrics={"price": ["mae", tf.keras.metrics.RootMeanSquaredError()], "high": [tf.keras.metrics.AUC()]},
    )
