"""`--evaluate`: the best or the newest good checkpoint of a run, measured on every validation sample."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Optional, TextIO

from tf_ipu_dp import cli
from tf_ipu_dp.config.train_flags import TrainConfig
from tf_ipu_dp.planning.plan import RunPlan
from tf_ipu_dp.runs import checkpoints, result_report, run_folder
from tf_ipu_dp.sdk import Sdk
from tf_ipu_dp.training import checks
from tf_ipu_dp.training.console import Console, make_console
from tf_ipu_dp.training.run import attach_session, leader_reports_first


def evaluate(cfg: TrainConfig, plan: RunPlan, sdk: Sdk, instance: int, stdout: TextIO, stderr: TextIO) -> int:
    """Prints the scores of a checkpoint. Returns the exit code."""
    with leader_reports_first(instance):
        console = make_console(stderr, instance, os.environ)
        if cfg.run_dir is None:
            raise cli.UsageError("--evaluate needs a run with a checkpoint. Add --run_dir=runs/NAME.")
        found = _find_checkpoint(run_folder.RunFolder(Path(cfg.run_dir)), cfg, console)
        if found is None:
            raise cli.UsageError(f"--run_dir={cfg.run_dir} has no good checkpoint. Train first, without --evaluate.")
        session = attach_session(cfg, plan, sdk, instance)
        checks.require_same_model(found, cfg, plan, session.variables())
        session.restore(found, whole=False)
        with console.waiting(f"evaluating step {found.manifest.step:,}"):
            scores = session.evaluate()
        if not session.world.is_leader:
            return 0
        if cfg.json:
            value = {**scores.to_json(), "checkpoint": str(found.path), "step": found.manifest.step}
            stdout.write(f"{json.dumps(value)}\n")
        else:
            make_console(stdout, instance, os.environ).info(f"{found.path}: {result_report.render_scores(scores)}")
        return 0


def _find_checkpoint(
    folder: run_folder.RunFolder, cfg: TrainConfig, console: Console
) -> Optional[checkpoints.Checkpoint]:
    """Returns the best checkpoint, which runs with early stopping keep, or else the newest."""
    paths = [folder.best, folder.checkpoints] if cfg.weights == "best" else [folder.checkpoints]
    stores = [checkpoints.Store(path, cfg.keep_checkpoints, console.warning) for path in paths]
    return next((found for found in (store.newest() for store in stores) if found), None)
