"""Trains a Keras model data-parallel on IPUs: `python -m tf_ipu_dp.train --ipus=8`."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from typing import Sequence

from tf_ipu_dp import cli, config, plan, world


def main(words: Sequence[str]) -> int:
    """Parses, plans, shows or refuses, acts."""
    if cli.wants_help(words):
        sys.stdout.write(_help())
        return 0
    cfg = config.parse(words)
    run = plan.plan_run(cfg, config.DATASETS[cfg.dataset], world.read_launched(os.environ))
    if cfg.dry_run:
        _show(cfg, run)
        return 0
    if run.topology.instances > 1:
        _require_horovod(run.topology.instances)
    raise cli.UsageError("Training is not part of this version, only its plan is. Add --dry_run to see the plan.")


def _require_horovod(instances: int) -> None:
    """Builds Horovod into the environment that launch/train made; in any other environment says how to."""
    if importlib.util.find_spec("horovod") or importlib.util.find_spec("popdist"):
        return

    from tf_ipu_dp import environment

    venv = Path(sys.prefix)
    if not environment.is_own(venv):
        raise cli.UsageError(
            f"--instances={instances} needs Horovod, and {sys.executable} has none. "
            "Build it with: python -m tf_ipu_dp.environment distributed"
        )
    try:
        environment.make("distributed", venv, "", environment.Status("train", sys.stderr))
    except environment.SetupError as error:
        raise cli.UsageError(str(error)) from error


def _show(cfg: config.TrainConfig, run: plan.RunPlan) -> None:
    from tf_ipu_dp import report  # imports rich

    ascii_only = not cli.speaks_unicode(sys.stdout)
    if cfg.json:
        text = report.render_json(run)
    elif cfg.format == "mermaid":
        text = report.render_mermaid(run, ascii_only)
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 200
        text = report.render_plan(run, width, ascii_only)
    sys.stdout.write(text)


def _help() -> str:
    return cli.render_help(
        "python -m tf_ipu_dp.train [--flag=value ...]",
        "Trains a Keras model data-parallel on IPUs. The replicas are derived: IPUs over IPUs per replica. "
        "Without an IPU and the Poplar SDK the same command runs on the emulator.",
        config.GROUPS,
        config.make_flags(),
        shutil.get_terminal_size().columns,
    )


if __name__ == "__main__":
    sys.exit(cli.run("train", lambda: main(sys.argv[1:]), sys.stderr))
