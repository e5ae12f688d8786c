"""Trains a Keras model data-parallel on IPUs: `python -m tf_ipu_dp.train --ipus=8`."""

# For the emulator's poprun, which imports them once for all instances of a host:
# poprun preloads: tf_ipu_dp.training.run, tf_ipu_dp.training.evaluate, tf_ipu_dp.training.input_speed

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import gc
import os
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import Any, Dict, Iterator, NoReturn, Optional, Sequence, Union

from tf_ipu_dp import cli, missing_packages
from tf_ipu_dp.config import train_flags
from tf_ipu_dp.datasets import info, lookup
from tf_ipu_dp.distributed import job, world
from tf_ipu_dp.monitoring import process_info
from tf_ipu_dp.planning import plan, relayout
from tf_ipu_dp.runs import saved_flags

_GIVEN_BY_POPRUN = ("ipus", "instances", "hosts", "pipeline_stages")
_GIVEN_BY_RANKS = ("instances", "hosts")

_EXAMPLES = (
    "python -m tf_ipu_dp.train --ipus=8 --run_dir=runs/first",
    "python -m tf_ipu_dp.train --ipus=8 --dry_run",
    "python -m tf_ipu_dp.train --flagfile=flags/resnet50_2_ipus.flags --dataset=synthetic --epochs=40steps",
    "python -m tf_ipu_dp.train --run_dir=runs/first --evaluate",
)


def main(words: Sequence[str], began: Optional[float] = None) -> int:
    """Parses the flags, plans the run, and trains, evaluates, measures the input or shows the plan.

    `began` is when the run began, on the clock of time.perf_counter; without it that is now.
    """
    began = time.perf_counter() if began is None else began
    if cli.wants_help(words):
        sys.stdout.write(_help())
        return 0
    launched = world.read_launched(os.environ)
    ranks = None if launched else world.read_ranks(os.environ)
    cfg = _parse(words, launched, ranks)
    with _error_saved_for_launcher(cfg, launched or ranks):
        return _run(cfg, words, launched, ranks, began)


def _run(
    cfg: train_flags.TrainConfig,
    words: Sequence[str],
    launched: Optional[plan.LaunchedTopology],
    ranks: Optional[world.Ranks],
    began: float,
) -> int:
    if ranks:
        cfg = _with_launched_instances(cfg, ranks)
    dataset = lookup.find(cfg.dataset, cfg.data_dir, cfg.image_size)
    cfg = _keep_saved_global_batch(cfg, dataset, launched)
    run = plan.plan_run(cfg, dataset, launched)
    if cfg.dry_run:
        _show(cfg, run)
        return 0
    if not (launched or ranks):
        from tf_ipu_dp.training import preflight

        preflight.check(cfg, run)
    missing_packages.require("tensorflow")
    if run.topology.instances > 1 and not (launched or ranks):
        # The launcher starts this command once for each instance.
        launch = [sys.executable, "-m", "tf_ipu_dp.launch", f"--instances={run.topology.instances}", "--", *words]
        os.execv(sys.executable, launch)
    if launched or ranks:
        # The saved flags record the topology of the run, even if a launcher chose it.
        cfg = dataclasses.replace(
            cfg,
            ipus=run.topology.ipus,
            instances=run.topology.instances,
            pipeline_stages=run.topology.pipeline_stages,
        )
    return _load_sdk_and_run(cfg, run, ranks, (launched or ranks or world.World()).instance, began)


@contextlib.contextmanager
def _error_saved_for_launcher(
    cfg: train_flags.TrainConfig, started: Union[plan.LaunchedTopology, world.Ranks, None]
) -> Iterator[None]:
    """Writes the error that ends one of several instances to the run's folder, where the launcher reads it."""
    try:
        yield
    except cli.UsageError as error:
        if started and started.instances > 1 and cfg.run_dir and Path(cfg.run_dir).is_dir():
            from tf_ipu_dp.runs import run_folder

            with contextlib.suppress(cli.UsageError):
                run_folder.RunFolder(Path(cfg.run_dir)).write_error(started.instance, str(error), transient=False)
        raise


def _with_launched_instances(cfg: train_flags.TrainConfig, ranks: world.Ranks) -> train_flags.TrainConfig:
    """Sets the instances of a launcher without support for IPUs; one replica each, unless --ipus asks for more."""
    if cfg.instances not in (None, ranks.instances):
        raise cli.UsageError(
            f"--instances={cfg.instances} disagrees with {ranks.launcher}, which started {ranks.instances}. "
            f"Leave --instances out, or start {cfg.instances}."
        )
    ipus = cfg.ipus or ranks.instances * plan.ipus_per_replica(cfg.requested_stages or 1)
    return dataclasses.replace(cfg, instances=ranks.instances, ipus=ipus)


def _keep_saved_global_batch(
    cfg: train_flags.TrainConfig, dataset: info.DatasetInfo, launched: Optional[plan.LaunchedTopology]
) -> train_flags.TrainConfig:
    """Returns the config of a resumed run with its saved global batch, if the IPUs can divide it."""
    saved = job.read_saved_batch(cfg)
    return relayout.keep_global_batch(cfg, dataset, saved, launched) if saved else cfg


def _parse(
    words: Sequence[str], launched: Optional[plan.LaunchedTopology], ranks: Optional[world.Ranks]
) -> train_flags.TrainConfig:
    """Parses the command line. The saved flags of a run that is resumed or evaluated are the defaults."""
    decided = _GIVEN_BY_POPRUN if launched else _GIVEN_BY_RANKS if ranks else ()
    return _with_expanded_paths(saved_flags.complete(words, decided).config)


def _with_expanded_paths(cfg: train_flags.TrainConfig) -> train_flags.TrainConfig:
    """Expands ~ in paths: a shell does not expand it in --flag=~/folder."""
    paths = ((name, getattr(cfg, name)) for name in ("run_dir", "data_dir", "executable_cache"))
    changes: Dict[str, Any] = {name: str(Path(path).expanduser()) for name, path in paths if path is not None}
    return dataclasses.replace(cfg, **changes)


def _load_sdk_and_run(
    cfg: train_flags.TrainConfig, run: plan.RunPlan, ranks: Optional[world.Ranks], instance: int, began: float
) -> int:
    from tf_ipu_dp import sdk

    if ranks:
        topology = run.topology
        os.environ.update(ranks.variables(replicas=topology.replicas, ipus_per_replica=topology.ipus_per_replica))

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    # What Horovod logs as errors follows from another instance's failure, which the launcher reports.
    os.environ.setdefault("HOROVOD_LOG_LEVEL", "fatal")
    if cfg.executable_cache is not None:
        if len(cfg.executable_cache.split()) != 1:
            raise cli.UsageError(
                f"--executable_cache={cfg.executable_cache} contains a blank, and the Poplar SDK splits its flags at "
                "blanks. Use a folder without one."
            )
        sdk.set_poplar_flags(os.environ, f"--executable_cache_path={cfg.executable_cache}")
    if run.dataset.made_on_device:
        sdk.set_poplar_flags(os.environ, *sdk.SYNTHETIC_INPUT)
    with _exiting_at_once_on_ctrl_c(instance):
        try:
            modules = sdk.load(cfg.sdk)
        except sdk.SdkError as error:
            raise cli.UsageError(str(error)) from error
        if ranks and modules.name == "poplar":
            raise cli.UsageError(
                f"{ranks.launcher} started this instance, but only poprun assigns IPUs. Start with launch/poprun.sh, "
                "or use --sdk=emulator."
            )

        gc.disable()  # collecting garbage among imported modules, which stay, would take a tenth of the start
        from tf_ipu_dp.training import evaluate, input_speed  # imports TensorFlow
        from tf_ipu_dp.training import run as training_run

        gc.freeze()
        gc.enable()

    if cfg.evaluate:
        return evaluate.evaluate(cfg, run, modules, instance, sys.stdout, sys.stderr)
    if cfg.input_only:
        return input_speed.measure_input(cfg, run, modules, instance, sys.stdout, sys.stderr)
    return training_run.train(cfg, run, modules, instance, sys.stdout, sys.stderr, began)


@contextlib.contextmanager
def _exiting_at_once_on_ctrl_c(instance: int) -> Iterator[None]:
    """Ends the process on Ctrl-C while TensorFlow is imported, which would turn a KeyboardInterrupt into other errors.

    Nothing is attached and nothing is written by then. A run handles signals itself afterwards.
    """

    def leave(number: int, _: Optional[FrameType]) -> NoReturn:
        if instance == 0:
            with contextlib.suppress(OSError):
                os.write(2, b"train: interrupted before training began; nothing was written.\n")
        os._exit(128 + number)

    before = signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _show(cfg: train_flags.TrainConfig, run: plan.RunPlan) -> None:
    from tf_ipu_dp.planning import report  # imports rich
    from tf_ipu_dp.runs import run_folder
    from tf_ipu_dp.runs.plan_record import PlanRecord

    ascii_only = not cli.supports_unicode(sys.stdout)
    if cfg.json:
        text = run_folder.render_json(PlanRecord.of(run).to_json())
    elif cfg.format == "mermaid":
        text = report.render_mermaid(run, ascii_only)
    else:
        text = report.render_plan(run, cli.width_of(sys.stdout), ascii_only)
        text += _render_prediction(cfg, run)
    sys.stdout.write(text)


def _render_prediction(cfg: train_flags.TrainConfig, run: plan.RunPlan) -> str:
    """Returns what the calibration of this machine predicts for the job's all-reduce; nothing without one."""
    from tf_ipu_dp.collectives import calibration_file

    path = calibration_file.path(os.environ)
    if run.topology.instances == 1 or not path.exists():
        return ""
    from tf_ipu_dp.collectives import buckets, calibration, job_prediction

    try:
        found = calibration.load(path)
    except cli.UsageError as error:  # the plan is complete without it
        return f"\n{cli.wrap(f'note: {error}', cli.width_of(sys.stdout))}\n"
    size = buckets.job_size(
        run, precision=cfg.precision, deterministic=cfg.deterministic, threshold=buckets.FUSION_THRESHOLD
    )
    predicted = job_prediction.predict_job(run, size, found) if found is not None else None
    return "" if predicted is None else f"\n{cli.wrap(predicted.render(), cli.width_of(sys.stdout))}\n"


def _help() -> str:
    return cli.render_help(
        "python -m tf_ipu_dp.train [--flag=value ...]",
        "Trains a Keras model data-parallel on IPUs. The replicas are derived: IPUs over IPUs per replica. "
        "Without an IPU and the Poplar SDK the same command runs on the emulator.",
        train_flags.GROUPS,
        train_flags.make_flags(),
        shutil.get_terminal_size().columns,
        _EXAMPLES,
    )


def _exit(code: int) -> NoReturn:
    """Ends the process. Failed instances skip Horovod's shutdown because peers may be gone."""
    from tf_ipu_dp import sdk

    failed = code and (world.read_launched(os.environ) or world.read_ranks(os.environ))
    if not failed and not sdk.skips_interpreter_shutdown():
        sys.exit(code)
    if not failed:
        atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def start(words: Sequence[str]) -> NoReturn:
    """Runs the command and ends the process, also after an unexpected exception."""
    try:
        code = cli.run("train", lambda: main(words, process_info.began()), sys.stderr)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    _exit(code)


if __name__ == "__main__":
    start(sys.argv[1:])
