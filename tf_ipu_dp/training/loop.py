"""Owns a run from its first line to its result: steps, votes, logs, checkpoints, validation, export, signals.

Decides nothing of the plan. The model and its device are in `learners`, what has to be alike for it in `agreement`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import shutil
import signal
import tempfile
import time
import traceback
from datetime import datetime, timezone
from pathlib import Path
from types import FrameType
from typing import Any, Dict, Iterator, List, Mapping, Optional, Set, TextIO, Tuple

import numpy as np
import tensorflow as tf
from absl import logging

from tf_ipu_dp import __version__, cli
from tf_ipu_dp.config.schema import TrainConfig
from tf_ipu_dp.datasets import sources
from tf_ipu_dp.distributed.world import World
from tf_ipu_dp.monitoring import bottleneck, diagnosis, sampler
from tf_ipu_dp.planning import report
from tf_ipu_dp.planning.plan import RunPlan
from tf_ipu_dp.runs import checkpoints, heartbeat, json_files, records, result_report, run_folder
from tf_ipu_dp.sdk import Sdk
from tf_ipu_dp.training import checks, console, executions, models, session

_MEASURED_S = 3.0
# Where nobody says how often, lines are not closer than this: short epochs would spend their time on logging.
_LOG_PERIOD_S = 1.0
# Instances agree so often on whether to go on; each time costs some milliseconds.
_VOTE_PERIOD_S = 0.25
# Where all instances have the same to say, instance 0 says it, and its end ends the others before they do.
_PATIENCE_S = 1.5


class TrainingError(cli.UsageError):
    """A run that cannot go on. The text is shown to the user as is."""


def train(
    cfg: TrainConfig, run: RunPlan, sdk: Sdk, instance: int, stdout: TextIO, stderr: TextIO, width: int, began: float
) -> int:
    """Trains from the newest checkpoint, or from the start, to the end. Returns the exit code.

    `began` is when the command began, on the clock of time.perf_counter.
    """
    term = console.Console(stderr, quiet=instance > 0)
    with _Interrupts(term) as interrupts, _in_turn(instance, interrupts):
        term.info(_version_line(run, sdk))
        term.info(report.render_plan(run, width, drawing=False).split("\n", 2)[2])
        # The device comes first: it may have a say in TensorFlow's threads, which nobody has once TensorFlow computes.
        # The folder comes last, so that what cannot be trained leaves none behind.
        device = session.attach(cfg, run, sdk, instance)
        source = session.open_source(cfg, run)
        checks.compare_instances(cfg, run, sdk, source, device.world)
        learner = session.make_session(cfg, run, sdk, device, source)
        with checks.open_folder(cfg, run, device.world) as folder:
            trainer = _Trainer(cfg, run, sdk, learner, folder, interrupts, began)
            result = _guarded(trainer, folder)
        value = records.result_value(result)
        if device.world.is_leader:
            stdout.write(_json_line(value) if cfg.json else result_report.render_result(result, width))
            stdout.flush()
        # Under some launchers the first exit that is not 0 ends the others: nobody leaves before all are done.
        device.world.broadcast_from_leader({})
        return 128 + trainer.stop_signal if trainer.stop_signal else 0


@contextlib.contextmanager
def _in_turn(instance: int, interrupts: Optional[_Interrupts] = None) -> Iterator[None]:
    """Lets instance 0 speak first where all of them have the same to say; who is ended meanwhile says nothing.

    So does one that has lost the others: the launcher knows who is missing, and is about to end it.
    """
    try:
        yield
    except (cli.UsageError, tf.errors.OpError) as error:
        lost = not isinstance(error, cli.UsageError)
        if lost and not World.is_lost_peer(getattr(error, "message", "")):
            raise
        if instance or lost:
            time.sleep(_PATIENCE_S)
            if interrupts and interrupts.signal:
                raise SystemExit(1) from None
        if lost:
            again = "Start the run again: it goes on from its last checkpoint." if interrupts else "Start it again."
            raise TrainingError(
                f"instance {instance} has lost the others: one of them has ended, or the network to it is gone. {again}"
            ) from error
        raise


def _guarded(trainer: _Trainer, folder: run_folder.RunFolder) -> records.RunResult:
    """Runs the trainer; what ends it is kept in the folder, and told in a sentence if it is not a bug of ours."""
    world = trainer.world
    try:
        return trainer.run()
    except SystemExit:
        raise
    except cli.UsageError as error:
        if world.instances > 1:  # for the launcher; one instance says it itself
            folder.write_error(world.instance, str(error), final=not trainer.may_pass)
        raise
    except checkpoints.CheckpointError as error:
        folder.write_error(world.instance, str(error), final=True)
        raise TrainingError(str(error)) from error
    except tf.errors.OpError as error:
        folder.write_error(world.instance, traceback.format_exc())
        if World.is_lost_peer(error.message):
            raise
        raise TrainingError(
            f"the device or TensorFlow failed ({type(error).__name__}: {cli.first_line(error.message)}). "
            f"All of it is in {folder.errors}; go on from the last checkpoint with {_same_run(folder)}."
        ) from error
    except BaseException:
        folder.write_error(world.instance, traceback.format_exc())
        raise


def evaluate(cfg: TrainConfig, run: RunPlan, sdk: Sdk, instance: int, stdout: TextIO, stderr: TextIO) -> int:
    """Measures the newest good checkpoint of a run on every validation sample."""
    with _in_turn(instance):
        return _evaluate(cfg, run, sdk, instance, stdout, stderr)


def measure_input(cfg: TrainConfig, run: RunPlan, sdk: Sdk, instance: int, stdout: TextIO, stderr: TextIO) -> int:
    """Measures the input alone and the model alone, per instance, and says whether the one can feed the other."""
    with _in_turn(instance):
        return _measure_input(cfg, run, sdk, instance, stdout, stderr)


def _evaluate(cfg: TrainConfig, run: RunPlan, sdk: Sdk, instance: int, stdout: TextIO, stderr: TextIO) -> int:
    term = console.Console(stderr, quiet=instance > 0)
    if cfg.run_dir is None:
        raise cli.UsageError("--evaluate needs the run whose checkpoint is to be measured. Add --run_dir=runs/NAME.")
    store = checkpoints.Store(Path(cfg.run_dir) / "checkpoints", cfg.keep_checkpoints, term.warning)
    found = store.newest()
    if found is None:
        raise cli.UsageError(f"--run_dir={cfg.run_dir} has no good checkpoint. Train first, without --evaluate.")
    device = session.attach(cfg, run, sdk, instance)
    source = session.open_source(cfg, run)
    checks.compare_instances(cfg, run, sdk, source, device.world)
    learner = session.make_session(cfg, run, sdk, device, source)
    checks.require_same_model(found, cfg, run, learner.variables())
    learner.restore(found, whole=False)
    with term.waiting(f"evaluating step {found.manifest.step:,}"):
        scores = learner.measure()
    if not device.world.is_leader:
        return 0
    if cfg.json:
        value = {"schema": 1, "checkpoint": str(found.path), "step": found.manifest.step}
        stdout.write(_json_line({**value, **dataclasses.asdict(scores)}))
    else:
        stdout.write(f"{found.path}: {_score_words(scores)}\n")
    return 0


def _measure_input(cfg: TrainConfig, run: RunPlan, sdk: Sdk, instance: int, stdout: TextIO, stderr: TextIO) -> int:
    term = console.Console(stderr, quiet=instance > 0)
    device = session.attach(cfg, run, sdk, instance)
    source = session.open_source(cfg, run)
    checks.compare_instances(cfg, run, sdk, source, device.world)
    learner = session.make_session(cfg, run, sdk, device, source)
    world = device.world
    per_update = run.batch.accumulation * run.topology.local_replicas
    dataset = learner.make_training(0, run.epochs.updates)
    elements = min(run.epochs.updates * per_update, max(200, 2 * per_update))
    with term.waiting("loading"):
        rate = sources.measure(dataset, sdk.ipu, elements=elements, samples_per_element=run.batch.micro_batch_size)
    iterations = run.keras.steps_per_execution * run.topology.local_replicas
    same = dataset.take(1).cache().repeat()
    times: List[float] = []

    def goes_on(done: executions.Execution) -> bool:
        times.append(done.seconds)
        return max(seconds for (seconds,) in world.gather_numbers([sum(times[1:])])) < _MEASURED_S

    enough = executions.AfterExecution(goes_on)
    with term.waiting("computing"):
        learner.model.fit(same, epochs=1, steps_per_epoch=50 * iterations, callbacks=[enough], verbose=0)
    samples = run.batch.global_batch_size // run.topology.instances * run.epochs.device_iterations
    needed = samples * len(times[1:]) / sum(times[1:]) if times[1:] else math.nan
    if not world.is_leader:
        return 0
    value = {
        "schema": 1,
        "input_samples_per_s": rate.samples_per_s,
        "input_bytes_per_s": rate.bytes_per_s,
        "model_samples_per_s": needed,
        "feeds": rate.samples_per_s >= needed,
    }
    if cfg.json:
        stdout.write(_json_line(value))
        return 0
    ratio = rate.samples_per_s / needed
    sentence = (
        f"The input can feed the model {ratio:.1f} times over."
        if ratio >= 1
        else f"The input cannot feed the model: it is {1 / ratio:.1f} times slower. {_input_advice(cfg)}"
    )
    stdout.write(
        f"input  {rate.samples_per_s:,.0f} samples/s  {rate.bytes_per_s / 1e6:,.1f} MB/s\n"
        f"model  {needed:,.0f} samples/s\n{sentence}\n"
    )
    return 0


class _Trainer:
    """One run from its first to its last step."""

    def __init__(
        self,
        cfg: TrainConfig,
        run: RunPlan,
        sdk: Sdk,
        learner: session.TrainingSession,
        folder: run_folder.RunFolder,
        interrupts: _Interrupts,
        began: float,
    ) -> None:
        self.cfg, self.plan, self.sdk, self.folder = cfg, run, sdk, folder
        self.learner = learner
        self.console, self.interrupts, self.began = interrupts.console, interrupts, began
        self.store = checkpoints.Store(folder.checkpoints, cfg.keep_checkpoints, self.console.warning)
        self.step = 0
        self.saved_step = 0
        self.compile_s = self.training_s = self.executing_s = self.bookkeeping_s = self.evaluation_s = 0.0
        self.busy_s = self.watched_s = 0.0
        self.waited_s: Optional[float] = None
        self.timed_samples = 0
        self.compiled = False
        self.scores: Optional[records.Scores] = None
        self.cache = sdk.executable_cache
        self.cached = self._executables()
        self.failure: Optional[str] = None
        self.may_pass: bool = False  # the same run, started again, may well go on
        self.stop_signal: int = 0  # of any instance
        self.time_is_up = False
        self.gives_up = False  # the validation has not got better for long
        self.validated = False
        self.world: World = learner.world
        self.reporter = heartbeat.StatusReporter(
            folder.path,
            instance=self.world.instance,
            instances=self.world.instances,
            planned_steps=run.epochs.updates,
            waits_for=sdk.waits_for,
            limit_s=cfg.stall_timeout.seconds,
            on_stall=self._end_stalled,
        )
        self._window = _Window()
        self._logged_s, self._logged_step = 0.0, 0
        self._log_period_s = 0.0 if cfg.log_every else _LOG_PERIOD_S
        self._collectives = _Collectives(sdk)
        self._stretches: List[List[bottleneck.InstanceTimes]] = []
        self._until_vote = 0  # executions
        self._before_vote = self._voted_step = 0

    def run(self) -> records.RunResult:
        """Trains to the end, or to a signal; a loss that is not finite is a TrainingError."""
        self.reporter.start()
        try:
            return self._run()
        finally:
            self.reporter.stop()

    def _run(self) -> records.RunResult:
        cfg, run = self.cfg, self.plan
        resumed = checks.find_checkpoint(self.store, cfg, run, self.learner.variables(), self.world)
        if resumed:
            self.learner.restore(resumed, whole=True)
            self.step = self.saved_step = self._before_vote = self._voted_step = resumed.manifest.step
            self._logged_step = self.step
            self.console.info(f"going on from step {self.step:,} ({resumed.path})")
            before = resumed.manifest.plan["training"]["updates"]
            if before != run.epochs.updates and run.recipe.schedule != "constant":
                self.console.info(
                    f"the learning rate's schedule is now of {run.epochs.updates:,} updates, not {before:,}"
                )
        if self.world.is_leader:
            self.store.set_aside_after(self.step)
            self.folder.write_start(cfg, cfg.flag_lines(), report.render_json(run))
            self.folder.truncate_metrics(after_step=self.step)
        # A run that was resumed is a second curve: event files cannot be cut back to the checkpoint's step.
        board = self.folder.tensorboard / f"from-step-{self.step:08d}" if resumed else self.folder.tensorboard
        self.board = (
            tf.summary.create_file_writer(str(board)) if self.world.is_leader else tf.summary.create_noop_writer()
        )
        self.sampler = sampler.Sampler(self.sdk.gcipuinfo, pid=os.getpid())
        self.sampler.start()
        try:
            finished = self.step >= run.epochs.updates
            if finished:
                self.console.info(f"nothing is left to train: the run is of {run.epochs.updates:,} updates")
            validated = self.world.broadcast_from_leader({"validated": self._validated(self.step)})["validated"]
            if resumed and (finished or (self._at_end_of_epoch() and not validated)):
                self._validate()
            while self.step < run.epochs.updates and not self._stopping():
                self._train_to_end_of_epoch()
                if not self._stopping() and self._at_end_of_epoch():
                    self._validate()
            if self._stopping() and self.step and not self.failure:
                self._save()
        finally:
            self.sampler.stop()
            self.board.close()
        if self.failure:
            raise TrainingError(self.failure)
        if cfg.export and not (self.stop_signal or self.time_is_up):
            self.reporter.update("exporting", watched=False)
            with self.console.waiting("exporting"):
                self._export()
        result = self._result()
        if self.world.is_leader:
            self.folder.write_result(records.result_value(result))
        return result

    def _stopping(self) -> bool:
        return bool(self.failure or self.stop_signal or self.time_is_up or self.gives_up)

    def _vote(self, loss: float, accuracy: float, wants_to_log: bool, execution_s: float) -> Tuple[float, float, bool]:
        """Returns the means over the instances, and whether to log; all of them stop after the same execution.

        A signal to any instance counts for all. Where clocks decide, instance 0's does; it also says how many
        executions there are to the next vote.
        """
        limit = self.cfg.time_limit
        late = limit is not None and time.perf_counter() - self.began >= limit.seconds
        everyone = self.world.gather_numbers(
            [loss, accuracy, self.interrupts.signal, late, wants_to_log, execution_s if self.compiled else math.inf]
        )
        losses, accuracies, signals, lates, wishes, seconds = zip(*everyone)
        self._until_vote = max(int(_VOTE_PERIOD_S / max(seconds[0], 1e-3)), 1)
        self._before_vote, self._voted_step = self._voted_step, self.step
        self.stop_signal = int(max(signals))
        self.time_is_up = bool(lates[0])
        return sum(losses) / len(losses), sum(accuracies) / len(accuracies), bool(wishes[0])

    def _end_stalled(self, sentence: str, culprit: heartbeat.Status) -> None:
        """Ends this process, whose main thread may wait for ever inside the device or a collective."""
        kept = f"The last checkpoint is of step {self.saved_step:,}." if self.saved_step else "There is no checkpoint."
        text = f"{sentence} {kept} Go on with {_same_run(self.folder)}."
        with contextlib.suppress(cli.UsageError):
            self.folder.write_error(culprit.instance, text, host=culprit.host)
        self.console.warning(f"train: {text}")
        os._exit(1)

    def _at_end_of_epoch(self) -> bool:
        return self.step % self.plan.epochs.updates_per_epoch == 0 or self.step >= self.plan.epochs.updates

    def _train_to_end_of_epoch(self) -> None:
        run = self.plan
        per_epoch = run.epochs.updates_per_epoch
        epoch = self.step // per_epoch
        end = min((epoch + 1) * per_epoch, run.epochs.updates)
        micro_batches = (end - self.step) * run.batch.accumulation * run.topology.local_replicas
        self._epoch = epoch
        self._epoch_end = end
        self._first_step = self.step
        self._window = _Window()
        dataset = self.learner.make_training(self.step, end)
        self._callback = executions.AfterExecution(self._after_execution)
        fit = {"epochs": epoch + 1, "initial_epoch": epoch, "steps_per_epoch": micro_batches, "verbose": 0}
        self._begin_watch()
        self.reporter.update("training" if self.compiled else "compiling", self.step, watched=self.compiled)
        if not self.compiled:
            self._compiling = self.console.waiting("compiling")
            self._compiling.__enter__()
            self._fit_began = time.perf_counter()
        else:
            self.console.begin_epoch(epoch + 1, end - epoch * per_epoch, self.step - epoch * per_epoch)
        self._timed_from = time.perf_counter()
        try:
            self.learner.model.fit(dataset, callbacks=[self._callback], **fit)
            self.training_s += time.perf_counter() - self._timed_from
        finally:
            if not self.compiled:
                self._compiling.__exit__(None, None, None)
            self.console.end_epoch()
        self.board.flush()

    def _after_execution(self, execution: executions.Execution) -> bool:
        """Returns whether to go on."""
        run = self.plan
        updates = run.epochs.device_iterations
        self.step += updates
        self.reporter.update("training", self.step)
        at_end = self.step >= self._epoch_end
        passed = self.step // run.log_every > self._logged_step // run.log_every
        due = passed and execution.ended_s - self._logged_s >= self._log_period_s
        saves = self.step % run.checkpoint_every < updates or self.step >= run.epochs.updates
        loss, accuracy = execution.logs.get("loss", math.nan), execution.logs.get("accuracy", math.nan)
        logging_now = False
        self._until_vote -= 1
        # All instances come to the same answer here: none of them looks at a clock of its own.
        asked_to_log = passed and not self._log_period_s
        if self._until_vote <= 0 or at_end or saves or asked_to_log or self.world.instances == 1:
            loss, accuracy, logging_now = self._vote(loss, accuracy, at_end or due, execution.seconds)
        samples = 0
        if not self.compiled:
            self._finish_compiling()
        else:
            samples = updates * run.batch.global_batch_size
            self.executing_s += execution.seconds
            self.timed_samples += samples
            self.reporter.expect_step_time(execution.seconds)
        # One instance's own loss is all that it has between votes; where it is not finite, the next vote finds it.
        if not math.isfinite(loss) and self._voted_step == self.step:
            self.failure = self._not_finite("The loss")
            return False
        self._window.add(self.step - self._first_step, (loss, accuracy), samples, execution)
        self.console.advance(updates if samples else 0, loss, accuracy)
        began = time.perf_counter()
        if logging_now:
            self._log()
            self._logged_s, self._logged_step = execution.ended_s, self.step
        every = self.cfg.check_weights_every
        if every and self.world.instances > 1 and self.step % every < updates:
            self._compare_weights()
        if (saves or self._stopping()) and not self.failure:
            self._save()
        self.bookkeeping_s += time.perf_counter() - began
        return not self._stopping()

    def _compare_weights(self) -> None:
        odd = checks.compare_weights(self.learner.model.weights, self.world)
        if odd is not None:
            self.may_pass = True
            self.failure = (
                f"The instances' weights have drifted apart by step {self.step:,}: {odd}. "
                f"The memory of a host or its network may be at fault. {self._last_good()} "
                f"Go on from it with {_same_run(self.folder)}."
            )

    def _finish_compiling(self) -> None:
        self._try_checkpoint()
        self.compile_s = time.perf_counter() - self._fit_began
        self._callback.forgive()
        self._timed_from = time.perf_counter()
        self._compiling.__exit__(None, None, None)
        self.compiled = True
        self._report_cache()
        per_epoch = self.plan.epochs.updates_per_epoch
        first = self._epoch * per_epoch
        self.console.begin_epoch(self._epoch + 1, self._epoch_end - first, self.step - first)
        self._begin_watch()

    def _try_checkpoint(self) -> None:
        """Writes the state once and throws it away: a disk that does not take it is found now and not after an epoch.

        The first time also costs TensorFlow several times what the later ones do.
        """
        try:
            self._write_and_forget()
        except (OSError, tf.errors.OpError) as error:
            raise TrainingError(
                f"A checkpoint cannot be written to {self.folder.path} ({cli.first_line(str(error))}). "
                "Make room, or choose another folder with --run_dir."
            ) from error

    def _write_and_forget(self) -> None:
        """Writes the state where nobody looks: what needs all instances is read by all when one of them saves."""
        place = str(self.folder.path) if self.world.is_leader else None
        with tempfile.TemporaryDirectory(prefix=".trial-", dir=place) as folder:
            self.learner.state.write(f"{folder}/state")

    def _report_cache(self) -> None:
        if self.cache is None:
            return
        if self._executables() - self.cached:
            self.console.info(f"executable cache: miss, compiled and kept in {self.cache}")
        else:
            self.console.info(f"executable cache: hit in {self.cache}")

    def _executables(self) -> Set[Path]:
        return set(self.cache.glob("**/*.poplar_exec")) if self.cache else set()

    def _watch(self) -> sampler.Usage:
        """Returns how busy the IPUs were since the last call."""
        return self.sampler.mark()

    def _begin_watch(self) -> None:
        """Leaves out what was before, which is no training."""
        self._watch()
        self._collectives.take()

    def _not_finite(self, what: str) -> str:
        before = min(self._before_vote, self.step - self.plan.epochs.device_iterations)
        advice = "use --loss_scaling=dynamic" if self.cfg.precision != "32.32" else "raise --warmup_epochs"
        return (
            f"{what} became NaN or infinite between steps {before:,} and {self.step:,}. {self._last_good()} "
            f"Begin again in another --run_dir with a lower --learning_rate (it rises to "
            f"{self.plan.recipe.learning_rate:g}), or {advice}."
        )

    def _last_good(self) -> str:
        return (
            f"The last good checkpoint is of step {self.saved_step:,}."
            if self.saved_step
            else "No checkpoint was made."
        )

    def _log(self) -> None:
        run = self.plan
        window = self._window.take()
        usage = self._watch()
        waited = None
        if usage.utilisation_pct is not None and window.seconds:
            waited = max(window.executing_s - usage.seconds * usage.utilisation_pct / 100, 0.0)
            self.waited_s = (self.waited_s or 0.0) + waited
            self.watched_s += usage.seconds
            self.busy_s += usage.seconds * usage.utilisation_pct / 100
        shares = self._gather_shares(window, waited)
        self._stretches.append(bottleneck.parse_stretch(shares) or [])
        slowest_s = max(share["seconds"] for share in shares)
        rate = window.samples / slowest_s if slowest_s else None
        self.reporter.update("training", self.step, rate)
        learning_rate = float(self.learner.schedule(tf.constant(self.step - 1)))
        record: Dict[str, Any] = {
            "kind": "train",
            "step": self.step,
            "epoch": self.step / run.epochs.updates_per_epoch,
            "loss": window.loss,
            "accuracy": window.accuracy,
            "learning_rate": learning_rate,
            "samples_per_s": rate,
            "input_wait_s": waited,
            "elapsed_s": time.perf_counter() - self.began,
            "ipu_utilisation_pct": {str(ipu): percent for ipu, percent in usage.per_ipu_pct.items()},
            "instances": shares,
        }
        if not self.world.is_leader:
            return
        self.folder.append_metrics(record)
        self._to_board(record)
        left = run.epochs.updates - self.step
        eta = f"  eta {console.render_duration(left * run.batch.global_batch_size / rate)}" if rate else ""
        speed = f"  {rate:,.0f} samples/s ({rate / run.topology.replicas:,.0f} per replica)" if rate else ""
        width = len(f"{run.epochs.updates}")
        self.console.log(
            f"step {self.step:{width}}/{run.epochs.updates}  loss {window.loss:.4f}  accuracy {window.accuracy:.3f}"
            f"{speed}{eta}"
        )

    def _gather_shares(self, window: _Window, waited: Optional[float]) -> List[Dict[str, Any]]:
        """Returns where the seconds since the last log went, of every instance."""
        own = (window.seconds, window.executing_s, waited, self._collectives.take())
        everyone = self.world.gather_numbers([math.nan if each is None else each for each in own])
        names = ("seconds", "executing_s", "input_wait_s", "collective_s")
        return [
            {"instance": instance, **{name: json_files.plain(value) for name, value in zip(names, row)}}
            for instance, row in enumerate(everyone)
        ]

    def _to_board(self, record: Dict[str, Any]) -> None:
        kind = record["kind"]
        with self.board.as_default(step=record["step"]):
            for name, value in record.items():
                if isinstance(value, float):
                    tf.summary.scalar(f"{kind}/{name}", value)
                elif isinstance(value, dict):
                    for key, each in value.items():
                        if each is not None:
                            tf.summary.scalar(f"{kind}/{name}/{key}", each)

    def _save(self) -> None:
        if self.step == self.saved_step:
            return
        finite = all(np.isfinite(weight).all() for weight in self.learner.model.get_weights())
        if not all(answer for (answer,) in self.world.gather_numbers([finite])):
            self.failure = self._not_finite("The weights")
            return
        manifest = checks.manifest_at(
            self.step, self.cfg, self.plan, self.sdk, self.learner.variables(), datetime.now(timezone.utc)
        )
        self.reporter.update("saving")
        if self.world.is_leader:
            self.store.save(manifest, lambda prefix: self.learner.state.write(str(prefix)))
        else:
            self._write_and_forget()
        self.saved_step = self.step
        self.reporter.update("training")

    def _validated(self, step: int) -> bool:
        return any(each.get("kind") == "validation" and each.get("step") == step for each in self.folder.read_metrics())

    def _validate(self) -> None:
        began = time.perf_counter()
        self.reporter.update("evaluating", self.step, watched=self.validated)
        moved = functools.partial(self.reporter.update, "evaluating", self.step, watched=self.validated)
        self.scores = self.learner.measure(moved)
        self.validated = True
        seconds = time.perf_counter() - began
        self.evaluation_s += seconds
        record = {
            "kind": "validation",
            "step": self.step,
            "epoch": self.step / self.plan.epochs.updates_per_epoch,
            "loss": self.scores.loss,
            "accuracy": self.scores.top1,
            "top5": self.scores.top5,
            "seconds": seconds,
        }
        if not math.isfinite(self.scores.loss):
            self.failure = self._not_finite("The validation's loss")
        if self.world.is_leader and not self._validated(self.step):
            self.folder.append_metrics(record)
            self._to_board(record)
        self.console.info(f"validation after step {self.step:,}: {_score_words(self.scores)}")
        if self.cfg.early_stop:
            self._consider_giving_up(self.cfg.early_stop)

    def _consider_giving_up(self, patience: int) -> None:
        """Stops when the last validations, as many as the patience, were no better than the best one before them."""
        records = {each["step"]: each["loss"] for each in self.folder.read_metrics() if each["kind"] == "validation"}
        losses = [math.inf if records[step] is None else records[step] for step in sorted(records)]
        stuck = len(losses) > patience and min(losses[-patience:]) >= min(losses[:-patience])
        # What instance 0 has written, the others may not see yet.
        self.gives_up = bool(self.world.broadcast_from_leader({"gives_up": stuck})["gives_up"])
        if self.gives_up:
            self.console.info(
                f"the validation's loss has not become lower in {cli.count(patience, 'validation')}: "
                f"stopping early, after step {self.step:,} of {self.plan.epochs.updates:,}"
            )

    def _export(self) -> None:
        run = self.plan
        plain = models.make_export_model(
            self.learner.model, run.model.architecture, run.dataset.mean, run.dataset.deviation
        )
        if not self.world.is_leader:
            return  # it has read the weights with the others, which is what it is needed for
        fresh, old = self.folder.path / ".export", self.folder.path / ".export-old"
        for path in (fresh, old):
            shutil.rmtree(path, ignore_errors=True)
        before = logging.get_verbosity()
        logging.set_verbosity(logging.ERROR)  # Keras warns that a model for serving has no metrics
        try:
            plain.save(str(fresh), save_format="tf", include_optimizer=False)
        finally:
            logging.set_verbosity(before)
        if self.folder.export.exists():
            self.folder.export.rename(old)
        fresh.rename(self.folder.export)
        shutil.rmtree(old, ignore_errors=True)
        if self.sdk.serves_ipus:
            self.learner.evaluator.export_for_ipu_serving(
                str(self.folder.export / "ipu"), batch_size=run.batch.micro_batch_size
            )

    def _result(self) -> records.RunResult:
        run = self.plan
        between_s = max(self.training_s - self.executing_s - self.bookkeeping_s, 0.0)
        own = (
            self.training_s,
            self.compile_s,
            self.executing_s,
            between_s,
            self.bookkeeping_s,
            self.evaluation_s,
        )
        waited_s = math.nan if self.waited_s is None else self.waited_s
        everyone = self.world.gather_numbers([*own, waited_s])
        # Throughput is that of all samples over the slowest instance's time.
        _, compile_s, executing_s, between_s, bookkeeping_s, evaluation_s, waited_s = max(
            everyone, key=lambda row: row[0]
        )
        times = records.RunTimes(
            total_s=time.perf_counter() - self.began,
            compile_s=compile_s,
            executing_s=executing_s,
            between_s=between_s,
            bookkeeping_s=bookkeeping_s,
            evaluation_s=evaluation_s,
            input_wait_s=None if math.isnan(waited_s) else waited_s,
        )
        stopped = None
        if self.stop_signal or self.time_is_up:
            name = signal.Signals(self.stop_signal).name if self.stop_signal else f"--time_limit={self.cfg.time_limit}"
            done = f"after step {self.step:,}, saved" if self.step else "before the first step"
            stopped = f"{name} {done}. Go on with {_same_run(self.folder)}."
        facts = bottleneck.Facts(
            device_iterations=run.epochs.device_iterations,
            executions=self.timed_samples // (run.batch.global_batch_size * run.epochs.device_iterations),
            larger=diagnosis.larger_executions(self.cfg),
            prefetch=self.cfg.prefetch,
            eight_bit_io=self.cfg.eight_bit_io,
            compile_s=times.compile_s,
            total_s=times.total_s,
            bookkeeping_s=times.bookkeeping_s,
        )
        held_back = bottleneck.judge(self._stretches, facts).sentence
        if self.step and not self.compiled:
            held_back = "Nothing was left to train."
        return records.RunResult(
            run_dir=str(self.folder.path),
            model=self.cfg.model,
            dataset=self.cfg.dataset,
            replicas=run.topology.replicas,
            updates=self.step,
            planned_updates=run.epochs.updates,
            timed_samples=self.timed_samples,
            times=times,
            utilisation_pct=100 * self.busy_s / self.watched_s if self.watched_s else None,
            scores=self.scores,
            verdict=held_back,
            stopped=stopped,
        )


class _Interrupts:
    """Turns SIGINT and SIGTERM into a wish that is granted after the execution; a second one ends at once."""

    def __init__(self, term: console.Console) -> None:
        self.signal = 0
        self.console = term

    def __enter__(self) -> _Interrupts:
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: Optional[FrameType]) -> None:
        name = signal.Signals(number).name
        if self.signal:
            self.console.warning(f"{name}: stopped at once.")
            raise SystemExit(128 + number)
        self.signal = number
        self.console.info(f"{name}: finishing the execution and saving; once more to stop at once.")


class _Window:
    """Means over the last steps, from Keras's means since fit was called."""

    def __init__(self) -> None:
        self._updates = 0
        self._sums = (0.0, 0.0)
        self._now: Tuple[int, Tuple[float, float]] = (0, (0.0, 0.0))
        self.samples = 0
        self.seconds = self.executing_s = 0.0
        self.loss = self.accuracy = math.nan

    def add(self, updates: int, means: Tuple[float, float], samples: int, execution: executions.Execution) -> None:
        """Takes in one execution; `updates` and `means` count from fit's beginning. Without samples it is not timed."""
        self._now = (updates, (means[0] * updates, means[1] * updates))
        if samples:
            self.samples += samples
            self.seconds += execution.seconds + execution.idle_s
            self.executing_s += execution.seconds

    def take(self) -> _Window:
        """Returns the means since the last call, and begins anew."""
        done = _Window()
        updates, sums = self._now
        steps = max(updates - self._updates, 1)
        done.loss, done.accuracy = ((now - before) / steps for now, before in zip(sums, self._sums))
        done.samples, done.seconds, done.executing_s = self.samples, self.seconds, self.executing_s
        self._updates, self._sums = updates, sums
        self.samples, self.seconds, self.executing_s = 0, 0.0, 0.0
        return done


class _Collectives:
    """How long this instance was in collectives, where the SDK tells it."""

    def __init__(self, sdk: Sdk) -> None:
        self._sdk = sdk
        self._before = 0.0

    def take(self) -> Optional[float]:
        """Returns the seconds since it was last asked."""
        now = self._sdk.collective_s()
        if now is None:
            return None
        seconds, self._before = now - self._before, now
        return seconds


def _input_advice(cfg: TrainConfig) -> str:
    if not cfg.prefetch:
        return "Add --prefetch."
    return "Use more --instances." if cfg.eight_bit_io else "Add --eight_bit_io."


def _version_line(run: RunPlan, sdk: Sdk) -> str:
    topology, batch = run.topology, run.batch
    instances = f"{topology.instances} instances x " if topology.instances > 1 else ""
    return (
        f"tf_ipu_dp {__version__}  {sdk.title}  {instances}{cli.count(topology.local_replicas, 'replica')}  "
        f"micro batch {batch.micro_batch_size} x {cli.count(topology.replicas, 'replica')} x accumulation "
        f"{batch.accumulation} = global batch {batch.global_batch_size}"
    )


def _score_words(scores: records.Scores) -> str:
    return (
        f"loss {scores.loss:.4f}  accuracy {100 * scores.top1:.2f} %  top 5 {100 * scores.top5:.2f} %  "
        f"({scores.samples:,} samples)"
    )


def _same_run(folder: run_folder.RunFolder) -> str:
    return f"--flagfile={folder.run_flags} --run_dir={folder.path}"


def _json_line(value: Mapping[str, Any]) -> str:
    return json.dumps(json_files.plain(value)) + "\n"
