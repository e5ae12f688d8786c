"""The plan of a run: topology, batch and step arithmetic.

Pure: takes a config, facts about the data and what a launcher started; returns a RunPlan or raises PlanError. No other
module calculates any of this. The error lists all problems at once, and every value that it suggests has been tried.
"""

from __future__ import annotations

import dataclasses
from typing import Callable, FrozenSet, Optional, Sequence, Tuple

from tf_ipu_dp import cli
from tf_ipu_dp.config import train_flags
from tf_ipu_dp.config.train_flags import TrainConfig
from tf_ipu_dp.datasets.info import OWN, DatasetInfo
from tf_ipu_dp.planning import errors, rules
from tf_ipu_dp.planning.architectures import ModelPlan
from tf_ipu_dp.planning.errors import PlanError, Problem
from tf_ipu_dp.planning.recipe import Recipe, plan_recipe
from tf_ipu_dp.planning.steps import Batch, Epochs, KerasSteps, Validation, plan_keras_steps, plan_validation
from tf_ipu_dp.planning.topology import LaunchedTopology, Replica, Topology, accumulation_unit, ipus_per_replica

# The parts of a plan are exported here too, so that its readers need one import.
__all__ = [
    "Batch",
    "Epochs",
    "KerasSteps",
    "LaunchedTopology",
    "ModelPlan",
    "Recipe",
    "Replica",
    "RunPlan",
    "Topology",
    "Validation",
    "accumulation_unit",
    "ipus_per_replica",
    "plan_run",
]


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """How one run is laid out. It is the same on every instance."""

    dataset: DatasetInfo
    model: ModelPlan
    topology: Topology
    batch: Batch
    epochs: Epochs
    validation: Validation
    keras: KerasSteps
    recipe: Recipe
    checkpoint_every: int  # updates
    log_every: int  # updates
    augment: str
    notes: Tuple[str, ...]  # combinations of flags that work, but not as one would expect


def plan_run(
    config: TrainConfig,
    dataset: DatasetInfo,
    launched: Optional[LaunchedTopology] = None,
    resolve: Callable[[TrainConfig], TrainConfig] = lambda config: config,
    resumable: Sequence[int] = (),
) -> RunPlan:
    """Returns the plan of a run, or raises PlanError with every problem that its flags have.

    `resolve` sets what the flags leave open and a launcher or a saved run decides, and raises UsageError for flags that
    contradict them. It is applied to suggested flags as well, as if they had been typed. `resumable` are the steps that
    the run has checkpoints of.
    """
    typed, config = config, resolve(config)
    examined = rules.examine(config, dataset, launched, resumable)
    topology, model, batch, epochs = examined.topology, examined.model, examined.batch, examined.epochs
    if examined.broken:

        def try_fix(fix: errors.Fix) -> Optional[FrozenSet[str]]:
            """Returns the rules that are broken with a fix; None if it cannot be typed here."""
            try:
                changed = resolve(train_flags.check_values(fix.apply(typed), dict(fix.changes)))
            except cli.UsageError:
                return None
            return frozenset(rules.examine(changed, dataset, launched).broken_names())

        raise PlanError([_try_fixes(broken, examined, config, try_fix) for broken in examined.broken])
    assert topology and model and batch and epochs  # each is None only if a rule is broken
    keras = plan_keras_steps(dataset, topology, batch, epochs)
    return RunPlan(
        dataset=dataset,
        model=model,
        topology=topology,
        batch=batch,
        epochs=epochs,
        validation=plan_validation(dataset, topology, batch, keras),
        keras=keras,
        recipe=plan_recipe(config, batch, epochs),
        checkpoint_every=config.checkpoint_every or epochs.updates_per_epoch,
        log_every=config.log_every or max(epochs.updates_per_epoch // 10, 1),
        augment=dataset.augment if config.augment == "auto" else config.augment,
        notes=(*_notes_of_data(config, dataset), *_make_notes(config, model, epochs)),
    )


def _try_fixes(
    broken: rules.BrokenRule,
    examined: rules.Examination,
    config: TrainConfig,
    try_fix: Callable[[errors.Fix], Optional[FrozenSet[str]]],
) -> Problem:
    """Returns a problem with the fixes that solve it; those that cause no other problem are preferred."""
    before = examined.broken_names()
    solving, clean = [], []
    for fix in errors.distinct_fixes(broken.suggest(), config):
        after = try_fix(fix)
        if after is not None and broken.name not in after:
            solving.append(fix)
            if after <= before:
                clean.append(fix)
    return Problem(broken.name, broken.sentence, tuple(clean or solving))


def _notes_of_data(config: TrainConfig, dataset: DatasetInfo) -> Tuple[str, ...]:
    if dataset.origin != OWN or not dataset.streamed:
        return ()
    return (
        f"--dataset={config.dataset} streams its samples: their order depends on the number of instances, a resumed "
        "run reads past the samples that it has seen, and both are exact only if the stream repeats itself.",
    )


def _make_notes(config: TrainConfig, model: ModelPlan, epochs: Epochs) -> Tuple[str, ...]:
    """Returns a sentence for each combination of flags that works but not as one would expect."""
    notes = []
    own = model.architecture.own
    if own and len(model.stages) > 1 and own.has_norm:
        notes.append(
            f"{config.model} has batch norm: in a pipeline the SDK does not keep its moving statistics, which makes "
            "validation worse. Use another normalisation where the function's argument norm is 'group'."
        )
    if own and own.is_compiled:
        notes.append(
            f"{config.model} returns a model that is compiled, which has no effect: the optimizer is "
            f"--optimizer={config.optimizer}, loss and metrics are those of tf_ipu_dp.Task(model, loss=...)."
        )
    if own and own.has_own_loss and config.label_smoothing:
        notes.append(f"--label_smoothing={config.label_smoothing:g} has no effect: {config.model} has its own loss.")
    if not own and len(model.stages) > 1 and config.norm == "batch":
        notes.append(
            "--norm=batch: in a pipeline the SDK does not keep batch norm's moving statistics, which makes validation "
            "worse. Use --norm=group."
        )
    if config.lr_drop_epochs is not None and config.lr_schedule != "step":
        notes.append(f"--lr_drop_epochs has no effect with --lr_schedule={config.lr_schedule}. Use --lr_schedule=step.")
    if config.warmup_epochs and config.warmup_epochs * epochs.updates_per_epoch > epochs.updates:
        notes.append(
            f"--warmup_epochs={config.warmup_epochs:g} is longer than the run: the learning rate never reaches its "
            "highest value."
        )
    return tuple(notes)
