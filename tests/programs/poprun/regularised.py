"""Batch norm, dropout and metrics under PopDist: what differs between replicas does not differ between layouts."""

import numpy as np
import popdist
import popdist.tensorflow
import tensorflow as tf
from tensorflow.python import ipu
from tensorflow.python.ipu import distributed
from tensorflow.python.ipu.distributed.popdist_strategy import PopDistStrategy

UPDATES, REPLICAS, MICRO_BATCH = 8, 4, 6

popdist.init()
config = ipu.config.IPUConfig()
popdist.tensorflow.set_ipu_config(config, ipus_per_replica=1)
config.configure_ipu_system()
ipu.utils.reset_ipu_seed(3)

own, local = popdist.getInstanceIndex(), popdist.getNumLocalReplicas()
features = np.random.RandomState(0).randn(UPDATES * REPLICAS * MICRO_BATCH, 6).astype("float32")
labels = (features.sum(1) > 0).astype("int32")
mine = np.arange(len(labels)).reshape(UPDATES, REPLICAS, MICRO_BATCH)[:, own * local : (own + 1) * local].ravel()
dataset = tf.data.Dataset.from_tensor_slices((features[mine], labels[mine])).batch(MICRO_BATCH, drop_remainder=True)


def dense(units, seed, **options):
    return tf.keras.layers.Dense(units, kernel_initializer=tf.keras.initializers.GlorotUniform(seed=seed), **options)


with PopDistStrategy().scope():
    model = tf.keras.Sequential(
        [
            tf.keras.Input((6,), batch_size=MICRO_BATCH),
            dense(8, 1, activation="relu"),
            tf.keras.layers.BatchNormalization(),
            tf.keras.layers.Dropout(0.3),
            dense(2, 2),
        ]
    )
    assert model.output_shape == (MICRO_BATCH, 2)  # of a micro batch, which is not divided by the replicas
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, metrics=["accuracy"], steps_per_execution=4)
    model.set_replication_options(replicated_metric_reduction_method="MEAN")
    history = model.fit(dataset, steps_per_epoch=UPDATES * local, epochs=2, verbose=0).history
    scores = model.evaluate(dataset, steps=UPDATES * local, verbose=0)
# The host has the metrics of one replica of each instance, and adds them up when it reads them.
assert model.metrics[1].count.numpy() == len(labels) / local

# Logs are those of this instance's replicas.
logs = tf.constant([*history["loss"], *history["accuracy"], *scores], tf.float32)
everyone = distributed.allgather(logs).numpy()
assert len(np.unique(everyone[:, 0])) == popdist.getNumInstances(), everyone

if own == popdist.getNumInstances() - 1:
    # Read by the last instance: all of them have the same weights.
    print("logs", *everyone.mean(axis=0))
    print("weights", *(np.abs(weight).sum() for weight in model.get_weights()))
