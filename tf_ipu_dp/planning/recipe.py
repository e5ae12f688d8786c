"""How the weights change: the flags of the recipe, resolved into numbers for one job. Pure."""

from __future__ import annotations

import dataclasses
import math
from typing import Optional, Tuple

from tf_ipu_dp.config.recipe import LR_DROP_SHARES, MAX_WARMUP_SHARE, OPTIMIZERS, STATIC_LOSS_SCALE, WARMUP_EPOCHS
from tf_ipu_dp.config.train_flags import RecipeFlags, TrainConfig
from tf_ipu_dp.config.values import LossScaling
from tf_ipu_dp.planning.steps import Batch, Epochs


@dataclasses.dataclass(frozen=True)
class Recipe(RecipeFlags):
    """How the weights change: flags as they are, and numbers that depend on the job. Lengths are in weight updates."""

    learning_rate: float  # the highest, after --lr_scaling
    schedule: str  # constant, step, cosine or polynomial
    warmup_updates: int  # updates in which the rate rises from 0 to the highest
    updates: int  # of the whole run: where cosine and polynomial reach 0
    drops: Tuple[int, ...]  # updates at which --lr_schedule=step drops to a tenth
    loss_scale: Optional[float]  # 1: none; None: dynamic


def plan_recipe(config: TrainConfig, batch: Batch, epochs: Epochs) -> Recipe:
    """Returns the recipe of a run, with the defaults that depend on the batch, the length and other flags."""
    ratio = batch.global_batch_size / config.lr_base_batch
    factor = {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[config.lr_scaling]
    rate = OPTIMIZERS[config.optimizer].learning_rate if config.learning_rate is None else config.learning_rate
    per_epoch, updates = epochs.updates_per_epoch, epochs.updates
    if config.warmup_epochs is None:
        warmup = min(round(WARMUP_EPOCHS * per_epoch), int(MAX_WARMUP_SHARE * updates))
    else:
        warmup = min(round(config.warmup_epochs * per_epoch), updates)
    if config.lr_drop_epochs is None:
        drops = tuple(round(share * updates) for share in LR_DROP_SHARES)
    else:
        drops = tuple(round(epoch * per_epoch) for epoch in config.lr_drop_epochs)
    scaling = config.loss_scaling or LossScaling(1.0 if config.precision == "32.32" else STATIC_LOSS_SCALE)
    return Recipe(
        **{field.name: getattr(config, field.name) for field in dataclasses.fields(RecipeFlags)},
        learning_rate=rate * factor,
        schedule=config.lr_schedule,
        warmup_updates=warmup,
        updates=updates,
        drops=drops if config.lr_schedule == "step" else (),
        loss_scale=scaling.factor,
    )
