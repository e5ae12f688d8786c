"""Options of pipelined Keras models, what a run of them needs, and how they are shown and saved."""

from __future__ import annotations

import textwrap
import threading

import numpy as np
import pytest
import tensorflow as tf
from pipelined_models import Subclass, assign, dense, diamond, sequential, staged

from tf_ipu_dp.emulator.keras import model_options, models, pipelines
from tf_ipu_dp.emulator.sdk_api.ipu.distributed import popdist_strategy
from tf_ipu_dp.emulator.sdk_api.ipu.gradient_accumulation import GradientAccumulationReductionMethod as Method
from tf_ipu_dp.emulator.sdk_api.ipu.ops.pipelining_ops import PipelineSchedule, PipelineStageOptions, RecomputationMode
from tf_ipu_dp.emulator.sdk_api.keras_ipu import PipelineStage, extensions, optimizers

layers = tf.keras.layers


# Options, and what a run needs


def test_options_are_kept_until_they_are_set_again(two_ipus):
    model = staged([0, 1])
    assert model_options.pipelining_of(model) == model_options.PipeliningOptions()
    model.set_pipelining_options(8, [0, 0], True, "mean", pipeline_schedule=PipelineSchedule.Sequential)
    model.set_pipelining_options(recomputation_mode=RecomputationMode.Auto, name="p", offload_weights=None)
    assert model_options.pipelining_of(model) == model_options.PipeliningOptions(
        8, Method.SUM, PipelineSchedule.Grouped, [0, 0], True,
        {"recomputation_mode": RecomputationMode.Auto, "name": "p", "offload_weights": None},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("error", "options"),
    [
        *((ValueError, {"gradient_accumulation_steps_per_replica": value}) for value in (0, -1, 1.5, "2", True)),
        *((ValueError, {"device_mapping": value}) for value in ((0, 1), [0.0, 1.0], [-1, 0], 2)),
        (ValueError, {"accumulate_outfeed": 1}),
        (ValueError, {"gradient_accumulation_reduction_method": "median"}),
        *((ValueError, {name: None}) for name in ("gradient_accumulation_count", "computational_stages", "inputs")),
        *((ValueError, {name: None}) for name in ("repeat_count", "infeed_queue", "outfeed_queue", "outfeed_mask")),
        *((ValueError, {name: 1}) for name in ("optimizer_function", "outfeed_loss", "batch_serialization_iterations")),
        (TypeError, {"pipeline_scheduler": PipelineSchedule.Grouped}),
        (TypeError, {"pipeline_schedule": "Grouped"}),
        (TypeError, {"recomputation_mode": 1}),
        (TypeError, {"forward_propagation_stages_poplar_options": [{}]}),
        (TypeError, {"weight_update_poplar_options": {}}),
        (TypeError, {"offload_activations": "yes"}),
        (TypeError, {"gradient_accumulation_dtype": "half a byte"}),
        (NotImplementedError, {"continuous_weight_updates": True}),
    ],
    ids=str,
)
def test_options_that_cannot_be_are_refused(two_ipus, error, options):
    with pytest.raises(error):
        sequential().set_pipelining_options(**options)


def test_training_needs_the_number_of_accumulated_steps(two_ipus):
    model = staged([0, 1])
    with pytest.raises(ValueError, match="gradient_accumulation_steps_per_replica"):
        pipelines.check_before_run(model, training=True)
    model.set_pipelining_options(4)
    pipelines.check_before_run(model, training=True, steps_per_execution=8)


def test_the_schedule_must_be_filled(two_ipus):
    model = staged([0, 1, 2])
    model.set_pipelining_options(8)
    with pytest.raises(tf.errors.FailedPreconditionError, match="must be a multiple of 6"):
        pipelines.check_before_run(model, training=True, steps_per_execution=24)
    with pytest.raises(tf.errors.FailedPreconditionError, match="must be a multiple of 3"):
        pipelines.check_before_run(model, training=False, steps_per_execution=4)
    model.set_pipelining_options(pipeline_schedule=PipelineSchedule.Sequential)
    pipelines.check_before_run(model, training=True, steps_per_execution=8)
    pipelines.check_before_run(model, training=False, steps_per_execution=1)


def test_interleaved_stages_cannot_share_a_device_in_training(two_ipus):
    model = staged([0, 1])
    model.set_pipelining_options(4, [0, 0], pipeline_schedule=PipelineSchedule.Interleaved)
    pipelines.check_before_run(model, training=False)
    with pytest.raises(NotImplementedError, match="Interleaved"):
        pipelines.check_before_run(model, training=True)


def test_lists_for_stages_must_have_an_entry_for_each(two_ipus):
    model = staged([0, 1, 1])
    model.set_pipelining_options(4, [0, 1, 1])
    with pytest.raises(ValueError, match="3 entries for 2 stages"):
        pipelines.check_before_run(model, training=True)
    model.set_pipelining_options(4, [0, 1], forward_propagation_stages_poplar_options=[PipelineStageOptions()])
    with pytest.raises(ValueError, match="options for 1 stages"):
        pipelines.check_before_run(model, training=True)


def test_a_stage_with_a_negative_share_of_memory_is_refused(two_ipus):
    model, share = staged([0, 1]), PipelineStageOptions(matmul_options={"availableMemoryProportion": "-1"})
    options = [PipelineStageOptions(), share]
    model.set_pipelining_options(4, forward_propagation_stages_poplar_options=options)
    with pytest.raises(tf.errors.InternalError, match="matmul_options of stage 1: availableMemoryProportion=-1"):
        pipelines.check_before_run(model, training=True)


def test_a_weight_update_with_a_negative_share_of_memory_is_refused(two_ipus):
    model, share = staged([0, 1]), PipelineStageOptions(slice_options={"availableMemoryProportion": "-1"})
    model.set_pipelining_options(4, weight_update_poplar_options=share)
    with pytest.raises(tf.errors.InternalError, match="slice_options of the weight update: availableMemoryProportion"):
        pipelines.check_before_run(model, training=True)


def test_tensors_cannot_be_sharded_under_popdist(emulator_dir):
    with popdist_strategy.PopDistStrategy().scope():
        model = staged([0, 1])
        for name in ("replicated_optimizer_state_sharding", "replicated_weight_sharding"):
            with pytest.raises(NotImplementedError, match=f"{name} is not supported with PopDistStrategy"):
                model.set_pipelining_options(4, **{name: True})
        sharded = {"replicated_optimizer_state_sharding": True}
        with pytest.raises(NotImplementedError, match="not supported with PopDistStrategy"):
            model.set_gradient_accumulation_options(4, **sharded)
        with pytest.raises(NotImplementedError, match="not supported with PopDistStrategy"):
            optimizers.GradientAccumulationOptimizer(tf.keras.optimizers.SGD(), 2, **sharded)
        model.set_pipelining_options(4, replicated_weight_sharding=False)


def test_a_pipelined_sequential_model_cannot_override_call(two_ipus):
    class Own(tf.keras.Sequential):
        def call(self, inputs, training=None, mask=None):
            return super().call(inputs, training, mask)

    model = Own([layers.Dense(2, input_shape=(2,)), layers.Dense(2)])
    pipelines.check_before_run(model, training=True)
    model.set_pipeline_stage_assignment([0, 1])
    with pytest.raises(RuntimeError, match="overrides call"):
        pipelines.check_before_run(model, training=False)


@pytest.mark.parametrize(
    ("stages", "mapping", "ipus"),
    [([0, 0], None, 1), ([0, 1], None, 2), ([0, 1, 2], None, 4), ([0, 1, 2], [0, 0, 0], 1), ([0, 1], [0, 2], 4)],
)
def test_a_replica_occupies_a_power_of_two_of_ipus(two_ipus, stages, mapping, ipus):
    model = staged(stages)
    model.set_pipelining_options(device_mapping=mapping)
    assert pipelines.ipus_per_replica(model) == ipus


def test_a_pipeline_over_all_ipus_trains_as_one_replica_that_accumulates(two_ipus):
    x = np.linspace(-1, 1, 32).astype("float32").reshape(16, 2)
    model = staged([0, 1])
    by_hand = sequential(2)
    by_hand.set_weights(model.get_weights())
    for start in (0, 8):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((by_hand(x[start : start + 8]) - 1) ** 2)
        for weight, gradient in zip(by_hand.trainable_weights, tape.gradient(loss, by_hand.trainable_weights)):
            weight.assign_sub(0.1 * gradient)
    model.compile(tf.keras.optimizers.SGD(0.1), "mse", steps_per_execution=8)
    model.set_pipelining_options(4, gradient_accumulation_reduction_method="mean")
    model.fit(x, np.ones_like(x), batch_size=2, shuffle=False, verbose=0)
    for ours, expected in zip(model.get_weights(), by_hand.get_weights()):
        np.testing.assert_allclose(ours, expected, atol=1e-6)
    model.set_pipelining_options(2)
    with pytest.raises(tf.errors.FailedPreconditionError, match="multiple of 4"):
        model.fit(x, np.ones_like(x), batch_size=2, verbose=0)


def test_models_that_are_no_pipelines_pass(two_ipus):
    model = sequential()
    pipelines.check_before_run(model, training=True, steps_per_execution=1)
    assert (pipelines.stage_count(model), pipelines.ipus_per_replica(model)) == (0, 1)


def test_models_outside_a_scope_have_no_stages():
    models.extend_keras()
    model = sequential()
    with pytest.raises(AttributeError, match="IPU strategy"):
        model.set_pipeline_stage_assignment([0, 0, 1, 1])
    with pytest.raises(AttributeError, match="IPU strategy"):
        model.set_pipelining_options(2)
    assert not pipelines.is_pipelined(model)
    assert pipelines.ipus_per_replica(model) == 1


# Shown and saved


def summary_of(model, **arguments):
    lines = []
    model.print_pipeline_stage_assignment_summary(print_fn=lines.append, **arguments)
    return "\n".join(lines)


def test_the_summary_of_a_sequential_model_has_a_row_for_every_layer(two_ipus, capsys):
    model = sequential(2)
    model.get_pipeline_stage_assignment()[0].pipeline_stage = 0
    expected = textwrap.dedent(
        """\
        Model: "sequential"
        ________________________________________
        Layer (type)            Pipeline Stage
        ========================================
        d0 (Dense)              {}
        ________________________________________
        d1 (Dense)              {}
        ========================================
        """
    )
    model.print_pipeline_stage_assignment_summary(line_length=40)
    model.set_pipeline_stage_assignment([0, 1])
    model.print_pipeline_stage_assignment_summary(line_length=40)
    assert capsys.readouterr().out == expected.format("-", "-") + expected.format(0, 1)


def test_the_summary_of_a_functional_model_shows_calls_inputs_and_what_is_nested(two_ipus):
    start = layers.Input((2,), name="start")
    inner = tf.keras.Sequential([dense("inner")], name="nested")
    x = dense("first")(start)
    model = tf.keras.Model(start, layers.Add(name="sum")([inner(x), x]), name="whole")
    assert summary_of(assign(model, [0, 1, 1])) == textwrap.dedent(
        """\
        Model: "whole"
        _________________________________________________________________
        Layer (type) (node index)          Input Layers  Pipeline Stage
        =================================================================
        first (Dense) (0)                  start         0
        _________________________________________________________________
        nested (Sequential) (0)            first
        _________________________________________________________________
          inner (Dense)                                  1
        _________________________________________________________________
        sum (Add) (0)                      nested        1
                                           first
        ================================================================="""
    )


def nested_functional():
    start = layers.Input((2,))
    inner = tf.keras.Sequential([layers.Dense(2, input_shape=(2,)), layers.Dense(2)])
    model = tf.keras.Model(start, inner(dense("middle")(inner(start))))
    return assign(model, [0, 1, 2])


def nested_stages(model):
    return [
        [inner.pipeline_stage for inner in getattr(one, "pipeline_stage_assignments", [one])]
        for one in model.get_pipeline_stage_assignment()
    ]


@pytest.mark.parametrize("make", [lambda: staged([0, 1, 1, 2]), nested_functional], ids=["sequential", "functional"])
@pytest.mark.parametrize("way", ["config", "json", "h5", "tf"])
def test_stages_and_options_survive_saving(two_ipus, tmp_path, make, way):
    model = make()
    model.set_pipelining_options(6, [0, 1, 0], True, "running_mean")
    path = str(tmp_path / f"model.{way}")
    if way in ("h5", "tf"):
        model.save(path, save_format=way)
    load = {
        "config": lambda: type(model).from_config(model.get_config()),
        "json": lambda: tf.keras.models.model_from_json(model.to_json()),
    }.get(way, lambda: tf.keras.models.load_model(path))
    loaded = load()
    assert nested_stages(loaded) == nested_stages(model)
    assert model_options.pipelining_of(loaded) == model_options.pipelining_of(model)
    pipelines.check_before_run(loaded, training=True)


def test_a_model_saved_with_stages_is_a_plain_model_outside_a_scope(two_ipus, tmp_path):
    path = str(tmp_path / "model.h5")
    staged([0, 1]).save(path)
    loaded = []
    # A thread begins without the scope of this one.
    thread = threading.Thread(target=lambda: loaded.append(tf.keras.models.load_model(path)))
    thread.start()
    thread.join()
    assert not pipelines.is_pipelined(loaded[0])
    assert "ipu_pipelining" not in loaded[0].get_config()


def test_models_on_an_ipu_are_instances_of_the_extensions(two_ipus):
    subclass = Subclass()
    for model, kind in ((sequential(), "Sequential"), (diamond(), "Functional"), (subclass, "Model")):
        kinds = {
            name for name in ("Sequential", "Functional") if isinstance(model, getattr(extensions, f"{name}Extension"))
        }
        assert kinds == {kind} - {"Model"}
        assert isinstance(model, extensions.ModelExtension)
    assert not isinstance(3, extensions.ModelExtension)


def test_models_elsewhere_are_not_instances_of_the_extensions():
    assert not isinstance(sequential(), extensions.SequentialExtension)


class StagedInCall(tf.keras.Model):
    """Its stages are known once it has been called."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (layers.Dense(2) for _ in range(2))

    def call(self, x):
        with PipelineStage(0):
            x = self.first(x)
        with PipelineStage(1):
            return self.second(x)


def test_a_subclass_that_has_not_been_built_is_held_to_the_rules_of_pipelines(two_ipus):
    class OwnMinimize(tf.keras.optimizers.SGD):
        def minimize(self, *args, **kwargs):
            return super().minimize(*args, **kwargs)

    x = np.zeros([24, 2], np.float32)
    model = StagedInCall()
    model.set_pipelining_options(4)
    model.compile("sgd", "mse", steps_per_execution=6)
    with pytest.raises(RuntimeError, match=r"steps_per_execution=6 is not a multiple of .*=4"):
        model.fit(x, x, batch_size=2, verbose=0)

    model = StagedInCall()
    model.set_pipelining_options(4)
    model.compile(OwnMinimize(), "mse", steps_per_execution=4)
    with pytest.raises(ValueError, match="minimize"):
        model.fit(x, x, batch_size=2, verbose=0)


def test_unknown_options_of_the_infeed_are_ignored_as_by_the_queue_itself(two_ipus):
    model = sequential(2)
    model.set_infeed_queue_options(prefetch_depth=2, another=1)
    with pytest.raises(ValueError, match="prefetch_depth must be between 1 and 255, not 256"):
        model.set_infeed_queue_options(prefetch_depth=256, another=1)
