"""A small CNN. The images arrive normalised to mean 0 and deviation 1."""

import tensorflow as tf


def build(input_shape, classes):
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            tf.keras.Input(input_shape),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(classes),
        ]
    )
