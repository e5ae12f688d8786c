"""Facts of a training recipe that the flags, the planner and the trainer share: optimizers and dependent defaults.

The help texts quote these numbers and the planner calculates with them, so each of them is written here and nowhere
else. Pure.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """What is known of an optimizer before TensorFlow is imported; `training.optimizers` has its class."""

    learning_rate: float  # default of --learning_rate
    slots: int  # further values that it keeps for each weight
    has_momentum: bool  # whether it takes --momentum


OPTIMIZERS = {
    "sgd": Optimizer(learning_rate=0.05, slots=1, has_momentum=True),
    "adam": Optimizer(learning_rate=0.001, slots=2, has_momentum=False),
    "lars": Optimizer(learning_rate=1.0, slots=1, has_momentum=True),
}
# Default of --loss_scaling where gradients have 16 bits.
STATIC_LOSS_SCALE = 128.0
# Default of --warmup_epochs: so many epochs, but no larger share of the run than this.
WARMUP_EPOCHS = 0.5
MOST_WARMUP_SHARE = 0.1
# Default of --lr_drop_epochs: shares of the run after which --lr_schedule=step drops.
LR_DROP_SHARES = (0.5, 0.75)
