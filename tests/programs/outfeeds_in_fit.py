"""Outfeed queues inside `fit`: in a loss, in a learning-rate schedule, in a layer and in a metric, on two replicas."""

import numpy as np
import tensorflow as tf
from tensorflow import keras
from tensorflow.python import ipu
from tensorflow.python.ipu.ipu_outfeed_queue import IPUOutfeedMode, IPUOutfeedQueue

REPLICAS = 2
ACCUMULATION = 2
STEPS_PER_EXECUTION = 4
MICRO_BATCH = 4
SAMPLES = 64
RATE = 0.1

rng = np.random.RandomState(4)
inputs = rng.randn(SAMPLES, 5).astype("float32")
labels = rng.randint(0, 3, SAMPLES).astype("int32")
dataset = tf.data.Dataset.from_tensor_slices((inputs, labels)).batch(MICRO_BATCH, drop_remainder=True).repeat()


def wrap_loss_in_enqueuer(loss_class):
    """Returns a loss class that sends every sample's loss to a queue."""

    class LossEnqueuer(loss_class):
        def __init__(self, queue, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.queue = queue

        def call(self, y_true, y_pred):
            losses = super().call(y_true, y_pred)
            self.queue.enqueue(losses)
            return losses

    return LossEnqueuer


class AverageOverExecution(keras.callbacks.Callback):
    """Replaces the last replica's loss in the logs by the mean over everything that has come since."""

    def __init__(self, queue):
        super().__init__()
        self.queue, self.averages, self.shapes = queue, [], []

    def on_train_batch_end(self, batch, logs=None):
        if self.queue.enqueued:
            losses = self.queue.dequeue()
            self.shapes.append(tuple(losses.shape))
            self.averages.append(float(tf.reduce_mean(losses)))
            logs["loss_average"] = self.averages[-1]


class ReportedSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """A learning rate that goes down by steps, and tells where it is."""

    def __init__(self, rate, queue):
        super().__init__()
        self.rate, self.queue = rate, queue

    def __call__(self, step):
        rate = self.rate / (1.0 + tf.cast(step, tf.float32))
        self.queue.enqueue({"lr": rate, "update": tf.cast(step, tf.int32)})
        return rate

    def get_config(self):
        return {"rate": self.rate}


class LearningRateLog(keras.callbacks.Callback):
    def __init__(self, queue):
        super().__init__()
        self.queue, self.rates, self.updates = queue, [], []

    def on_train_batch_end(self, batch, logs=None):
        last = self.queue.dequeue()
        assert set(last) == {"lr", "update"} and last["lr"].shape == (REPLICAS,), last
        self.rates.append(last["lr"].numpy().tolist())
        self.updates.append(last["update"].numpy().tolist())


class Spy(keras.layers.Layer):
    """Sends the mean and the largest of its inputs to a queue, in training only."""

    def __init__(self, queue, **kwargs):
        super().__init__(**kwargs)
        self.queue = queue

    def call(self, x, training=None):
        if training:
            self.queue.enqueue((tf.reduce_mean(x), tf.reduce_max(x)))
        return x


class SentAccuracy(keras.metrics.SparseCategoricalAccuracy):
    """Sends the accuracy so far to a queue whenever a micro batch is done."""

    def __init__(self, queue, **kwargs):
        super().__init__(name="accuracy", **kwargs)
        self.queue = queue

    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(y_true, y_pred, sample_weight)
        return self.queue.enqueue([self.count])


def expected_losses(weights, biases):
    """Returns the losses of all micro batches [step, replica, sample], trained by hand, and the activations' means."""
    losses, activations = [], []
    batches = iter(dataset)
    for update in range(SAMPLES // MICRO_BATCH // REPLICAS // ACCUMULATION):
        total_w, total_b = np.zeros_like(weights), np.zeros_like(biases)
        for _ in range(ACCUMULATION):
            losses.append([])
            activations.append([])
            for _ in range(REPLICAS):
                x, y = (part.numpy() for part in next(batches))
                logits = x @ weights + biases
                probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
                losses[-1].append(-np.log(probabilities[np.arange(MICRO_BATCH), y]))
                activations[-1].append(logits.mean())
                error = (probabilities - np.eye(3)[y]) / MICRO_BATCH
                total_w += x.T @ error / ACCUMULATION
                total_b += error.sum(axis=0) / ACCUMULATION
        weights = weights - RATE / (1 + update) * total_w
        biases = biases - RATE / (1 + update) * total_b
    return np.array(losses), np.array(activations), weights


config = ipu.config.IPUConfig()
config.auto_select_ipus = REPLICAS
config.configure_ipu_system()
strategy = ipu.ipu_strategy.IPUStrategy()

with strategy.scope():
    loss_queue, layer_queue, metric_queue = IPUOutfeedQueue(), IPUOutfeedQueue(), IPUOutfeedQueue()
    rate_queue = IPUOutfeedQueue(outfeed_mode=IPUOutfeedMode.LAST)
    assert loss_queue.dequeue() == [] and not loss_queue.enqueued

    image = keras.Input((5,))
    model = keras.Model(image, Spy(layer_queue)(keras.layers.Dense(3)(image)))
    start = model.get_weights()
    model.set_gradient_accumulation_options(
        gradient_accumulation_steps_per_replica=ACCUMULATION, gradient_accumulation_reduction_method="running_mean"
    )
    enqueuer = wrap_loss_in_enqueuer(keras.losses.SparseCategoricalCrossentropy)
    model.compile(
        keras.optimizers.SGD(ReportedSchedule(RATE, rate_queue)),
        enqueuer(loss_queue, from_logits=True),
        metrics=[SentAccuracy(metric_queue)],
        steps_per_execution=STEPS_PER_EXECUTION,
    )
    average, rates = AverageOverExecution(loss_queue), LearningRateLog(rate_queue)
    model.fit(dataset, steps_per_epoch=SAMPLES // MICRO_BATCH, callbacks=[average, rates], verbose=0)

losses, activations, weights = expected_losses(*start)
np.testing.assert_allclose(model.get_weights()[0], weights, atol=1e-5)

# The loss comes once per step and replica; 8 steps are 2 executions of 4.
assert average.shapes == [(STEPS_PER_EXECUTION, REPLICAS, MICRO_BATCH)] * 2, average.shapes
np.testing.assert_allclose(average.averages, [losses[:4].mean(), losses[4:].mean()], rtol=1e-4)
print("averages:", len(average.averages))

# The learning rate comes once per update and replica; the last of two updates per execution is what is left.
np.testing.assert_allclose(rates.rates, [[RATE / 2] * REPLICAS, [RATE / 4] * REPLICAS], rtol=1e-6)
assert rates.updates == [[1] * REPLICAS, [3] * REPLICAS], rates.updates
print("updates told:", [update[0] for update in rates.updates])

# The layer's queue has not been emptied: all 8 steps are there.
means, largest = layer_queue.dequeue()
assert means.shape == largest.shape == (8, REPLICAS)
np.testing.assert_allclose(means, activations, atol=1e-5)
assert (largest.numpy() >= means.numpy()).all()
assert layer_queue.dequeue()[0].shape == (0, REPLICAS)

# The metric counts the samples of its own replica.
counts = [count.numpy().tolist() for (count,) in metric_queue]
assert counts == [[MICRO_BATCH * step] * REPLICAS for step in range(1, 9)], counts
assert list(metric_queue) == []
print("samples counted:", int(counts[-1][0]))

# Evaluation is another program, whose loss goes to the same queue; the layer is silent in it.
model.evaluate(dataset, steps=STEPS_PER_EXECUTION * REPLICAS, verbose=0)
assert loss_queue.dequeue().shape == (STEPS_PER_EXECUTION, REPLICAS, MICRO_BATCH)
assert layer_queue.dequeue()[0].shape == (0, REPLICAS)
print("done")
