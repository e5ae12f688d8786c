"""One instance of a PopDist job with two replicas: the strategy, the collectives, and how gradients are scaled.

The same model is trained with `IPUStrategy` too. PopDistStrategy divides Keras' losses by all replicas, IPUStrategy
does not: there the optimizer has to divide, and only there.
"""

import numpy as np
import popdist
import popdist.tensorflow
import tensorflow as tf
from tensorflow import keras
from tensorflow.python import ipu
from tensorflow.python.ipu import distributed
from tensorflow.python.ipu.distributed.popdist_strategy import PopDistStrategy

ACCUMULATION = 2
MICRO_BATCH = 4
SAMPLES = 64

rng = np.random.RandomState(9)
inputs = rng.randn(SAMPLES, 5).astype("float32")
labels = rng.randint(0, 3, SAMPLES).astype("int32")

assert popdist.isPopdistEnvSet()
popdist.init()
replicas = popdist.getNumTotalReplicas()
print(f"instance {popdist.getInstanceIndex()} of {popdist.getNumInstances()}, {replicas} replicas")

config = ipu.config.IPUConfig()
config.compilation_poplar_options = {"target.deterministicWorkers": "portable"}
popdist.tensorflow.set_ipu_config(config, ipus_per_replica=1)
config.configure_ipu_system()

dataset = tf.data.Dataset.from_tensor_slices((inputs, labels))
dataset = dataset.shard(popdist.getNumInstances(), popdist.getInstanceIndex())
dataset = dataset.batch(MICRO_BATCH, drop_remainder=True).repeat()


class AllReduceMetrics(keras.callbacks.Callback):
    """The mean of the logs over all instances, and what they all are."""

    def __init__(self):
        super().__init__()
        self.means, self.gathered = [], []

    def on_train_batch_end(self, batch, logs=None):
        loss = tf.convert_to_tensor(logs["loss"], tf.float32)
        self.means.append(float(distributed.allreduce(loss, tf.distribute.ReduceOp.MEAN)))
        self.gathered.append(distributed.allgather(loss, tensor_name="loss"))
        np.testing.assert_allclose(self.means[-1], logs["loss"], rtol=1e-6)


def divide_by(count):
    def transform(grads_and_vars):
        return [(gradient / count, variable) for gradient, variable in grads_and_vars]

    return transform


def train(strategy, reduction, divisor, start, regularizer=None):
    callback = AllReduceMetrics()
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Dense(6, activation="relu", input_shape=(5,), kernel_regularizer=regularizer),
                keras.layers.Dense(3),
            ]
        )
        if start is not None:
            model.set_weights(start)
        first = model.get_weights()
        model.set_gradient_accumulation_options(gradient_accumulation_steps_per_replica=ACCUMULATION)
        model.compile(
            keras.optimizers.SGD(1.0 if reduction == "sum" else 0.1, gradient_transformers=[divide_by(divisor)]),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction),
            steps_per_execution=ACCUMULATION,
        )
        model.fit(dataset, steps_per_epoch=SAMPLES // MICRO_BATCH, callbacks=[callback], verbose=0)
    assert len(callback.means) == SAMPLES // MICRO_BATCH // replicas // ACCUMULATION
    assert all(loss.shape == (1,) for loss in callback.gathered)
    return first, model.get_weights()


distributed_strategy, single_strategy = PopDistStrategy(), ipu.ipu_strategy.IPUStrategy()
assert distributed_strategy.num_replicas_in_sync == replicas and single_strategy.num_replicas_in_sync == 1
assert distributed_strategy.update_ipu_config(ipu.config.IPUConfig()) is None
assert not isinstance(distributed_strategy, ipu.ipu_strategy.IPUStrategyV1)

# The mean over the batch: divided by the strategy here, by the optimizer there.
automatic = keras.losses.Reduction.AUTO
start, distributed_weights = train(distributed_strategy, automatic, ACCUMULATION, None)
_, single_weights = train(single_strategy, automatic, replicas * ACCUMULATION, start)
for one, other in zip(distributed_weights, single_weights):
    np.testing.assert_allclose(one, other, atol=1e-5)
assert not np.allclose(start[0], single_weights[0])
print("means agree")

# A sum is divided by nobody, and a regularisation loss always: an equal penalty then needs the division for both.
for regularizer in (None, keras.regularizers.l2(0.01)):
    divisor = 32 * replicas * ACCUMULATION
    _, by_popdist = train(distributed_strategy, keras.losses.Reduction.SUM, divisor, start, regularizer)
    _, by_ipu = train(single_strategy, keras.losses.Reduction.SUM, divisor, start, regularizer)
    agree = all(np.allclose(one, other, atol=1e-6) for one, other in zip(by_popdist, by_ipu))
    assert agree == (regularizer is None), regularizer
print("sums agree")

# Values that every instance must have alike.
stamp = distributed.broadcast(tf.constant(1234567, tf.int32), root_rank=0)
assert stamp.numpy() == 1234567 and distributed.broadcast(tf.constant(True)).numpy()
total = distributed.allreduce(tf.constant([1.0, 2.0]), tf.distribute.ReduceOp.SUM)
np.testing.assert_array_equal(total, np.multiply([1.0, 2.0], popdist.getNumInstances()))
assert distributed.allgather(tf.constant([1, 2])).shape == (popdist.getNumInstances(), 2)
assert popdist.execute_on_instances({0}, lambda x: x + 1, 1) == 2
popdist.synchronize()


# A plain function may be run by this strategy; gradients meet over the replicas in the optimizer.
with distributed_strategy.scope():
    variable = tf.Variable(1.0)
    optimizer = keras.optimizers.SGD(1.0)


def step(x):
    with tf.GradientTape() as tape:
        loss = variable * x / distributed_strategy.num_replicas_in_sync
    optimizer.apply_gradients([(tape.gradient(loss, variable), variable)])
    context = tf.distribute.get_replica_context()
    return context.all_reduce(tf.distribute.ReduceOp.SUM, 1.0), context.num_replicas_in_sync


counted, in_sync = distributed_strategy.run(step, args=[tf.constant(0.25)])
assert counted.numpy() == replicas == in_sync
np.testing.assert_allclose(variable.numpy(), 0.75, rtol=1e-6)
print("done")
