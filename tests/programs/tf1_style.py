"""Programs in the older style in eager mode: scopes, the compiler's entry point, shards and outlined functions."""

import numpy as np
import tensorflow as tf
from tensorflow.python import ipu

config = ipu.config.IPUConfig()
config.auto_select_ipus = [1]
config.configure_ipu_system()
assert ipu.utils.get_num_of_ipus_in_device("/device:IPU:0") == 1


def basic_graph(a, b, c):
    x = a + b
    y = a - c
    return x + y


with ipu.scopes.ipu_scope("/device:IPU:0"):
    (result,) = ipu.ipu_compiler.compile(
        basic_graph, [tf.constant([1.0, 1.0]), tf.constant([0.0, 1.0]), tf.constant([1.0, 5.0])]
    )
np.testing.assert_array_equal(result, [1.0, -2.0])
print("compiled:", result.numpy().tolist())

# A loop over a dataset with a variable, a queue for the losses and a sharded model.
dataset = tf.data.Dataset.from_tensors(tf.constant([[1.0, 2.0]])).repeat()
infeed_queue = ipu.ipu_infeed_queue.IPUInfeedQueue(dataset)
outfeed_queue = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
weights = tf.Variable(tf.ones([2, 1]), name="weights")


@ipu.outlined_function
def block(x):
    with ipu.scopes.ipu_shard(0):
        return ipu.nn_ops.gelu(tf.matmul(x, weights), approximate=False)


def body(scale, x):
    with ipu.scopes.stochastic_rounding(False), ipu.scopes.partials_type(np.float32):
        y = block(x)
    with ipu.scopes.frontend_attribute("phase", "update"):
        weights.assign_sub(0.1 * tf.ones([2, 1]))
    return scale * 2.0, outfeed_queue.enqueue((y, scale))


def network():
    return ipu.loops.repeat(4, body, tf.constant(1.0), infeed_queue)


infeed_queue.initializer  # noqa: B018
with ipu.scopes.ipu_scope("/device:IPU:0"):
    (scale,) = ipu.ipu_compiler.compile(network)
values, scales = outfeed_queue.dequeue()
assert scale.numpy() == 16.0 and scales.numpy().tolist() == [1.0, 2.0, 4.0, 8.0]
np.testing.assert_allclose(tf.reshape(values, [-1]), tf.nn.gelu([3.0, 2.7, 2.4, 2.1]), rtol=1e-6)
np.testing.assert_allclose(weights, [[0.6], [0.6]], rtol=1e-6)
print("looped:", len(values))

try:
    ipu.ipu_compiler.compile(lambda x: x, [tf.constant(1.0)])
except Exception:
    print("a computation must be placed on a device")

# An optimizer of TensorFlow 1 with accumulated gradients, in a loop of a strategy.
strategy = ipu.ipu_strategy.IPUStrategy()
with strategy.scope():
    variable = tf.Variable(1.0)
    optimizer = ipu.optimizers.GradientAccumulationOptimizerV2(
        tf.compat.v1.train.GradientDescentOptimizer(0.1), num_mini_batches=2
    )
    numbers = tf.data.Dataset.from_tensor_slices(tf.constant([1.0, 2.0, 3.0, 4.0]))
    feed = ipu.ipu_infeed_queue.IPUInfeedQueue(numbers)

    def accumulate(x):
        return optimizer.minimize(lambda: variable * x, var_list=[variable])

    @tf.function
    def train():
        ipu.loops.repeat(4, accumulate, infeed_queue=feed)

    feed.initializer  # noqa: B018
    strategy.run(train)
np.testing.assert_allclose(variable.numpy(), 1.0 - 0.1 * 3.0 - 0.1 * 7.0, rtol=1e-6, atol=1e-7)

# The queue is started again from its beginning; what is past its end is an error.
with strategy.scope():
    feed.deleter  # noqa: B018
    feed.initializer  # noqa: B018
    strategy.run(train)
np.testing.assert_allclose(variable.numpy(), -1.0, rtol=1e-6)
try:
    strategy.run(train)
except tf.errors.OutOfRangeError:
    print("the data have an end")
