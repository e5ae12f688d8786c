"""A training loop of one's own under poprun, with Horovod beside PopDist as Graphcore's CNN example has it.

It keeps metrics and moving statistics. Each replica has its own, the host sees those of the first local one, and what
it reads is reduced over the instances.
"""

import tempfile

import horovod.tensorflow as hvd
import numpy as np
import popdist
import popdist.tensorflow
import tensorflow as tf
from tensorflow.python import ipu
from tensorflow.python.ipu import distributed
from tensorflow.python.ipu.distributed.popdist_strategy import PopDistStrategy

RUNS, UPDATES, MICRO_BATCH = 2, 3, 4  # updates of each run

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

replicas, instances, instance = popdist.getNumTotalReplicas(), popdist.getNumInstances(), popdist.getInstanceIndex()
rng = np.random.RandomState(11)
features = rng.randn(RUNS * UPDATES * MICRO_BATCH * replicas, 3).astype("float32")
targets = (features @ [[1.0], [-2.0], [0.5]]).astype("float32")
dataset = tf.data.Dataset.from_tensor_slices((features, targets))
dataset = dataset.shard(instances, instance).batch(MICRO_BATCH, drop_remainder=True)

with strategy.scope():
    kernel = tf.Variable(tf.fill([3, 1], float(instance)))  # all begin with instance 0's
    optimizer = tf.keras.optimizers.SGD(0.1)
    norm = tf.keras.layers.BatchNormalization(momentum=0.5)
    mean_loss, samples = tf.keras.metrics.Mean(), tf.keras.metrics.Sum()
    runs = []
    infeed = iter(dataset)
    outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()


@tf.function
def train(iterator):
    if not runs:
        runs.append(tf.Variable(10.0 * (instance + 1)))  # made while tracing: instance 0's too
    runs[0].assign_add(1.0)
    for _ in tf.range(UPDATES):
        x, y = next(iterator)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ kernel - y) ** 2)
            scaled = loss / strategy.num_replicas_in_sync
        optimizer.apply_gradients([(tape.gradient(scaled, kernel), kernel)])
        norm(x, training=True)
        mean_loss.update_state(loss)
        samples.update_state(tf.ones([MICRO_BATCH]))
        outfeed.enqueue(loss)


for run in range(RUNS):
    strategy.run(train, args=[infeed])
    assert samples.result().numpy() == instances * (run + 1) * UPDATES * MICRO_BATCH
losses = tf.reshape(tf.cast(outfeed.dequeue(), tf.float32), [RUNS * UPDATES, -1])
means = distributed.allreduce(tf.reduce_mean(losses, axis=1), tf.distribute.ReduceOp.MEAN)
assert runs[0].numpy() == 10 + RUNS

own_loss = tf.reduce_mean(losses[:, 0])
expected = distributed.allreduce(own_loss, tf.distribute.ReduceOp.MEAN).numpy()
assert instances == 1 or abs(own_loss - expected) > 1e-3 * expected
with strategy.scope():
    inside = mean_loss.result().numpy()
np.testing.assert_allclose([inside, mean_loss.result().numpy()], expected, rtol=1e-5)

moving = np.zeros((instances, 3))
for update in features.reshape(RUNS * UPDATES, -1, instances, 3):
    moving = 0.5 * moving + 0.5 * update[:MICRO_BATCH].mean(axis=0)
if instance == 0:  # the statistics are known to each one, and all but a metric's sum can be saved by one alone
    np.testing.assert_allclose(norm.moving_mean.numpy(), moving.mean(axis=0), rtol=1e-4, atol=1e-6)
    with tempfile.TemporaryDirectory() as folder:
        path = tf.train.Checkpoint(norm=norm, samples=samples).save(f"{folder}/own")
        saved = tf.train.load_checkpoint(path)
        np.testing.assert_array_equal(
            saved.get_tensor("norm/moving_mean/.ATTRIBUTES/VARIABLE_VALUE"), norm.moving_mean.numpy()
        )
        assert saved.get_tensor("samples/total/.ATTRIBUTES/VARIABLE_VALUE") == RUNS * UPDATES * MICRO_BATCH
samples.reset_states()
assert samples.total.numpy() == 0

# What only the first two need to know, where there are so many.
some = {0, 1} & set(range(instances))
known = popdist.execute_on_instances(some, lambda: distributed.allgather(tf.constant(instance)).numpy().tolist())
assert known == (sorted(some) if instance in some else None)
popdist.synchronize()
everyone = distributed.allgather(kernel.read_value()).numpy()
assert (everyone == everyone[0]).all()
if instance == 0:
    print("losses", *(f"{loss:.5f}" for loss in means.numpy()))
    print("kernel", *(f"{value:.5f}" for value in kernel.numpy().ravel()))
