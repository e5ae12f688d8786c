"""A trainer for image classification as applications write it for poprun: accumulation, a pipeline, validation in fit.

Without a pipeline the model has batch normalisation, with one group normalisation. Only instance 0 prints.
"""

import argparse
import math
import tempfile

import numpy as np
import popdist
import popdist.tensorflow
import tensorflow as tf
from ipu_tensorflow_addons.keras.layers import GroupNormalization
from tensorflow import keras
from tensorflow.python import ipu
from tensorflow.python.ipu import distributed
from tensorflow.python.ipu.distributed.popdist_strategy import PopDistStrategy

CLASSES, SAMPLES, MICRO_BATCH = 4, 192, 4

parser = argparse.ArgumentParser()
parser.add_argument("--pipeline-stages", type=int, default=1)
parser.add_argument("--accumulation", type=int, default=2)
parser.add_argument("--micro-batches-per-execution", type=int, default=4)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--learning-rate", type=float, default=0.05)
args = parser.parse_args()

popdist.init()
instance, instances = popdist.getInstanceIndex(), popdist.getNumInstances()
local_replicas, steps_per_execution = popdist.getNumLocalReplicas(), args.micro_batches_per_execution
config = ipu.config.IPUConfig()
config.compilation_poplar_options = {"target.deterministicWorkers": "portable"}
config.convolutions.poplar_options = {"availableMemoryProportion": "0.3"}
popdist.tensorflow.set_ipu_config(config, ipus_per_replica=popdist.getNumIpusPerReplica())
strategy = PopDistStrategy()
config.configure_ipu_system()


def make_dataset(seed):
    """Noisy pictures of a pattern for each class; every instance has its own micro batches."""
    patterns = np.random.RandomState(1).randn(CLASSES, 8, 8, 3)
    rng = np.random.RandomState(seed)
    labels = rng.permutation(np.arange(SAMPLES) % CLASSES).astype("int32")
    images = (patterns[labels] + 0.5 * rng.randn(SAMPLES, 8, 8, 3)).astype("float32")
    dataset = tf.data.Dataset.from_tensor_slices((images, labels)).batch(MICRO_BATCH, drop_remainder=True)
    return dataset.shard(instances, instance).cache().repeat().prefetch(tf.data.AUTOTUNE)


def normalised(x, name):
    if args.pipeline_stages == 1:
        return keras.layers.BatchNormalization(momentum=0.8, name=name)(x)
    return GroupNormalization(4, gamma_initializer="ones", beta_initializer="zeros", name=name)(x)


def conv_block(x, filters, strides, seed):
    initializer = keras.initializers.HeNormal(seed=seed)
    x = keras.layers.Conv2D(
        filters, 3, strides, "same", use_bias=False, kernel_initializer=initializer, name=f"conv{seed}"
    )(x)
    return keras.layers.ReLU(name=f"relu{seed}")(normalised(x, f"norm{seed}"))


def make_model():
    inputs = keras.Input((8, 8, 3), MICRO_BATCH)
    x = conv_block(inputs, 8, 1, seed=1)
    x = keras.layers.Add(name="shortcut")([x, conv_block(x, 8, 1, seed=2)])
    x = conv_block(x, 16, 2, seed=3)
    x = keras.layers.GlobalAveragePooling2D(name="pool")(x)
    outputs = keras.layers.Dense(CLASSES, kernel_initializer=keras.initializers.GlorotUniform(seed=4), name="head")(x)
    return keras.Model(inputs, outputs)


def assign_stages(model):
    first_of_stage = {"conv2": 1, "conv3": 2}
    assignments, stage = model.get_pipeline_stage_assignment(), 0
    for assignment in assignments:
        stage = first_of_stage.get(assignment.layer.name, stage)
        assignment.pipeline_stage = stage
    model.set_pipeline_stage_assignment(assignments)
    model.print_pipeline_stage_assignment_summary(print_fn=lambda line: None)
    model.set_pipelining_options(
        gradient_accumulation_steps_per_replica=args.accumulation,
        gradient_accumulation_reduction_method="running_mean",
        pipeline_schedule=ipu.ops.pipelining_ops.PipelineSchedule.Grouped,
        recomputation_mode=ipu.ops.pipelining_ops.RecomputationMode.Auto,
    )


class Cosine(keras.optimizers.schedules.LearningRateSchedule):
    def __init__(self, rate, updates):
        super().__init__()
        self.rate, self.updates = rate, updates

    def __call__(self, step):
        return self.rate * 0.5 * (1.0 + tf.cos(math.pi * tf.cast(step, tf.float32) / self.updates))

    def get_config(self):
        return {"rate": self.rate, "updates": self.updates}


class AllReduceMetrics(keras.callbacks.Callback):
    """Replaces the logs of this instance by the mean over the instances, for the callbacks after it."""

    def on_epoch_end(self, epoch, logs=None):
        for name in sorted(logs):
            value = tf.convert_to_tensor(logs[name], tf.float32)
            logs[name] = distributed.allreduce(value, tf.distribute.ReduceOp.MEAN).numpy().item()


class Recorder(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.epochs = []

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(dict(logs))


training, validation = make_dataset(seed=2), make_dataset(seed=3)
steps = SAMPLES // MICRO_BATCH // instances
updates = args.epochs * steps // local_replicas // args.accumulation

with strategy.scope():
    model = make_model()
    if args.pipeline_stages > 1:
        assign_stages(model)
    else:
        model.set_gradient_accumulation_options(
            gradient_accumulation_steps_per_replica=args.accumulation,
            gradient_accumulation_reduction_method="running_mean",
        )
        model.set_replication_options(replicated_metric_reduction_method="MEAN")
    model.compile(
        keras.optimizers.SGD(Cosine(args.learning_rate, updates), momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        steps_per_execution=steps_per_execution,
    )
    recorder = Recorder()
    model.fit(
        training,
        epochs=args.epochs,
        steps_per_epoch=steps,
        validation_data=validation,
        validation_steps=steps,
        callbacks=[AllReduceMetrics(), recorder],
        verbose=0,
    )
    # Moving statistics are reduced over the instances when they are read: all of them save, each for itself.
    with tempfile.TemporaryDirectory() as folder:
        model.save_weights(f"{folder}/weights")
        restored = make_model()
        restored.load_weights(f"{folder}/weights").expect_partial()

assert model.optimizer.iterations.numpy() == updates
for one, other in zip(model.get_weights(), restored.get_weights()):
    np.testing.assert_array_equal(one, other)
checksums = tf.constant([np.abs(weight).sum() for weight in model.get_weights()], tf.float32)
everyone = distributed.allgather(checksums).numpy()
assert (everyone == everyone[0]).all(), everyone
if instance == 0:
    first, last = recorder.epochs[0], recorder.epochs[-1]
    assert set(last) == {"loss", "accuracy", "val_loss", "val_accuracy"}, last
    assert last["loss"] < first["loss"] and last["val_accuracy"] > 0.9, recorder.epochs
    if args.pipeline_stages == 1:  # otherwise the logs are those of each instance's last replica
        for name in sorted(last):
            print(name, *(epoch[name] for epoch in recorder.epochs))
    print("updates", updates)
    print("weights", *checksums.numpy())
