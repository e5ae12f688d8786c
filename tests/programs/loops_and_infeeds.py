"""`ipu.loops` over infeed queues: a zip of dict datasets, a list that is sent and iterated over, and a while loop."""

import numpy as np
import tensorflow as tf
from tensorflow import keras
from tensorflow.python import ipu

REPLICAS = 2
MICRO_BATCH = 3
STEPS = 5
RATE = 0.1

rng = np.random.RandomState(6)
count = 2 * STEPS * REPLICAS * MICRO_BATCH
graphs = {"nodes": rng.randn(count, 4).astype("float32"), "mask": rng.randint(0, 2, (count, 1)).astype("int32")}
truth = {"energy": rng.randn(count, 1).astype("float32")}

features = tf.data.Dataset.from_tensor_slices(graphs)
targets = tf.data.Dataset.from_tensor_slices(truth)
dataset = tf.data.Dataset.zip((features, targets)).batch(MICRO_BATCH, drop_remainder=True).repeat()

config = ipu.config.IPUConfig()
config.auto_select_ipus = REPLICAS
config.configure_ipu_system()
strategy = ipu.ipu_strategy.IPUStrategy()


class Regression(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, inputs, training=None):
        return self.dense(inputs["nodes"] * tf.cast(inputs["mask"], tf.float32))


with strategy.scope():
    model = Regression()
    model({name: values[:1] for name, values in graphs.items()})
    start = [weight.copy() for weight in model.get_weights()]
    optimizer = keras.optimizers.SGD(RATE)
    infeed_queue = ipu.ipu_infeed_queue.IPUInfeedQueue(dataset, prefetch_depth=4)
    outfeed_queue = ipu.ipu_outfeed_queue.IPUOutfeedQueue()

    @tf.function(experimental_compile=True)
    def train_step(total, inputs, labels):
        with tf.GradientTape() as tape:
            predictions = model(inputs, training=True)
            loss = tf.reduce_mean(tf.square(labels["energy"] - predictions))
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
        outfeed_queue.enqueue({"loss": loss, "predictions": predictions})
        return total + loss

    @tf.function(experimental_compile=True)
    def train_epoch():
        return ipu.loops.repeat(STEPS, train_step, inputs=[tf.constant(0.0)], infeed_queue=infeed_queue)

    try:
        strategy.run(train_epoch)
    except tf.errors.FailedPreconditionError:
        print("an infeed queue must be initialised")
    infeed_queue.initializer  # noqa: B018
    totals = [strategy.run(train_epoch).numpy() for _ in range(2)]

# By hand, both epochs.
weights, bias = (weight.astype("float64") for weight in start)
losses, predictions = [], []
for step in range(2 * STEPS):
    weight_sum, bias_sum = np.zeros_like(weights), np.zeros_like(bias)
    losses.append([])
    predictions.append([])
    for replica in range(REPLICAS):
        first = (step * REPLICAS + replica) * MICRO_BATCH
        rows = slice(first, first + MICRO_BATCH)
        x = graphs["nodes"][rows] * graphs["mask"][rows]
        predicted = x @ weights + bias
        error = predicted - truth["energy"][rows]
        losses[-1].append(np.mean(error**2))
        predictions[-1].append(predicted)
        weight_sum += x.T @ error * 2 / MICRO_BATCH
        bias_sum += error.sum(axis=0) * 2 / MICRO_BATCH
    weights, bias = weights - RATE * weight_sum, bias - RATE * bias_sum

np.testing.assert_allclose(model.get_weights()[0], weights, atol=1e-5)
sent = outfeed_queue.dequeue()
assert sent["predictions"].shape == (2 * STEPS, REPLICAS, MICRO_BATCH, 1)
np.testing.assert_allclose(sent["loss"], losses, rtol=1e-4)
np.testing.assert_allclose(sent["predictions"], predictions, atol=1e-5)
np.testing.assert_allclose(totals, [np.sum(losses[:STEPS], axis=0)[0], np.sum(losses[STEPS:], axis=0)[0]], rtol=1e-4)
print(f"epochs: {len(totals)}, steps sent: {len(sent['loss'])}")

# Inference in a loop: a list is sent for each step, and iterated over afterwards.
images = tf.data.Dataset.from_tensor_slices({"image": rng.rand(24, 2, 2).astype("float16")}).batch(
    4, drop_remainder=True
)
with strategy.scope():
    image_queue = ipu.ipu_infeed_queue.IPUInfeedQueue(images)
    detections = ipu.ipu_outfeed_queue.IPUOutfeedQueue()

    def predict_step(image):
        boxes = tf.stack([tf.reduce_min(image, [1, 2]), tf.reduce_max(image, [1, 2])], axis=-1)
        return detections.enqueue([boxes, tf.cast(boxes[:, 1] > 0.5, tf.int32)])

    @tf.function
    def predict_loop():
        ipu.loops.repeat(3, predict_step, infeed_queue=image_queue)

    image_queue.initializer  # noqa: B018
    assert strategy.run(predict_loop) is None
    boxes = []
    for box, label in detections:
        assert box.shape == (REPLICAS, 4, 2) and label.shape == (REPLICAS, 4) and box.dtype == tf.float16
        boxes.append(box.numpy().reshape(-1, 2))
    assert list(detections) == []
everything = np.stack([element["image"].numpy() for element in images]).reshape(24, 4)
np.testing.assert_array_equal(np.concatenate(boxes), np.stack([everything.min(1), everything.max(1)], axis=1))
print(f"detections: {sum(len(box) for box in boxes)}")

# A deleted queue can be initialised again and starts from the beginning.
with strategy.scope():
    image_queue.deleter  # noqa: B018
    image_queue.initializer  # noqa: B018
    strategy.run(predict_loop)
    np.testing.assert_array_equal(
        np.concatenate([box.numpy().reshape(-1, 2) for box, _ in detections]), np.concatenate(boxes)
    )


# A while loop whose condition sees the carried values only, and a repeated body of several values.
@tf.function
def collatz(start):
    def step(value, steps):
        return tf.where(value % 2 == 0, value // 2, 3 * value + 1), steps + 1

    return ipu.loops.while_loop(lambda value, steps: value > 1, step, [start, tf.constant(0)], maximum_iterations=100)


assert [int(value) for value in strategy.run(collatz, args=[tf.constant(27)])][1] == 100
assert [int(value) for value in strategy.run(collatz, args=[tf.constant(6)])] == [1, 8]


@tf.function
def fibonacci(n):
    return ipu.loops.repeat(n, lambda a, b: (b, a + b), [tf.constant(0), tf.constant(1)])


assert strategy.run(fibonacci, args=[10])[0].numpy() == 55
print("done")
