"""`--evaluate`: the best or the newest good checkpoint of a run, measured on every validation sample."""

from __future__ import annotations

import json
import os
from typing import TextIO

from tf_ipu_dp import cli
from tf_ipu_dp.config.train_flags import TrainConfig
from tf_ipu_dp.planning.plan import RunPlan
from tf_ipu_dp.runs import result_report
from tf_ipu_dp.sdk import Sdk
from tf_ipu_dp.training import checks, preflight
from tf_ipu_dp.training.console import make_console, make_result_console
from tf_ipu_dp.training.run import attach_session, leader_reports_first


def evaluate(cfg: TrainConfig, plan: RunPlan, sdk: Sdk, instance: int, stdout: TextIO, stderr: TextIO) -> int:
    """Prints the scores of a checkpoint. Returns the exit code."""
    with leader_reports_first(instance):
        console = make_console(stderr, instance, os.environ)
        found = preflight.find_checkpoint(cfg, console.warning)
        session = attach_session(cfg, plan, sdk, instance)
        plan = session.plan
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
            text = cli.printable(f"{found.path}: {result_report.render_scores(scores)}")
            stdout.write(cli.wrap(text, make_result_console(stdout, instance, os.environ).width) + "\n")
        return 0
