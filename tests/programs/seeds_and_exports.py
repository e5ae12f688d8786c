"""Reproducible dropout on two replicas, the benchmark of a dataset, and a model exported for serving."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import tensorflow as tf
from tensorflow import keras
from tensorflow.python import ipu

REPLICAS = 2
MICRO_BATCH = 4
SAMPLES = 64

rng = np.random.RandomState(11)
inputs = rng.randn(SAMPLES, 6).astype("float32")
targets = rng.randn(SAMPLES, 1).astype("float32")
dataset = tf.data.Dataset.from_tensor_slices((inputs, targets)).batch(MICRO_BATCH, drop_remainder=True)

config = ipu.config.IPUConfig()
config.auto_select_ipus = REPLICAS
config.configure_ipu_system()
strategy = ipu.ipu_strategy.IPUStrategy()


class Sent(keras.layers.Layer):
    """Sends what it gets to a queue in training."""

    def __init__(self, queue, **kwargs):
        super().__init__(**kwargs)
        self.queue = queue

    def call(self, x, training=None):
        if training:
            self.queue.enqueue(x)
        return x


with strategy.scope():
    queue = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
    model = keras.Sequential(
        [
            keras.layers.Dense(8, activation="relu", bias_initializer="ones", input_shape=(6,)),
            keras.layers.Dropout(0.5),
            Sent(queue),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.SGD(0.01), "mse", steps_per_execution=4)
start = model.get_weights()
alike = tf.data.Dataset.from_tensors((tf.zeros([MICRO_BATCH, 6]), tf.ones([MICRO_BATCH, 1]))).repeat(8)


def train(seed, **kwargs):
    """Returns the weights after two short epochs, and which activations of the first one were dropped."""
    ipu.utils.reset_ipu_seed(seed, **kwargs)
    model.set_weights(start)
    model.fit(alike, verbose=0)
    dropped = queue.dequeue().numpy() == 0
    model.fit(dataset, verbose=0)
    queue.dequeue()
    return np.concatenate([weight.ravel() for weight in model.get_weights()]), dropped


first, first_dropped = train(seed=7)
second, second_dropped = train(seed=7)
other, other_dropped = train(seed=8)
np.testing.assert_array_equal(first_dropped, second_dropped)
np.testing.assert_allclose(first, second, atol=1e-6)
assert not np.allclose(first, other) and not np.array_equal(first_dropped, other_dropped)
assert first_dropped.shape == (4, REPLICAS, MICRO_BATCH, 8)
assert not np.array_equal(first_dropped[:, 0], first_dropped[:, 1])  # replicas drop differently
assert not np.array_equal(first_dropped[0], first_dropped[1])  # and so do steps
_, identical = train(seed=7, experimental_identical_replicas=True)
np.testing.assert_array_equal(identical[:, 0], identical[:, 1])
print("seeds repeat the training")

# The dataset alone.
result = ipu.dataset_benchmark.dataset_benchmark(
    dataset.repeat(), number_of_epochs=2, elements_per_epochs=32, print_stats=False
)
epochs = json.loads(result.numpy()[0])["epochs"]
assert len(epochs) == 2 and epochs[0]["elements_processed"] == 32 and epochs[0]["elements_per_second"] > 0
print("epochs measured:", len(epochs))

# The model for serving, with which a process without the SDK answers: a program of one replica.
folder = Path(tempfile.mkdtemp()) / "exported"
expected = model.predict(inputs[: MICRO_BATCH * 8], batch_size=MICRO_BATCH)[:MICRO_BATCH]
config.auto_select_ipus = 1
config.configure_ipu_system()
serve = model.export_for_ipu_serving(str(folder), batch_size=MICRO_BATCH, output_names="score")
np.testing.assert_allclose(serve(tf.constant(inputs[:MICRO_BATCH]))["score"], expected, atol=1e-5)
np.save(str(folder.parent / "inputs.npy"), inputs[:MICRO_BATCH])
np.save(str(folder.parent / "expected.npy"), expected)
client = f"""
import sys
import numpy as np, tensorflow as tf
folder = {str(folder.parent)!r}
loaded = tf.saved_model.load(folder + "/exported")
serve = loaded.signatures["serving_default"]
(name,) = serve.structured_input_signature[1]
answer = serve(**{{name: tf.constant(np.load(folder + "/inputs.npy"))}})
np.testing.assert_allclose(answer["score"], np.load(folder + "/expected.npy"), atol=1e-5)
assert not any(module.startswith("tf_ipu_dp") for module in sys.modules)
print("a plain process answers alike")
"""
subprocess.run([sys.executable, "-c", client], check=True)
