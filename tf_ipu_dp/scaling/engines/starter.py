"""Starts the processes of an engine that is not ours, waits for them, and collects what they answer."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Callable, Dict, List, Optional, Sequence, Tuple

from tf_ipu_dp import cli
from tf_ipu_dp.collectives import rank_job
from tf_ipu_dp.collectives.network import EmulatedHosts
from tf_ipu_dp.distributed.job_process import start_session, stop_session
from tf_ipu_dp.scaling.engines import order_files, registry, samples
from tf_ipu_dp.scaling.engines.protocol import Answer, Order
from tf_ipu_dp.scaling.records import Cell

_LOG = "engine.log"
_LAST_BYTES = 65536
_POLL_S = 0.05
# poprun's fork with TensorFlow in it would be neither stock Keras nor PyTorch alone.
_OWN_PYTHON = {"IPU_EMULATOR_PRELOAD": "0"}


def run(
    cell: Cell,
    order: Order,
    folder: Path,
    network: Optional[EmulatedHosts],
    on_process: Callable[[int], None],
    *,
    hosts: Sequence[str] = (),
) -> List[Answer]:
    """Trains one cell in the folder and returns the answers by rank.

    `hosts` are machines by name, of which the cell takes its first ones: the same remote shell starts the processes as
    those of our engine, and the folder must be shared, since samples and answers are there. `on_process` is called with
    the id of the process that all others descend from. UsageError with the reason if the engine fails; its output is in
    the folder. Ctrl-C ends all processes and is raised again.
    """
    engine = registry.ENGINES[cell.engine]
    _require_possible(engine, order)
    folder.mkdir(parents=True, exist_ok=True)
    shared = str(folder.parent) if hosts else None
    exported = _export_samples(order.dataset, order.data_dir, order.image_size, order.seed, shared)
    path = order_files.write_order(dataclasses.replace(order, samples=str(exported)), folder)
    names = (network.hosts if network is not None else tuple(hosts))[: cell.hosts]
    words, environ = _command(engine, order, path, network, names)
    process = start_session(words, {**os.environ, **environ}, folder / _LOG)
    try:
        on_process(process.pid)
        status = process.wait()
    finally:
        stop_session(process)
    answers = order_files.read_answers(folder, order.processes)
    found = [answer for answer in answers if answer is not None]
    if status or len(found) < len(answers):
        raise cli.UsageError(f"{engine.title} failed: {_reason(folder / _LOG, status)}")
    return found


def run_together(name: str, order: Order, folder: Path) -> List[Answer]:
    """Trains in `order.together` programs of an engine at once, which exchange nothing, and returns their answers.

    UsageError with the reason if one of them fails; then all are ended.
    """
    engine = registry.ENGINES[name]
    _require_possible(engine, order)
    exported = _export_samples(order.dataset, order.data_dir, order.image_size, order.seed, None)
    order = dataclasses.replace(order, samples=str(exported))
    folders = [folder / str(number) for number in range(order.together)]
    started: List[subprocess.Popen[bytes]] = []
    try:
        for own in folders:
            own.mkdir(parents=True)
            words, environ = _command(engine, order, order_files.write_order(order, own), None, ())
            started.append(start_session(words, {**os.environ, **environ}, own / _LOG))
        _wait_for_all(started, engine, folders)
    finally:
        for process in started:
            stop_session(process)
    answers = [order_files.read_answers(own, 1)[0] for own in folders]
    found = [answer for answer in answers if answer is not None]
    if len(found) < len(answers):
        raise cli.UsageError(f"{engine.title} gave no answer.")
    return found


def _wait_for_all(started: Sequence[subprocess.Popen[bytes]], engine: registry.Engine, folders: Sequence[Path]) -> None:
    """Waits until all programs have ended; UsageError as soon as one has failed, since the others wait for it."""
    while True:
        states = [process.poll() for process in started]
        for status, own in zip(states, folders):
            if status:
                raise cli.UsageError(f"{engine.title} failed: {_reason(own / _LOG, status)}")
        if None not in states:
            return
        time.sleep(_POLL_S)


def _require_possible(engine: registry.Engine, order: Order) -> None:
    sentence = registry.missing(engine.name)
    if sentence:
        raise cli.UsageError(sentence)
    if engine.most_processes is not None and order.processes > engine.most_processes:
        raise cli.UsageError(f"{engine.title} trains in one process, not in {order.processes}. Use size 1 for it.")
    samples.find_dataset(order)


def _command(
    engine: registry.Engine, order: Order, path: Path, network: Optional[EmulatedHosts], hosts: Sequence[str]
) -> Tuple[List[str], Dict[str, str]]:
    program = [sys.executable, "-m", engine.program, str(path.resolve())]
    threads = str(order.threads)
    environ = {**_OWN_PYTHON, "OMP_NUM_THREADS": threads, "TF_NUM_INTRAOP_THREADS": threads}
    if not hosts:
        # The name of this machine may have no address.
        environ["GLOO_SOCKET_IFNAME"] = "lo"
    if order.processes == 1 and (network is not None or not hosts):
        return program, environ
    words, added = rank_job.make_command(program, order.processes, hosts=hosts, network=network)
    return words, {**added, **environ}


@functools.lru_cache(maxsize=None)
def _export_samples(
    dataset: str, data_dir: Optional[str], image_size: Optional[int], seed: int, shared: Optional[str]
) -> Path:
    """Returns a folder with the training samples, in the shared one if there is one, until this process ends."""
    folder = Path(tempfile.mkdtemp(prefix="tf_ipu_dp-samples-", dir=shared))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    wanted = Order(
        model="mlp", norm="batch", dataset=dataset, data_dir=data_dir, image_size=image_size, batch_size=1, processes=1,
        warmup_updates=0, updates=0, learning_rate=0.0, momentum=0.0, weight_decay=0.0, seed=seed, threads=1,
    )  # fmt: skip
    path = order_files.write_order(wanted, folder)
    words = [sys.executable, "-m", "tf_ipu_dp.scaling.engines.export_samples", str(path), str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        raise cli.UsageError(f"--dataset={dataset} cannot be read: {_last_line(done.stderr.splitlines())}")
    return folder


def _reason(log: Path, status: int) -> str:
    """Returns the line of an engine's output that says why it failed."""
    with contextlib.suppress(OSError):
        lines = log.read_bytes()[-_LAST_BYTES:].decode("utf-8", "replace").splitlines()
        return _last_line(lines) or f"it exited with status {status}."
    return f"it exited with status {status}."


def _last_line(lines: Sequence[str]) -> str:
    """Returns the launcher's own last line, else the last line of an exception, else the last line."""
    filled = [line.strip() for line in lines if line.strip()]
    return (filled or [""])[-1]
