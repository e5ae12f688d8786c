"""Exports for serving: what is saved answers like the model, in a process that knows nothing of the emulator."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from tf_ipu_dp.emulator.sdk_api.ipu import config as ipu_config
from tf_ipu_dp.emulator.sdk_api.ipu import ipu_strategy, serving
from tf_ipu_dp.emulator.sdk_api.ipu.ops import pipelining_ops

X = np.arange(8, dtype="float32").reshape(4, 2)
SPEC = tf.TensorSpec([4, 2], tf.float32)


@pytest.fixture
def scope(emulator_dir):
    """The scope of a strategy on one IPU."""
    yield ipu_strategy.IPUStrategy().scope
    ipu_config.reset_ipu_configuration()


@pytest.fixture
def target(tmp_path):
    return str(tmp_path / "export")


def make_model(**arguments):
    return tf.keras.Sequential([tf.keras.layers.Dense(3, input_shape=(2,), name="only", **arguments)])


def loaded(path, **inputs):
    signature = tf.saved_model.load(path).signatures["serving_default"]
    return {name: value.numpy() for name, value in signature(**inputs).items()}


def double(x):
    return 2.0 * x


def test_an_export_is_of_one_replica(emulator_dir, target):
    config = ipu_config.IPUConfig()
    config.auto_select_ipus = 4
    config.configure_ipu_system()
    pipelined = ([double, double], target, 2)
    with ipu_strategy.IPUStrategy().scope():
        model = make_model()
        for export, replicas, needed in (
            (lambda: serving.export_keras(model, target, batch_size=4), 4, 1),
            (lambda: serving.export_single_step(double, target, 1, [SPEC]), 4, 1),
            (lambda: serving.export_pipeline(*pipelined, predict_step_signature=[SPEC]), 2, 2),
        ):
            with pytest.raises(NotImplementedError, match=f"{replicas} replicas.*auto_select_ipus={needed} before"):
                export()
        config.auto_select_ipus = 2
        config.configure_ipu_system()
        serving.export_pipeline(*pipelined, predict_step_signature=[SPEC])
    ipu_config.reset_ipu_configuration()


def test_an_exported_model_answers_alike_in_a_process_without_the_emulator(scope, target):
    with scope():
        model = make_model()
        model.compile(steps_per_execution=4)
        expected = model(X).numpy()
        returned = serving.export_keras(model, target, batch_size=4)
    model.set_weights([np.zeros_like(weight) for weight in model.get_weights()])
    np.testing.assert_allclose(returned(tf.constant(X)).numpy(), expected, rtol=1e-6)
    code = f"""
import json, sys, tensorflow as tf
signature = tf.saved_model.load({target!r}).signatures["serving_default"]
spec = signature.structured_input_signature[1]["only_input"]
answer = signature(only_input=tf.constant({X.tolist()}))["output_0"].numpy().tolist()
print(json.dumps([spec.shape.as_list(), answer, any("tf_ipu_dp" in name for name in sys.modules)]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    shape, answer, emulated = json.loads(done.stdout.splitlines()[-1])
    assert (shape, emulated) == ([4, 2], False)
    np.testing.assert_allclose(answer, expected, rtol=1e-5)


def test_steps_before_and_after_run_around_the_model_and_outputs_have_names(scope, target):
    with scope():
        model = make_model()

        @tf.function(input_signature=[tf.TensorSpec([4], tf.string, name="lines")])
        def parse(lines):
            return tf.strings.to_number(tf.strings.split(lines, ",").to_tensor(shape=[4, 2]))

        def best(logits):
            return tf.argmax(logits, axis=-1), tf.reduce_max(logits, axis=-1)

        returned = serving.export_keras(
            model, target, 4, ["label", "logit"], parse, None, best, [tf.TensorSpec([None, 3], tf.float32)]
        )
    lines = tf.constant([f"{a},{b}" for a, b in X])
    expected = model(X).numpy()
    for result in (returned(lines), loaded(target, lines=lines)):
        np.testing.assert_array_equal(result["label"], expected.argmax(axis=-1))
        np.testing.assert_allclose(result["logit"], expected.max(axis=-1), rtol=1e-5)


def test_a_table_of_the_step_before_is_saved_with_it(target):
    keys = tf.lookup.KeyValueTensorInitializer(tf.constant(["a", "b"]), tf.constant([1.0, 2.0]))
    table = tf.lookup.StaticHashTable(keys, 0.0)
    serving.export_single_step(
        lambda x: 10.0 * x,
        target,
        1,
        preprocessing_step=lambda words: 1.0 * table.lookup(words),
        preprocessing_step_signature=[tf.TensorSpec([3], tf.string)],
    )
    answer = loaded(target, words=tf.constant(["b", "a", "?"]))["output_0"]
    np.testing.assert_array_equal(answer, [20, 10, 0])


def test_models_of_several_inputs_and_own_models_are_exported_too(scope, target, tmp_path):
    class Own(tf.keras.Model):
        def call(self, inputs, training=None):
            return inputs * (2.0 if training else 3.0)

    with scope():
        inputs = {name: tf.keras.Input((2,), name=name) for name in ("left", "right")}
        joined = tf.keras.Model(inputs, {"sum": inputs["left"] + inputs["right"]})
        serving.export_keras(joined, target, batch_size=4)
        own = Own()
        own(X)
        serving.export_keras(own, str(tmp_path / "own"), batch_size=4)
    x = tf.constant(X)
    np.testing.assert_array_equal(loaded(target, left=x, right=x + 1)["sum"], 2 * X + 1)
    np.testing.assert_array_equal(loaded(str(tmp_path / "own"), input_1=x)["output_0"], 3 * X)


def test_a_single_step_takes_its_signature_from_a_list_a_function_or_a_dataset(tmp_path):
    weight = tf.Variable(3.0)
    exports = [
        ({"predict_step_signature": [SPEC]}, lambda x: weight * x, {"x": X}),
        ({}, tf.function(lambda y: weight * y, input_signature=(SPEC,)), {"y": X}),
        ({"input_dataset": tf.data.Dataset.from_tensors(X)}, lambda z: weight * z, {"z": X}),
        ({"input_dataset": tf.data.Dataset.from_tensors((X, X))}, lambda a, b: a + 2 * b, {"a": X, "b": X}),
        ({"input_dataset": tf.data.Dataset.from_tensors({"b": X, "a": X})}, lambda b, a: 2 * b + a, {"a": X, "b": X}),
    ]  # fmt: skip
    for number, (arguments, step, inputs) in enumerate(exports):
        path = str(tmp_path / str(number))
        serving.export_single_step(step, path, 16, **arguments)
        answer = loaded(path, **{name: tf.constant(value) for name, value in inputs.items()})
        np.testing.assert_array_equal(answer["output_0"], 3 * X)


def test_a_pipeline_is_its_stages_in_a_row(scope, target):
    weight = tf.Variable(3.0)
    returned = serving.export_pipeline(
        [lambda factor, x: (factor * x, x), lambda y, x: y + weight * x, double],
        target,
        iterations=6,
        inputs=[5.0],
        device_mapping=[0, 1, 0],
        predict_step_signature=[SPEC],
        output_names="answer",
    )
    weight.assign(0.0)
    np.testing.assert_array_equal(returned(tf.constant(X))["answer"], 16 * X)
    np.testing.assert_array_equal(loaded(target, x=tf.constant(X))["answer"], 16 * X)


@pytest.mark.parametrize(
    ("error", "arguments"),
    [
        (ValueError, {"predict_step_signature": None}),
        (ValueError, {"input_dataset": tf.data.Dataset.from_tensors(X)}),
        (ValueError, {"predict_step_signature": []}),
        (ValueError, {"predict_step_signature": [tf.TensorSpec([None, 2], tf.float32)]}),
        (ValueError, {"output_names": ["one", "two"]}),
        (ValueError, {"iterations": 0}),
        (ValueError, {"preprocessing_step": double}),
        (ValueError, {"postprocessing_step": double}),
        (ValueError, {"preprocessing_step": double, "preprocessing_step_signature": ()}),
        (ValueError, {"preprocessing_step": double, "preprocessing_step_signature": [tf.TensorSpec([4], tf.float32)]}),
        (ValueError, {"postprocessing_step": double, "postprocessing_step_signature": [tf.TensorSpec([4], tf.int32)]}),
        (ValueError, {"postprocessing_step": double, "postprocessing_step_signature": [SPEC, SPEC]}),
        (TypeError, {"predict_step_signature": SPEC}),
        (TypeError, {"predict_step_signature": [X]}),
        (TypeError, {"predict_step_signature": None, "input_dataset": [X]}),
        (TypeError, {"output_names": ("one",)}),
        (TypeError, {"postprocessing_step": double, "postprocessing_step_signature": "x"}),
        (tf.errors.FailedPreconditionError, {"predict_step_signature": [tf.TensorSpec([4, 2], tf.int64)]}),
    ],
)  # fmt: skip
def test_exports_that_cannot_be_are_refused_and_write_nothing(target, tmp_path, error, arguments):
    given = {"iterations": 1, "predict_step_signature": [SPEC], **arguments}
    with pytest.raises(error):
        serving.export_single_step(lambda x: x + x, target, **given)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_is_emptied_only_if_asked(target, tmp_path):
    (tmp_path / "export" / "old").mkdir(parents=True)
    (tmp_path / "export" / "old.txt").write_text("old")
    with pytest.raises(ValueError, match="not empty"):
        serving.export_single_step(double, target, 1, [SPEC])
    serving.export_single_step(double, target, 1, [SPEC], purge_export_dir=True)
    assert not [path for path in (tmp_path / "export").iterdir() if "old" in path.name]
    np.testing.assert_array_equal(loaded(target, x=tf.constant(X))["output_0"], 2 * X)


def test_pipelines_follow_the_count_rule(scope, target):
    stages = [double, double]
    with pytest.raises(tf.errors.FailedPreconditionError, match="multiple"):
        serving.export_pipeline(stages, target, 3, predict_step_signature=[SPEC])
    with pytest.raises(ValueError, match="at least two"):
        serving.export_pipeline(stages[:1], target, 4, predict_step_signature=[SPEC])
    with pytest.raises(ValueError, match="device_mapping"):
        serving.export_pipeline(stages, target, 4, device_mapping=[0], predict_step_signature=[SPEC])
    schedule = pipelining_ops.PipelineSchedule.Sequential
    serving.export_pipeline(stages, target, 3, pipeline_schedule=schedule, predict_step_signature=[SPEC])


def test_a_pipelined_model_is_exported_if_its_execution_fills_the_pipeline(scope, target):
    with scope():
        model = tf.keras.Sequential([tf.keras.layers.Dense(3, input_shape=(2,)), tf.keras.layers.Dense(1)])
        model.set_pipeline_stage_assignment([0, 1])
        model.compile(steps_per_execution=3)
        with pytest.raises(tf.errors.FailedPreconditionError, match="multiple of 2"):
            model.export_for_ipu_serving(target, batch_size=4)
        model.compile(steps_per_execution=4)
        model.export_for_ipu_serving(target, batch_size=4, output_names="logit")
    answer = loaded(target, **{model.input_names[0]: tf.constant(X)})["logit"]
    np.testing.assert_allclose(answer, model(X).numpy(), rtol=1e-5)


def test_models_without_batch_size_inputs_or_ipu_are_value_errors(scope, target):
    with pytest.raises(ValueError, match="IPU strategy"):
        serving.export_keras(make_model(), target, batch_size=4)
    with scope():
        with pytest.raises(ValueError, match="batch_size is needed"):
            serving.export_keras(make_model(), target)
        fixed = tf.keras.Sequential([tf.keras.layers.Dense(3, batch_input_shape=(4, 2))])
        with pytest.raises(ValueError, match="does not fit"):
            serving.export_keras(fixed, target, batch_size=2)
        with pytest.raises(ValueError, match="has no known inputs"):
            serving.export_keras(tf.keras.Sequential([tf.keras.layers.Dense(3)]), target, batch_size=2)
        serving.export_keras(fixed, target)


@pytest.mark.parametrize("kind", [tf.constant, np.int64, lambda size: tf.Variable(size, trainable=False)])
def test_a_batch_size_and_iterations_may_be_tensors(scope, tmp_path, kind):
    with scope():
        model = make_model()
        expected = model(X).numpy()
        model.export_for_ipu_serving(str(tmp_path / "model"), batch_size=kind(4))
    np.testing.assert_allclose(loaded(str(tmp_path / "model"), only_input=X)["output_0"], expected, rtol=1e-6)
    spec = tf.TensorSpec([tf.constant(4), 2], tf.float32)
    serving.export_single_step(double, str(tmp_path / "step"), kind(8), [spec])
    np.testing.assert_array_equal(loaded(str(tmp_path / "step"), x=X)["output_0"], 2 * X)


def test_a_batch_size_that_is_no_number_is_refused(scope, target):
    with scope():
        for size in (0, 2.0, tf.constant([4]), tf.constant(4.0), tf.constant(-1)):
            with pytest.raises(ValueError, match="batch_size must be an int of 1 or more"):
                make_model().export_for_ipu_serving(target, batch_size=size)
