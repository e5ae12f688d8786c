"""A program of TensorFlow 1: a graph with a training loop, its variables made inside, run by a session."""

import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow.python import ipu

tf.disable_v2_behavior()
config = ipu.config.IPUConfig()
config.auto_select_ipus = 1
config.configure_ipu_system()

STEPS, ACCUMULATED, RATE, MOMENTUM = 8, 2, 0.05, 0.9
rows = np.random.RandomState(0).randn(4, 16, 3).astype(np.float32)
targets = rows @ np.float32([[1.0], [-2.0], [3.0]]) + 0.5

dataset = tf.data.Dataset.from_tensor_slices((rows, targets)).repeat()
infeed_queue = ipu.ipu_infeed_queue.IPUInfeedQueue(dataset)
outfeed_queue = ipu.ipu_outfeed_queue.IPUOutfeedQueue()


def body(x, y):
    with tf.variable_scope("model"):
        weights = tf.get_variable("weights", [3, 1], initializer=tf.zeros_initializer())
        bias = tf.get_variable("bias", [1], initializer=tf.zeros_initializer())
    loss = tf.reduce_mean(tf.square(tf.matmul(x, weights) + bias - y))
    optimizer = tf.train.MomentumOptimizer(RATE, MOMENTUM)
    optimizer = ipu.optimizers.GradientAccumulationOptimizerV2(
        optimizer, ACCUMULATED, reduction_method=ipu.gradient_accumulation.GradientAccumulationReductionMethod.MEAN
    )
    with tf.control_dependencies([optimizer.minimize(loss)]):
        return outfeed_queue.enqueue({"loss": loss})


def network():
    return ipu.loops.repeat(STEPS, body, [], infeed_queue)


with ipu.scopes.ipu_scope("/device:IPU:0"):
    train = ipu.ipu_compiler.compile(network, inputs=[])
dequeue = outfeed_queue.dequeue()
ipu.utils.move_variable_initialization_to_cpu()

with tf.Session() as session:
    session.run(infeed_queue.initializer)
    session.run(tf.global_variables_initializer())
    losses = []
    for _ in range(2):
        session.run(train)
        losses.extend(session.run(dequeue)["loss"])
    learned = {variable.op.name: session.run(variable) for variable in tf.trainable_variables()}
    session.run(infeed_queue.deleter)

# The same by hand.
weights, bias = np.zeros((3, 1)), np.zeros(1)
speed, sums = [0.0, 0.0], [0.0, 0.0]
expected = []
for step in range(2 * STEPS):
    x, y = rows[step % 4], targets[step % 4]
    error = x @ weights + bias - y
    expected.append(np.mean(error**2))
    sums = [sums[0] + 2 * x.T @ error / len(x) / ACCUMULATED, sums[1] + 2 * error.mean(axis=0) / ACCUMULATED]
    if step % ACCUMULATED == ACCUMULATED - 1:
        speed = [MOMENTUM * before + new for before, new in zip(speed, sums)]
        weights, bias, sums = weights - RATE * speed[0], bias - RATE * speed[1], [0.0, 0.0]
np.testing.assert_allclose(losses, expected, rtol=1e-4)
np.testing.assert_allclose(learned["model/weights"], weights, rtol=1e-4)
np.testing.assert_allclose(learned["model/bias"], bias, rtol=1e-4)
print(f"trained: {losses[0]:.2f} to {losses[-1]:.2f}")
