"""Trains a Keras model data-parallel on IPUs: `python -m tf_ipu_dp.train --ipus=8`."""

# For the emulator's poprun, which imports them once for all instances of a host:
# poprun preloads: tf_ipu_dp.training.run, tf_ipu_dp.training.evaluate, tf_ipu_dp.training.input_speed

from __future__ import annotations

if __name__ == "__main__":  # before other modules are imported, so that a signal during their import is one line
    from tf_ipu_dp import early_signals

    early_signals.exit_in_one_line("train", "training began")

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
import types
from pathlib import Path
from typing import Any, Dict, Iterator, List, NoReturn, Optional, Sequence, Union

from tf_ipu_dp import cli, early_signals, missing_packages, python_calls
from tf_ipu_dp.config import train_flags
from tf_ipu_dp.datasets import facts
from tf_ipu_dp.distributed import job, world
from tf_ipu_dp.monitoring import process_info
from tf_ipu_dp.planning import plan, relayout
from tf_ipu_dp.runs import saved_flags
from tf_ipu_dp.runs.records import RunResult

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
    stages = launched.ipus_per_replica if launched and not cfg.requested_stages else None
    dataset = facts.find(_with_launched_instances(cfg, ranks) if ranks else cfg, stages=stages)
    saved = job.read_saved_batch(cfg)

    def resolve(config: train_flags.TrainConfig) -> train_flags.TrainConfig:
        """Sets the instances that a launcher has started, and the saved global batch, if the IPUs can divide it."""
        config = _with_launched_instances(config, ranks) if ranks else config
        return relayout.keep_global_batch(config, dataset, saved, launched) if saved else config

    run = plan.plan_run(cfg, dataset, launched, resolve, saved_flags.resumable_steps(cfg))
    cfg = resolve(cfg)
    if cfg.dry_run:
        _show(cfg, run)
        return 0
    if not (launched or ranks):
        from tf_ipu_dp.training import preflight

        preflight.check(cfg, run)
    starts_instances = run.topology.instances > 1 and not (launched or ranks)
    # A new environment gets both at once: a missing compiler is named before TensorFlow is downloaded.
    missing_packages.require("tensorflow", target="distributed" if starts_instances else "run")
    if starts_instances:
        # The launcher starts this command once for each instance.
        launch = [sys.executable, "-m", "tf_ipu_dp.launch", f"--instances={run.topology.instances}", "--", *words]
        early_signals.block()  # until launch handles them
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


def _parse(
    words: Sequence[str], launched: Optional[plan.LaunchedTopology], ranks: Optional[world.Ranks]
) -> train_flags.TrainConfig:
    """Parses the command line. The saved flags of a run that is resumed or evaluated are the defaults."""
    decided = _GIVEN_BY_POPRUN if launched else _GIVEN_BY_RANKS if ranks else ()
    command = saved_flags.complete(words, decided)
    for warning in command.warnings if not (launched or ranks) else ():  # else the launcher has said so
        cli.announce("train", warning)
    return _with_expanded_paths(command.config)


def _with_expanded_paths(cfg: train_flags.TrainConfig) -> train_flags.TrainConfig:
    """Expands ~ in paths: a shell does not expand it in --flag=~/folder."""
    paths = ((name, getattr(cfg, name)) for name in ("run_dir", "data_dir", "executable_cache"))
    changes: Dict[str, Any] = {name: str(cli.expand_path(path)) for name, path in paths if path is not None}
    return dataclasses.replace(cfg, **changes)


def train_here(cfg: train_flags.TrainConfig, callbacks: Sequence[Any]) -> RunResult:
    """Trains in this process, which goes on afterwards, and returns the result. For calls from Python."""
    from tf_ipu_dp import sdk
    from tf_ipu_dp.training import own_models, preflight, session  # imports TensorFlow
    from tf_ipu_dp.training import run as training_run

    began = time.perf_counter()
    cfg = _with_expanded_paths(cfg)
    if callbacks and cfg.device_iterations is None:
        cfg = dataclasses.replace(cfg, device_iterations=1)  # callbacks are called between executions: for each update
    session.prepare_host(cfg)  # before code of the user computes anything, which fixes TensorFlow's threads
    dataset = facts.find(cfg, learn_here=own_models.learn)
    saved = job.read_saved_batch(cfg)
    cfg = relayout.keep_global_batch(cfg, dataset, saved, None) if saved else cfg
    run = plan.plan_run(cfg, dataset, resumable=saved_flags.resumable_steps(cfg))
    preflight.check(cfg, run)
    sdk.quieten_tensorflow(cfg.sdk, os.environ)
    try:
        modules = sdk.load(cfg.sdk)
    except sdk.SdkError as error:
        raise cli.UsageError(str(error)) from error
    results: List[RunResult] = []
    try:
        training_run.train(cfg, run, modules, 0, sys.stdout, sys.stderr, began, callbacks=callbacks, results=results)
    finally:
        modules.ipu.config.reset_ipu_configuration()  # so that the IPUs are free for the next call
    return results[0]


def _load_sdk_and_run(
    cfg: train_flags.TrainConfig, run: plan.RunPlan, ranks: Optional[world.Ranks], instance: int, began: float
) -> int:
    from tf_ipu_dp import sdk

    if ranks:
        topology = run.topology
        os.environ.update(ranks.variables(replicas=topology.replicas, ipus_per_replica=topology.ipus_per_replica))

    sdk.quieten_tensorflow(cfg.sdk, os.environ)
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
    with _exiting_at_once_on_signals():
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
def _exiting_at_once_on_signals() -> Iterator[None]:
    """Ends the process on a signal while TensorFlow is imported, which would turn an exception into other errors.

    Nothing is attached and nothing is written by then. A run handles signals itself afterwards.
    """
    before = {number: signal.getsignal(number) for number in early_signals.NUMBERS}
    early_signals.exit_in_one_line("train", "training began")
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _show(cfg: train_flags.TrainConfig, run: plan.RunPlan) -> None:
    from tf_ipu_dp.planning import report  # imports rich
    from tf_ipu_dp.runs import run_folder
    from tf_ipu_dp.runs.plan_record import PlanRecord

    ascii_only = not cli.supports_unicode(sys.stdout, os.environ)
    if cfg.json:
        text = run_folder.render_json(PlanRecord.of(run).to_json())
    elif cfg.format == "mermaid":
        text = report.render_mermaid(run, ascii_only)
    else:
        text = report.render_plan(run, cli.width_of(sys.stdout), ascii_only)
        text += _render_prediction(cfg, run)
    sys.stdout.write(cli.printable_lines(text))


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
    if early_signals.is_launched():
        early_signals.exit_in_one_line("train", "training began")
    else:
        early_signals.raise_interrupted()
    try:
        code = cli.run("train", lambda: main(words, process_info.began(os.environ)), sys.stderr)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    _exit(code)


class _CallableModule(types.ModuleType):
    """Makes `tf_ipu_dp.train(...)` train, although `tf_ipu_dp.train` is also the module of the command."""

    def __call__(self, model: Any = None, data: Any = None, *, callbacks: Any = (), **flags: Any) -> RunResult:
        """Trains, and returns the result: `tf_ipu_dp.train(model=build, data=load, ipus=8, epochs=5)`.

        Keywords are the flags. `model` is a function (or the value of --model), `data` is a function, arrays, a
        `tf_ipu_dp.Data` (or the value of --dataset). A mistake is a `tf_ipu_dp.UsageError` with the sentence that the
        command would print. `callbacks` are Keras callbacks, or the function that returns them (or the value of
        --callbacks), which several instances need.
        """
        return python_calls.train(train_here, model, data, callbacks, flags)


sys.modules[__name__].__class__ = _CallableModule


if __name__ == "__main__":
    start(sys.argv[1:])
