"""A small transformer that fills in masked tokens, as BERT is pretrained under poprun, with validation in fit.

The loss comes from an outfeed, the optimizer from the addons. Only instance 0 prints.
"""

import numpy as np
import popdist
import popdist.tensorflow
import tensorflow as tf
from ipu_tensorflow_addons.keras.layers import Embedding, LayerNormalization
from ipu_tensorflow_addons.keras.optimizers import AdamIpuOptimizer
from tensorflow import keras
from tensorflow.python import ipu
from tensorflow.python.ipu import distributed
from tensorflow.python.ipu.distributed.popdist_strategy import PopDistStrategy

TOKENS, MASK, LENGTH, HIDDEN, HEADS = 10, 0, 6, 16, 2
SAMPLES, MICRO_BATCH, ACCUMULATION, EPOCHS = 384, 8, 3, 10

popdist.init()
instance, instances = popdist.getInstanceIndex(), popdist.getNumInstances()
config = ipu.config.IPUConfig()
config.compilation_poplar_options = {"target.deterministicWorkers": "portable"}
popdist.tensorflow.set_ipu_config(config, ipus_per_replica=1)
config.configure_ipu_system()


def make_dataset(seed):
    """Sentences that count upwards from a random token, with one token masked."""
    rng = np.random.RandomState(seed)
    tokens = (rng.randint(0, TOKENS - 1, (SAMPLES, 1)) + np.arange(LENGTH)) % (TOKENS - 1) + 1
    places = rng.randint(0, LENGTH, SAMPLES)
    ids = tokens.copy()
    ids[np.arange(SAMPLES), places] = MASK
    features = {"ids": ids.astype("int32"), "place": places.astype("int32")[:, None]}
    dataset = tf.data.Dataset.from_tensor_slices((features, tokens[np.arange(SAMPLES), places].astype("int32")))
    return dataset.batch(MICRO_BATCH, drop_remainder=True).shard(instances, instance).repeat()


def dense(units, seed, **options):
    return keras.layers.Dense(units, kernel_initializer=keras.initializers.GlorotUniform(seed=seed), **options)


def embedding(rows, seed):
    return Embedding(rows, HIDDEN, embeddings_initializer=keras.initializers.RandomUniform(-0.5, 0.5, seed=seed))


class Encoder(keras.layers.Layer):
    def __init__(self, seed, **kwargs):
        super().__init__(**kwargs)
        # Without a bias: attention does not depend on that of the keys, and Adam would follow its rounding errors.
        self.qkv, self.projection = dense(3 * HIDDEN, seed, use_bias=False), dense(HIDDEN, seed + 1)
        self.wide, self.narrow = dense(2 * HIDDEN, seed + 2, activation=ipu.nn_ops.gelu), dense(HIDDEN, seed + 3)
        self.norms = [LayerNormalization(), LayerNormalization()]

    def call(self, x):
        heads = tf.reshape(self.qkv(x), [MICRO_BATCH, LENGTH, 3 * HEADS, HIDDEN // HEADS])
        q, k, v = tf.split(tf.transpose(heads, [0, 2, 1, 3]), 3, axis=1)
        scores = tf.nn.softmax(tf.matmul(q, k, transpose_b=True) / (HIDDEN // HEADS) ** 0.5)
        mixed = tf.reshape(tf.transpose(tf.matmul(scores, v), [0, 2, 1, 3]), [MICRO_BATCH, LENGTH, HIDDEN])
        x = self.norms[0](x + self.projection(mixed))
        return self.norms[1](x + self.narrow(self.wide(x)))


class Embeddings(keras.layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.word, self.place, self.norm = embedding(TOKENS, 1), embedding(LENGTH, 2), LayerNormalization()

    def call(self, ids):
        places = tf.tile(tf.range(LENGTH)[tf.newaxis], [MICRO_BATCH, 1])
        return self.norm(self.word(ids) + self.place(places))


class AtPlace(keras.layers.Layer):
    def call(self, inputs):
        x, place = inputs
        return tf.squeeze(tf.gather(x, place, batch_dims=1), axis=1)


class EnqueuedLoss(keras.losses.SparseCategoricalCrossentropy):
    """Sends the losses of every micro batch to the host."""

    def __init__(self, queue):
        super().__init__(from_logits=True)
        self.queue = queue

    def call(self, y_true, y_pred):
        losses = super().call(y_true, y_pred)
        self.queue.enqueue(tf.reduce_mean(losses))
        return losses


class Dequeue(keras.callbacks.Callback):
    """The mean loss of each execution, over all replicas of all instances."""

    def __init__(self, queue):
        super().__init__()
        self.queue, self.losses = queue, []

    def on_train_batch_end(self, batch, logs=None):
        own = tf.reduce_mean(tf.cast(self.queue.dequeue(), tf.float32))
        self.losses.append(distributed.allreduce(own, tf.distribute.ReduceOp.MEAN).numpy().item())

    def on_test_end(self, logs=None):
        self.queue.dequeue()  # validation has sent its losses too


with PopDistStrategy().scope():
    ids = keras.Input((LENGTH,), MICRO_BATCH, dtype=tf.int32, name="ids")
    place = keras.Input((1,), MICRO_BATCH, dtype=tf.int32, name="place")
    x = Embeddings(name="embeddings")(ids)
    for number in range(2):
        x = Encoder(10 * (number + 1), name=f"encoder{number}")(x)
    model = keras.Model([ids, place], dense(TOKENS, 50, name="logits")(AtPlace(name="masked")([x, place])))
    queue = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
    model.compile(
        AdamIpuOptimizer(0.01), EnqueuedLoss(queue), metrics=["accuracy"], steps_per_execution=2 * ACCUMULATION
    )
    model.set_gradient_accumulation_options(
        gradient_accumulation_steps_per_replica=ACCUMULATION,
        gradient_accumulation_reduction_method="mean",
        dtype=tf.float32,
    )
    model.set_replication_options(replicated_metric_reduction_method="MEAN")
    steps = SAMPLES // MICRO_BATCH // instances
    sent = Dequeue(queue)
    history = model.fit(
        make_dataset(seed=2),
        steps_per_epoch=steps,
        epochs=EPOCHS,
        validation_data=make_dataset(seed=3),
        validation_steps=steps,
        callbacks=[sent],
        verbose=0,
    ).history

validation = tf.constant([history["val_loss"][-1], history["val_accuracy"][-1]])
validation = distributed.allreduce(validation, tf.distribute.ReduceOp.MEAN).numpy()
if instance == 0:
    assert len(sent.losses) == EPOCHS * steps // popdist.getNumLocalReplicas() // (2 * ACCUMULATION)
    assert sent.losses[-1] < 0.3 * sent.losses[0] and validation[1] > 0.9, (sent.losses, validation)
    print("losses", *sent.losses)
    print("validation", *validation)
    print("weights", *(np.abs(weight).sum() for weight in model.get_weights()))
