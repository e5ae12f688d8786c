"""Own models and data of several kinds: two inputs by name or place, tables, images, tasks; some are subclassed."""

import numpy as np
import tensorflow as tf

import tf_ipu_dp

layers = tf.keras.layers


class ByName(tf.keras.Model):
    def __init__(self, classes):
        super().__init__()
        self.hidden = layers.Dense(8, activation="relu")
        self.head = layers.Dense(classes)

    def call(self, inputs):
        count = tf.cast(inputs["count"], inputs["measures"].dtype)[:, None]
        return self.head(self.hidden(tf.concat([inputs["measures"], count], 1)))


class ByPlace(tf.keras.Model):
    def __init__(self):
        super().__init__(name="sums")
        self.head = layers.Dense(2)

    def call(self, inputs):
        return self.head(tf.concat(inputs, 1))


def by_name(classes):
    return ByName(classes)


def by_name_data(count=200):
    random = np.random.RandomState(1)
    counts, measures = random.randint(0, 5, count), random.normal(size=(count, 3))
    return tf_ipu_dp.Data(({"count": counts, "measures": measures}, (counts > 2).astype(int)))


def by_place():
    return tf_ipu_dp.Task(ByPlace(), loss="mse")


def by_place_data(count=128):
    first, second = np.random.RandomState(1).normal(size=(2, count, 3)).astype(np.float32)
    return tf_ipu_dp.Data(((first, second), (first + second)[:, :2]))


def small(input_shape, classes):
    return tf.keras.Sequential(
        [tf.keras.Input(input_shape), layers.Flatten(), layers.Dense(classes, activation="softmax")]
    )


def scores(input_shape, classes):
    """Returns a task on class numbers: what it returns stays as it is."""
    inputs = [tf.keras.Input(input_shape), layers.Flatten(), layers.Dense(classes, name="scores")]
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return tf_ipu_dp.Task(tf.keras.Sequential(inputs), loss=loss, metrics=["accuracy"])


def number(input_shape):
    return tf_ipu_dp.Task(tf.keras.Sequential([tf.keras.Input(input_shape), layers.Dense(1)]), loss="mse")
