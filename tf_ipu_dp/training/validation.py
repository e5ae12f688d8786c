"""Validations of one run: their scores and records, what a resumed run has to repeat, and early stopping."""

from __future__ import annotations

import functools
import json
from typing import Iterable, Optional

from tf_ipu_dp.config.train_flags import TrainConfig
from tf_ipu_dp.planning.plan import RunPlan
from tf_ipu_dp.runs.records import BestWeights, Scores, StopReason, ValidationRecord
from tf_ipu_dp.training.clock import RunClock
from tf_ipu_dp.training.console import Console
from tf_ipu_dp.training.reporting import Reporting
from tf_ipu_dp.training.session import TrainingSession
from tf_ipu_dp.training.stop import BestValidation, EarlyStopping


class Validation:
    """Evaluates the model of a run. All instances take part; only the leader knows validations before a resumption."""

    def __init__(
        self,
        cfg: TrainConfig,
        plan: RunPlan,
        session: TrainingSession,
        clock: RunClock,
        reporting: Reporting,
        console: Console,
    ) -> None:
        self._plan, self._session, self._world = plan, session, session.world
        self._clock, self._reporting, self._console = clock, reporting, console
        self._patience = cfg.early_stop or 0
        self._early_stopping = EarlyStopping(self._patience, {})
        self._best = BestValidation(cfg.best_metric or "loss")
        self.scores: Optional[Scores] = None  # of the last validation

    def add_past(self, past: Iterable[ValidationRecord]) -> None:
        """Adds the validations before a resumption."""
        past = list(past)
        self._early_stopping = EarlyStopping(self._patience, {record.step: record.loss for record in past})
        for record in past:
            scores = Scores(record.samples or 0, record.loss, record.accuracy, record.top5, record.metrics)
            self._best.add(record.step, scores)

    def run(self, step: int) -> Scores:
        """Validates the weights after a step, and records the scores."""
        first = self.scores is None  # it compiles, so its duration is not known
        progress = functools.partial(self._reporting.phase, "evaluating", step, watched=not first)
        progress()
        with self._clock.evaluating() as seconds:
            self.scores = scores = self._session.evaluate(progress)
            epoch = step / self._plan.epochs.updates_per_epoch
            record = ValidationRecord(
                step, epoch, scores.loss, scores.top1, scores.top5, seconds(), scores.samples, scores.metrics
            )
        self._reporting.write(record)
        self._early_stopping.add(step, scores.loss)
        self._best.add(step, scores)
        return scores

    def is_missing(self, step: int, *, at_end_of_epoch: bool) -> bool:
        """Whether a resumed run was interrupted before its validation, or has nothing left to train."""
        updates = self._plan.epochs.updates
        if step >= updates:
            self._console.info(f"Nothing is left to train: the run has {updates:,} updates.")
            return True
        # A run that was stopped early stops again, with the scores of its last step.
        settled = self._early_stopping.has_validated(step) and not self._early_stopping.reason()
        settled = self._world.broadcast_from_leader("yes" if settled else "no") == "yes"
        return at_end_of_epoch and not settled

    def is_best(self, step: int) -> bool:
        """Whether the validation after a step is the best so far, by what the leader knows."""
        best = self._best.best
        return self._world.broadcast_from_leader("yes" if best and best.step == step else "no") == "yes"

    def best(self) -> Optional[BestWeights]:
        """Returns the best validation so far, without its checkpoint, on the leader."""
        return self._best.best

    def early_stop(self) -> Optional[StopReason]:
        """Returns the leader's reason to stop early, if the validation loss no longer improves."""
        if not self._patience:
            return None
        reason = self._early_stopping.reason() if self._world.is_leader else None
        agreed = self._world.broadcast_from_leader(json.dumps(reason.to_json()) if reason else "")
        if not agreed:
            return None
        found = StopReason.from_json(json.loads(agreed))
        self._console.info(found.message)
        return found
