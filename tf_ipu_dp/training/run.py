"""One training run with TensorFlow: from attaching the device to the printed result and the exit code.

Evaluation and the input measurement start with `attach_session` too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import threading
import time
import traceback
from typing import Any, Iterator, List, Optional, Sequence, TextIO

import tensorflow as tf

from tf_ipu_dp import __version__, cli
from tf_ipu_dp.config.train_flags import TrainConfig
from tf_ipu_dp.datasets import facts as dataset_facts
from tf_ipu_dp.datasets.info import OWN, DatasetInfo
from tf_ipu_dp.distributed import failures
from tf_ipu_dp.planning import report
from tf_ipu_dp.planning.plan import RunPlan, plan_run
from tf_ipu_dp.runs import checkpoints, result_report, saved_flags
from tf_ipu_dp.runs.records import RunResult
from tf_ipu_dp.runs.run_folder import RunFolder
from tf_ipu_dp.sdk import Sdk
from tf_ipu_dp.training import checks, session
from tf_ipu_dp.training.console import make_console, make_result_console
from tf_ipu_dp.training.executions import load_callbacks, require_callbacks
from tf_ipu_dp.training.loop import TrainingError, TrainingLoop
from tf_ipu_dp.training.session import TrainingSession
from tf_ipu_dp.training.stop import SignalHandler, require_metric

# If all instances have the same error, only the leader reports it: its exit ends the others within this time.
_LEADER_REPORTS_WITHIN_S = 1.5
_LAUNCHER_REPORTS_WITHIN_S = 15.0
_TOO_SHORT = re.compile(r"expected to contain \d+ elements but contained only \d+")
_PLACE_IN_GRAPH = re.compile(r"\{\{.*?\}\} ?")
_BAD_SAMPLES = re.compile(r"\[(--dataset=.*?\.)\]")  # what a stream says of samples that cannot be trained on


def train(  # noqa: PLR0913
    cfg: TrainConfig,
    plan: RunPlan,
    sdk: Sdk,
    instance: int,
    stdout: TextIO,
    stderr: TextIO,
    began: float,
    *,
    callbacks: Sequence[Any] = (),
    results: Optional[List[RunResult]] = None,
) -> int:
    """Trains from the newest checkpoint, or from the start, to the end. Returns the exit code.

    `began` is when the command began, on the clock of time.perf_counter. The user's Keras callbacks are called on the
    leader, with those of --callbacks. The result is printed, or added to `results` if that is given.
    """
    console = make_console(stderr, instance, os.environ)
    with SignalHandler(console.info, console.warning) as signals, leader_reports_first(instance, signals):
        console.info(f"{_version_line(plan, sdk)}\n{report.render_summary(plan)}")
        require_callbacks(callbacks, "callbacks has", "takes")
        if cfg.callbacks and instance == 0:
            offered = {"run_dir": cfg.run_dir, "updates_per_epoch": plan.epochs.updates_per_epoch, "seed": cfg.seed}
            callbacks = [*callbacks, *load_callbacks(cfg.callbacks, offered)]
        made = attach_session(cfg, plan, sdk, instance)
        plan = made.plan
        require_metric(cfg.best_metric or "loss", made.score_names)
        # The folder is made last, so that a run that cannot start leaves none behind.
        with checks.open_folder(cfg, plan, made.world) as folder:
            loop = TrainingLoop(cfg, plan, sdk, made, folder, console, signals, began, callbacks)
            result = _run_and_save_errors(loop, folder)
        if results is not None:
            results.append(result)
        elif made.world.is_leader:
            shown = make_result_console(stdout, instance, os.environ)
            stdout.write(
                f"{json.dumps(result.to_json())}\n"
                if cfg.json
                else result_report.render_result(result, shown.width, shown.colour)
            )
            stdout.flush()
        # Some launchers end all instances at the first exit code that is not 0, so all finish before any exits.
        made.world.barrier()
        return 128 + loop.stop_signal if loop.stop_signal else 0


def attach_session(cfg: TrainConfig, plan: RunPlan, sdk: Sdk, instance: int) -> TrainingSession:
    """Attaches the device, opens the data, checks that all instances match, and makes the model."""
    # The device is attached first: it may set TensorFlow's threads, which is impossible once TensorFlow has computed.
    with _attached_in_time(cfg.stall_timeout.seconds if plan.topology.instances > 1 else 0, instance):
        device = session.attach(cfg, plan, sdk, instance)
    source = session.open_source(cfg, plan)
    if source.facts != plan.dataset:
        plan = _plan_data_as_found(cfg, plan, source.facts)
    checks.compare_instances(cfg, plan, sdk, source, device.world)
    return session.make_session(cfg, plan, sdk, device, source)


def _plan_data_as_found(cfg: TrainConfig, plan: RunPlan, facts: DatasetInfo) -> RunPlan:
    """Returns the plan for own data that is not what it was when the run was planned; the topology stays."""
    dataset_facts.keep(cfg, facts)
    found = plan_run(cfg, facts, resumable=saved_flags.resumable_steps(cfg))
    return dataclasses.replace(found, topology=plan.topology)


@contextlib.contextmanager
def _attached_in_time(limit_s: float, instance: int) -> Iterator[None]:
    """Ends the process if the body, in which all instances connect, takes longer than the limit (0: none).

    There are no heartbeats before, and the call cannot be interrupted. A launcher that knows which instance is missing
    reports it first.
    """

    def leave() -> None:
        text = f"train: instance {instance} {failures.LOST_PEERS}: they have not connected within {limit_s:.0f} s "
        with contextlib.suppress(OSError):
            os.write(2, f"{text}(--stall_timeout). Start the run again.\n".encode())
        os._exit(1)

    timer = threading.Timer(limit_s + _LAUNCHER_REPORTS_WITHIN_S, leave)
    timer.daemon = True
    if limit_s:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def leader_reports_first(instance: int, signals: Optional[SignalHandler] = None) -> Iterator[None]:
    """Delays errors on other instances: the leader reports a common error, and its exit ends them before they do.

    An instance that has lost its peers waits too: the launcher knows which one failed, and will end the others.
    """
    try:
        yield
    except (cli.UsageError, tf.errors.OpError) as error:
        lost_peers = not isinstance(error, cli.UsageError)
        if lost_peers and not failures.is_lost_peer(getattr(error, "message", "")):
            raise
        if instance or lost_peers:
            time.sleep(_LEADER_REPORTS_WITHIN_S)
            if signals and signals.received:
                raise SystemExit(1) from None
        if lost_peers:
            again = "Start the run again: it resumes from its last checkpoint." if signals else "Start it again."
            raise cli.UsageError(
                f"instance {instance} {failures.LOST_PEERS}: one of them has ended, or the network to it is down. "
                f"{again}"
            ) from error
        raise


def _run_and_save_errors(loop: TrainingLoop, folder: RunFolder) -> RunResult:
    """Runs the loop and saves its error in the folder; errors of the device or TensorFlow become a UsageError."""
    world = loop.world
    try:
        return loop.run()
    except SystemExit:
        raise
    except cli.UsageError as error:
        if world.instances > 1:  # for the launcher; a single instance prints it itself
            transient = isinstance(error, TrainingError) and error.transient
            common = isinstance(error, TrainingError) and error.common
            folder.write_error(world.instance, str(error), transient=transient, common=common)
        raise
    except checkpoints.CheckpointError as error:
        folder.write_error(world.instance, str(error), transient=False)
        raise cli.UsageError(str(error)) from error
    except tf.errors.OpError as error:
        folder.write_error(world.instance, traceback.format_exc())
        if failures.is_lost_peer(error.message):
            raise
        if _TOO_SHORT.search(error.message) and loop.plan.dataset.streamed and loop.plan.dataset.origin == OWN:
            facts = loop.plan.dataset
            raise cli.UsageError(
                f"--dataset={facts.name} streams fewer samples than the {facts.train_samples:,} for training and "
                f"{facts.validation_samples:,} for validation that it gives as their numbers."
            ) from error
        if bad := _BAD_SAMPLES.search(error.message):
            raise cli.UsageError(
                f"{bad.group(1)} Resume from the last checkpoint with: {loop.resume_command}"
            ) from error
        reason = _PLACE_IN_GRAPH.sub("", cli.first_line(error.message))
        raise cli.UsageError(
            f"the device or TensorFlow failed ({type(error).__name__}: {reason}). "
            f"The traceback is in {folder.errors}. Resume from the last checkpoint with: {loop.resume_command}"
        ) from error
    except BaseException:
        folder.write_error(world.instance, traceback.format_exc())
        raise


def _version_line(plan: RunPlan, sdk: Sdk) -> str:
    topology, batch = plan.topology, plan.batch
    instances = f"{topology.instances} instances x " if topology.instances > 1 else ""
    return (
        f"tf_ipu_dp {__version__}  {sdk.title}  {instances}{cli.count(topology.local_replicas, 'replica')}  "
        f"micro batch {batch.micro_batch_size} x {cli.count(topology.replicas, 'replica')} x accumulation "
        f"{batch.accumulation} = global batch {batch.global_batch_size}"
    )
