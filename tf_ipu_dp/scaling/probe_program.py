"""The program that the calibration of compute starts: trains in a process per run folder until it is ended.

    python -m tf_ipu_dp.scaling.probe_program FLAG_FILE RUN_DIR...

It is the trainer's own loop without validation and checkpoints, which would leave the cores to the other processes.
The processes are forked after the trainer is imported, as poprun does for the instances of a host.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from typing import Any, List, Sequence

from tf_ipu_dp import cli, sdk
from tf_ipu_dp.config import train_flags
from tf_ipu_dp.datasets import lookup
from tf_ipu_dp.planning import plan

_TRAINER = "tf_ipu_dp.training.run"


def main(words: Sequence[str]) -> int:
    """Trains in all run folders at once; returns when one of the processes has ended."""
    flag_file, *run_dirs = words
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    first, *others = run_dirs
    if not others:
        return train(flag_file, first)
    importlib.import_module(_TRAINER)
    children: List[int] = []
    for run_dir in run_dirs:
        pid = os.fork()
        if pid == 0:
            # The child must not return into its parent's stack, whatever happens.
            os._exit(cli.run("scaling", lambda: train(flag_file, run_dir), sys.stderr))  # noqa: B023
        children.append(pid)
    os.wait()
    return 1


def train(flag_file: str, run_dir: str) -> int:
    """Trains with the flags of a file until the time limit."""
    began = time.perf_counter()
    cfg = train_flags.parse([f"--flagfile={flag_file}", f"--run_dir={run_dir}"])
    run = plan.plan_run(cfg, lookup.find(cfg.dataset, cfg.data_dir, cfg.image_size))
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
    console = trainer.Console(sys.stderr, quiet=True)
    handler = trainer.SignalHandler(console.info, console.warning)
    with handler as signals, trainer.checks.open_folder(cfg, run, made.world) as folder:
        Endless(cfg, run, modules, made, folder, console, signals, began).run()
    return 0


if __name__ == "__main__":
    sys.exit(cli.run("scaling", lambda: main(sys.argv[1:]), sys.stderr))
