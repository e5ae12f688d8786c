"""A Functional model with shortcuts. In a pipeline it has no batch norm: the SDK does not keep its statistics there."""

import tensorflow as tf

layers = tf.keras.layers


def block(x, filters, name):
    shortcut = layers.Conv2D(filters, 1, strides=2, padding="same", name=f"{name}_shortcut")(x)
    x = layers.Conv2D(filters, 3, strides=2, padding="same", activation="relu", name=f"{name}_conv1")(x)
    x = layers.Conv2D(filters, 3, padding="same", name=f"{name}_conv2")(x)
    return layers.ReLU(name=f"{name}_relu")(layers.Add(name=f"{name}_add")([x, shortcut]))


def build(input_shape, classes):
    image = tf.keras.Input(input_shape)
    x = layers.Conv2D(16, 3, padding="same", activation="relu", name="stem")(image)
    for number, filters in enumerate((16, 32, 64), 1):
        x = block(x, filters, f"block{number}")
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    return tf.keras.Model(image, layers.Dense(classes, name="head")(x))
