"""Layers and optimizers of `ipu_tensorflow_addons` in models that are trained on two replicas."""

import random

import numpy as np
import tensorflow as tf
from ipu_tensorflow_addons.keras.layers import LSTM, Dropout, Embedding, GroupNormalization, LayerNormalization
from ipu_tensorflow_addons.keras.optimizers import AdamIpuOptimizer, LAMBIpuOptimizer, SGDIpuOptimizer
from tensorflow import keras
from tensorflow.python import ipu

REPLICAS = 2
MICRO_BATCH = 8
SAMPLES = 128
WORDS, LENGTH = 20, 6

rng = np.random.RandomState(8)
random.seed(1)  # of Keras's initializers
tf.random.set_seed(1)
sentences = rng.randint(1, WORDS, (SAMPLES, LENGTH)).astype("int32")
labels = (sentences[:, 0] > WORDS // 2).astype("int32")

config = ipu.config.IPUConfig()
config.auto_select_ipus = REPLICAS
config.configure_ipu_system()
strategy = ipu.ipu_strategy.IPUStrategy()


def make_text_model():
    words = keras.Input((LENGTH,), batch_size=MICRO_BATCH, dtype=tf.int32)
    x = Embedding(WORDS, 8, serialization_factor=2)(words)
    x = LayerNormalization()(x)
    x = LSTM(12, return_sequences=False)(x)
    x = Dropout(0.1)(x)
    x = keras.layers.Dense(8, activation=ipu.nn_ops.gelu)(x)
    return keras.Model(words, keras.layers.Dense(2)(x))


def make_image_model():
    return keras.Sequential(
        [
            keras.layers.Conv2D(8, 3, padding="same", input_shape=(6, 6, 1)),
            GroupNormalization(groups=4, gamma_initializer="ones", beta_initializer="zeros"),
            keras.layers.ReLU(),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(2),
        ]
    )


def compile_and_fit(model, optimizer, data, **kwargs):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], steps_per_execution=4)
    return model.fit(data, labels, batch_size=MICRO_BATCH, shuffle=False, verbose=0, **kwargs).history["loss"]


with strategy.scope():
    model = make_text_model()
    model.set_gradient_accumulation_options(gradient_accumulation_steps_per_replica=2)
    adam = AdamIpuOptimizer(0.02, m_dtype=tf.float32, v_dtype=tf.float32, outline_apply_gradients=True)
    losses = compile_and_fit(model, adam, sentences, epochs=10)
    logits = model.predict(sentences, batch_size=MICRO_BATCH)
assert losses[-1] < 0.7 * losses[0], losses
assert logits.shape == (SAMPLES, 2) and np.mean(logits.argmax(axis=1) == labels) > 0.75
print(f"Adam: {adam.iterations.numpy()} updates")

# An image is bright where its label says so.
images = rng.randn(SAMPLES, 6, 6, 1).astype("float32")
images[labels == 1, :3] += 2.0
with strategy.scope():
    model = make_image_model()
    lamb = LAMBIpuOptimizer(0.02, weight_decay_rate=0.01, exclude_from_weight_decay=["bias", "gamma", "beta"])
    losses = compile_and_fit(model, lamb, images, epochs=4)
assert losses[-1] < losses[0], losses
print(f"LAMB: {lamb.iterations.numpy()} updates")

# SGD with momentum: the addons' rule is that of Keras.
start = make_image_model().get_weights()
trained = []
for make_optimizer in (SGDIpuOptimizer, keras.optimizers.SGD):
    with strategy.scope():
        model = make_image_model()
        model.set_weights(start)
        optimizer = make_optimizer(learning_rate=0.05, momentum=0.9, nesterov=True)
        compile_and_fit(model, optimizer, images)
    trained.append(model.get_weights())
for ours, stock in zip(*trained):
    np.testing.assert_allclose(ours, stock, atol=1e-5)
print("SGD agrees with Keras")
