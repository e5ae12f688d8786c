"""Keras outside an IPU strategy's scope does the same with the emulator as without it."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
if sys.argv[1] == "with":
    from tf_ipu_dp import emulator
    emulator.install()
    from tensorflow.python import ipu
    ipu.ipu_strategy.IPUStrategy()
import hashlib, pickle
import numpy as np, tensorflow as tf
tf.keras.utils.set_random_seed(1) if hasattr(tf.keras.utils, "set_random_seed") else tf.random.set_seed(1)
np.random.seed(1)
x = np.random.RandomState(0).randn(96, 4).astype("float32")
y = np.random.RandomState(1).randint(0, 3, 96)  # int64, a partial last batch, a generator: all fine here
shapes = [(4, 8), (8,), (8, 3), (3,)]
initial = [np.random.RandomState(n).randn(*shape).astype("float32") for n, shape in enumerate(shapes)]

def digest(model):
    return hashlib.sha1(b"".join(weights.tobytes() for weights in model.get_weights())).hexdigest()[:12]

def make(optimizer, steps_per_execution=3):
    layers = tf.keras.layers
    model = tf.keras.Sequential(
        [layers.Dense(8, "relu", input_shape=(4,)), layers.Dropout(0.2, seed=3), layers.Dense(3)])
    model.set_weights(initial)
    model.compile(optimizer, tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True), ["accuracy"],
                  steps_per_execution=steps_per_execution)
    return model

for optimizer in ("sgd", "adam", "rmsprop", tf.keras.optimizers.Adam(0.01), tf.keras.optimizers.SGD(0.1, momentum=0.9)):
    tf.random.set_seed(5)
    model = make(optimizer)
    history = model.fit(x, y, batch_size=10, epochs=2, shuffle=False, verbose=0, validation_split=0.1)
    print(type(model.optimizer).__name__, digest(model), history.history["val_loss"], history.params)
model = make("sgd", 1)
model.fit((pair for pair in [(x[:5], y[:5]), (x[5:9], y[5:9])]), verbose=0)
print(digest(model), model.evaluate(x, y, verbose=0), model.predict(x[:7], verbose=0).sum())
model.run_eagerly = True
print(model.train_on_batch(x[:5], y[:5]), digest(model))
print([int(number) for number in tf.data.Dataset.range(3)], tf.random.uniform([2], seed=4).numpy())
print(hasattr(model, "set_pipelining_options"), tf.keras.optimizers.get("adam").learning_rate.numpy())
strategy = tf.distribute.OneDeviceStrategy("/cpu:0")
with strategy.scope():
    tf.random.set_seed(5)
    other = make("adam")
    other.fit(x, y, batch_size=10, shuffle=False, verbose=0)
print(digest(other))
f = tf.function(lambda a: a * 2, jit_compile=False)
print(f(tf.constant(3)).numpy())
"""


def test_a_program_of_plain_keras_prints_the_same_with_and_without_the_emulator():
    printed = []
    for way in ("with", "without"):
        done = subprocess.run([sys.executable, "-c", PROGRAM, way], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        printed.append(done.stdout.splitlines())
    assert printed[0] == printed[1] and len(printed[0]) == 11
