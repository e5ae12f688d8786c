"""Pipeline stages of Keras models: how they are assigned, the SDK's rules for them, and what becomes of them."""

from __future__ import annotations

import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pipelined_models import Subclass, assign, calls_of, dense, diamond, sequential, staged, stages_of

from tf_ipu_dp.emulator.keras import pipelines
from tf_ipu_dp.emulator.sdk_api import keras_ipu
from tf_ipu_dp.emulator.sdk_api.keras_ipu import PipelineStage

layers = tf.keras.layers


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
def test_a_list_is_taken_exactly_if_it_begins_with_0_and_goes_up_by_at_most_1(two_ipus, count, stages):
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


def test_the_list_that_is_given_is_filled_with_assignments(two_ipus):
    model, offered = sequential(2), [0, 1]
    model.set_pipeline_stage_assignment(offered)
    assert all(isinstance(one, keras_ipu.SequentialLayerPipelineStageAssignment) for one in offered)
    assert [one.layer for one in offered] == model.layers
    assert model.get_pipeline_stage_assignment() == offered


def test_assignments_can_be_taken_out_changed_and_given_back(two_ipus):
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
def test_other_things_than_a_list_of_ints_are_a_value_error(two_ipus, offered):
    with pytest.raises(ValueError):
        sequential(2).set_pipeline_stage_assignment(offered)


def test_an_assignment_of_another_layer_is_a_value_error(two_ipus):
    model = sequential(2)
    first, second = model.get_pipeline_stage_assignment()
    first.pipeline_stage, second.pipeline_stage = 0, 1
    with pytest.raises(ValueError, match="in place of"):
        model.set_pipeline_stage_assignment([second, first])


@pytest.mark.parametrize("change", [lambda model: model.add(dense("new")), lambda model: model.pop()])
def test_adding_or_removing_layers_makes_the_assignment_invalid(two_ipus, change):
    model = staged([0, 1, 1])
    change(model)
    assert set(stages_of(model)) == {None}
    with pytest.raises(RuntimeError, match="added or removed"):
        pipelines.check_before_run(model, training=False)
    model.set_pipeline_stage_assignment([0] * (len(model.layers) - 1) + [1])
    pipelines.check_before_run(model, training=False)


def test_a_nested_model_in_a_sequential_one_has_assignments_of_its_own(two_ipus):
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


def test_a_functional_model_has_an_assignment_for_every_call_in_post_order(two_ipus):
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


def test_data_that_would_go_backwards_are_a_value_error(two_ipus):
    with pytest.raises(ValueError, match=r"join .* needs data of the later stage 1"):
        assign(diamond(), [0, 0, 1, 0, 2])


def test_a_call_without_a_stage_is_a_value_error(two_ipus):
    with pytest.raises(ValueError, match="not assigned"):
        assign(diamond(), [0, None, 1, 1, 1])


@pytest.mark.parametrize("stages", [[0, 0, 2, 2, 2], [1, 1, 2, 2, 3]])
def test_stages_with_a_gap_are_a_runtime_error_when_the_model_is_run(two_ipus, stages):
    model = assign(diamond(), stages)
    with pytest.raises(RuntimeError, match="not contiguous"):
        pipelines.check_before_run(model, training=False)


def test_lists_that_do_not_fit_the_calls_are_a_value_error(two_ipus):
    model = diamond()
    assignments = model.get_pipeline_stage_assignment()
    others = [keras_ipu.SequentialLayerPipelineStageAssignment(one.layer, 0) for one in assignments]
    for offered in (assignments[1:], [0] * 5, others, assignments[::-1], tuple(assignments)):
        for assignment in assignments:
            assignment.pipeline_stage = 0
        with pytest.raises(ValueError):
            model.set_pipeline_stage_assignment(offered)


def test_every_call_of_a_nested_model_has_stages_of_its_own(two_ipus):
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


def test_calls_in_a_stage_belong_to_it_and_keras_is_afterwards_as_it_was(two_ipus):
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


def test_a_layer_made_in_a_stage_takes_it_along_unless_it_is_called_in_another(two_ipus):
    start = layers.Input((2,))
    with PipelineStage(0):
        first, second = dense("first"), dense("second")
    x = first(start)
    with PipelineStage(1):
        x = second(x)
    assert stages_of(tf.keras.Model(start, x)) == [0, 1]


def test_a_sequential_model_made_in_stages_is_pipelined(two_ipus):
    with PipelineStage(0):
        first = [layers.Dense(2, input_shape=(2,)), layers.ReLU()]
    with PipelineStage(1):
        model = tf.keras.Sequential([*first, layers.Dense(2)])
    assert stages_of(model) == [0, 0, 1]


def test_a_nested_model_called_in_a_stage_is_in_it_as_a_whole(two_ipus):
    inner = tf.keras.Sequential([dense("inner0"), dense("inner1")])
    start = layers.Input((2,))
    with PipelineStage(0):
        x = inner(start)
    with PipelineStage(1):
        x = inner(x)
    model = tf.keras.Model(start, x)
    assert stages_of(model) == [0, 1]
    assert pipelines.stage_count(model) == 2


def test_recurrent_and_wrapped_layers_are_one_call(two_ipus):
    start = layers.Input((3, 2))
    with PipelineStage(0):
        x, *state = layers.LSTM(2, return_sequences=True, return_state=True)(start)
    with PipelineStage(1):
        x = layers.LSTM(2, return_sequences=True)(x, initial_state=state)
        x = layers.Bidirectional(layers.GRU(2))(x)
    assert stages_of(tf.keras.Model(start, x)) == [0, 1, 1]


def test_a_model_with_some_layers_in_stages_cannot_be_run(two_ipus):
    start = layers.Input((2,))
    with PipelineStage(0):
        x = dense("in")(start)
    model = tf.keras.Model(start, dense("out")(x))
    assert pipelines.is_pipelined(model)
    with pytest.raises(ValueError, match="1 of 2 layers"):
        pipelines.check_before_run(model, training=False)


def test_a_stage_is_not_negative_not_nested_and_only_for_an_ipu_strategy(two_ipus):
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


def test_a_subclass_must_be_built_before_its_calls_are_known(two_ipus):
    for error in (ValueError, RuntimeError):
        with pytest.raises(error, match="build"):
            Subclass().get_pipeline_stage_assignment()


@pytest.mark.parametrize("build", [lambda model: model.build((4, 2)), lambda model: model(tf.zeros([4, 2]))])
def test_a_subclass_has_an_assignment_for_every_call(two_ipus, build):
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
def test_stages_in_a_subclass_are_found_with_the_first_run_if_need_be(two_ipus, kind):
    model = kind()
    pipelines.check_before_run(model, training=False)
    assert pipelines.is_pipelined(model) == (kind is MadeInStages)
    assert pipelines.ipus_per_replica(model) == (2 if kind is MadeInStages else 1)
    pipelines.check_before_run(model, training=False, inputs=tf.TensorSpec([4, 2]))
    assert pipelines.is_pipelined(model)
    assert pipelines.stage_count(model) == 2
    assert model.a.kernel.name == f"{model.name}/a/kernel:0"


def test_tracing_a_built_subclass_does_not_decide_what_is_saved(two_ipus):
    model = Subclass()
    model.build((4, 2))
    model.get_pipeline_stage_assignment()
    model(tf.zeros([8, 2]))
    assert model.save_spec(dynamic_batch=False)[0][0].shape == [8, 2]
