"""Pipelines of functions on the emulated device, against the stages run by hand."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tf_ipu_dp.emulator.runtime import pipeline_layout, replicas
from tf_ipu_dp.emulator.sdk_api.ipu import config as ipu_config
from tf_ipu_dp.emulator.sdk_api.ipu import ipu_infeed_queue, ipu_outfeed_queue
from tf_ipu_dp.emulator.sdk_api.ipu.gradient_accumulation import GradientAccumulationReductionMethod as Method
from tf_ipu_dp.emulator.sdk_api.ipu.ops import pipelining_ops
from tf_ipu_dp.emulator.sdk_api.ipu.ops.pipelining_ops import (
    OptimizerFunctionOutput,
    PipelineSchedule,
    PipelineStageOptions,
)

X = np.arange(1, 17, dtype="float32").reshape(8, 2) / 10
SEQUENTIAL = {"pipeline_schedule": PipelineSchedule.Sequential, "device_mapping": [0, 0]}


@pytest.fixture(autouse=True)
def _one_ipu(emulator_dir):
    yield
    ipu_config.reset_ipu_configuration()


def configure(**settings):
    config = ipu_config.IPUConfig()
    config.auto_select_ipus = settings.pop("ipus", 1)
    for name, value in settings.items():
        setattr(config.io_tiles, name, value)
    config.configure_ipu_system()


def infeed(elements=X):
    queue = ipu_infeed_queue.IPUInfeedQueue(tf.data.Dataset.from_tensor_slices(elements).repeat())
    queue.initializer  # noqa: B018 reading it makes the iterator
    return queue


def run(stages, count, **arguments):
    """Runs a pipeline and returns what came out of its outfeed."""
    outfeed = arguments.setdefault("outfeed_queue", ipu_outfeed_queue.IPUOutfeedQueue())

    @tf.function(autograph=False)
    def program():
        operation = pipelining_ops.pipeline(stages, count, **{**SEQUENTIAL, **arguments})
        assert isinstance(operation, tf.Operation)

    program()
    return outfeed.dequeue()


def double(x):
    return 2 * x


def total(x):
    return tf.reduce_sum(x)


def test_micro_batches_go_through_the_stages_in_order():
    results = run([double, total], 4, repeat_count=2, infeed_queue=infeed())
    np.testing.assert_allclose(results, 2 * X.sum(axis=1), rtol=1e-6)


@pytest.mark.parametrize(
    ("last", "structure"),
    [
        (lambda x: x, float),
        (lambda x: {"sum": x}, dict),
        (lambda x: (x, x), list),
        (lambda x: [x], list),
    ],
    ids=["a tensor", "a dict", "a tuple", "a list of one"],
)
def test_inference_keeps_tensors_and_dicts_and_makes_everything_else_a_list(last, structure):
    results = run([total, last], 2, infeed_queue=infeed())
    assert isinstance(results, tf.Tensor if structure is float else structure)
    np.testing.assert_allclose(tf.nest.flatten(results)[0], X[:2].sum(axis=1), rtol=1e-6)


def test_inputs_come_before_the_element_and_a_dict_arrives_as_keywords():
    def first(factor, x, y):
        return factor * x, y

    results = run([first, lambda x, y: x - y], 2, inputs=[3.0], infeed_queue=infeed({"y": X, "x": X + 1}))
    np.testing.assert_allclose(results, 3 * (X[:2] + 1) - X[:2], rtol=1e-6)


def test_parallel_stages_get_the_same_inputs_and_their_outputs_stand_side_by_side():
    results = run([[double, total], lambda doubled, summed: doubled + summed], 2, infeed_queue=infeed())
    np.testing.assert_allclose(results, 2 * X[:2] + X[:2].sum(axis=1, keepdims=True), rtol=1e-6)


class Trainer:
    """y = w x with a loss of 1/2 (w . x)^2, so that the gradient is (w . x) x."""

    def __init__(self):
        self.weights = tf.Variable([1.0, -2.0])

    def stages(self):
        return [lambda x: (x, tf.reduce_sum(self.weights * x)), lambda x, y: 0.5 * y * y]

    @staticmethod
    def expected(updates, count, rate, method=Method.SUM):
        weights, losses = np.array([1.0, -2.0]), []
        samples = iter(np.tile(X, (4, 1)))
        for _ in range(updates):
            gradient = 0.0
            for sample in (next(samples) for _ in range(count)):
                losses.append(0.5 * weights.dot(sample) ** 2)
                gradient += weights.dot(sample) * sample
            weights = weights - rate * gradient / (1 if method is Method.SUM else count)
        return weights, losses


def keras_optimizers():
    legacy = getattr(tf.keras.optimizers, "legacy", tf.keras.optimizers)
    return [tf.keras.optimizers.SGD, legacy.SGD]


@pytest.mark.parametrize("kind", keras_optimizers())
@pytest.mark.parametrize("method", list(Method))
def test_gradients_are_reduced_as_asked_and_applied_once_per_count(kind, method):
    trainer = Trainer()
    with tf.init_scope():
        optimizer = kind(0.1)
        optimizer.apply_gradients([(tf.zeros(2), trainer.weights)])
    results = run(
        trainer.stages(), 4, repeat_count=2, infeed_queue=infeed(), reduction_method=method,
        optimizer_function=lambda loss: OptimizerFunctionOutput(optimizer, loss, variables=[trainer.weights]),
    )  # fmt: skip
    weights, losses = Trainer.expected(2, 4, 0.1, method)
    np.testing.assert_allclose(trainer.weights, weights, rtol=1e-5)
    assert isinstance(results, list)
    np.testing.assert_allclose(results[0], losses, rtol=1e-5)


def test_a_learning_rate_can_come_through_the_stages():
    trainer = Trainer()

    def optimize(loss, rate):
        return OptimizerFunctionOutput(
            tf.compat.v1.train.GradientDescentOptimizer(rate), loss,
            compute_gradients_kwargs={"var_list": [trainer.weights]},
        )  # fmt: skip

    stages = [lambda rate, x: (tf.reduce_sum(trainer.weights * x), rate), lambda y, rate: (0.5 * y * y, rate)]
    run(stages, 4, repeat_count=3, inputs=[0.05], infeed_queue=infeed(), optimizer_function=optimize)
    np.testing.assert_allclose(trainer.weights, Trainer.expected(3, 4, 0.05)[0], rtol=1e-5)


def test_a_tape_knows_the_variables_itself():
    trainer = Trainer()
    optimizer = keras_optimizers()[1](0.1)
    outfeed = ipu_outfeed_queue.IPUOutfeedQueue()
    queue = infeed()

    @tf.function(autograph=False)
    def program():
        with tf.GradientTape() as tape:
            pipelining_ops.pipeline(
                trainer.stages(), 4, infeed_queue=queue, outfeed_queue=outfeed, **SEQUENTIAL,
                optimizer_function=lambda loss: OptimizerFunctionOutput(optimizer, loss, tape=tape),
            )  # fmt: skip

    program()
    np.testing.assert_allclose(trainer.weights, Trainer.expected(1, 4, 0.1)[0], rtol=1e-5)


def test_a_graph_of_tf1_trains_too():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        queue = ipu_infeed_queue.IPUInfeedQueue(tf.data.Dataset.from_tensor_slices(X).repeat())

        def first(x):
            with tf.compat.v1.variable_scope("stage", use_resource=True):
                start = tf.compat.v1.constant_initializer([1.0, -2.0])
                weights = tf.compat.v1.get_variable("weights", [2], initializer=start)
            return tf.reduce_sum(weights * x)

        start = queue.initializer
        operation = pipelining_ops.pipeline(
            [first, lambda y: 0.5 * y * y], 4, repeat_count=2, infeed_queue=queue, outfeed_mask=[True], **SEQUENTIAL,
            optimizer_function=lambda loss: OptimizerFunctionOutput(
                tf.compat.v1.train.GradientDescentOptimizer(0.1), loss
            ),
        )  # fmt: skip
        session.run([start, tf.compat.v1.global_variables_initializer()])
        session.run(operation)
        weights = session.run(tf.compat.v1.trainable_variables()[0])
    np.testing.assert_allclose(weights, Trainer.expected(2, 4, 0.1)[0], rtol=1e-5)


def sgd(trainer, **arguments):
    optimizer = keras_optimizers()[1](0.1)
    return lambda loss, *_: OptimizerFunctionOutput(optimizer, loss, variables=[trainer.weights], **arguments)


def test_the_outfeed_carries_the_bare_loss_or_what_the_mask_leaves():
    trainer = Trainer()
    losses = Trainer.expected(1, 4, 0.1)[1]
    stages = [trainer.stages()[0], lambda x, y: (0.5 * y * y, x)]
    bare = run(stages, 4, infeed_queue=infeed(), optimizer_function=sgd(trainer), outfeed_loss=True)
    np.testing.assert_allclose(bare, losses, rtol=1e-5)
    masked = run(stages, 4, infeed_queue=infeed(), optimizer_function=sgd(trainer), outfeed_mask=[True, False])
    assert len(masked) == 1
    np.testing.assert_allclose(masked[0], X[:4])


def test_an_accumulated_outfeed_has_one_sum_per_update():
    results = run(
        [total, lambda x: {"sum": x, "ones": 1}], 4, repeat_count=2, infeed_queue=infeed(), accumulate_outfeed=True
    )
    np.testing.assert_allclose(results["sum"], X.reshape(2, 8).sum(axis=1), rtol=1e-6)
    np.testing.assert_array_equal(results["ones"], [4, 4])


def test_gradients_arrive_in_the_type_of_the_accumulator():
    weights = tf.Variable(tf.constant([1.0, 1.0], tf.float16))
    arrived = []

    class Recorder(tf.compat.v1.train.GradientDescentOptimizer):
        def apply_gradients(self, grads_and_vars, global_step=None, name=None):
            arrived.extend(gradient.dtype for gradient, _ in grads_and_vars)
            return super().apply_gradients([(tf.cast(g, v.dtype), v) for g, v in grads_and_vars])

    optimizer = Recorder(1.0)
    run(
        [lambda x: tf.reduce_sum(weights * tf.cast(x, tf.float16)), double], 2, infeed_queue=infeed(),
        gradient_accumulation_dtype=tf.float32, outfeed_mask=[True],
        optimizer_function=lambda loss: OptimizerFunctionOutput(
            optimizer, loss, compute_gradients_kwargs={"var_list": [weights]}
        ),
    )  # fmt: skip
    assert arrived == [tf.float32]
    np.testing.assert_allclose(weights, 1 - 2 * X[:2].sum(axis=0), rtol=5e-3)


def test_gradients_of_looked_up_rows_are_accumulated_too():
    table = tf.Variable(tf.ones([3, 2]))
    optimizer = keras_optimizers()[1](1.0)
    run(
        [lambda x, row: tf.gather(table, row) * x, total], 3, infeed_queue=infeed((X[:3], np.int32([0, 2, 0]))),
        outfeed_mask=[True], optimizer_function=lambda loss: OptimizerFunctionOutput(optimizer, loss, variables=[table])
    )  # fmt: skip
    np.testing.assert_allclose(table, 1 - np.stack([X[0] + X[2], [0, 0], X[1]]), rtol=1e-5)


def test_a_program_for_more_replicas_than_fit_says_how_many_fit():
    configure(ipus=4)
    queue, program = infeed(), replicas.Program(4)

    @tf.function
    def function():
        pipelining_ops.pipeline([double, total], 4, infeed_queue=queue)

    with replicas.traced_as(program), pytest.raises(RuntimeError, match="the device holds 2 of 2 IPUs"):
        function()
    assert program.fitting_replicas == 2


def test_a_device_that_does_not_hold_a_replica_is_an_internal_error():
    with pytest.raises(tf.errors.InternalError, match="needs 2 IPUs"):
        run([double, total], 4, infeed_queue=infeed(), device_mapping=[0, 1])


REFUSED = {
    "no count": (ValueError, {"count": None}),
    "a negative count": (ValueError, {"count": -1}),
    "a count of another type": (TypeError, {"count": 1.5}),
    "one stage": (ValueError, {"stages": [total], "device_mapping": [0]}),
    "stages that are no list": (TypeError, {"stages": total}),
    "a stage that is no function": (TypeError, {"stages": [total, 1]}),
    "a short mapping": (ValueError, {"device_mapping": [0]}),
    "a mapping of floats": (TypeError, {"device_mapping": [0.0, 0.0]}),
    "options of a wrong length": (ValueError, {"forward_propagation_stages_poplar_options": [PipelineStageOptions()]}),
    "options of a wrong type": (TypeError, {"backward_propagation_stages_poplar_options": [{}, {}]}),
    "options for the update that are a dict": (TypeError, {"weight_update_poplar_options": {}}),
    "a schedule by name": (TypeError, {"pipeline_schedule": "Grouped"}),
    "a recomputation mode by name": (TypeError, {"recomputation_mode": "Auto"}),
    "a number for a bool": (TypeError, {"offload_activations": 1}),
    "an infeed that is none": (TypeError, {"infeed_queue": X}),
    "an unknown reduction": (ValueError, {"reduction_method": "median"}),
    "a mask without an optimizer": (ValueError, {"outfeed_mask": [True]}),
    "the loss without an optimizer": (ValueError, {"outfeed_loss": True}),
    "outputs without an outfeed": (ValueError, {"outfeed_queue": None}),
    "sums without an outfeed": (ValueError, {"outfeed_queue": None, "accumulate_outfeed": True}),
    "continuous updates": (NotImplementedError, {"continuous_weight_updates": True}),
    "serialisation with the mean": (ValueError, {"batch_serialization_iterations": 2, "reduction_method": "mean"}),
    "serialisation, grouped": (
        NotImplementedError,
        {"batch_serialization_iterations": 2, "pipeline_schedule": PipelineSchedule.Grouped},
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_arguments_that_do_not_fit_are_refused(case):
    error, arguments = REFUSED[case]
    arguments = {"stages": [double, total], "count": 2, "infeed_queue": infeed(), **arguments}
    with pytest.raises(error):
        run(**arguments)


def test_an_outfeed_that_keeps_the_last_cannot_be_summed_up():
    last = ipu_outfeed_queue.IPUOutfeedQueue(ipu_outfeed_queue.IPUOutfeedMode.LAST)
    with pytest.raises(ValueError, match="ALL"):
        run([double, total], 2, infeed_queue=infeed(), outfeed_queue=last, accumulate_outfeed=True)


def test_training_has_rules_of_its_own():
    trainer = Trainer()
    train = {"stages": trainer.stages(), "count": 4, "infeed_queue": infeed()}
    with pytest.raises(ValueError, match="Only one"):
        run(**train, optimizer_function=sgd(trainer), outfeed_mask=[True], outfeed_loss=True)
    with pytest.raises(ValueError, match="2 entries for 1 outputs"):
        run(**train, optimizer_function=sgd(trainer), outfeed_mask=[True, False])
    with pytest.raises(TypeError, match="OptimizerFunctionOutput"):
        run(**train, optimizer_function=lambda loss: loss)
    with pytest.raises(NotImplementedError, match="Interleaved"):
        run(**train, optimizer_function=sgd(trainer), pipeline_schedule=PipelineSchedule.Interleaved)
    with pytest.raises(RuntimeError, match="variables"):
        run(**train, optimizer_function=lambda loss: OptimizerFunctionOutput(keras_optimizers()[0](), loss))


def test_a_stage_that_uses_a_tensor_from_outside_is_a_value_error():
    @tf.function
    def program(factor):
        pipelining_ops.pipeline(
            [lambda x: factor * x, total], 2, infeed_queue=queue, outfeed_queue=outfeed, **SEQUENTIAL
        )

    queue, outfeed = infeed(), ipu_outfeed_queue.IPUOutfeedQueue()
    with pytest.raises(ValueError, match="neither its input nor a variable"):
        program(tf.constant(2.0))


def test_a_pipeline_cannot_be_called_eagerly():
    with pytest.raises(RuntimeError, match="part of a program"):
        pipelining_ops.pipeline([double, total], 2, **SEQUENTIAL)


@pytest.mark.parametrize(
    ("schedule", "training", "multiple"),
    [
        (PipelineSchedule.Grouped, True, 6),
        (PipelineSchedule.Grouped, False, 3),
        (PipelineSchedule.Interleaved, True, 3),
        (PipelineSchedule.Interleaved, False, 3),
        (PipelineSchedule.Sequential, True, 1),
        (PipelineSchedule.Sequential, False, 1),
    ],
)
def test_the_count_of_three_stages_is_a_multiple_that_depends_on_the_schedule(schedule, training, multiple):
    for count in range(1, 20):
        if count % multiple:
            with pytest.raises(tf.errors.FailedPreconditionError, match=f"must be a multiple of {multiple} "):
                pipeline_layout.check_iterations(count, 3, schedule, training)
        else:
            pipeline_layout.check_iterations(count, 3, schedule, training)


def test_with_io_tiles_the_count_has_a_lower_bound_only():
    configure(num_io_tiles=32, place_ops_on_io_tiles=True)
    pipeline_layout.check_iterations(9, 3, PipelineSchedule.Grouped, True)
    with pytest.raises(tf.errors.FailedPreconditionError, match="at least 8"):
        pipeline_layout.check_iterations(7, 3, PipelineSchedule.Grouped, True)


@pytest.mark.parametrize(("devices", "ipus"), [([0, 0], 1), ([0, 1], 2), ([0, 1, 2], 4), ([0, 3], 4), ([0, 4], 8)])
def test_a_replica_occupies_a_power_of_two(devices, ipus):
    assert pipeline_layout.ipus_for(devices) == ipus


def test_types_of_options_and_outputs_are_checked():
    for options in ([], {"a": 1}):
        with pytest.raises(TypeError):
            PipelineStageOptions(matmul_options=options)
    assert PipelineStageOptions({"partialsType": "half"}).convolution_options == {"partialsType": "half"}
    loss, optimizer = tf.constant(1.0), tf.keras.optimizers.SGD()
    tf1 = tf.compat.v1.train.GradientDescentOptimizer(0.1)
    with pytest.raises(TypeError):
        OptimizerFunctionOutput("sgd", loss)
    with pytest.raises(TypeError):
        OptimizerFunctionOutput(optimizer, 1.0)
    with pytest.raises(TypeError):
        OptimizerFunctionOutput(tf1, loss, compute_gradients_args=[])
    with pytest.raises(ValueError, match="TF1"):
        OptimizerFunctionOutput(optimizer, loss, compute_gradients_args=())
    with pytest.raises(ValueError, match="not both"):
        OptimizerFunctionOutput(optimizer, loss, variables=[], tape=tf.GradientTape())
    with pytest.raises(ValueError, match="Keras"):
        OptimizerFunctionOutput(tf1, loss, variables=[])


def test_a_recomputation_checkpoint_is_an_identity_on_a_nest():
    nest = {"a": tf.constant(1), "b": (tf.constant(2),)}
    tf.nest.map_structure(
        np.testing.assert_array_equal,
        nest,
        pipelining_ops.recomputation_checkpoint(nest),
    )
    assert [schedule.value for schedule in PipelineSchedule] == [0, 1, 2]
