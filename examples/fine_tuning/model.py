"""A CNN whose layers have names, by which weights are taken and frozen."""

import tensorflow as tf


def build(input_shape, classes):
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            tf.keras.Input(input_shape),
            layers.Conv2D(16, 3, padding="same", activation="relu", name="conv1"),
            layers.MaxPooling2D(name="pool1"),
            layers.Conv2D(32, 3, padding="same", activation="relu", name="conv2"),
            layers.GlobalAveragePooling2D(name="pool2"),
            layers.Dense(64, activation="relu", name="hidden"),
            layers.Dense(classes, name=f"head_of_{classes}"),
        ]
    )
