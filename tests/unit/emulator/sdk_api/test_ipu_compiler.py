"""`ipu_compiler.compile` on one IPU and several, in eager mode and in graphs of TensorFlow 1; IPU devices as scopes."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from tf_ipu_dp.emulator.devices import device_scopes
from tf_ipu_dp.emulator.sdk_api import on_import
from tf_ipu_dp.emulator.sdk_api.ipu import config as ipu_config
from tf_ipu_dp.emulator.sdk_api.ipu import (
    ipu_compiler,
    ipu_infeed_queue,
    ipu_outfeed_queue,
    ipu_strategy,
    loops,
    scopes,
)
from tf_ipu_dp.emulator.sdk_api.ipu.ops import cross_replica_ops, pipelining_ops

v1 = tf.compat.v1
IPU = "/device:IPU:0"


@pytest.fixture(autouse=True)
def _device(emulator_dir):
    on_import.apply_patches()
    yield
    ipu_config.reset_ipu_configuration()


def configure(ipus):
    config = ipu_config.IPUConfig()
    config.auto_select_ipus = ipus
    config.configure_ipu_system()


def compiled(computation, *inputs):
    with scopes.ipu_scope(IPU):
        return ipu_compiler.compile(computation, list(inputs))


@contextlib.contextmanager
def own_graph():
    with tf.Graph().as_default():
        yield


@contextlib.contextmanager
def default_graph():
    """Graph mode without a graph of its own. Functions in it are made from eager mode."""
    with context.graph_mode():
        v1.reset_default_graph()
        yield


in_both_graphs = pytest.mark.parametrize("graph", [own_graph, default_graph])


def sum_over_replicas(value):
    return cross_replica_ops.cross_replica_sum(value)


@pytest.mark.parametrize("ipus", [1, 2, 4])
def test_a_computation_runs_on_every_ipu_as_a_replica(ipus):
    configure(ipus)
    assert [float(each) for each in compiled(sum_over_replicas, tf.constant(3.0))] == [3.0 * ipus]


def test_replicas_share_the_feed_keep_their_variables_and_fill_the_outfeed():
    configure(2)
    numbers = tf.data.Dataset.from_tensor_slices(np.arange(8, dtype=np.float32))
    infeed, outfeed = ipu_infeed_queue.IPUInfeedQueue(numbers), ipu_outfeed_queue.IPUOutfeedQueue()
    total = tf.Variable(0.0)

    def body(own, number):
        total.assign_add(cross_replica_ops.cross_replica_sum(number))
        return own + number, outfeed.enqueue(number)

    infeed.initializer  # noqa: B018
    for expected, rows in ((2.0, [[0, 1], [2, 3]]), (10.0, [[4, 5], [6, 7]])):
        (own,) = compiled(lambda: loops.repeat(2, body, tf.constant(0.0), infeed))
        assert float(own) == expected
        assert outfeed.dequeue().numpy().tolist() == rows
    assert float(total) == 28.0


def on_shards(count):
    def computation(value):
        for shard in range(count):
            with scopes.ipu_shard(shard):
                value = value * 2.0
        return cross_replica_ops.cross_replica_sum(value)

    return computation


@pytest.mark.parametrize(("shards", "replicas"), [(1, 4), (2, 2), (3, 1), (4, 1)])
def test_shards_take_ipus_of_each_replica(shards, replicas):
    configure(4)
    assert float(compiled(on_shards(shards), tf.constant(1.0))[0]) == replicas * 2.0**shards
    strategy = ipu_strategy.IPUStrategy()
    for _ in range(2):
        assert float(strategy.run(tf.function(on_shards(shards)), [tf.constant(1.0)])) == replicas * 2.0**shards


@pytest.mark.parametrize(("ipus", "needed"), [(1, 2), (2, 4)])
def test_more_shards_than_ipus_are_refused(ipus, needed):
    configure(ipus)
    told = f"One replica needs {needed} IPUs, and the device's {ipus} IPUs"
    with pytest.raises(tf.errors.InternalError, match=told):
        compiled(on_shards(3), tf.constant(1.0))


def test_a_computation_within_a_function_runs_on_the_replicas_too():
    configure(2)
    function = tf.function(lambda value: compiled(sum_over_replicas, value)[0])
    assert float(function(tf.constant(3.0))) == 6.0


def test_the_scope_names_the_device():
    configure([1, 2])
    for device, replicas in (("/device:IPU:0", 1), ("/device:IPU:1", 2)):
        with tf.device(device):
            assert float(ipu_compiler.compile(sum_over_replicas, [tf.constant(1.0)])[0]) == replicas
    with tf.device("/device:IPU:2"), pytest.raises(tf.errors.InvalidArgumentError, match="no /device:IPU:2"):
        ipu_compiler.compile(sum_over_replicas, [tf.constant(1.0)])


@pytest.mark.parametrize("name", [IPU, "IPU:0", "ipu", tf.DeviceSpec(device_type="IPU", device_index=0)])
def test_operations_in_the_scope_of_an_ipu_are_on_the_host(name):
    with tf.device(name):
        assert device_scopes.current_ordinal() == 0
        assert "CPU" in (tf.constant(1.0) + 1.0).device
        with tf.device("/job:localhost"):
            assert device_scopes.current_ordinal() == 0
        for other in ("cpu", "/device:CPU:0", None):
            with tf.device(other):
                assert device_scopes.current_ordinal() is None
    assert device_scopes.current_ordinal() is None
    with pytest.raises(Exception, match="not placed on an IPU device"):
        ipu_compiler.compile(sum_over_replicas, [tf.constant(1.0)])


@in_both_graphs
def test_a_session_runs_what_a_graph_places_on_an_ipu(graph):
    with graph():
        with tf.device(IPU):
            given = v1.placeholder(tf.float32, [2])
            weights = v1.get_variable("weights", [2], initializer=v1.ones_initializer())
            result = given * 2.0 + weights
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            assert session.run(result, {given: [1.0, 2.0]}).tolist() == [3.0, 5.0]


@in_both_graphs
def test_a_loop_in_a_graph_has_variables_feeds_and_training(graph):
    with graph():
        infeed = ipu_infeed_queue.IPUInfeedQueue(tf.data.Dataset.from_tensors(np.ones([4, 3], np.float32)).repeat())
        outfeed = ipu_outfeed_queue.IPUOutfeedQueue()
        last = ipu_outfeed_queue.IPUOutfeedQueue(ipu_outfeed_queue.IPUOutfeedMode.LAST)

        def body(loss, rows):
            weights = v1.get_variable("weights", [3, 1], initializer=v1.ones_initializer())
            loss = tf.reduce_mean(tf.square(tf.matmul(rows, weights)))
            train = v1.train.GradientDescentOptimizer(0.01).minimize(loss)
            return loss, train, outfeed.enqueue(loss), last.enqueue(loss)

        result = compiled(lambda: loops.repeat(3, body, [0.0], infeed))
        dequeued = outfeed.dequeue(), last.dequeue()
        configure(1)  # programs may do it as late as here
        with v1.Session() as session:
            session.run([infeed.initializer, v1.global_variables_initializer()])
            (loss,) = session.run(result)
            losses, latest = session.run(dequeued)
    sums = 3.0 * 0.94 ** np.arange(3)  # each step takes 0.01 * 2 * sum from each of the three weights
    np.testing.assert_allclose(losses, sums**2, rtol=1e-5)
    assert loss == latest == losses[-1]


@in_both_graphs
def test_the_last_outputs_of_a_graph_need_no_initializer_and_are_no_variables_of_the_program(graph):
    with graph():
        last = ipu_outfeed_queue.IPUOutfeedQueue(ipu_outfeed_queue.IPUOutfeedMode.LAST)
        result = compiled(lambda: loops.repeat(3, lambda value: (value * 2.0, last.enqueue([value, -value])), [1.0]))
        dequeued = last.dequeue()
        configure(1)
        assert v1.global_variables() == []
        with v1.Session() as session:
            for _ in range(2):
                assert session.run(result) == [8.0]
                assert session.run(dequeued) == [4.0, -4.0]


@in_both_graphs
def test_a_sharded_or_pipelined_graph_runs_on_the_ipus_that_it_takes(graph):
    with graph():
        given = v1.placeholder(tf.float32, [])
        sharded = compiled(on_shards(2), given)
        infeed = ipu_infeed_queue.IPUInfeedQueue(tf.data.Dataset.from_tensors(np.float32(3.0)).repeat())
        outfeed = ipu_outfeed_queue.IPUOutfeedQueue()
        stages = [lambda number: number * 2.0, lambda number: number + 1.0]
        piped = compiled(lambda: pipelining_ops.pipeline(stages, 4, infeed_queue=infeed, outfeed_queue=outfeed))
        results = outfeed.dequeue()
        configure(2)
        with v1.Session() as session:
            assert session.run(sharded, {given: 1.0}) == [4.0]
            session.run(infeed.initializer)
            session.run(piped)
            assert session.run(results).tolist() == [7.0] * 4


@in_both_graphs
def test_a_session_on_several_replicas_is_refused_when_it_runs(graph):
    with graph():
        without_inputs = compiled(lambda: on_shards(2)(tf.constant(1.0)))
        configure(4)
        with v1.Session() as session, pytest.raises(
            tf.errors.UnimplementedError,
            match=r"cannot be emulated on 2 replicas: the device has 4 IPUs, and the program takes 2 for each "
            r"replica\. Configure 2, or call ipu_compiler\.compile in eager mode\.",
        ):
            session.run(without_inputs)


def test_a_loop_in_a_graph_leaves_the_control_flow_of_others_alone():
    enabled = v1.control_flow_v2_enabled()
    with own_graph(), pytest.raises(ZeroDivisionError):
        compiled(lambda: loops.repeat(2, lambda value: 1 / 0, [0.0]))
    assert v1.control_flow_v2_enabled() == enabled


def test_an_infeed_queue_has_a_state_in_each_graph():
    graphs = [tf.Graph(), tf.Graph()]
    with graphs[0].as_default():
        queue = ipu_infeed_queue.IPUInfeedQueue(tf.data.Dataset.range(3).map(lambda number: tf.cast(number, tf.int32)))
        assert isinstance(queue.initializer, tf.Operation)
        with pytest.raises(ValueError, match="initialised already"):
            queue.initializer  # noqa: B018
    with graphs[1].as_default():
        with pytest.raises(tf.errors.NotFoundError, match="not been initialised"):
            queue.deleter  # noqa: B018
        with pytest.raises(ValueError, match="graph"):  # TensorFlow's: the dataset is part of the first graph
            queue.initializer  # noqa: B018
    with graphs[0].as_default():
        queue.deleter  # noqa: B018
        start, (element,) = queue.initializer, tf.nest.flatten(queue._dequeue())
        with v1.Session() as session:
            for _ in range(2):
                session.run(start)
                assert [session.run(element) for _ in range(3)] == [0, 1, 2]
