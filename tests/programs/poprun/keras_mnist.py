"""A Keras model trained by several instances, as the SDK's guide to PopDist has it. Only instance 0 prints."""

import argparse

import numpy as np
import popdist
import popdist.tensorflow
import tensorflow as tf
from tensorflow import keras
from tensorflow.python import ipu
from tensorflow.python.ipu import distributed
from tensorflow.python.ipu.distributed.popdist_strategy import PopDistStrategy

parser = argparse.ArgumentParser()
parser.add_argument("--micro-batch-size", type=int, default=4)
parser.add_argument("--epochs", type=int, default=2)
args = parser.parse_args()

popdist.init()
config = ipu.config.IPUConfig()
popdist.tensorflow.set_ipu_config(config, ipus_per_replica=popdist.getNumIpusPerReplica())
config.configure_ipu_system()


def make_digits():
    """Images of ten kinds, each with a bright row of its own."""
    rng = np.random.RandomState(5)
    labels = np.arange(256) % 10
    images = rng.rand(256, 28, 28).astype("float32") * 0.3
    images[np.arange(256), 2 * labels + 3] += 1.0
    return images, labels.astype("int32")


def make_dataset():
    dataset = tf.data.Dataset.from_tensor_slices(make_digits())
    dataset = dataset.shard(num_shards=popdist.getNumInstances(), index=popdist.getInstanceIndex())
    return dataset.batch(args.micro_batch_size, drop_remainder=True).repeat().prefetch(4)


class MeanOverInstances(keras.callbacks.Callback):
    """Every instance has the losses of its own replicas only."""

    losses = ()

    def on_epoch_end(self, epoch, logs=None):
        loss = tf.constant(logs["loss"], tf.float32)
        self.losses += (distributed.allreduce(loss, tf.distribute.ReduceOp.MEAN).numpy(),)


with PopDistStrategy().scope():
    tf.random.set_seed(popdist.getInstanceIndex() + 1)  # instance 0's weights count
    model = keras.Sequential(
        [
            keras.layers.Flatten(input_shape=(28, 28)),
            keras.layers.Dense(32, activation="relu", kernel_initializer=keras.initializers.GlorotUniform(7)),
            keras.layers.Dense(10),
        ]
    )
    weights = [np.random.RandomState(3).randn(*shape) * 0.1 for shape in [(784, 32), (32,), (32, 10), (10,)]]
    model.set_weights(weights if popdist.getInstanceIndex() == 0 else [weight * 0 for weight in weights])
    for variable in model.variables:
        variable.assign(distributed.broadcast(variable.read_value()))
    model.set_gradient_accumulation_options(gradient_accumulation_steps_per_replica=2)
    model.compile(
        keras.optimizers.SGD(0.05, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        steps_per_execution=4,
    )
    means = MeanOverInstances()
    micro_batches = 256 // args.micro_batch_size // popdist.getNumInstances()
    model.fit(make_dataset(), steps_per_epoch=micro_batches, epochs=args.epochs, callbacks=[means], verbose=0)

checksum = np.float32([np.abs(weight).sum() for weight in model.get_weights()])
everyone = distributed.allgather(tf.constant(checksum)).numpy()
assert (everyone == everyone[0]).all(), everyone
if popdist.getInstanceIndex() == 0:
    assert means.losses[-1] < means.losses[0]
    print("weights", *(f"{number:.6f}" for number in checksum))
