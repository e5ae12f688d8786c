"""The built-in cnn as a user would write it, and the same model as a subclass."""

import tensorflow as tf

layers = tf.keras.layers


def build(input_shape, classes, norm):
    image = tf.keras.Input(input_shape)
    x = image
    for number, filters in enumerate((16, 32, 64), 1):
        name = f"conv{number}"
        x = layers.Conv2D(
            filters, 3, padding="same", use_bias=False, kernel_initializer="he_normal", name=f"{name}_conv"
        )(x)
        if norm == "batch":
            x = layers.BatchNormalization(momentum=0.9, epsilon=1.001e-5, name=f"{name}_norm")(x)
        x = layers.ReLU(name=f"{name}_relu")(x)
        if number < 3:
            x = layers.MaxPooling2D(2, 2, "same", name=f"{name}_pool")(x)
    x = layers.Flatten(name="flatten")(x)
    x = layers.Dense(128, kernel_initializer="he_normal", name="hidden_dense")(x)
    x = layers.ReLU(name="hidden_relu")(x)
    return tf.keras.Model(image, layers.Dense(classes, dtype="float32", name="predictions")(x))


class Subclassed(tf.keras.Model):
    def __init__(self, classes):
        super().__init__()
        self.flatten = layers.Flatten()
        self.hidden = layers.Dense(32, activation="relu")
        self.head = layers.Dense(classes, activation="softmax")

    def call(self, inputs):
        return self.head(self.hidden(self.flatten(inputs)))


def subclassed(classes):
    return Subclassed(classes)
