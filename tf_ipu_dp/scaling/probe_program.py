"""The program that the calibration of compute starts: trains in a process per run folder until it is ended.

    python -m tf_ipu_dp.scaling.probe_program FLAG_FILE RUN_DIR    trains in one folder
    python -m tf_ipu_dp.scaling.probe_program                      trains what is asked for in lines of its input

It is the trainer's own loop without validation and checkpoints, which would leave the cores to the other processes.
With orders as its input it imports the trainer once and forks the processes of each order, as poprun does for the
instances of a host: a calibration of several layouts has one start. An order is a JSON object in a line; the next line,
or the end of the input, ends the processes of the one before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import json
import os
import select
import signal
import sys
import time
from typing import Any, Dict, List, Sequence, Tuple

from tf_ipu_dp import cli, sdk
from tf_ipu_dp.config import train_flags
from tf_ipu_dp.datasets import facts
from tf_ipu_dp.planning import plan
from tf_ipu_dp.runs.records import Record
from tf_ipu_dp.training import console

_TRAINER = "tf_ipu_dp.training.run"
_POLL_S = 0.2


@dataclasses.dataclass(frozen=True)
class Order(Record):
    """Processes that train at once, one in each folder, with these variables added to their environment."""

    flag_file: str
    run_dirs: Tuple[str, ...]
    environ: Dict[str, str]


def main(words: Sequence[str]) -> int:
    """Trains in one folder until the time limit, or serves orders until its input ends."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if words:
        flag_file, run_dir = words
        return train(flag_file, run_dir)
    # As train does: collecting garbage among imported modules, which stay, takes time of the training.
    gc.disable()
    importlib.import_module(_TRAINER)
    gc.freeze()
    gc.enable()
    return serve()


def serve() -> int:
    """Trains what each line of the input asks for; returns 1 as soon as a process has ended by itself."""
    children: List[int] = []
    try:
        while True:
            ready, _, _ = select.select([sys.stdin], [], [], _POLL_S)
            ended = [pid for pid in children if os.waitpid(pid, os.WNOHANG)[0]]
            if ended:
                children = [pid for pid in children if pid not in ended]
                return 1
            if not ready:
                continue
            line = sys.stdin.readline()
            _end(children)
            if not line:
                return 0
            order = Order.from_json(json.loads(line))
            children = [_fork(order, run_dir) for run_dir in order.run_dirs]
    finally:
        _end(children)


def _fork(order: Order, run_dir: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.environ.update(order.environ)
    # The child must not return into its parent's stack, whatever happens.
    os._exit(cli.run("scaling", lambda: train(order.flag_file, run_dir), sys.stderr))


def _end(children: List[int]) -> None:
    """Ends processes at once: nothing of them is kept, so they need not write anything first."""
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for pid in children:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
    children.clear()


def train(flag_file: str, run_dir: str) -> int:
    """Trains with the flags of a file until the time limit."""
    began = time.perf_counter()
    cfg = train_flags.parse([f"--flagfile={flag_file}", f"--run_dir={run_dir}"])
    run = plan.plan_run(cfg, facts.find(cfg))
    if run.dataset.made_on_device:
        sdk.set_poplar_flags(os.environ, *sdk.SYNTHETIC_INPUT)
    try:
        modules = sdk.load(cfg.sdk)
    except sdk.SdkError as error:
        raise cli.UsageError(str(error)) from error
    trainer: Any = importlib.import_module(_TRAINER)

    class Endless(trainer.TrainingLoop):  # type: ignore[misc]
        """Training and nothing else."""

        def _validate(self) -> None:
            pass

        def _save(self) -> None:
            pass

    made = trainer.attach_session(cfg, run, modules, 0)
    quiet = console.Console(sys.stderr, quiet=True)
    handler = trainer.SignalHandler(quiet.info, quiet.warning)
    with handler as signals, trainer.checks.open_folder(cfg, run, made.world) as folder:
        Endless(cfg, run, modules, made, folder, quiet, signals, began).run()
    return 0


if __name__ == "__main__":
    sys.exit(cli.run("scaling", lambda: main(sys.argv[1:]), sys.stderr))
