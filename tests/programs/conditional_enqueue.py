"""Rejection sampling on four replicas, which agree by a sum over replicas on when to send something and when to end.

Each replica draws parameters, keeps those whose simulation is near the data, and all of them send what they have drawn
in those steps in which at least one of them has kept something.
"""

import numpy as np
import tensorflow as tf
from tensorflow.python import ipu

REPLICAS = 4
DRAWS = 32
WANTED = 40
TOLERANCE = 0.02
LONGEST = 500

config = ipu.utils.IPUConfig()
config.auto_select_ipus = REPLICAS
ipu.utils.configure_ipu_system(config)
ipu.utils.move_variable_initialization_to_cpu()
ipu.utils.reset_ipu_seed(42)
strategy = ipu.ipu_strategy.IPUStrategy()
queue = ipu.ipu_outfeed_queue.IPUOutfeedQueue(buffer_depth=8)
total_steps = tf.Variable(0, trainable=False)


@tf.function(experimental_compile=True)
def sample_until(wanted, observed):
    kept, step = tf.constant(0), tf.constant(0)
    while tf.logical_and(kept < wanted, step < LONGEST):
        parameters = tf.random.uniform([DRAWS, 2], 0.0, 1.0)
        simulated = parameters[:, 0] * parameters[:, 1]
        near = tf.abs(simulated - observed) < TOLERANCE
        own_count = tf.reduce_sum(tf.cast(near, tf.int32))
        count = ipu.ops.cross_replica_ops.cross_replica_sum(own_count, name="accepted")
        found = ipu.ops.cross_replica_ops.assume_equal_across_replicas(count > 0)
        tf.cond(
            found,
            lambda: queue.enqueue([parameters, near, ipu.replication_ops.replication_index()]),  # noqa: B023
            tf.no_op,
        )
        kept += count
        step += 1
    total_steps.assign_add(step)
    return kept, step


with strategy.scope():
    kept, steps = strategy.run(sample_until, args=[tf.constant(WANTED), tf.constant(0.25)])

parameters, near, replica = queue.dequeue()
sent = parameters.shape[0]
assert 0 < sent <= steps.numpy() and parameters.shape == (sent, REPLICAS, DRAWS, 2), parameters.shape
assert near.shape == (sent, REPLICAS, DRAWS) and near.dtype == tf.bool
assert (replica.numpy() == np.arange(REPLICAS)).all()
accepted = parameters.numpy()[near.numpy()]
assert len(accepted) == kept.numpy() >= WANTED
assert (abs(accepted[:, 0] * accepted[:, 1] - 0.25) < TOLERANCE).all()
assert near.numpy().any(axis=(1, 2)).all()  # nothing was sent in vain
assert total_steps.numpy() == steps.numpy()
draws = parameters.numpy()
assert not np.isclose(draws[:, 0], draws[:, 1]).all(axis=(1, 2)).any()  # replicas draw differently
print(f"kept enough: {bool(kept >= WANTED)}")

# A second run continues the random numbers; the same seed starts them again.
strategy.run(sample_until, args=[tf.constant(WANTED), tf.constant(0.25)])
second = queue.dequeue()[0].numpy()
assert second.shape[1:] == draws.shape[1:] and not np.array_equal(second[0], draws[0])
ipu.utils.reset_ipu_seed(42)
strategy.run(sample_until, args=[tf.constant(WANTED), tf.constant(0.25)])
np.testing.assert_array_equal(queue.dequeue()[0].numpy(), draws)
print("the seed repeats the draws")


@tf.function
def collectives(x):
    index = tf.cast(ipu.replication_ops.replication_index(), tf.float32)
    own = x + index
    context = tf.distribute.get_replica_context()
    return (
        ipu.ops.cross_replica_ops.cross_replica_sum(own),
        ipu.ops.cross_replica_ops.cross_replica_mean(own),
        context.all_reduce(tf.distribute.ReduceOp.SUM, own),
        context.all_reduce(tf.distribute.ReduceOp.MEAN, own),
        ipu.ops.all_to_all_op.all_gather(own, REPLICAS),
        ipu.ops.reduce_scatter_op.reduce_scatter(tf.tile(own, [REPLICAS]), REPLICAS),
        context.replica_id_in_sync_group,
    )


results = [result.numpy() for result in strategy.run(collectives, args=[tf.constant([1.0])])]
assert [value.item() for value in results[:4]] == [10.0, 2.5, 10.0, 2.5], results
np.testing.assert_array_equal(results[4], [[1], [2], [3], [4]])
np.testing.assert_array_equal(results[5], [10])
assert results[6] == 0 and strategy.num_replicas_in_sync == 1
print("collectives done")


# The gradient of a sum over replicas is the sum of the replicas' gradients.
@tf.function
def gradient_of_sum(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = ipu.ops.cross_replica_ops.cross_replica_sum(x * x)
    return tape.gradient(loss, x)


assert strategy.run(gradient_of_sum, args=[tf.constant(3.0)]).numpy() == REPLICAS * 6.0
print("done")
