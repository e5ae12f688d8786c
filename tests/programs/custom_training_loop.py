"""A training loop of one's own in `strategy.run`, on as many IPUs as the first argument says.

The result is compared with SGD by hand: gradients are summed over the replicas, each of which has its own micro batch.
"""

import sys
import threading

import numpy as np
import tensorflow as tf
from tensorflow import keras
from tensorflow.python import ipu

REPLICAS = int(sys.argv[1])
MICRO_BATCH = 4
STEPS = 6
RATE = 0.05

rng = np.random.RandomState(5)
samples = 2 * STEPS * REPLICAS * MICRO_BATCH
inputs = rng.randn(samples, 5).astype("float32")
labels = rng.randint(0, 3, samples).astype("int32")


def loss_function(targets, logits):
    return tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(targets, logits, from_logits=True))


def make_model():
    return keras.Sequential([keras.layers.Dense(8, activation="tanh", input_shape=(5,)), keras.layers.Dense(3)])


def make_dataset():
    dataset = tf.data.Dataset.from_tensor_slices((inputs, labels)).batch(MICRO_BATCH, drop_remainder=True)
    return dataset.repeat().prefetch(16)


def trained_by_hand(start, updates):
    """Returns the weights and each micro batch's loss [step, replica]."""
    model = make_model()
    model.set_weights(start)
    losses, batches = [], iter(make_dataset())
    for _ in range(updates):
        losses.append([])
        totals = [0.0] * len(start)
        for _ in range(REPLICAS):
            x, y = next(batches)
            with tf.GradientTape() as tape:
                loss = loss_function(y, model(x))
            gradients = tape.gradient(loss, model.trainable_variables)
            totals = [total + gradient.numpy() for total, gradient in zip(totals, gradients)]
            losses[-1].append(float(loss))
        for variable, total in zip(model.trainable_variables, totals):
            variable.assign_sub(RATE * total)
    return model.get_weights(), np.array(losses)


@tf.function(jit_compile=True)
def training_step(features, targets, model, optimizer):
    with tf.GradientTape() as tape:
        loss = loss_function(targets, model(features, training=True))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss


@tf.function(experimental_compile=True)
def training_loop(iterator, steps, queue, model, optimizer):
    total = 0.0
    for _ in tf.range(steps):
        features, targets = next(iterator)
        loss = training_step(features, targets, model, optimizer)
        queue.enqueue({"loss": loss, "replica": ipu.replication_ops.replication_index()})
        total += loss
    return total / tf.cast(steps, tf.float32)


config = ipu.config.IPUConfig()
config.auto_select_ipus = REPLICAS
config.configure_ipu_system()
strategy = ipu.ipu_strategy.IPUStrategy()

with strategy.scope():
    model = make_model()
    start = model.get_weights()
    optimizer = keras.optimizers.SGD(RATE)
    iterator = iter(make_dataset())
    queue = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
    mean_of_first = strategy.run(training_loop, args=[iterator, STEPS, queue, model, optimizer])

weights, losses = trained_by_hand(start, STEPS)
for ours, expected in zip(model.get_weights(), weights):
    np.testing.assert_allclose(ours, expected, atol=1e-5)
sent = queue.dequeue()
step_shape = (STEPS,) if REPLICAS == 1 else (STEPS, REPLICAS)
assert sent["loss"].shape == step_shape and sent["replica"].dtype == tf.int32
np.testing.assert_allclose(np.reshape(sent["loss"], losses.shape), losses, atol=1e-5)
assert (np.reshape(sent["replica"], losses.shape) == np.arange(REPLICAS)).all(), sent["replica"]
np.testing.assert_allclose(mean_of_first, losses[:, 0].mean(), rtol=1e-5)
assert tf.is_tensor(mean_of_first) and strategy.experimental_local_results(mean_of_first) == (mean_of_first,)
print(f"{REPLICAS} replicas: {optimizer.iterations.numpy()} updates")

# A second run goes on with the data where the first one stopped. The host changes the learning rate in between.
strategy.run(training_loop, args=[iterator, STEPS, queue, model, optimizer])
weights, losses = trained_by_hand(start, 2 * STEPS)
for ours, expected in zip(model.get_weights(), weights):
    np.testing.assert_allclose(ours, expected, atol=1e-5)
np.testing.assert_allclose([np.mean(sent["loss"]) for sent in queue], losses[STEPS:].mean(axis=1), rtol=1e-4)
optimizer.learning_rate = 0.0
strategy.run(training_loop, args=[iterator, STEPS, queue, model, optimizer])
for ours, expected in zip(model.get_weights(), weights):
    np.testing.assert_allclose(ours, expected, atol=1e-5)
assert queue.dequeue()["loss"].shape == step_shape
print("runs go on with the data")

# A thread takes the results out while the loop runs.
LONG = 200
taken = []


def poll():
    while len(taken) < LONG:
        for sent in queue:
            taken.append(sent)


thread = threading.Thread(target=poll, daemon=True)
thread.start()
strategy.run(training_loop, args=[iterator, LONG, queue, model, optimizer])
thread.join(timeout=120)
assert not thread.is_alive() and len(taken) == LONG, len(taken)
assert all((np.reshape(sent["replica"], [-1]) == np.arange(REPLICAS)).all() for sent in taken)
in_order = np.array([np.reshape(sent["loss"], [-1]) for sent in taken])
epoch = 2 * STEPS  # the dataset repeats, and the weights stay as they are
np.testing.assert_allclose(in_order[epoch:], in_order[:-epoch], atol=1e-5)
print(f"polled {len(taken)} steps")

# Functions that are not traced, and float64, are refused.
for function, arguments, error in [
    (lambda x: x, [tf.constant(1.0)], ValueError),
    (tf.function(lambda x: x), [tf.constant(1.0, tf.float64)], TypeError),
]:
    try:
        strategy.run(function, args=arguments)
    except error as refusal:
        print("refused:", type(refusal).__name__)
