"""The same network as a pipeline in the three ways of assigning stages: two replicas of two stages on four IPUs.

Stage by stage or not, the arithmetic is that of stock SGD on the sum over replicas and the mean over the accumulation.
"""

import numpy as np
import tensorflow as tf
from tensorflow import keras
from tensorflow.python import ipu

IPUS = 4
STAGES = 2
REPLICAS = IPUS // STAGES
ACCUMULATION = 4
STEPS_PER_EXECUTION = 8
MICRO_BATCH = 4
SAMPLES = 256
RATE = 0.1

rng = np.random.RandomState(3)
x_train = rng.randn(SAMPLES, 6).astype("float32")
y_train = rng.randint(0, 3, SAMPLES).astype("int32")
dataset = tf.data.Dataset.from_tensor_slices((x_train, y_train)).batch(MICRO_BATCH, drop_remainder=True)


def stage_context_model():
    """Stages from `PipelineStage`, around the calls of layers."""
    inputs = keras.Input(shape=(6,))
    with keras.ipu.PipelineStage(0):
        x = keras.layers.Dense(8, activation="relu", name="first")(inputs)
        x = keras.layers.Dense(8, activation="relu", name="second")(x)
    with keras.ipu.PipelineStage(1):
        outputs = keras.layers.Dense(3, name="logits")(x)
    return keras.Model(inputs, outputs)


def sequential_model():
    """Stages from a list, one number per layer."""
    model = keras.Sequential(
        [
            keras.layers.Dense(8, activation="relu", input_shape=(6,), name="first"),
            keras.layers.Dense(8, activation="relu", name="second"),
            keras.layers.Dense(3, name="logits"),
        ]
    )
    model.set_pipeline_stage_assignment([0, 0, 1])
    return model


def assigned_model():
    """Stages from the assignments of a functional model, which are changed and given back."""
    inputs = keras.Input(shape=(6,))
    x = keras.layers.Dense(8, activation="relu", name="first")(inputs)
    x = keras.layers.Dense(8, activation="relu", name="second")(x)
    model = keras.Model(inputs, keras.layers.Dense(3, name="logits")(x))
    assignments = model.get_pipeline_stage_assignment()
    for assignment in assignments:
        assignment.pipeline_stage = 1 if assignment.layer.name == "logits" else 0
    model.set_pipeline_stage_assignment(assignments)
    return model


def trained_by_hand(start, epochs):
    """One update is the gradient of the mean over all micro batches of one accumulation, times the replicas."""
    model = keras.Sequential([keras.layers.Dense(8, "relu"), keras.layers.Dense(8, "relu"), keras.layers.Dense(3)])
    model.build((None, 6))
    model.set_weights(start)
    loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    batch = MICRO_BATCH * REPLICAS * ACCUMULATION
    for _ in range(epochs):
        for first in range(0, SAMPLES, batch):
            with tf.GradientTape() as tape:
                loss = loss_function(y_train[first : first + batch], model(x_train[first : first + batch]))
            for variable, gradient in zip(model.trainable_variables, tape.gradient(loss, model.trainable_variables)):
                variable.assign_sub(RATE * REPLICAS * gradient)
    return model


config = ipu.config.IPUConfig()
config.auto_select_ipus = IPUS
config.configure_ipu_system()
strategy = ipu.ipu_strategy.IPUStrategy()

schedules = ipu.ops.pipelining_ops.PipelineSchedule
for make, schedule in [
    (stage_context_model, schedules.Grouped),
    (sequential_model, schedules.Interleaved),
    (assigned_model, schedules.Sequential),
]:
    with strategy.scope():
        model = make()
        start = model.get_weights()
        model.set_pipelining_options(
            gradient_accumulation_steps_per_replica=ACCUMULATION,
            gradient_accumulation_reduction_method=ipu.gradient_accumulation.GradientAccumulationReductionMethod.MEAN,
            pipeline_schedule=schedule,
            device_mapping=[0, 1],
            recomputation_mode=ipu.ops.pipelining_ops.RecomputationMode.Auto,
            offload_weight_update_variables=False,
            forward_propagation_stages_poplar_options=[
                ipu.ops.pipelining_ops.PipelineStageOptions(matmul_options={"availableMemoryProportion": "0.2"})
                for _ in range(STAGES)
            ],
            backward_propagation_stages_poplar_options=[
                ipu.ops.pipelining_ops.PipelineStageOptions() for _ in range(STAGES)
            ],
        )
        model.print_pipeline_stage_assignment_summary()
        model.compile(
            keras.optimizers.SGD(RATE),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            steps_per_execution=STEPS_PER_EXECUTION,
        )
        history = model.fit(dataset, epochs=2, validation_data=dataset, verbose=0)
        loss, accuracy = model.evaluate(dataset, verbose=0)
        logits = model.predict(x_train, batch_size=MICRO_BATCH)
    hand_made = trained_by_hand(start, epochs=2)
    for ours, expected in zip(model.get_weights(), hand_made.get_weights()):
        np.testing.assert_allclose(ours, expected, atol=1e-5)
    np.testing.assert_allclose(logits, hand_made(x_train), atol=1e-4)
    assert model.optimizer.iterations.numpy() == 2 * SAMPLES // (MICRO_BATCH * REPLICAS * ACCUMULATION)
    assert history.params["steps"] == SAMPLES // MICRO_BATCH // REPLICAS
    print(f"{make.__name__}: {schedule.name}, {model.optimizer.iterations.numpy()} updates")

# An execution that does not fill the pipeline is found by the compiler only.
with strategy.scope():
    model = sequential_model()
    model.set_pipelining_options(gradient_accumulation_steps_per_replica=3)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), steps_per_execution=3)
    try:
        model.fit(dataset.take(6), verbose=0)
    except tf.errors.FailedPreconditionError as error:
        assert "multiple of 4" in str(error), error
        print("a count that does not fill the pipeline is refused")

# Accumulated outputs: the logs of an update instead of those of its micro batches.
with strategy.scope():
    model = sequential_model()
    model.set_pipelining_options(gradient_accumulation_steps_per_replica=4, accumulate_outfeed=True)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), steps_per_execution=4)
    loss = model.fit(dataset, verbose=0).history["loss"][0]
    assert 0.5 < loss < 2.5, loss
print("done")
