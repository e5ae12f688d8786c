"""Facts of a training recipe that the flags, the planner and the trainer share: optimizers and dependent defaults.

The help texts quote these numbers and the planner calculates with them, so each is defined only here.
Pure.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """Facts of an optimizer that need no TensorFlow; its class is in `training.optimizers`."""

    learning_rate: float  # default of --learning_rate
    slots: int  # additional values stored for each weight
    has_momentum: bool  # whether it takes --momentum


OPTIMIZERS = {
    "sgd": Optimizer(learning_rate=0.05, slots=1, has_momentum=True),
    "adam": Optimizer(learning_rate=0.001, slots=2, has_momentum=False),
    "lars": Optimizer(learning_rate=1.0, slots=1, has_momentum=True),
}
# Default of --loss_scaling where gradients have 16 bits.
STATIC_LOSS_SCALE = 128.0
# Default of --warmup_epochs: this many epochs, but at most this share of the run.
WARMUP_EPOCHS = 0.5
MAX_WARMUP_SHARE = 0.1
# Default of --lr_drop_epochs: shares of the run after which --lr_schedule=step drops.
LR_DROP_SHARES = (0.5, 0.75)
