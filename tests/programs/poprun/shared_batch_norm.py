"""Batch statistics of all replicas, and of two at a time, under PopDist: the same however they are divided."""

import numpy as np
import popdist
import popdist.tensorflow
import tensorflow as tf
from tensorflow.python import ipu
from tensorflow.python.ipu.distributed.popdist_strategy import PopDistStrategy

UPDATES, REPLICAS, MICRO_BATCH = 4, 4, 2

popdist.init()
own, local = popdist.getInstanceIndex(), popdist.getNumLocalReplicas()
images = np.random.RandomState(0).randn(UPDATES * REPLICAS * MICRO_BATCH, 4, 4, 1).astype("float32")
images *= np.arange(len(images)).reshape(-1, 1, 1, 1)
targets = images.mean(axis=(1, 2))
mine = np.arange(len(images)).reshape(UPDATES, REPLICAS, MICRO_BATCH)[:, own * local : (own + 1) * local].ravel()
dataset = tf.data.Dataset.from_tensor_slices((images[mine], targets[mine])).batch(MICRO_BATCH, drop_remainder=True)


def train(group):
    config = ipu.config.IPUConfig()
    config.norms.experimental.distributed_batch_norm_replica_group_size = group
    popdist.tensorflow.set_ipu_config(config, ipus_per_replica=1)
    config.configure_ipu_system()
    with PopDistStrategy().scope():
        seeds = (tf.keras.initializers.GlorotUniform(seed=seed) for seed in (1, 2))
        model = tf.keras.Sequential(
            [
                tf.keras.layers.Conv2D(3, 3, use_bias=False, kernel_initializer=next(seeds), input_shape=(4, 4, 1)),
                tf.keras.layers.BatchNormalization(),
                tf.keras.layers.Flatten(),
                tf.keras.layers.Dense(1, kernel_initializer=next(seeds)),
            ]
        )
        model.compile(tf.keras.optimizers.SGD(0.001), "mse", steps_per_execution=2)
        model.fit(dataset, steps_per_epoch=UPDATES * local, epochs=2, verbose=0)
    return [np.abs(weight).sum() for weight in model.get_weights()]


weights = {group: train(group) for group in (1, 2, REPLICAS)}
assert not np.allclose(weights[1], weights[2]) and not np.allclose(weights[2], weights[REPLICAS])
if own == popdist.getNumInstances() - 1:
    for group, sums in weights.items():
        print(f"groups_of_{group}", *sums)
