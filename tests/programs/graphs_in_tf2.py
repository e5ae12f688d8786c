"""Graphs and sessions in a program that leaves TensorFlow 2's behaviour on: loops, shards, a pipeline, placements."""

import numpy as np
import tensorflow as tf
from tensorflow.python import ipu

v1 = tf.compat.v1


def configure(ipus):
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = ipus
    config.configure_ipu_system()


# Operations placed by hand, without a compiled program.
with tf.Graph().as_default():
    with tf.device("/device:IPU:0"):
        x = v1.placeholder(tf.float32, [3])
        scale = v1.get_variable("scale", [], initializer=v1.constant_initializer(2.0))
        y = tf.nn.relu(x * scale)
    with v1.Session() as session:
        session.run(v1.global_variables_initializer())
        print("placed:", session.run(y, {x: [-1.0, 0.5, 3.0]}).tolist())

# A training loop. The devices are configured after the graph is made, and the queue is started a second time.
with tf.Graph().as_default():
    dataset = tf.data.Dataset.from_tensor_slices(np.float32([1.0, 2.0, 3.0, 4.0]))
    infeed_queue = ipu.ipu_infeed_queue.IPUInfeedQueue(dataset)
    outfeed_queue = ipu.ipu_outfeed_queue.IPUOutfeedQueue()

    def body(total, number):
        with v1.variable_scope("model", reuse=v1.AUTO_REUSE):
            weight = v1.get_variable("weight", [], initializer=v1.zeros_initializer())
        loss = tf.square(weight * number - 3.0 * number)
        # The rate depends on the data, so that the loop holds a condition.
        rate = tf.cond(number > 2.0, lambda: 0.01, lambda: 0.05)
        train = v1.train.GradientDescentOptimizer(rate).minimize(loss)
        return total + loss, train, outfeed_queue.enqueue(loss)

    def network():
        return ipu.loops.repeat(4, body, [0.0], infeed_queue)

    with ipu.scopes.ipu_scope("/device:IPU:0"):
        compiled = ipu.ipu_compiler.compile(network)
    dequeue = outfeed_queue.dequeue()
    configure(1)
    initializer = infeed_queue.initializer
    with v1.Session() as session:
        session.run(v1.global_variables_initializer())
        totals, losses = [], []
        for _ in range(2):
            session.run(initializer)
            totals += session.run(compiled)
            losses += session.run(dequeue).tolist()
        (weight,) = session.run(v1.trainable_variables())

by_hand, expected = 0.0, []
for number in [1.0, 2.0, 3.0, 4.0] * 2:
    error = by_hand * number - 3.0 * number
    expected.append(error**2)
    by_hand -= (0.01 if number > 2.0 else 0.05) * 2 * error * number
np.testing.assert_allclose(losses, expected, rtol=1e-4, atol=1e-6)
np.testing.assert_allclose(totals, [sum(expected[:4]), sum(expected[4:])], rtol=1e-4, atol=1e-6)
np.testing.assert_allclose(weight, by_hand, rtol=1e-4)
print("trained in a loop, steps:", len(losses))

# A computation on two shards and a pipeline of two stages: each is one replica on two IPUs.
configure(2)
with tf.Graph().as_default():
    given = v1.placeholder(tf.float32, [2])

    def sharded(value):
        with ipu.scopes.ipu_shard(0):
            value = value + 1.0
        with ipu.scopes.ipu_shard(1):
            return ipu.loops.while_loop(lambda v: tf.reduce_sum(v) < 100.0, lambda v: v * 2.0, [value])

    infeed_queue = ipu.ipu_infeed_queue.IPUInfeedQueue(tf.data.Dataset.from_tensors(np.float32(5.0)).repeat())
    outfeed_queue = ipu.ipu_outfeed_queue.IPUOutfeedQueue()

    def pipelined():
        return ipu.pipelining_ops.pipeline(
            [lambda number: number * 2.0, lambda number: number - 1.0],
            gradient_accumulation_count=4,
            infeed_queue=infeed_queue,
            outfeed_queue=outfeed_queue,
        )

    with ipu.scopes.ipu_scope("/device:IPU:0"):
        doubled = ipu.ipu_compiler.compile(sharded, [given])
        piped = ipu.ipu_compiler.compile(pipelined)
    dequeue = outfeed_queue.dequeue()
    with v1.Session() as session:
        print("sharded:", session.run(doubled, {given: [0.0, 1.0]})[0].tolist())
        session.run(infeed_queue.initializer)
        session.run(piped)
        print("pipelined:", session.run(dequeue).tolist())

# Replicas of a session's program cannot be emulated, which is told when it runs.
with tf.Graph().as_default():
    with ipu.scopes.ipu_scope("/device:IPU:0"):
        replicated = ipu.ipu_compiler.compile(lambda: tf.constant(1.0) * 2.0)
    with v1.Session() as session:
        try:
            session.run(replicated)
        except tf.errors.UnimplementedError:
            print("a session has one replica")
