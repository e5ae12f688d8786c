"""Programs that others write for poprun run unmodified on several instances, and get what one instance gets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("emulator_dir")

PROGRAMS = Path(__file__).parents[1] / "programs" / "poprun"
# Three stages on four IPUs. The accumulation is a multiple of twice the stages, which the schedule asks for.
PIPELINE = (
    "cnn_trainer --pipeline-stages 3 --accumulation 6 --micro-batches-per-execution 6 --epochs 10 --learning-rate 0.2"
)


def numbers_of(output):
    """Returns what one instance has printed: numbers, each line with its title."""
    lines = [line.split("<stdout>:")[1].split() for line in output.splitlines()]
    assert len({line.split("<")[0] for line in output.splitlines()}) == 1, "several have printed"
    return {title: [float(word) for word in words] for title, *words in lines}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "titles"),
    [
        ("cnn_trainer", {"accuracy", "loss", "val_accuracy", "val_loss", "updates", "weights"}),
        (PIPELINE, {"updates", "weights"}),
        ("transformer", {"losses", "validation", "weights"}),
        ("keras_mnist", {"weights"}),
        ("own_loop", {"losses", "kernel"}),
        ("regularised", {"logs", "weights"}),
        ("release_2_6", {"losses", "weights"}),
        ("shared_batch_norm", {"groups_of_1", "groups_of_2", "groups_of_4"}),
        (
            "device_collectives",
            {"gathered", "exchanged", "scattered", "largest", "slope", "summed_in_a_loop", "updated"},
        ),
    ],
)
def test_two_instances_get_what_one_gets(program, titles, poprun):
    name, *words = program.split()
    ipus = ("--ipus-per-replica", "4") if program == PIPELINE else ()
    path = PROGRAMS / f"{name}.py"
    runs = [poprun(instances, 4, *ipus, "python3", path, *words) for instances in (1, 2)]
    assert [code for code, *_ in runs] == [0, 0], runs
    one, two = (numbers_of(out) for _, out, _ in runs)
    assert set(one) == titles
    for title, expected in one.items():
        assert two[title] == pytest.approx(expected, rel=1e-4), title


COLLECTIVES = """
import threading, time
import popdist, popdist.tensorflow, tensorflow as tf
from tensorflow.python import ipu
from tensorflow.python.ipu import distributed
from tensorflow.python.ipu.distributed.popdist_strategy import PopDistStrategy
from tf_ipu_dp.emulator.runtime import instances

popdist.init()
own, count = popdist.getInstanceIndex(), popdist.getNumInstances()
SUM, MEAN = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN
for dtype in (tf.int8, tf.uint8, tf.int16, tf.uint16, tf.int32, tf.uint32, tf.int64, tf.uint64, tf.float16, tf.float32):
    value = tf.cast([own, 2], dtype)
    for result, expected in (
        (distributed.allreduce(value, SUM), [sum(range(count)), 2 * count]),
        (distributed.allreduce(value, MEAN), [1 if dtype.is_integer else 1.5, 2]),
        (distributed.allgather(value), [[index, 2] for index in range(count)]),
        (distributed.broadcast(value + 3, root_rank=1), [3, 5]),
    ):
        assert result.dtype == dtype and result.numpy().tolist() == expected, (dtype, result)
assert distributed.broadcast(tf.constant(own == 0)).numpy()


def refused(error, call):
    try:
        call()
    except error:
        return True


assert refused(tf.errors.UnknownError, lambda: distributed.allreduce(tf.zeros([1 + own]), SUM))
assert refused(tf.errors.InvalidArgumentError, lambda: distributed.allgather(tf.zeros([1], tf.float64)))
assert refused(AttributeError, lambda: distributed.allreduce(tf.zeros([1]), "SUM"))
assert refused(ValueError, lambda: popdist.execute_on_instances({7}, print))


def inside():
    return distributed.allgather(tf.constant(own)).numpy().tolist(), float(distributed.allreduce(tf.constant(1.0), SUM))


# The first set makes the instances meet anew; what was traced before goes on working.
add_up = tf.function(lambda value: distributed.allreduce(value, SUM))
assert add_up(tf.constant(1.0)) == count
for members in ([0, 2], [1, 2], [0, 2]):
    assert popdist.execute_on_instances(set(members), inside) == ((members, 2.0) if own in members else None)
assert add_up(tf.constant(1.0)) == count
assert popdist.execute_on_instances({1}, inside) == (([1], 1.0) if own == 1 else None)

# What was traced for all is traced again for some, and for all once more.
config = ipu.config.IPUConfig()
popdist.tensorflow.set_ipu_config(config, ipus_per_replica=1)
config.configure_ipu_system()
strategy = PopDistStrategy()
with strategy.scope():
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", input_shape=[1])])
    model.compile(tf.keras.optimizers.SGD(0.0), metrics=[tf.keras.metrics.MeanSquaredError()], loss="mse")
data = tf.data.Dataset.from_tensors(([[float(own)]], [[0.0]]))  # errors of 0, 1, 4 and 9


def own_error():
    # Logs are those of the local replicas: a program all-reduces what it wants to know of the job.
    with strategy.scope():
        history = model.fit(data, verbose=0).history
        assert history["mean_squared_error"] == [own**2], history
        return model.evaluate(data, verbose=0)[1]


for members, total in ((None, 6.0), ({0, 2}, 2.0), ({3}, 3.0), (None, 6.0)):
    chosen = members or set(range(count))
    for call, expected in (
        (own_error, float(own**2)),
        (lambda: float(strategy.run(add_up, [tf.constant(float(own))])), total),
    ):
        result = popdist.execute_on_instances(chosen, call) if members else call()
        assert result == (expected if own in chosen else None), (members, result, expected)


@tf.function
def twice(value):  # both with one name, so that only their order tells them apart
    return distributed.allreduce(value, SUM, tensor_name="a"), distributed.allreduce(2 * value, SUM, tensor_name="b")


first, second = twice(tf.constant([1.0 + own]))
assert (first.numpy(), second.numpy()) == ([10.0], [20.0])

# Who waits for a late one knows it, also from another thread.
before, seen = instances.seconds_in_collectives(), []


def watch():
    while not seen and time.monotonic() < deadline:
        seen.extend([1] if instances.is_waiting() else [])
        time.sleep(0.01)


popdist.synchronize()
deadline = time.monotonic() + 10
watcher = threading.Thread(target=watch)
if own:
    watcher.start()
    twice(tf.constant([1.0]))
    watcher.join()
else:
    time.sleep(1)
    twice(tf.constant([1.0]))
assert not own or (seen and instances.seconds_in_collectives() - before > 0.7)
assert not instances.is_waiting()
popdist.synchronize()
print("done", flush=True)
"""


@pytest.mark.slow
def test_collectives_keep_types_sets_and_order_and_know_how_long_they_wait(poprun):
    code, out, err = poprun(4, 4, "python3", "-c", COLLECTIVES)
    assert (code, out.count("done")) == (0, 4), err[-5000:]


EXCHANGES = """
import os, sys, time
import popdist, popdist.tensorflow, tensorflow as tf
from tensorflow.python import ipu
from tensorflow.python.ipu import distributed
from tensorflow.python.ipu.distributed.popdist_strategy import PopDistStrategy
from tf_ipu_dp.emulator.runtime import instances

steps, late, dtype = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
config = ipu.config.IPUConfig()
popdist.init()
popdist.tensorflow.set_ipu_config(config, ipus_per_replica=1)
config.configure_ipu_system()


def mean_squares(given, made):
    error = tf.reduce_mean(tf.square(tf.cast(given, made.dtype) - made))
    if popdist.getInstanceIndex() != late:
        return error
    with tf.control_dependencies([tf.numpy_function(lambda: time.sleep(0.1), [], [])]):
        return tf.identity(error)


with PopDistStrategy().scope():
    model = tf.keras.Sequential([tf.keras.layers.Dense(3, input_shape=(2,), dtype=dtype)])
model.compile("sgd", mean_squares, metrics=["mse"], steps_per_execution=steps)
data = tf.data.Dataset.from_tensors((tf.ones([1, 2]), tf.ones([1, 3]))).repeat()
assert instances.exchange_times() == (0, [])
model.fit(data, steps_per_epoch=16, verbose=0)
made, seconds = instances.exchange_times()
assert made == len(seconds) == 8, made  # two local replicas
assert instances.uses_shared_memory()
is_idle = [os.sched_getscheduler(thread) == os.SCHED_IDLE for thread in instances._horovod_threads]
assert is_idle and set(is_idle) == {instances.uses_shared_memory()}
# The last to arrive does not wait. On a busy machine that may be the other one now and then.
everyone = distributed.allgather(tf.constant(seconds)).numpy()
assert sum(everyone[late] < everyone[1 - late]) > 4 and everyone[1 - late].max() > 0.1, everyone
model.evaluate(data, steps=16, verbose=0)
model.predict(data.map(lambda x, y: x), steps=16)
assert instances.exchange_times() == (made, seconds)  # only gradients count
popdist.synchronize()
print("done", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("words", [("1", "0", "float32"), ("4", "1", "float16")], ids=["one_update", "many_updates"])
def test_every_exchange_of_gradients_is_timed_from_the_arrival_of_each_instance(words, poprun):
    code, out, err = poprun(2, 4, "python3", "-c", EXCHANGES, *words)
    assert code == 0, err
    assert out.count("done") == 2


@pytest.mark.slow
@pytest.mark.parametrize("variable", ["IPU_EMULATOR_EXCHANGE=horovod", "HOROVOD_TIMELINE={}/timeline.json"])
def test_shared_memory_can_be_turned_off_and_leaves_the_timeline_whole(variable, poprun, monkeypatch, tmp_path):
    monkeypatch.setenv(*variable.format(tmp_path).split("="))
    program = EXCHANGES.replace("assert instances.uses", "assert not instances.uses")
    code, out, err = poprun(2, 4, "python3", "-c", program, "1", "0", "float32")
    assert (code, out.count("done")) == (0, 2), err


WITHOUT_POPRUN = """
from tf_ipu_dp import emulator
emulator.install()
import popdist, tensorflow as tf
from tensorflow.python.ipu import distributed
popdist.init()
print(distributed.allgather(tf.constant(popdist.getInstanceIndex())).numpy().tolist())
"""


def place(rank, size):
    """Returns what the application says to PopDist of a launcher's rank and size."""
    return {
        "POPDIST_NUM_TOTAL_REPLICAS": str(size), "POPDIST_NUM_LOCAL_REPLICAS": "1", "POPDIST_NUM_IPUS_PER_REPLICA": "1",
        "POPDIST_REPLICA_INDEX_OFFSET": str(rank), "POPDIST_LOCAL_INSTANCE_INDEX": str(rank),
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpirun", "srun"])
def test_instances_of_other_launchers_find_each_other(launcher):
    """With the variables that `mpirun` and `srun` set, as neither may be there."""
    names = {
        "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "PMIX_NAMESPACE"),
        "srun": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_JOB_ID"),
    }[launcher]
    job = f"{launcher}-{os.getpid()}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WITHOUT_POPRUN], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **place(rank, 2), **dict(zip(names, (str(rank), "2", "2", job)))},
        )
        for rank in range(2)
    ]  # fmt: skip
    for process in processes:
        out, err = process.communicate(timeout=100)
        assert (process.returncode, out) == (0, "[0, 1]\n"), err


FAILING = """
import os, sys, time
import popdist, popdist.tensorflow, tensorflow as tf
from tensorflow.python import ipu
from tensorflow.python.ipu import distributed

if os.environ["WAY"] == "horovod":
    import horovod.tensorflow as hvd

    hvd.init()
    exchange = hvd.allreduce
else:
    popdist.init()
    exchange = lambda value: distributed.allreduce(value, tf.distribute.ReduceOp.SUM)
if os.environ["WAY"] == "anew":
    popdist.execute_on_instances({0, 1}, popdist.synchronize)
    popdist.execute_on_instances({1, 2}, popdist.synchronize)
exchange(tf.constant(1.0))
if popdist.getInstanceIndex() == 1:
    time.sleep(0.5)
    sys.exit(3)
exchange(tf.constant(1.0))
"""


@pytest.mark.parametrize(
    ("way", "preload"), [("popdist", "1"), ("anew", "1"), ("anew", "0"), ("horovod", "1"), ("horovod", "0")]
)
def test_the_instance_that_fails_is_the_first_even_if_the_others_fail_as_a_consequence(tmp_path, way, preload, poprun):
    (tmp_path / "program.py").write_text(FAILING, encoding="utf-8")
    code, _, err = poprun(4, 4, "python3", tmp_path / "program.py", IPU_EMULATOR_PRELOAD=preload, WAY=way)
    assert code == 3
    assert err.splitlines()[-1] == "poprun: instance 1 exited with status 3; the other instances were stopped."
