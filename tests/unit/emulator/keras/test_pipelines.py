"""Pipeline stages of Keras models: how they are assigned, the SDK's rules for them, and what becomes of them."""

from __future__ import annotations

import textwrap
import threading

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tf_ipu_dp.emulator.keras import model_options, models, pipelines
from tf_ipu_dp.emulator.sdk_api import keras_ipu
from tf_ipu_dp.emulator.sdk_api.ipu import config as ipu_config
from tf_ipu_dp.emulator.sdk_api.ipu import ipu_strategy
from tf_ipu_dp.emulator.sdk_api.ipu.gradient_accumulation import GradientAccumulationReductionMethod as Method
from tf_ipu_dp.emulator.sdk_api.ipu.ops.pipelining_ops import PipelineSchedule, PipelineStageOptions, RecomputationMode
from tf_ipu_dp.emulator.sdk_api.keras_ipu import PipelineStage, extensions

layers = tf.keras.layers


@pytest.fixture
def scope(emulator_dir):
    """The scope of a strategy on two IPUs."""
    config = ipu_config.IPUConfig()
    config.auto_select_ipus = 2
    config.configure_ipu_system()
    models.extend_keras()
    tf.keras.backend.clear_session()
    with ipu_strategy.IPUStrategy().scope():
        yield
    ipu_config.reset_ipu_configuration()


def dense(name, units=2):
    return layers.Dense(units, name=name)


def sequential(count=4):
    return tf.keras.Sequential([layers.Input((2,)), *(dense(f"d{number}") for number in range(count))])


def staged(stages):
    model = sequential(len(stages))
    model.set_pipeline_stage_assignment(list(stages))
    return model


def stages_of(model):
    return [assignment.pipeline_stage for assignment in model.get_pipeline_stage_assignment()]


def calls_of(model):
    return [(one.layer.name, one.node_index) for one in model.get_pipeline_stage_assignment()]


# Sequential


def is_valid(stages, count):
    """The rule, as the documentation puts it."""
    steps = [after - before for before, after in zip([0, *stages], stages)]
    return len(stages) == count and stages[0] == 0 and all(step in (0, 1) for step in steps)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    count=st.integers(1, 5),
    stages=st.one_of(
        st.lists(st.integers(-1, 4), min_size=1, max_size=6),
        st.lists(st.integers(0, 1), min_size=1, max_size=5).map(
            lambda steps: [sum(steps[1 : n + 1]) for n in range(len(steps))]
        ),
    ),
)
def test_a_list_is_taken_exactly_if_it_begins_with_0_and_goes_up_by_at_most_1(scope, count, stages):
    model = sequential(count)
    offered = list(stages)
    if not is_valid(stages, count):
        with pytest.raises(ValueError):
            model.set_pipeline_stage_assignment(offered)
        assert offered == stages
        assert not pipelines.is_pipelined(model)
        return
    model.set_pipeline_stage_assignment(offered)
    assert stages_of(model) == stages
    assert pipelines.stage_count(model) == max(stages) + 1
    if max(stages) == 0:
        with pytest.raises(ValueError, match="at least two computational stages"):
            pipelines.check_before_run(model, training=False)
    else:
        pipelines.check_before_run(model, training=False)


def test_the_list_that_is_given_is_filled_with_assignments(scope):
    model, offered = sequential(2), [0, 1]
    model.set_pipeline_stage_assignment(offered)
    assert all(isinstance(one, keras_ipu.SequentialLayerPipelineStageAssignment) for one in offered)
    assert [one.layer for one in offered] == model.layers
    assert model.get_pipeline_stage_assignment() == offered


def test_assignments_can_be_taken_out_changed_and_given_back(scope):
    model = sequential(3)
    assignments = model.get_pipeline_stage_assignment()
    assert [one.pipeline_stage for one in assignments] == [None] * 3
    for stage, assignment in enumerate(assignments):
        assignment.pipeline_stage = stage
    model.set_pipeline_stage_assignment(assignments)
    assert stages_of(model) == [0, 1, 2]
    model.reset_pipeline_stage_assignment()
    assert stages_of(model) == [None] * 3
    assert not pipelines.is_pipelined(model)


@pytest.mark.parametrize(
    "offered",
    [(0, 1), 1, None, [0.0, 1.0], [False, True], ["0", "1"], [None, None], [0, None]],
    ids=repr,
)
def test_other_things_than_a_list_of_ints_are_a_value_error(scope, offered):
    with pytest.raises(ValueError):
        sequential(2).set_pipeline_stage_assignment(offered)


def test_an_assignment_of_another_layer_is_a_value_error(scope):
    model = sequential(2)
    first, second = model.get_pipeline_stage_assignment()
    first.pipeline_stage, second.pipeline_stage = 0, 1
    with pytest.raises(ValueError, match="in place of"):
        model.set_pipeline_stage_assignment([second, first])


@pytest.mark.parametrize("change", [lambda model: model.add(dense("new")), lambda model: model.pop()])
def test_adding_or_removing_layers_makes_the_assignment_invalid(scope, change):
    model = staged([0, 1, 1])
    change(model)
    assert set(stages_of(model)) == {None}
    with pytest.raises(RuntimeError, match="added or removed"):
        pipelines.check_before_run(model, training=False)
    model.set_pipeline_stage_assignment([0] * (len(model.layers) - 1) + [1])
    pipelines.check_before_run(model, training=False)


def test_a_nested_model_in_a_sequential_one_has_assignments_of_its_own(scope):
    inner = tf.keras.Sequential([dense("inner0"), dense("inner1")], name="inner")
    model = tf.keras.Sequential([layers.Input((2,)), dense("before"), inner, dense("after")])
    with pytest.raises(ValueError, match="SequentialNestedModelPipelineStageAssignment"):
        model.set_pipeline_stage_assignment([0, 0, 1])
    nested = keras_ipu.SequentialNestedModelPipelineStageAssignment(inner)
    assert nested.nested_model is inner and nested.is_nested_model
    assert not any(assignment.is_nested_model for assignment in nested.pipeline_stage_assignments)
    for stage, assignment in enumerate(nested.pipeline_stage_assignments):
        assignment.pipeline_stage = stage
    with pytest.raises(ValueError, match="later stage 1"):
        model.set_pipeline_stage_assignment([0, nested, 0])
    model.set_pipeline_stage_assignment([0, nested, 2])
    assert pipelines.stage_count(model) == 3
    assert not pipelines.is_pipelined(inner)


# Functional models


def diamond():
    """a -> (b, c) -> join -> a again."""
    start, shared = layers.Input((2,)), dense("a")
    first = shared(start)
    joined = layers.Add(name="join")([dense("b")(first), dense("c")(first)])
    return tf.keras.Model(start, shared(joined))


def assign(model, stages):
    assignments = model.get_pipeline_stage_assignment()
    for assignment, stage in zip(assignments, stages):
        assignment.pipeline_stage = stage
    model.set_pipeline_stage_assignment(assignments)
    return model


def test_a_functional_model_has_an_assignment_for_every_call_in_post_order(scope):
    model = diamond()
    assert calls_of(model) == [("a", 0), ("b", 0), ("c", 0), ("join", 0), ("a", 1)]
    assignments = model.get_pipeline_stage_assignment()
    assert all(isinstance(one, keras_ipu.FunctionalLayerPipelineStageAssignment) for one in assignments)
    assert [[layer.name for layer in one.inbound_layers] for one in assignments[1:]] == [
        ["a"],
        ["a"],
        ["b", "c"],
        ["join"],
    ]
    assert stages_of(assign(model, [0, 0, 1, 1, 2])) == [0, 0, 1, 1, 2]
    pipelines.check_before_run(model, training=False)


def test_data_that_would_go_backwards_are_a_value_error(scope):
    with pytest.raises(ValueError, match=r"join .* needs data of the later stage 1"):
        assign(diamond(), [0, 0, 1, 0, 2])


def test_a_call_without_a_stage_is_a_value_error(scope):
    with pytest.raises(ValueError, match="not assigned"):
        assign(diamond(), [0, None, 1, 1, 1])


@pytest.mark.parametrize("stages", [[0, 0, 2, 2, 2], [1, 1, 2, 2, 3]])
def test_stages_with_a_gap_are_a_runtime_error_when_the_model_is_run(scope, stages):
    model = assign(diamond(), stages)
    with pytest.raises(RuntimeError, match="not contiguous"):
        pipelines.check_before_run(model, training=False)


def test_lists_that_do_not_fit_the_calls_are_a_value_error(scope):
    model = diamond()
    assignments = model.get_pipeline_stage_assignment()
    others = [keras_ipu.SequentialLayerPipelineStageAssignment(one.layer, 0) for one in assignments]
    for offered in (assignments[1:], [0] * 5, others, assignments[::-1], tuple(assignments)):
        for assignment in assignments:
            assignment.pipeline_stage = 0
        with pytest.raises(ValueError):
            model.set_pipeline_stage_assignment(offered)


def test_every_call_of_a_nested_model_has_stages_of_its_own(scope):
    start = layers.Input((2,))
    middle = layers.Input((2,), name="middle")
    inner = tf.keras.Model(middle, dense("inner1")(dense("inner0")(middle)), name="inner")
    model = tf.keras.Model(start, inner(dense("between")(inner(start))))
    first, between, second = model.get_pipeline_stage_assignment()
    assert isinstance(first, keras_ipu.FunctionalNestedModelPipelineStageAssignment)
    assert [assignment.is_nested_model for assignment in (first, between, second)] == [True, False, True]
    assert first.node_index != second.node_index
    assert [layer.name for layer in second.inbound_layers] == ["between"]
    between.pipeline_stage = 1
    for nested, stages in ((first, [0, 1]), (second, [1, 2])):
        for assignment, stage in zip(nested.pipeline_stage_assignments, stages):
            assignment.pipeline_stage = stage
    model.set_pipeline_stage_assignment([first, between, second])
    assert pipelines.stage_count(model) == 3
    first.pipeline_stage_assignments[1].pipeline_stage = 2
    with pytest.raises(ValueError, match="later stage 2"):
        pipelines.check_before_run(model, training=False)


# PipelineStage


def test_calls_in_a_stage_belong_to_it_and_keras_is_afterwards_as_it_was(scope):
    before = dict(vars(layers.Layer))
    start, shared = layers.Input((2,)), dense("shared")
    with PipelineStage(0):
        x = shared(start)
    with PipelineStage(1):
        x = tf.nn.relu(shared(x)[:, ::-1]) + x
    assert dict(vars(layers.Layer)) == before
    model = tf.keras.Model(start, x)
    assert [one.layer.name for one in model.get_pipeline_stage_assignment()][:2] == ["shared", "shared"]
    assert stages_of(model) == [0, 1, 1, 1, 1]
    pipelines.check_before_run(model, training=False)
    model.reset_pipeline_stage_assignment()
    assert not pipelines.is_pipelined(model)


def test_a_layer_made_in_a_stage_takes_it_along_unless_it_is_called_in_another(scope):
    start = layers.Input((2,))
    with PipelineStage(0):
        first, second = dense("first"), dense("second")
    x = first(start)
    with PipelineStage(1):
        x = second(x)
    assert stages_of(tf.keras.Model(start, x)) == [0, 1]


def test_a_sequential_model_made_in_stages_is_pipelined(scope):
    with PipelineStage(0):
        first = [layers.Dense(2, input_shape=(2,)), layers.ReLU()]
    with PipelineStage(1):
        model = tf.keras.Sequential([*first, layers.Dense(2)])
    assert stages_of(model) == [0, 0, 1]


def test_a_nested_model_called_in_a_stage_is_in_it_as_a_whole(scope):
    inner = tf.keras.Sequential([dense("inner0"), dense("inner1")])
    start = layers.Input((2,))
    with PipelineStage(0):
        x = inner(start)
    with PipelineStage(1):
        x = inner(x)
    model = tf.keras.Model(start, x)
    assert stages_of(model) == [0, 1]
    assert pipelines.stage_count(model) == 2


def test_recurrent_and_wrapped_layers_are_one_call(scope):
    start = layers.Input((3, 2))
    with PipelineStage(0):
        x, *state = layers.LSTM(2, return_sequences=True, return_state=True)(start)
    with PipelineStage(1):
        x = layers.LSTM(2, return_sequences=True)(x, initial_state=state)
        x = layers.Bidirectional(layers.GRU(2))(x)
    assert stages_of(tf.keras.Model(start, x)) == [0, 1, 1]


def test_a_model_with_some_layers_in_stages_cannot_be_run(scope):
    start = layers.Input((2,))
    with PipelineStage(0):
        x = dense("in")(start)
    model = tf.keras.Model(start, dense("out")(x))
    assert pipelines.is_pipelined(model)
    with pytest.raises(ValueError, match="1 of 2 layers"):
        pipelines.check_before_run(model, training=False)


def test_a_stage_is_not_negative_not_nested_and_only_for_an_ipu_strategy(scope):
    with pytest.raises(ValueError):
        PipelineStage(-1)
    with PipelineStage(0), pytest.raises(RuntimeError, match="cannot be nested"), PipelineStage(1):
        pass
    with PipelineStage(2):
        pass  # the nested one has left nothing behind


@pytest.mark.parametrize("strategy", [None, "/cpu:0"])
def test_a_stage_under_another_strategy_is_a_runtime_error(strategy):
    other = tf.distribute.OneDeviceStrategy(strategy) if strategy else tf.distribute.get_strategy()
    with other.scope(), pytest.raises(RuntimeError, match="IPUStrategy"), PipelineStage(0):
        pass


# Subclasses of Model


class Subclass(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.a, self.b = dense("a"), dense("b")
        self.inner = tf.keras.Sequential([dense("inner")], name="nested")

    def call(self, x):
        y = self.b(self.a(x))
        return self.inner(self.a(layers.add([2.0 * y, x])))


class InStages(Subclass):
    def call(self, x):
        with PipelineStage(0):
            x = self.a(x)
        with PipelineStage(1):
            return self.inner(self.b(x))


class MadeInStages(Subclass):
    def __init__(self):
        super().__init__()
        with PipelineStage(0):
            self.a = dense("a")
        with PipelineStage(1):
            self.b = dense("b")

    def call(self, x):
        return self.b(self.a(x))


def test_a_subclass_must_be_built_before_its_calls_are_known(scope):
    for error in (ValueError, RuntimeError):
        with pytest.raises(error, match="build"):
            Subclass().get_pipeline_stage_assignment()


@pytest.mark.parametrize("build", [lambda model: model.build((4, 2)), lambda model: model(tf.zeros([4, 2]))])
def test_a_subclass_has_an_assignment_for_every_call(scope, build):
    model = Subclass()
    build(model)
    assignments = model.get_pipeline_stage_assignment()
    assert calls_of(model) == [("a", 0), ("b", 0), ("add", 0), ("a", 1), ("nested", 0)]
    assert all(isinstance(one, keras_ipu.ModelLayerPipelineStageAssignment) for one in assignments[:-1])
    assert isinstance(assignments[-1], keras_ipu.NestedModelPipelineStageAssignment)
    inbound = [[layer.name for layer in one.inbound_layers] for one in assignments]
    assert inbound == [[], ["a"], ["b"], ["add"], ["a"]]
    assert not pipelines.is_pipelined(model)
    assert stages_of(assign(model, [0, 0, 1, 1, 2])) == [0, 0, 1, 1, 2]
    with pytest.raises(ValueError, match="later stage 1"):
        assign(model, [0, 1, 0, 1, 2])


@pytest.mark.parametrize("kind", [InStages, MadeInStages])
def test_stages_in_a_subclass_are_found_with_the_first_run_if_need_be(scope, kind):
    model = kind()
    pipelines.check_before_run(model, training=False)
    assert pipelines.is_pipelined(model) == (kind is MadeInStages)
    assert pipelines.ipus_per_replica(model) == (2 if kind is MadeInStages else 1)
    pipelines.check_before_run(model, training=False, inputs=tf.TensorSpec([4, 2]))
    assert pipelines.is_pipelined(model)
    assert pipelines.stage_count(model) == 2
    assert model.a.kernel.name == f"{model.name}/a/kernel:0"


def test_tracing_a_built_subclass_does_not_decide_what_is_saved(scope):
    model = Subclass()
    model.build((4, 2))
    model.get_pipeline_stage_assignment()
    model(tf.zeros([8, 2]))
    assert model.save_spec(dynamic_batch=False)[0][0].shape == [8, 2]


# Options, and what a run needs


def test_options_are_kept_until_they_are_set_again(scope):
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
def test_options_that_cannot_be_are_refused(scope, error, options):
    with pytest.raises(error):
        sequential().set_pipelining_options(**options)


def test_training_needs_the_number_of_accumulated_steps(scope):
    model = staged([0, 1])
    with pytest.raises(ValueError, match="gradient_accumulation_steps_per_replica"):
        pipelines.check_before_run(model, training=True)
    model.set_pipelining_options(4)
    pipelines.check_before_run(model, training=True, steps_per_execution=8)


def test_the_schedule_must_be_filled(scope):
    model = staged([0, 1, 2])
    model.set_pipelining_options(8)
    with pytest.raises(tf.errors.FailedPreconditionError, match="must be a multiple of 6"):
        pipelines.check_before_run(model, training=True, steps_per_execution=24)
    with pytest.raises(tf.errors.FailedPreconditionError, match="must be a multiple of 3"):
        pipelines.check_before_run(model, training=False, steps_per_execution=4)
    model.set_pipelining_options(pipeline_schedule=PipelineSchedule.Sequential)
    pipelines.check_before_run(model, training=True, steps_per_execution=8)
    pipelines.check_before_run(model, training=False, steps_per_execution=1)


def test_interleaved_stages_cannot_share_a_device_in_training(scope):
    model = staged([0, 1])
    model.set_pipelining_options(4, [0, 0], pipeline_schedule=PipelineSchedule.Interleaved)
    pipelines.check_before_run(model, training=False)
    with pytest.raises(NotImplementedError, match="Interleaved"):
        pipelines.check_before_run(model, training=True)


def test_lists_for_stages_must_have_an_entry_for_each(scope):
    model = staged([0, 1, 1])
    model.set_pipelining_options(4, [0, 1, 1])
    with pytest.raises(ValueError, match="3 entries for 2 stages"):
        pipelines.check_before_run(model, training=True)
    model.set_pipelining_options(4, [0, 1], forward_propagation_stages_poplar_options=[PipelineStageOptions()])
    with pytest.raises(ValueError, match="options for 1 stages"):
        pipelines.check_before_run(model, training=True)


def test_a_stage_with_a_negative_share_of_memory_is_refused(scope):
    model, share = staged([0, 1]), PipelineStageOptions(matmul_options={"availableMemoryProportion": "-1"})
    options = [PipelineStageOptions(), share]
    model.set_pipelining_options(4, forward_propagation_stages_poplar_options=options)
    with pytest.raises(tf.errors.InternalError, match="matmul_options of stage 1: availableMemoryProportion=-1"):
        pipelines.check_before_run(model, training=True)


def test_a_pipelined_sequential_model_cannot_override_call(scope):
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
def test_a_replica_occupies_a_power_of_two_of_ipus(scope, stages, mapping, ipus):
    model = staged(stages)
    model.set_pipelining_options(device_mapping=mapping)
    assert pipelines.ipus_per_replica(model) == ipus


def test_a_pipeline_over_all_ipus_trains_as_one_replica_that_accumulates(scope):
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


def test_models_that_are_no_pipelines_pass(scope):
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


def test_the_summary_of_a_sequential_model_has_a_row_for_every_layer(scope, capsys):
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


def test_the_summary_of_a_functional_model_shows_calls_inputs_and_what_is_nested(scope):
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
def test_stages_and_options_survive_saving(scope, tmp_path, make, way):
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


def test_a_model_saved_with_stages_is_a_plain_model_outside_a_scope(scope, tmp_path):
    path = str(tmp_path / "model.h5")
    staged([0, 1]).save(path)
    loaded = []
    # A thread begins without the scope of this one.
    thread = threading.Thread(target=lambda: loaded.append(tf.keras.models.load_model(path)))
    thread.start()
    thread.join()
    assert not pipelines.is_pipelined(loaded[0])
    assert "ipu_pipelining" not in loaded[0].get_config()


def test_models_on_an_ipu_are_instances_of_the_extensions(scope):
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
