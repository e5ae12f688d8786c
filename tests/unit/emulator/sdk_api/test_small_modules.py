"""The emulator's smaller modules: benchmark, datasets, sharding, trace points, and what is refused."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from tf_ipu_dp.emulator import refusal
from tf_ipu_dp.emulator.sdk_api.ipu import dataset_benchmark, ipu_infeed_queue, sharding
from tf_ipu_dp.emulator.sdk_api.ipu.data.ops import dataset_ops

VALUES = {"elements_processed", "total_bytes_processed", "time_elapsed", "elements_per_second", "bandwidth"}


def dataset(elements=10):
    return tf.data.Dataset.from_tensor_slices((np.zeros((elements, 3), "float32"), np.zeros(elements, "int32")))


def test_a_benchmark_gives_five_floats_for_each_epoch(capsys):
    result = dataset_benchmark.dataset_benchmark(dataset().repeat(), 3, 7)
    assert result.shape == [1]
    epochs = json.loads(result.numpy()[0])["epochs"]
    assert [set(epoch) for epoch in epochs] == [VALUES] * 3
    assert all(isinstance(value, float) for epoch in epochs for value in epoch.values())
    assert [epoch["total_bytes_processed"] for epoch in epochs] == [7 * 16] * 3
    assert len(capsys.readouterr().out.splitlines()) == 3
    queue = ipu_infeed_queue.IPUInfeedQueue(dataset())
    result = dataset_benchmark.infeed_benchmark(queue, 1, 10, print_stats=False, do_memcpy=False)
    assert json.loads(result.numpy()[0])["epochs"][0]["elements_processed"] == 10
    assert not capsys.readouterr().out


def test_a_benchmark_runs_in_a_graph_too():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        text = session.run(dataset_benchmark.dataset_benchmark(dataset(), 2, 5, print_stats=False))
    assert len(json.loads(text[0])["epochs"]) == 2
    with tf.Graph().as_default(), tf.compat.v1.Session() as session, pytest.raises(tf.errors.OutOfRangeError):
        session.run(dataset_benchmark.dataset_benchmark(dataset(), 2, 6, print_stats=False))


def test_a_benchmark_returns_the_exception_for_bad_arguments_and_raises_for_bad_data():
    assert isinstance(dataset_benchmark.dataset_benchmark(dataset(), 0, 5), ValueError)
    assert isinstance(dataset_benchmark.dataset_benchmark(dataset(), 1, -5), ValueError)
    assert isinstance(dataset_benchmark.dataset_benchmark([1, 2], 1, 5), TypeError)
    assert isinstance(dataset_benchmark.infeed_benchmark(dataset(), 1, 5), TypeError)
    with pytest.raises(tf.errors.OutOfRangeError):
        dataset_benchmark.dataset_benchmark(dataset(), 2, 6, print_stats=False)
    with pytest.raises(tf.errors.InvalidArgumentError):
        dataset_benchmark.dataset_benchmark(tf.data.Dataset.from_tensors(np.zeros((0, 2))), 1, 1)


@pytest.mark.parametrize(
    "structure", [lambda x: x, lambda x: (x, {"square": x * x}), lambda x: {"x": x}, lambda x: (x,)]
)
def test_buffers_drop_the_elements_that_do_not_fill_one(structure):
    source = tf.data.Dataset.range(11).map(structure)
    buffered = dataset_ops.BufferDataset(source, 4)
    assert buffered.element_spec == source.element_spec
    assert buffered.cardinality().numpy() == 8
    assert list(buffered.as_numpy_iterator()) == list(source.take(8).as_numpy_iterator())
    endless = dataset_ops.BufferDataset(source.repeat(), 4)
    assert endless.cardinality().numpy() == tf.data.INFINITE_CARDINALITY
    unknown = dataset_ops.BufferDataset(source.filter(lambda *_: True), 4)
    assert len(list(unknown)) == 8


def test_operations_have_attributes_and_needs_but_no_shard():
    with tf.Graph().as_default() as graph:
        a, b = tf.constant(1.0), tf.constant(2.0)
        total = a + b
        assert sharding.dependencies([total.op]) == {a.op, b.op, total.op}
        assert sharding.has_attr(total.op, "T")
        assert not sharding.has_attr(total.op, "sharding")
        assert sharding.get_sharding(total.op) is None
        assert sharding.get_shard_from_colocation(total.op) is None
        sharding.propagate_sharding(graph)


REFUSED = {
    "dataset_extractor": "dataset_extractor export_dataset_to_file export_inputs_to_file import_data_in_live_model",
    "ipu_estimator": "IPUEstimator IPUEstimatorSpec",
    "ipu_multi_worker_strategy": "IPUMultiWorkerStrategy IPUMultiWorkerStrategyV1",
    "ipu_pipeline_estimator": "IPUPipelineEstimator IPUPipelineEstimatorSpec",
    "ipu_run_config": "IPURunConfig RunConfig",
    "ipu_session_run_hooks": "IPULoggingTensorHook",
    "vertex_edsl": "PlaceholderVertexExpr",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_emulated_can_be_imported_and_says_why_when_called(name):
    module = importlib.import_module(f"tf_ipu_dp.emulator.sdk_api.ipu.{name}")
    for attribute in REFUSED[name].split():
        with pytest.raises(NotImplementedError, match=rf"^The emulator has no ipu\.\S*{attribute}: .*\.$"):
            getattr(module, attribute)("any", argument=1)


def test_a_class_made_from_a_refused_one_is_refused_when_called():
    class Own(refusal.refused("ipu.Thing", "it needs a device")):
        pass

    with pytest.raises(NotImplementedError, match="it needs a device"):
        Own()


def test_trace_points_do_nothing_and_need_no_tensorflow():
    code = """
import sys
from tf_ipu_dp.emulator.sdk_api import libpvti
channel = libpvti.createTraceChannel("steps")
with libpvti.Tracepoint(channel, "one"):
    pass
libpvti.Tracepoint.begin(channel, "two")
libpvti.Tracepoint.end(channel, "two")
try:
    with libpvti.Tracepoint(channel, "three"):
        raise KeyError
except KeyError:
    sys.exit("tensorflow" in sys.modules)
sys.exit(2)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
