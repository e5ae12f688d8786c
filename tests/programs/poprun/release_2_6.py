"""A program for the SDK's releases 2.5 to 3.0: modules that later ones have under other names, and its own loop."""

import numpy as np
import popdist
import popdist.tensorflow
import tensorflow as tf
from tensorflow.python import ipu
from tensorflow.python.ipu import horovod as hvd
from tensorflow.python.ipu.horovod import popdist_strategy
from tensorflow.python.ipu.keras.layers import GroupNorm
from tensorflow.python.ipu.keras.optimizers import GradientAccumulationOptimizer

UPDATES, ACCUMULATED, REPLICAS, MICRO_BATCH = 3, 2, 4, 2

try:
    hvd.rank()
except ValueError:
    hvd.init()
assert (hvd.size(), hvd.rank()) == (popdist.getNumInstances(), popdist.getInstanceIndex())
assert (hvd.local_size(), hvd.local_rank()) == (hvd.size(), hvd.rank())

config = ipu.config.IPUConfig()
popdist.tensorflow.set_ipu_config(config, ipus_per_replica=1)
config.configure_ipu_system()
strategy = popdist_strategy.PopDistStrategy()

own, local = hvd.rank(), popdist.getNumLocalReplicas()
steps = UPDATES * ACCUMULATED
features = np.random.RandomState(1).randn(steps, REPLICAS, MICRO_BATCH, 4).astype("float32")
mine = features[:, own * local : (own + 1) * local].reshape(-1, MICRO_BATCH, 4)
dataset = tf.data.Dataset.from_tensor_slices((mine, mine.sum(axis=2, keepdims=True)))

with strategy.scope():
    norm = GroupNorm(groups=2, gamma_initializer="ones", beta_initializer="zeros")
    dense = tf.keras.layers.Dense(1, kernel_initializer="ones")
    optimizer = GradientAccumulationOptimizer(tf.keras.optimizers.SGD(0.1), ACCUMULATED)
    queue = ipu.ipu_outfeed_queue.IPUOutfeedQueue()

    @tf.function(experimental_compile=True)
    def train(iterator):
        for _ in tf.range(steps):
            x, y = next(iterator)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((dense(norm(x)) - y) ** 2)
                share = loss / strategy.num_replicas_in_sync
            variables = norm.trainable_variables + dense.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(share, variables), variables))
            queue.enqueue(loss)

    strategy.run(train, args=[iter(dataset)])

losses = tf.reshape(queue.dequeue(), [steps, local])
sums = hvd.allreduce(tf.reduce_sum(losses, axis=1), op=hvd.Sum)
means = hvd.allreduce(tf.reduce_mean(losses, axis=1), prescale_factor=2.0, postscale_factor=0.5)
np.testing.assert_allclose(means, sums / REPLICAS, rtol=1e-5)
gathered = hvd.allgather(tf.constant([[own, 1], [own, 2]]))
assert gathered.numpy().tolist() == [[rank, row] for rank in range(hvd.size()) for row in (1, 2)]
assert int(hvd.broadcast(tf.constant(own), root_rank=0)) == 0
last = hvd.size() - 1
assert int(hvd.broadcast(tf.constant(own), root_rank=last)) == last

if own == 0:
    print("losses", *sums.numpy())
    print("weights", *np.concatenate([variable.numpy().ravel() for variable in norm.variables + dense.variables]))
hvd.shutdown()
