"""Prices of made-up houses from their measures and their district."""

import numpy as np
import tensorflow as tf

import tf_ipu_dp

DISTRICTS = 8


def load():
    random = np.random.RandomState(7)
    worth = random.uniform(0.5, 2.0, DISTRICTS)

    def make(count):
        measures = random.normal(size=(count, 4)).astype(np.float32)  # area, rooms, age, garden: standardised
        district = random.randint(0, DISTRICTS, count)
        price = worth[district] * (1.5 * measures[:, 0] + 0.4 * measures[:, 1] - 0.3 * measures[:, 2])
        return {"measures": measures, "district": district}, (price + 0.05 * random.normal(size=count)).astype(
            np.float32
        )

    return make(4000), make(501)


def huber(targets, prices):
    error = tf.abs(targets - prices)
    return tf.reduce_mean(tf.where(error < 1.0, 0.5 * error**2, error - 0.5), axis=-1)


def build(input_shape):
    measures = tf.keras.Input(input_shape["measures"], name="measures")
    district = tf.keras.Input(input_shape["district"], name="district", dtype="int32")
    place = tf.keras.layers.Flatten()(tf.keras.layers.Embedding(DISTRICTS, 4)(tf.expand_dims(district, -1)))
    x = tf.keras.layers.Concatenate()([measures, place])
    x = tf.keras.layers.Dense(64, activation="relu")(x)
    x = tf.keras.layers.Dense(32, activation="relu")(x)
    price = tf.keras.layers.Dense(1, name="price")(x)
    model = tf.keras.Model({"measures": measures, "district": district}, price)
    return tf_ipu_dp.Task(model, loss=huber, metrics=["mae", tf.keras.metrics.RootMeanSquaredError(name="rmse")])
