"""Values that the replicas of all instances exchange on their devices. Instance 0 prints what its replica 0 has."""

import popdist
import popdist.tensorflow
import tensorflow as tf
from tensorflow.python import ipu
from tensorflow.python.ipu.distributed.popdist_strategy import PopDistStrategy
from tensorflow.python.ipu.ops import all_to_all_op, cross_replica_ops, reduce_scatter_op, replication_ops

config = ipu.config.IPUConfig()
popdist.tensorflow.set_ipu_config(config, ipus_per_replica=1)
config.configure_ipu_system()
strategy = PopDistStrategy()
total = popdist.getNumTotalReplicas()
assert ipu.utils.get_num_of_ipus_in_device("/device:IPU:0") == total


def own_number():
    return tf.cast(popdist.getReplicaIndexOffset() + replication_ops.replication_index(), tf.float32)


def gathered():
    return all_to_all_op.all_gather(own_number(), total)


def exchanged():
    return all_to_all_op.all_to_all(10 * own_number() + tf.range(float(total)), 0, 0, total)


def scattered():
    return reduce_scatter_op.reduce_scatter(own_number() + tf.range(2.0 * total), total)


def largest():
    return reduce_scatter_op.reduce_scatter(own_number() * tf.ones([total]), total, op="COLLECTIVE_OP_MAX")


def slope():
    number = own_number()
    with tf.GradientTape() as tape:
        tape.watch(number)
        squared = cross_replica_ops.cross_replica_sum(number) ** 2
    return tf.stack([squared, tape.gradient(squared, number)])


def summed_in_a_loop():
    value = own_number()
    for _ in tf.range(3):
        value = cross_replica_ops.cross_replica_mean(value) + own_number()
    return value


with strategy.scope():
    weight = tf.Variable(1.0)
optimizer = ipu.optimizers.CrossReplicaOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.5))


def updated():
    optimizer.apply_gradients([(own_number(), weight)])
    return weight.read_value()


for function in (gathered, exchanged, scattered, largest, slope, summed_in_a_loop, updated):
    result = strategy.run(tf.function(function))
    if popdist.getInstanceIndex() == 0:
        print(function.__name__, *tf.reshape(result, [-1]).numpy())
