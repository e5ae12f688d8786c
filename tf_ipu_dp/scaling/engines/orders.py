"""What programs of other engines are asked to train, from the flags of train. Reads how many cores there are."""

from __future__ import annotations

import os

from tf_ipu_dp.config.train_flags import TrainConfig
from tf_ipu_dp.scaling.engines.protocol import Order
from tf_ipu_dp.scaling.modes import Length


def make_order(
    config: TrainConfig, *, batch_size: int, processes: int, on_this_machine: int, length: Length, learning_rate: float
) -> Order:
    """Returns the order of a job; `on_this_machine` are the processes that divide the cores of one machine."""
    return Order(
        model=config.model,
        norm=config.norm or "batch",
        dataset=config.dataset,
        data_dir=config.data_dir,
        image_size=config.image_size,
        batch_size=batch_size,
        processes=processes,
        warmup_updates=length.warmup,
        updates=length.updates,
        learning_rate=learning_rate,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        seed=config.seed,
        threads=max(count_cores() // on_this_machine, 1),
        l2=config.l2,
        label_smoothing=config.label_smoothing,
    )


def count_cores() -> int:
    """Returns the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
