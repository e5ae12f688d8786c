"""Pretraining of a tiny BERT as applications write it: masked tokens and sentence order, accumulation, a pipeline,
outfeeds for losses and learning rate, captured gradients, and automatic loss scaling.
"""

import random

import numpy as np
import tensorflow as tf
from ipu_tensorflow_addons.keras.layers import Embedding, LayerNormalization
from ipu_tensorflow_addons.keras.optimizers import AdamIpuOptimizer, LAMBIpuOptimizer
from keras.ipu.layers import CaptureActivationGradients, CaptureUpstreamGradients
from keras.ipu.optimizers import ALSOptimizer
from tensorflow import keras
from tensorflow.python import ipu
from tensorflow.python.ipu.eager.backprop import GradientCaptureContext, GradientCaptureTape
from tensorflow.python.ipu.ipu_outfeed_queue import IPUOutfeedMode, IPUOutfeedQueue

TOKENS, MASK, LENGTH, MASKED = 12, 0, 8, 2
HIDDEN, HEADS = 16, 2
MICRO_BATCH, ACCUMULATION, SAMPLES = 4, 8, 256
RATE = 0.02

# Sentences count upwards from a random token; the second half continues the first one, or starts anew.
rng = np.random.RandomState(21)
first = rng.randint(0, TOKENS - 1, (SAMPLES, 1))
second = np.where(np.arange(SAMPLES)[:, None] % 2, first + LENGTH // 2, rng.randint(0, TOKENS - 1, (SAMPLES, 1)))
counting = np.arange(LENGTH // 2)
tokens = (np.concatenate([first + counting, second + counting], axis=1) % (TOKENS - 1) + 1).astype("int32")
positions = np.stack([rng.choice(LENGTH, MASKED, replace=False) for _ in range(SAMPLES)]).astype("int32")
masked_ids = np.take_along_axis(tokens, positions, axis=1)
input_ids = tokens.copy()
np.put_along_axis(input_ids, positions, MASK, axis=1)
features = {"input_ids": input_ids, "positions": positions}
targets = {"mlm": masked_ids, "nsp": (np.arange(SAMPLES) % 2).astype("int32")}


def make_dataset():
    data = tf.data.Dataset.from_tensor_slices((features, targets))
    return data.batch(MICRO_BATCH, drop_remainder=True).repeat()


class SelfAttention(keras.layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.qkv = keras.layers.Dense(3 * HIDDEN, name="qkv")
        self.projection = keras.layers.Dense(HIDDEN, name="projection")
        self.norm = LayerNormalization(name="norm")

    def call(self, x):
        batch = x.shape[0] or -1
        heads = tf.reshape(self.qkv(x), [batch, LENGTH, 3 * HEADS, HIDDEN // HEADS])
        q, k, v = tf.split(tf.transpose(heads, [0, 2, 1, 3]), 3, axis=1)
        scores = tf.nn.softmax(tf.matmul(q, k, transpose_b=True) / (HIDDEN // HEADS) ** 0.5)
        mixed = tf.reshape(tf.transpose(tf.matmul(scores, v), [0, 2, 1, 3]), [batch, LENGTH, HIDDEN])
        return self.norm(x + self.projection(mixed))


class FeedForward(keras.layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        # The gradients of the widest activations show first whether float16 would overflow.
        wide = keras.layers.Dense(2 * HIDDEN, activation=ipu.nn_ops.gelu, name=f"{self.name}_wide")
        self.wide = CaptureActivationGradients(wide)
        self.narrow = keras.layers.Dense(HIDDEN, name="narrow")
        self.norm = LayerNormalization(name="norm")

    def call(self, x):
        return self.norm(x + self.narrow(self.wide(x)))


class Embeddings(keras.layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.word = Embedding(TOKENS, HIDDEN, name="word")
        self.place = Embedding(LENGTH, HIDDEN, name="place")
        self.norm = LayerNormalization(name="norm")

    def call(self, ids):
        places = tf.broadcast_to(tf.range(LENGTH)[tf.newaxis], tf.shape(ids))
        return self.norm(self.word(ids) + self.place(tf.ensure_shape(places, ids.shape)))


class MaskedTokens(keras.layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.logits = CaptureUpstreamGradients(keras.layers.Dense(TOKENS, name="logits"), tag="mlm_logits")

    def call(self, inputs):
        x, places = inputs
        return self.logits(tf.gather(x, places, batch_dims=1))


def make_model():
    ids = keras.Input((LENGTH,), MICRO_BATCH, dtype=tf.int32, name="input_ids")
    places = keras.Input((MASKED,), MICRO_BATCH, dtype=tf.int32, name="positions")
    x = Embeddings(name="embeddings")(ids)
    for number in range(2):
        x = SelfAttention(name=f"encoder_{number}_attention")(x)
        x = FeedForward(name=f"encoder_{number}_feed")(x)
    mlm = MaskedTokens(name="mlm")([x, places])
    pooled = keras.layers.GlobalAveragePooling1D(name="pool")(x)
    return keras.Model([ids, places], {"mlm": mlm, "nsp": keras.layers.Dense(2, name="nsp")(pooled)})


class Enqueued(keras.losses.SparseCategoricalCrossentropy):
    """Sends the loss of every sample to a queue."""

    def __init__(self, queue, **kwargs):
        super().__init__(from_logits=True, **kwargs)
        self.queue = queue

    def call(self, y_true, y_pred):
        losses = super().call(y_true, y_pred)
        self.queue.enqueue(losses)
        return losses


class Warmup(keras.optimizers.schedules.LearningRateSchedule):
    def __init__(self, queue):
        super().__init__()
        self.queue = queue

    def __call__(self, step):
        rate = RATE * tf.minimum(1.0, (tf.cast(step, tf.float32) + 1) / 4)
        self.queue.enqueue({"lr": rate})
        return rate


class Progress(keras.callbacks.Callback):
    def __init__(self, losses, rates):
        super().__init__()
        self.losses, self.rates, self.seen, self.told = losses, rates, [], []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(float(tf.reduce_mean(self.losses.dequeue())))
        self.told.append(float(np.ravel(self.rates.dequeue()["lr"])[0]))


def crossentropy(y_true, y_pred):
    return tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True))


def configure(ipus):
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = ipus
    config.configure_ipu_system()
    ipu.utils.reset_ipu_seed(22)
    return ipu.ipu_strategy.IPUStrategy()


def compile_and_fit(model, make_optimizer, replicas, epochs):
    losses, rates = IPUOutfeedQueue(), IPUOutfeedQueue(outfeed_mode=IPUOutfeedMode.LAST)
    mean = [lambda pairs: [(gradient / replicas, variable) for gradient, variable in pairs]]
    model.compile(
        make_optimizer(learning_rate=Warmup(rates), gradient_transformers=mean),
        {"mlm": Enqueued(losses), "nsp": keras.losses.SparseCategoricalCrossentropy(from_logits=True)},
        metrics={"mlm": "accuracy"},
        steps_per_execution=ACCUMULATION,
    )
    progress = Progress(losses, rates)
    steps = SAMPLES // MICRO_BATCH
    history = model.fit(make_dataset(), steps_per_epoch=steps, epochs=epochs, verbose=0, callbacks=[progress]).history
    return history, progress


random.seed(23)  # of Keras's initializers
tf.random.set_seed(23)

# Two replicas with accumulation and LAMB.
strategy = configure(2)
with strategy.scope():
    model = make_model()
    start = model.get_weights()
    model.set_gradient_accumulation_options(ACCUMULATION, "running_mean")
    history, progress = compile_and_fit(model, LAMBIpuOptimizer, 2, epochs=2)
executions = 2 * SAMPLES // MICRO_BATCH // 2 // ACCUMULATION
assert len(progress.seen) == executions and model.optimizer.iterations.numpy() == executions
np.testing.assert_allclose(progress.told[:5], [RATE / 4, RATE / 2, RATE * 3 / 4, RATE, RATE], rtol=1e-6)
print(f"LAMB with accumulation: {executions} updates, loss falls: {progress.seen[-1] < progress.seen[0]}")
plain = [weight.copy() for weight in model.get_weights()]

# The same as a pipeline of two replicas of two stages: the same weights.
strategy = configure(4)
with strategy.scope():
    model = make_model()
    model.set_weights(start)
    assignments = model.get_pipeline_stage_assignment()
    for assignment in assignments:
        assignment.pipeline_stage = 0 if assignment.layer.name.startswith(("embeddings", "encoder_0")) else 1
    model.set_pipeline_stage_assignment(assignments)
    model.set_pipelining_options(
        gradient_accumulation_steps_per_replica=ACCUMULATION,
        gradient_accumulation_reduction_method="running_mean",
        device_mapping=[0, 1],
        recomputation_mode=ipu.ops.pipelining_ops.RecomputationMode.RecomputeAndBackpropagateInterleaved,
    )
    compile_and_fit(model, LAMBIpuOptimizer, 2, epochs=2)
for ours, expected in zip(model.get_weights(), plain):
    np.testing.assert_allclose(ours, expected, atol=1e-4)
print("a pipeline trains the same weights")

# A custom loop on two replicas: every step sends the size of what was captured.
strategy = configure(2)
with strategy.scope():
    model = make_model()
    model.set_weights(start)
    optimizer = AdamIpuOptimizer(0.01)
    sizes = IPUOutfeedQueue()
    iterator = iter(make_dataset())

    @tf.function(jit_compile=True)
    def training_loop(iterator, steps):
        for _ in tf.range(steps):
            x, y = next(iterator)
            with GradientCaptureTape() as tape:
                outputs = model(x, training=True)
                loss = crossentropy(y["mlm"], outputs["mlm"]) + crossentropy(y["nsp"], outputs["nsp"])
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            largest = {tag: tf.reduce_max(tf.abs(value)) for tag, value in tape.captured_gradients.items()}
            sizes.enqueue({"loss": loss, **largest})

    strategy.run(training_loop, args=[iterator, 24])
sent = sizes.dequeue()
assert sorted(sent) == ["encoder_0_feed_wide_grad", "encoder_1_feed_wide_grad", "loss", "mlm_logits"], sorted(sent)
assert sent["loss"].shape == (24, 2) and (sent["mlm_logits"].numpy() > 0).all()
# The gradient of a mean of cross entropies with respect to its logits is never larger than one over their number.
assert sent["mlm_logits"].numpy().max() <= 1 / (MICRO_BATCH * MASKED)
loss = sent["loss"].numpy().mean(axis=1)
print(f"captured in a loop: {len(sent) - 1} tags, loss falls: {loss[-6:].mean() < loss[:6].mean()}")

# A pipeline of functions: captured gradients go to an outfeed of their own with every update.
strategy = configure(2)
with strategy.scope():
    weights = tf.Variable(rng.randn(HIDDEN, TOKENS).astype("float32") / 4)
    table = tf.Variable(rng.randn(TOKENS, HIDDEN).astype("float32") / 4)
    before = weights.numpy(), table.numpy()
    descent = keras.optimizers.SGD(0.5)
    infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(make_dataset())
    losses, captured = IPUOutfeedQueue(), IPUOutfeedQueue()

    def embed(x, y):
        vectors = tf.reduce_mean(ipu.embedding_ops.embedding_lookup(table, x["input_ids"]), axis=1)
        return ipu.grad_util_ops.capture_upstream_gradients(vectors, tag="vectors"), y["mlm"][:, 0]

    def score(vectors, wanted):
        return crossentropy(wanted, tf.matmul(vectors, weights))

    def optimizer_function(loss):
        return ipu.pipelining_ops.OptimizerFunctionOutput(
            descent,
            loss,
            variables=[weights, table],
            gradient_capture_context=GradientCaptureContext(),
            captured_gradient_outfeed=captured,
        )

    @tf.function(jit_compile=True)
    def pipeline():
        ipu.pipelining_ops.pipeline(
            [embed, score], 4, repeat_count=2, infeed_queue=infeed, outfeed_queue=losses,
            optimizer_function=optimizer_function, outfeed_loss=True,
        )  # fmt: skip

    infeed.initializer  # noqa: B018
    strategy.run(pipeline)
vectors = captured.dequeue()["vectors"].numpy()
assert vectors.shape == (2, MICRO_BATCH, HIDDEN) and losses.dequeue().shape == (8,)
expected = np.zeros((MICRO_BATCH, HIDDEN))
for number in range(4):
    rows = slice(number * MICRO_BATCH, (number + 1) * MICRO_BATCH)
    logits = before[1][input_ids[rows]].mean(axis=1) @ before[0]
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    expected += (probabilities - np.eye(TOKENS)[masked_ids[rows, 0]]) / MICRO_BATCH @ before[0].T
np.testing.assert_allclose(vectors[0], expected, atol=1e-5)
print("captured in a pipeline: the sum over the micro batches of an update")

# Automatic loss scaling in float16 counts the captured gradients.
strategy = configure(1)
keras.mixed_precision.set_global_policy("float16")
with strategy.scope():
    model = make_model()
    scaling = ALSOptimizer(
        keras.optimizers.SGD(0.05), initial_loss_scaling_factor=1024, update_frequency=2, captured_grads_only=True
    )
    crossentropies = {name: keras.losses.SparseCategoricalCrossentropy(from_logits=True) for name in ("mlm", "nsp")}
    model.compile(scaling, crossentropies, steps_per_execution=8)
    history = model.fit(make_dataset(), steps_per_epoch=SAMPLES // MICRO_BATCH, epochs=2, verbose=0).history
assert np.isfinite(history["loss"]).all(), history
falls = history["loss"][-1] < history["loss"][0]
print(f"loss scaling: factor above 1: {scaling.loss_scaling_factor.numpy() > 1}, loss falls: {falls}")
