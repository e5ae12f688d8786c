"""A training loop of one's own under poprun, with Horovod beside PopDist as Graphcore's CNN example has it."""

import horovod.tensorflow as hvd
import numpy as np
import popdist
import popdist.tensorflow
import tensorflow as tf
from tensorflow.python import ipu
from tensorflow.python.ipu import distributed
from tensorflow.python.ipu.distributed.popdist_strategy import PopDistStrategy

UPDATES, MICRO_BATCH = 6, 4

if popdist.isPopdistEnvSet() and popdist.getNumInstances() > 1:
    hvd.init()
    assert (hvd.rank(), hvd.size()) == (popdist.getInstanceIndex(), popdist.getNumInstances())
    assert hvd.local_rank() == popdist.getLocalInstanceIndex()
popdist.init()
config = ipu.config.IPUConfig()
config.select_ipus = [popdist.getDeviceId()]
strategy = PopDistStrategy()
strategy.update_ipu_config(config)
config.configure_ipu_system()

replicas, instance = popdist.getNumTotalReplicas(), popdist.getInstanceIndex()
rng = np.random.RandomState(11)
features = rng.randn(UPDATES * MICRO_BATCH * replicas, 3).astype("float32")
targets = (features @ [[1.0], [-2.0], [0.5]]).astype("float32")
dataset = tf.data.Dataset.from_tensor_slices((features, targets))
dataset = dataset.shard(popdist.getNumInstances(), instance).batch(MICRO_BATCH, drop_remainder=True)

with strategy.scope():
    kernel = tf.Variable(tf.fill([3, 1], float(instance)))  # all begin with instance 0's
    optimizer = tf.keras.optimizers.SGD(0.1)
    infeed = iter(dataset)
    outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()


@tf.function
def train(iterator):
    for _ in tf.range(UPDATES):
        x, y = next(iterator)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ kernel - y) ** 2)
            scaled = loss / strategy.num_replicas_in_sync
        optimizer.apply_gradients([(tape.gradient(scaled, kernel), kernel)])
        outfeed.enqueue(loss)


strategy.run(train, args=[infeed])
losses = tf.reshape(tf.cast(outfeed.dequeue(), tf.float32), [UPDATES, -1])
means = distributed.allreduce(tf.reduce_mean(losses, axis=1), tf.distribute.ReduceOp.MEAN)

# What only the first two need to know, where there are so many.
some = {0, 1} & set(range(popdist.getNumInstances()))
known = popdist.execute_on_instances(some, lambda: distributed.allgather(tf.constant(instance)).numpy().tolist())
assert known == (sorted(some) if instance in some else None)
popdist.synchronize()
everyone = distributed.allgather(kernel.read_value()).numpy()
assert (everyone == everyone[0]).all()
if instance == 0:
    print("losses", *(f"{loss:.5f}" for loss in means.numpy()))
    print("kernel", *(f"{value:.5f}" for value in kernel.numpy().ravel()))
