"""Trains a Keras model data-parallel on IPUs: `python -m tf_ipu_dp.train --ipus=8`."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any, Dict, Sequence

from tf_ipu_dp import catalogue, cli, config, plan, world

# How a run was divided; its checkpoint can be measured on any other number of IPUs.
_OF_TRAINING_ALONE = tuple(
    f"--{name}="
    for name in (
        "device_iterations", "global_batch_size", "gradient_accumulation", "updates_per_epoch", "epochs",
        "checkpoint_every",
    )
)  # fmt: skip


def main(words: Sequence[str]) -> int:
    """Parses, plans, shows or refuses, acts."""
    began = time.perf_counter()
    if cli.wants_help(words):
        sys.stdout.write(_help())
        return 0
    cfg = _parse(words)
    dataset = catalogue.find(cfg.dataset, cfg.data_dir, cfg.image_size)
    launched = world.read_launched(os.environ)
    run = plan.plan_run(cfg, dataset, launched)
    if cfg.dry_run:
        _show(cfg, run)
        return 0
    if run.topology.instances > 1 and launched is None:
        _require_horovod(run.topology.instances)
        raise cli.UsageError(
            f"--instances={run.topology.instances} cannot be trained by this version, only planned. "
            "Use --instances=1, or add --dry_run."
        )
    return _act(cfg, run, launched.instance if launched else 0, began)


def _parse(words: Sequence[str]) -> config.TrainConfig:
    """A run that is evaluated has its own flags; those on the line win over them."""
    cfg = _at_home(config.parse(words))
    if cfg.evaluate and cfg.run_dir is not None:
        from tf_ipu_dp import run_folder

        own = run_folder.read_run_flags(Path(cfg.run_dir))
        kept = [flag for flag in own if not flag.startswith(_OF_TRAINING_ALONE)]
        cfg = _at_home(config.parse([*kept, *words]))
    return cfg


def _at_home(cfg: config.TrainConfig) -> config.TrainConfig:
    """A shell leaves the ~ of --flag=~/folder as it is."""
    paths = ((name, getattr(cfg, name)) for name in ("run_dir", "data_dir", "executable_cache"))
    changes: Dict[str, Any] = {name: str(Path(path).expanduser()) for name, path in paths if path is not None}
    return dataclasses.replace(cfg, **changes)


def _act(cfg: config.TrainConfig, run: plan.RunPlan, instance: int, began: float) -> int:
    from tf_ipu_dp import sdk

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if cfg.executable_cache is not None:
        if len(cfg.executable_cache.split()) != 1:
            raise cli.UsageError(
                f"--executable_cache={cfg.executable_cache} has a blank in it, at which the Poplar SDK cuts its flags. "
                "Use a folder without one."
            )
        sdk.set_poplar_flags(os.environ, f"--executable_cache_path={cfg.executable_cache}")
    if cfg.dataset == "synthetic_device":
        sdk.set_poplar_flags(os.environ, "--use_synthetic_data", "--synthetic_data_categories=infeed")
    try:
        modules = sdk.load(cfg.sdk)
    except sdk.SdkError as error:
        raise cli.UsageError(str(error)) from error

    from tf_ipu_dp import training  # imports TensorFlow

    if cfg.evaluate:
        return training.evaluate(cfg, run, modules, sys.stdout, sys.stderr)
    if cfg.input_only:
        return training.measure_input(cfg, run, modules, sys.stdout, sys.stderr)
    return training.train(cfg, run, modules, instance, sys.stdout, sys.stderr, _width(), began)


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
        text = report.render_plan(run, _width(), ascii_only)
    sys.stdout.write(text)


def _width() -> int:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 200


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
