"""The training loop: fit an execution, record, stop?, save, validate; from the newest checkpoint to the last step.

The plan is made elsewhere. `meters` and `clock` measure, `stop` decides when to stop, `reporting` writes records and
heartbeats, `validation` evaluates, and `session` has the model on its device.
"""

from __future__ import annotations

import contextlib
import math
import os
from typing import Any, Optional, Sequence

from tf_ipu_dp import cli
from tf_ipu_dp.config.train_flags import TrainConfig
from tf_ipu_dp.planning.plan import RunPlan
from tf_ipu_dp.runs import checkpoints
from tf_ipu_dp.runs.plan_record import PlanRecord
from tf_ipu_dp.runs.records import BestWeights, RunResult, StopReason
from tf_ipu_dp.runs.run_folder import RunFolder
from tf_ipu_dp.sdk import Sdk
from tf_ipu_dp.training import checks, stop
from tf_ipu_dp.training.clock import RunClock
from tf_ipu_dp.training.console import Console
from tf_ipu_dp.training.executable_cache import ExecutableCache
from tf_ipu_dp.training.executions import Execution, OwnCallbacks, TrainingCallback
from tf_ipu_dp.training.export import export_model, render_export
from tf_ipu_dp.training.meters import RunMeter
from tf_ipu_dp.training.reporting import Reporting
from tf_ipu_dp.training.result import make_result
from tf_ipu_dp.training.saver import Saver
from tf_ipu_dp.training.session import TrainingSession
from tf_ipu_dp.training.unused_memory import UnusedMemory
from tf_ipu_dp.training.validation import Validation

# Where --log_every is not given, records are at least this far apart: short epochs would spend their time on logging.
_LOG_PERIOD_S = 1.0


class TrainingError(cli.UsageError):
    """A run that cannot continue. The text is shown to the user as is."""

    def __init__(self, reason: StopReason) -> None:
        super().__init__(reason.message)
        self.transient = reason.transient
        self.common = reason.kind == StopReason.NOT_FINITE  # the loss is the mean over the instances


class TrainingLoop:
    """One run. The same on every instance; only the leader writes and prints."""

    def __init__(  # noqa: PLR0913, PLR0917
        self,
        cfg: TrainConfig,
        plan: RunPlan,
        sdk: Sdk,
        session: TrainingSession,
        folder: RunFolder,
        console: Console,
        signals: stop.SignalHandler,
        began: float,
        callbacks: Sequence[Any] = (),
    ) -> None:
        self.cfg, self.plan, self.sdk, self.session, self.folder = cfg, plan, sdk, session, folder
        self.console, self.signals, self.world = console, signals, session.world
        self.resume_command = cli.resume_command(folder.path, os.environ, cfg.own_code)
        self.clock = RunClock(began)
        self.meter = RunMeter(
            plan, sdk, self.world, session.learning_rate, lambda: self.clock.bookkeeping_s, session.metric_names,
            session.scorer.running_metrics if session.scorer else (),
        )  # fmt: skip
        self.exchange = stop.InstanceExchange(self.world)
        self.store = checkpoints.Store(folder.checkpoints, cfg.keep_checkpoints, console.warning)
        self.saver = Saver(cfg, plan, sdk, session, folder, self.store)
        self.cache = ExecutableCache(sdk.executable_cache)
        self.reporting = Reporting(cfg, plan, sdk, self.world, folder, console, self._stalled)
        self.validation = Validation(cfg, plan, session, self.clock, self.reporting, console)
        self.has_callbacks = bool(callbacks or cfg.callbacks)
        several = self.world.instances > 1
        self.own_callbacks = OwnCallbacks(session.model, callbacks, stops_fit=not several) if callbacks else None
        self.unused_memory = UnusedMemory()
        self.compiling = contextlib.ExitStack()  # shows the time until the first execution is done
        self.step = self.epoch = self.epoch_end = self.fit_end = 0
        self.stop: Optional[StopReason] = None
        self.stop_signal = 0  # received by any instance
        self.logged_step, self.logged_at_s = 0, -math.inf

    def run(self) -> RunResult:
        """Trains to the last step, or until a stop reason; TrainingError for a failure."""
        self.signals.before_leaving = self.reporting.remove_heartbeat
        with self.reporting.heartbeat():
            resumed = self._resume()
            with self.reporting.records(self.session.example_images) as past:
                self.validation.add_past(past)
                self._train(resumed)
            if self.stop and self.stop.is_failure:
                raise TrainingError(self.stop)
            if self.cfg.export and not (self.stop and self.stop.is_resumable):
                self.reporting.phase("exporting", watched=False)
                with self.console.waiting("exporting"), self.clock.exporting():
                    exported = self._restore_weights_to_export()
                    export_model(self.session, self.plan, self.sdk, self.folder)
                self.console.info(render_export(self.folder, exported, self.plan))
            result = make_result(
                self.session, self.folder, self.clock, self.meter,
                step=self.step, scores=self.validation.scores, stopped=self.stop, best=self._best_weights(),
            )  # fmt: skip
            self._write_exchange_times()
            if self.world.is_leader:
                self.folder.write_result(result)
            return result

    def _resume(self) -> bool:
        """Restores the newest checkpoint, if any, and prepares the folder to continue from it."""
        found = checks.find_checkpoint(self.store, self.cfg, self.plan, self.session.variables(), self.world)
        if found:
            self.session.restore(found, whole=True)
            self.step = self.logged_step = found.manifest.step
            self.saver.resume_at(self.step)
            self.exchange.resume_at(self.step)
            self.console.info(f"Resuming from step {self.step:,} ({found.path})")
            for sentence in checks.changed_code(found, self.cfg):
                self.console.warning(sentence)
            for change in checks.changed_updates(found, self.cfg, self.plan):
                self.console.info(f"From step {self.step:,} on, {change}.")
            before, now = found.manifest.plan.training.updates, self.plan.epochs.updates
            if before != now and self.plan.recipe.schedule != "constant":
                self.console.info(f"The learning rate schedule now ends after {now:,} updates instead of {before:,}.")
        elif self.session.loaded:
            self.console.info(self.session.loaded.render())
        if self.world.is_leader:
            for store in (self.store, self.saver.best):
                store.set_aside_after(self.step)
            self.folder.write_start(self.cfg, PlanRecord.of(self.plan))
            self.folder.truncate_metrics(after_step=self.step)
        return found is not None

    def _train(self, resumed: bool) -> None:
        self.meter.start()
        self.clock.finish_startup()
        try:
            if resumed and self.validation.is_missing(self.step, at_end_of_epoch=self._at_end_of_epoch()):
                self._validate()
            while self.step < self.plan.epochs.updates and not self.stop:
                self._fit()
            if self.stop:
                self._save()
            self.saver.finish()
        finally:
            if self.own_callbacks:
                self.own_callbacks.finish()
            self.meter.stop()
            self.unused_memory.close()

    def _end_epoch_of_callbacks(self) -> None:
        """Tells the user's callbacks, on the leader, that an epoch has ended, with the scores of its validation."""
        if self.own_callbacks:
            scores = self.validation.scores if self.cfg.validate and self._at_end_of_epoch() else None
            self.own_callbacks.end_epoch(self.epoch, scores)
        (has_stopped,) = self.world.sum_over_instances([float(self._callback_stops())])
        if has_stopped and not self.stop and self.step < self.plan.epochs.updates:
            self.stop = stop.callback_stop(self.step)
            self.console.info(self.stop.message)

    def _callback_stops(self) -> bool:
        return self.own_callbacks is not None and self.own_callbacks.has_stopped

    def _fit(self) -> None:
        """Calls fit once, for the rest of an epoch or for whole epochs; Keras calls the methods below.

        All epochs of a call read one dataset, so its pipeline is started once and reads ahead during validations.
        """
        self.fit_end = self.plan.epochs.end_of_fit(self.step, self.session.source.train.epochs_per_dataset)
        dataset = self.session.make_training(self.step, self.fit_end)
        self.callback = TrainingCallback(self._after_execution, self._after_epoch)
        self._begin_epoch()
        micro_batches_per_update = self.plan.batch.accumulation * self.plan.topology.local_replicas
        try:
            self.session.model.fit(
                dataset,
                callbacks=[self.callback, *([self.own_callbacks] if self.own_callbacks else [])],
                epochs=-(-self.fit_end // self.plan.epochs.updates_per_epoch),
                initial_epoch=self.epoch,
                steps_per_epoch=(self.epoch_end - self.step) * micro_batches_per_update,
                verbose=0,
            )
        finally:
            self.compiling.close()
            self.console.end_epoch()

    def _begin_epoch(self) -> None:
        per_epoch = self.plan.epochs.updates_per_epoch
        self.epoch = self.step // per_epoch
        self.epoch_end = min((self.epoch + 1) * per_epoch, self.fit_end)
        self.meter.start_epoch(self.step)
        compiled = self.clock.compiled
        self.reporting.phase("training" if compiled else "compiling", self.step, watched=compiled)
        if compiled:
            self.unused_memory.give_back()
            self._start_bar()
        else:
            self.compiling.enter_context(self.console.waiting("compiling"))
        self.clock.start_epoch()

    def _after_epoch(self) -> bool:
        """Validates after an epoch, and begins the next one of a call of fit. Returns whether to continue."""
        self.clock.end_epoch()
        self.compiling.close()
        self.console.end_epoch()
        if not self.stop and self._at_end_of_epoch():
            self._validate()
        if self.has_callbacks:
            self._end_epoch_of_callbacks()
        if self.stop or self.step >= self.fit_end:
            return False
        self._begin_epoch()
        return True

    def _after_execution(self, execution: Execution) -> bool:
        """Records, checks and saves what is due after an execution. Returns whether to continue."""
        self.signals.begin_training()
        updates = self.plan.epochs.device_iterations
        self.step += updates
        self.reporting.phase("training", self.step)
        names = ("loss", "accuracy", *self.session.metric_names)
        loss, accuracy, *others = (execution.logs.get(name, math.nan) for name in names)
        if self.session.scorer:
            accuracy = math.nan  # of a task it is one of the others
        saves = self._is_due(self.plan.checkpoint_every) or self.step >= self.plan.epochs.updates
        exchange = self._exchange(execution, (loss, accuracy, *others), saves)
        if exchange:
            loss, accuracy, self.stop_signal = exchange.loss, exchange.accuracy, exchange.signal
            others = list(exchange.others)
            self.stop = stop.requested_stop(exchange, self.step, self.cfg.time_limit, self.resume_command)
            if exchange.callback_stops and not self.stop:
                self.stop = stop.callback_stop(self.step)
                self.console.info(self.stop.message)
            if self.clock.compiled:
                self.meter.exchanges.add(exchange.numbers)
        timed = self.clock.compiled
        if timed:
            self.clock.add_execution(execution.seconds)
            self.reporting.expect_step_time(execution.seconds)
        else:
            self._finish_compiling()
        if exchange and not math.isfinite(loss):
            # Between exchanges an instance only knows its own loss; the next exchange finds what is not finite.
            self._stop_not_finite("The loss")
            return False
        self.meter.add(self.step, loss, accuracy, execution, timed=timed, others=others)
        self.console.advance(updates if timed else 0, loss, accuracy, dict(zip(names[2:], others)))
        with self.clock.bookkeeping():
            if exchange and exchange.log_now:
                self.reporting.write(self.meter.take_record(self.step, self.clock.elapsed_s))
                self.logged_step, self.logged_at_s = self.step, execution.ended_s
            if self.world.instances > 1 and self._is_due(self.cfg.check_weights_every):
                self._compare_weights()
            if saves or self.stop:
                self._save()
            if self.stop or self.step >= self.plan.epochs.updates:
                self.saver.finish()  # its time belongs to the run
            else:
                self.saver.check()
        return not self.stop

    def _exchange(self, execution: Execution, means: Sequence[float], saves: bool) -> Optional[stop.Exchange]:
        """Exchanges metrics and stop requests between the instances, if that is due."""
        at_end = self.step >= self.epoch_end
        record_due = self.step // self.plan.log_every > self.logged_step // self.plan.log_every
        # Without --log_every the leader's clock decides, so that the others only know after an exchange.
        log_requested = record_due and self.cfg.log_every is not None
        if not self.exchange.is_due(must_exchange=at_end or saves or log_requested):
            return None
        period_elapsed = log_requested or execution.ended_s - self.logged_at_s >= _LOG_PERIOD_S
        limit = self.cfg.time_limit
        return self.exchange.run(
            self.step,
            loss=means[0],
            accuracy=means[1],
            others=means[2:],
            signal=self.signals.received,
            time_is_up=limit is not None and self.clock.elapsed_s >= limit.seconds,
            log_now=at_end or (record_due and period_elapsed),
            execution_s=execution.seconds if self.clock.compiled else math.inf,
            numbers=self.meter.exchanges.take(),
            callback_stops=self._callback_stops(),
        )

    def _finish_compiling(self) -> None:
        self.saver.write_trial()
        self.clock.finish_compiling()
        self.callback.restart_idle_time()
        self.compiling.close()
        self.cache.report(self.console)
        self._start_bar()
        self.meter.device.restart()

    def _start_bar(self) -> None:
        first = self.epoch * self.plan.epochs.updates_per_epoch
        self.console.begin_epoch(self.epoch + 1, self.epoch_end - first, self.step - first)

    def _save(self) -> None:
        """Saves a checkpoint of this step, unless it is already saved; weights that are not finite stop the run."""
        if self.step == self.saver.saved_step or (self.stop and self.stop.is_failure):
            return
        if not self.saver.weights_are_finite():
            self._stop_not_finite("The weights")
            return
        self.reporting.phase("saving")
        self.saver.save(self.step)
        self.unused_memory.give_back()
        self._write_exchange_times()
        self.reporting.phase("training")

    def _write_exchange_times(self) -> None:
        times = self.meter.exchanges.times
        if self.world.is_leader and times is not None:
            self.folder.write_exchange_times(times)

    def _validate(self) -> None:
        if not self.cfg.validate:
            return
        scores = self.validation.run(self.step)
        if scores.loss is None:
            self._stop_not_finite("The validation loss")
            return
        if self.cfg.best_metric and self.validation.is_best(self.step):
            self.reporting.phase("saving")
            self.saver.save_best(self.step)
        if self.step < self.plan.epochs.updates:
            self.stop = self.validation.early_stop()

    def _best_weights(self) -> Optional[BestWeights]:
        """Returns what the result says of the best weights, on the leader."""
        best, found = self.validation.best(), self.saver.best.newest() if self.cfg.best_metric else None
        if not best or not found or found.manifest.step != best.step:
            return None
        if best.metric == "loss":
            return BestWeights(best.step, best.loss, str(found.path))
        return BestWeights(best.step, best.loss, str(found.path), best.metric, best.value)

    def _restore_weights_to_export(self) -> int:
        """Restores the best weights if they are there and not asked otherwise; returns the step of the weights."""
        found = self.saver.best.newest() if self.cfg.best_metric and self.cfg.weights == "best" else None
        if found is None or found.manifest.step == self.step:
            return self.step
        self.session.restore(found, whole=False)
        return found.manifest.step

    def _at_end_of_epoch(self) -> bool:
        return self.step % self.plan.epochs.updates_per_epoch == 0 or self.step >= self.plan.epochs.updates

    def _is_due(self, updates: int) -> bool:
        """Whether an action with this period, in updates, was due within the last execution; 0: never."""
        return bool(updates) and self.step % updates < self.plan.epochs.device_iterations

    def _compare_weights(self) -> None:
        difference = checks.compare_weights(self.session.model.weights, self.world)
        if difference is not None:
            self.saver.finish()
            self.stop = stop.weights_differ(difference, self.step, self.saver.last_saved, self.resume_command)

    def _stop_not_finite(self, what: str) -> None:
        self.saver.finish()
        before = min(self.exchange.step_before, self.step - self.plan.epochs.device_iterations)
        rate = self.plan.recipe.learning_rate
        self.stop = stop.not_finite(
            what, before, self.step, self.saver.last_saved, learning_rate=rate, precision=self.cfg.precision
        )

    def _stalled(self, sentence: str) -> StopReason:
        return stop.stalled(sentence, self.saver.last_saved, self.resume_command)
