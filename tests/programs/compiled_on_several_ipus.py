"""Computations in the older style, in eager mode: data-parallel on four IPUs, then on shards of two and of four."""

import numpy as np
import tensorflow as tf
from tensorflow.python import ipu

config = ipu.config.IPUConfig()
config.auto_select_ipus = 4
config.configure_ipu_system()

STEPS, RATE = 6, 0.1
rows = np.random.RandomState(1).randn(8, 5, 3).astype(np.float32)
targets = rows @ np.float32([[0.5], [-1.0], [2.0]])

infeed_queue = ipu.ipu_infeed_queue.IPUInfeedQueue(tf.data.Dataset.from_tensor_slices((rows, targets)).repeat())
outfeed_queue = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
weights = tf.Variable(tf.zeros([3, 1]), name="weights")


def body(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(tf.matmul(x, weights) - y))
    gradient = tape.gradient(loss, weights)
    weights.assign_sub(RATE * ipu.cross_replica_ops.cross_replica_mean(gradient))
    return outfeed_queue.enqueue({"loss": loss})


def train():
    return ipu.loops.repeat(STEPS, body, infeed_queue=infeed_queue)


infeed_queue.initializer  # noqa: B018
with ipu.scopes.ipu_scope("/device:IPU:0"):
    ipu.ipu_compiler.compile(train)
losses = outfeed_queue.dequeue()["loss"].numpy()

# The same by hand: each replica takes every fourth batch.
learned, expected = np.zeros((3, 1)), []
for step in range(STEPS):
    batches = [(4 * step + replica) % 8 for replica in range(4)]
    errors = [rows[batch] @ learned - targets[batch] for batch in batches]
    expected.append([np.mean(error**2) for error in errors])
    gradients = [2 * rows[batch].T @ error / 5 for batch, error in zip(batches, errors)]
    learned = learned - RATE * np.mean(gradients, axis=0)
np.testing.assert_allclose(losses, expected, rtol=1e-4)
np.testing.assert_allclose(weights, learned, rtol=1e-4)
print(f"{losses.shape[1]} replicas: {losses[0].mean():.2f} to {losses[-1].mean():.2f}")


def halves(x):
    with ipu.scopes.ipu_shard(0):
        hidden = tf.matmul(x, tf.ones([3, 4]))
    with ipu.scopes.ipu_shard(1):
        return tf.reduce_sum(hidden), ipu.cross_replica_ops.cross_replica_sum(tf.constant(1))


def quarters(x):
    for index in range(4):
        with ipu.scopes.ipu_shard(index):
            x = x + 1.0
    return x, ipu.cross_replica_ops.cross_replica_sum(tf.constant(1))


with tf.device("/device:IPU:0"):
    total, replicas = ipu.ipu_compiler.compile(halves, [tf.ones([2, 3])])
    print(f"two shards: {float(total)}, replicas {int(replicas)}")
    result, replicas = ipu.ipu_compiler.compile(quarters, [tf.constant(0.5)])
    print(f"four shards: {float(result)}, replicas {int(replicas)}")


def fifths(x):
    with ipu.scopes.ipu_shard(4):
        return x


try:
    with tf.device("/device:IPU:0"):
        ipu.ipu_compiler.compile(fifths, [tf.constant(0.5)])
except tf.errors.InternalError:
    print("a fifth shard does not fit")
