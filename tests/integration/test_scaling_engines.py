"""The engines that a study compares compute the same: same weights, same samples, same losses, real processes."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from tf_ipu_dp import cli
from tf_ipu_dp.collectives import fabric_flags, namespaces, network
from tf_ipu_dp.collectives.calibration import Calibration, MessageTime
from tf_ipu_dp.scaling import engine_probe, our_runs, prediction
from tf_ipu_dp.scaling.engines import keras_training, registry, starter
from tf_ipu_dp.scaling.engines.protocol import Order
from tf_ipu_dp.scaling.records import Cell

NEEDS_TORCH = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None,
    reason="PyTorch is not installed: python -m tf_ipu_dp.environment ddp",
)
OTHERS = ["horovod", pytest.param("ddp", marks=NEEDS_TORCH)]
TOLERANCE = {"mlp": 1e-5, "cnn": 1e-4, "resnet20": 1e-4, "resnet50": 1e-3}


def make_order(**changes):
    settings = {
        "model": "mlp", "norm": "batch", "dataset": "synthetic", "data_dir": None, "image_size": None,
        "batch_size": 16, "processes": 1, "warmup_updates": 1, "updates": 3, "learning_rate": 0.05, "momentum": 0.9,
        "weight_decay": 0.0, "seed": 1, "threads": 1,
    }  # fmt: skip
    return Order(**{**settings, **changes})


@pytest.fixture
def run_engine(tmp_path):
    """Runs an engine and returns the answers of its processes."""

    def run(engine, order, network=None, on_process=lambda pid: None, hosts=()):
        size, batch = order.processes, order.batch_size
        count = len(network.hosts) if network is not None else max(len(hosts), 1)
        cell = Cell(f"{engine}-{size}", engine, size, size, size, count, batch, 1, batch * size, ())
        return starter.run(cell, order, tmp_path / cell.key, network, on_process, hosts=hosts)

    return run


@pytest.fixture(scope="module")
def keras_answer(tmp_path_factory):
    """Runs plain Keras in one process and returns its answer; several tests compare with the same one."""

    @functools.lru_cache(maxsize=None)
    def answer(order):
        cell = Cell("keras-1", "keras", 1, 1, 1, 1, order.batch_size, 1, order.batch_size, ())
        (only,) = starter.run(cell, order, tmp_path_factory.mktemp("keras"), None, lambda pid: None)
        return only

    return answer


@functools.lru_cache(maxsize=None)
def initial_weights(model, folder):
    """Writes weights off their initial values, where many differences do not show, and returns the path."""
    import tensorflow as tf

    tf.random.set_seed(3)
    made = keras_training.make_model(make_order(model=model))
    source = np.random.RandomState(2)
    arrays = {keras_training.variable_name(each): each.numpy() for each in made.weights}
    for name, values in arrays.items():
        arrays[name] = (values + source.uniform(0.05, 0.1, values.shape) * (values.ndim == 1)).astype(np.float32)
    path = f"{folder}/{model}.npz"
    np.savez(path, **arrays)
    tf.keras.backend.clear_session()
    return path


@pytest.fixture(scope="module")
def weights_of(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    return lambda model: initial_weights(model, str(folder))


# Horovod's recipe trains the Keras models of plain Keras, so one tells all; those of PyTorch have layers of their own.
@pytest.mark.parametrize(
    "model",
    [
        "mlp",
        pytest.param("cnn", marks=NEEDS_TORCH),
        pytest.param("resnet20", marks=NEEDS_TORCH),
        pytest.param("resnet50", marks=[NEEDS_TORCH, pytest.mark.slow]),
    ],
)
def test_all_engines_have_the_same_loss_on_the_first_batch(model, run_engine, keras_answer, weights_of):
    order = make_order(model=model, weights=weights_of(model), updates=1)
    expected = keras_answer(order)
    engines = ["horovod", *(["ddp"] if importlib.util.find_spec("torch") else [])]
    for engine in engines:
        (found,) = run_engine(engine, order)
        assert found.first_loss == pytest.approx(expected.first_loss, rel=TOLERANCE[model]), engine
        assert found.mean_loss == pytest.approx(expected.mean_loss, rel=10 * TOLERANCE[model]), engine


@pytest.mark.parametrize("model", ["mlp", "cnn", "resnet20"])
def test_plain_keras_has_the_losses_of_our_trainer(model, keras_answer, train, tmp_path):
    found = keras_answer(make_order(model=model, l2=0.01, weight_decay=0.1, label_smoothing=0.1))
    losses = our_losses(train, tmp_path / "ours", f"--model={model}", "--micro_batch_size=16")
    assert losses[0] == pytest.approx(found.first_loss, rel=TOLERANCE[model])
    assert np.mean(losses) == pytest.approx(found.mean_loss, rel=10 * TOLERANCE[model])


def our_losses(command, folder, *words):
    """Trains 4 updates with our engine, as `make_order` asks others to, and returns the losses."""
    recipe = ["--lr_schedule=constant", "--warmup_epochs=0", "--learning_rate=0.05", "--l2=0.01", "--weight_decay=0.1"]
    done = command(
        "--sdk=emulator", "--dataset=synthetic", "--augment=none", "--seed=1", "--epochs=4steps", "--log_every=1",
        "--label_smoothing=0.1", f"--run_dir={folder}", *recipe, *words,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record["loss"] for record in map(json.loads, lines) if record["kind"] == "train"]


@pytest.mark.parametrize("engine", ["tf_ipu_dp", our_runs.MPI_ENGINE])
def test_two_instances_of_ours_have_the_losses_of_keras_with_the_whole_batch(
    engine, keras_answer, run_command, tmp_path
):
    problem = registry.missing(engine)
    if problem is None and engine == our_runs.MPI_ENGINE:
        import horovod.tensorflow as hvd

        problem = None if hvd.mpi_built() else "Horovod is built without MPI"
    if problem:
        pytest.skip(problem)
    expected = keras_answer(make_order(l2=0.01, weight_decay=0.1, label_smoothing=0.1))
    cell = Cell(f"{engine}-2", engine, 2, 2, 2, 1, 8, 1, 16, ())
    words, environ = our_runs.make_command(cell, [], our_runs.Place())
    started = words[words.index("tf_ipu_dp.launch") + 1 :]

    def launch(*flags):
        return run_command("launch", *started, *flags, **environ)

    losses = our_losses(
        launch, tmp_path / "ours", "--model=mlp", "--micro_batch_size=8", "--instances=2", "--ipus=2"
    )  # fmt: skip
    assert losses[0] == pytest.approx(expected.first_loss, rel=1e-5)
    assert np.mean(losses) == pytest.approx(expected.mean_loss, rel=1e-4)


@pytest.mark.parametrize("engine", OTHERS)
def test_two_processes_train_as_one_with_the_whole_batch(engine, run_engine, keras_answer, weights_of):
    common = {"weights": weights_of("mlp"), "l2": 0.01, "weight_decay": 0.1, "label_smoothing": 0.1}
    expected = keras_answer(make_order(**common))
    answers = run_engine(engine, make_order(**common, batch_size=8, processes=2))
    assert [(each.rank, each.samples) for each in answers] == [(0, 24), (1, 24)]
    assert all(each.seconds > 0 for each in answers)
    assert np.mean([each.first_loss for each in answers]) == pytest.approx(expected.first_loss, rel=1e-5)
    # Only if gradients are averaged are later losses the same too.
    assert np.mean([each.mean_loss for each in answers]) == pytest.approx(expected.mean_loss, rel=1e-4)


@NEEDS_TORCH
def test_with_batch_norm_two_processes_have_the_losses_of_their_own_halves(run_engine, weights_of):
    order = make_order(model="resnet20", weights=weights_of("resnet20"), batch_size=8, processes=2)
    horovod, ddp = (run_engine(engine, order) for engine in ("horovod", "ddp"))
    for one, other in zip(horovod, ddp):
        assert other.first_loss == pytest.approx(one.first_loss, rel=1e-4)
        assert other.mean_loss == pytest.approx(one.mean_loss, rel=1e-2)


@pytest.mark.parametrize("engine", OTHERS)
def test_processes_on_emulated_hosts_train_too(engine, run_engine, keras_answer, weights_of):
    reason = namespaces.why_not()
    if reason:
        pytest.skip(reason)
    order = make_order(weights=weights_of("mlp"), batch_size=8, processes=2)
    expected = keras_answer(make_order(weights=weights_of("mlp")))
    with network.EmulatedHosts(fabric_flags.load("r4").override({"hosts": "2"})) as hosts:
        answers = run_engine(engine, order, hosts)
        assert all(hosts.read_counters(host).sent_bytes > 500_000 for host in hosts.hosts)
    assert np.mean([each.mean_loss for each in answers]) == pytest.approx(expected.mean_loss, rel=1e-4)


@pytest.mark.parametrize("engine", OTHERS)
def test_processes_on_hosts_by_name_train_too(
    engine, run_engine, keras_answer, weights_of, two_hosts, monkeypatch, tmp_path
):
    monkeypatch.setenv("OMPI_MCA_plm_rsh_agent", two_hosts.agent)
    expected = keras_answer(make_order(weights=weights_of("mlp")))
    order = make_order(weights=weights_of("mlp"), batch_size=8, processes=2)
    answers = run_engine(engine, order, hosts=two_hosts.names)
    assert [answer.rank for answer in answers] == [0, 1]
    assert np.mean([each.mean_loss for each in answers]) == pytest.approx(expected.mean_loss, rel=1e-4)
    kept = json.loads((tmp_path / f"{engine}-2" / "order.json").read_text(encoding="utf-8"))
    assert kept["samples"].startswith(str(tmp_path)), "the samples are where all hosts find them"


@pytest.mark.parametrize("engine", ["keras", *OTHERS])
def test_programs_of_a_calibration_train_at_once_until_their_time_is_over(engine, tmp_path):
    order = make_order(updates=2000, together=2, times_updates=True, most_s=0.2)
    answers = starter.run_together(engine, order, tmp_path)
    assert len(answers) == 2
    for answer in answers:
        assert 3 <= len(answer.update_s) < 2000
        assert answer.samples == 16 * len(answer.update_s)
        assert sum(answer.update_s) == pytest.approx(answer.seconds, rel=0.05)
        assert answer.first_loss > 0 and answer.mean_loss > 0
    assert len(list(tmp_path.glob("*/ready"))) == 2, "they were timed together"


@pytest.mark.parametrize("engine", OTHERS)
def test_an_engine_is_calibrated_once_and_its_cells_are_predicted(engine, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(engine_probe, "_MOST_S", 0.3)
    words = ["--model=mlp", "--dataset=synthetic", "--sdk=emulator"]
    cells = [Cell(f"{engine}-{n}", engine, n, n, n, 1, 16, 1, 16 * n, ()) for n in (1, 2)]
    said = []
    found = engine_probe.probe(engine, words, cells, said.append, on_one_machine=False)
    assert [each.shape.processes for each in found.times] == [1, 2]
    (job,) = found.shared_exchanges
    assert 0 <= job.seconds < job.update_s
    assert len(said) == 1 and said[0].startswith(f"calibrating {engine}: 3 starts, about ")
    assert engine_probe.probe(engine, words, cells, said.append, on_one_machine=False) == found and len(said) == 1
    collective = Calibration("2026-11-18", "Horovod", (MessageTime(2048, 1e-4), MessageTime(2e6, 2e-3)))
    alone, two = prediction.predict_others(cells, found, collective)
    assert alone.update_s == found.times[0].total_s
    assert two.update_s == pytest.approx(max(found.times[1].total_s, job.update_s))


def test_a_program_of_a_calibration_that_fails_ends_the_others(tmp_path):
    order = make_order(together=2, times_updates=True, weights=str(tmp_path / "missing.npz"))
    with pytest.raises(cli.UsageError, match=r"^plain Keras failed: FileNotFoundError.*missing\.npz.*$"):
        starter.run_together("keras", order, tmp_path)


def test_an_engine_that_fails_is_one_sentence_with_the_reason(run_engine, tmp_path):
    with pytest.raises(cli.UsageError, match=r"^plain Keras failed: FileNotFoundError.*missing\.npz.*$"):
        run_engine("keras", make_order(weights=str(tmp_path / "missing.npz")))


def test_one_process_that_fails_ends_the_others(run_engine, tmp_path):
    with pytest.raises(cli.UsageError, match=r"^Horovod's recipe for Keras failed: .+"):
        run_engine("horovod", make_order(weights=str(tmp_path / "missing.npz"), processes=2))


def test_keras_refuses_several_processes(run_engine):
    with pytest.raises(cli.UsageError, match="trains in one process, not in 2"):
        run_engine("keras", make_order(processes=2))


INTERRUPTED = """
import signal; signal.signal(signal.SIGINT, signal.default_int_handler)  # also in a background shell
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import test_scaling_engines as tests
from tf_ipu_dp.scaling.engines import starter
order = tests.make_order(processes=2, updates=1_000_000)
cell = tests.Cell("horovod-2", "horovod", 2, 2, 2, 1, 16, 1, 32, ())
starter.run(cell, order, Path(sys.argv[2]), None, lambda pid: print(pid, flush=True))
"""


def test_ctrl_c_ends_all_processes(tmp_path, wait_until):
    words = [sys.executable, "-c", INTERRUPTED, os.path.dirname(__file__), str(tmp_path)]  # noqa: PTH120
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        timer = threading.Timer(240, process.kill)
        timer.start()
        group = int(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate()
        timer.cancel()
    assert "KeyboardInterrupt" in stderr
    wait_until(lambda: not list_group(group), limit_s=30)


def list_group(group):
    done = subprocess.run(["ps", "-o", "pid=", "-g", str(group)], capture_output=True, text=True, check=False)
    return done.stdout.split()
