"""Subclassed models in mixed precision: losses and metrics added in `call`, loss scaling, schedules, own loss class."""

import random

import numpy as np
import tensorflow as tf
from tensorflow import keras
from tensorflow.python import ipu

REPLICAS = 2
ACCUMULATION = 2
MICRO_BATCH = 8
SAMPLES = 256

rng = np.random.RandomState(2)
random.seed(1)  # of Keras's initializers
tf.random.set_seed(1)
inputs = rng.randn(SAMPLES, 12).astype("float32")
labels = (inputs[:, :3].argmax(axis=1)).astype("int32")


class Sparse(keras.layers.Layer):
    """Passes its inputs on, adds a penalty on them, and tells how many are not zero."""

    def __init__(self, rate, **kwargs):
        super().__init__(**kwargs)
        self.rate = rate

    def call(self, x, training=None):
        if training:
            self.add_loss(self.rate * tf.reduce_mean(tf.abs(tf.cast(x, tf.float32))))
        self.add_metric(tf.reduce_mean(tf.cast(x > 0, tf.float32)), name="active")
        return x


class Classifier(keras.Model):
    def __init__(self, classes, **kwargs):
        super().__init__(**kwargs)
        self.hidden = [keras.layers.Dense(16, activation="relu") for _ in range(2)]
        self.sparse = Sparse(1e-4)
        self.norm = keras.layers.BatchNormalization()
        self.dropout = keras.layers.Dropout(0.1)
        self.out = keras.layers.Dense(classes, dtype="float32")

    def call(self, x, training=None):
        for layer in self.hidden:
            x = layer(x)
        x = self.norm(self.sparse(x), training=training)
        return self.out(self.dropout(x, training=training))


class FocalLoss(keras.losses.Loss):
    def __init__(self, gamma=1.0, **kwargs):
        super().__init__(**kwargs)
        self.gamma = gamma

    def call(self, y_true, y_pred):
        entropy = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.reshape(tf.cast(y_true, tf.int32), [-1]), y_pred)
        return (1 - tf.exp(-entropy)) ** self.gamma * entropy


class WarmUp(keras.optimizers.schedules.LearningRateSchedule):
    def __init__(self, rate, steps):
        super().__init__()
        self.rate, self.steps = rate, steps

    def __call__(self, step):
        return self.rate * tf.minimum(1.0, (tf.cast(step, tf.float32) + 1) / self.steps)

    def get_config(self):
        return {"rate": self.rate, "steps": self.steps}


def accuracy(y_true, y_pred):
    return keras.metrics.sparse_categorical_accuracy(y_true, y_pred)


config = ipu.config.IPUConfig()
config.auto_select_ipus = REPLICAS
config.configure_ipu_system()
strategy = ipu.ipu_strategy.IPUStrategy()

keras.mixed_precision.set_global_policy("mixed_float16")
dataset = tf.data.Dataset.from_tensor_slices((inputs, labels)).batch(MICRO_BATCH, drop_remainder=True).cache()

for dynamic in (False, True):
    with strategy.scope():
        model = Classifier(3)
        model.set_gradient_accumulation_options(
            gradient_accumulation_steps_per_replica=ACCUMULATION, gradient_accumulation_reduction_method="mean"
        )
        optimizer = keras.optimizers.Adam(WarmUp(0.02, 8))
        if dynamic:
            optimizer = keras.mixed_precision.LossScaleOptimizer(optimizer, initial_scale=64.0, dynamic_growth_steps=16)
        else:
            optimizer = keras.mixed_precision.LossScaleOptimizer(optimizer, dynamic=False, initial_scale=256.0)
        model.compile(optimizer, FocalLoss(), metrics=[accuracy], steps_per_execution=4)
        history = model.fit(dataset, epochs=8, verbose=0)

    assert set(history.history) == {"loss", "accuracy", "active"}, history.history.keys()
    assert model.hidden[0].compute_dtype == "float16" and model.hidden[0].kernel.dtype == tf.float32
    updates = 8 * SAMPLES // (MICRO_BATCH * REPLICAS * ACCUMULATION)
    assert model.optimizer.iterations.numpy() == updates, model.optimizer.iterations
    scale = float(model.optimizer.loss_scale)
    assert scale == (64.0 * 2 ** (updates // 16) if dynamic else 256.0), scale
    assert history.history["loss"][-1] < history.history["loss"][0] / 2
    print(f"dynamic {dynamic}: scale {scale:.0f}, {updates} updates")

results = model.evaluate(dataset, verbose=0, return_dict=True)
predictions = model.predict(inputs, batch_size=MICRO_BATCH)
assert predictions.dtype == np.float32 and predictions.shape == (SAMPLES, 3)
assert results["accuracy"] > 0.85, results

# A model that holds another model, trained after it was called by hand.
keras.mixed_precision.set_global_policy("float32")


class Encoder(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(4, activation="tanh")

    def call(self, x):
        return self.dense(x)


class Auto(keras.Model):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.decoder = keras.Sequential([keras.layers.Dense(8, activation="relu"), keras.layers.Dense(12)])

    def call(self, x):
        code = self.encoder(x)
        return {"code": code, "image": self.decoder(code)}


with strategy.scope():
    auto = Auto()
    auto(tf.zeros([1, 12]))
    auto.compile(keras.optimizers.RMSprop(0.01), loss={"image": "mse"}, steps_per_execution=2)
    losses = auto.fit(inputs, {"image": inputs}, batch_size=MICRO_BATCH, epochs=4, verbose=0).history["loss"]
    outputs = auto.predict(inputs, batch_size=MICRO_BATCH)
assert losses[-1] < losses[0] and outputs["code"].shape == (SAMPLES, 4) and outputs["image"].shape == (SAMPLES, 12)
np.testing.assert_allclose(outputs["image"], auto(inputs)["image"], atol=1e-5)
print("nested model done")
