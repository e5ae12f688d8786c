"""Orders for the programs of other engines, and their cells."""

from __future__ import annotations

import dataclasses

from tf_ipu_dp.scaling.engines.protocol import Order
from tf_ipu_dp.scaling.records import Cell

ORDER = Order(
    model="mlp", norm="batch", dataset="synthetic", data_dir=None, image_size=None, batch_size=32, processes=1,
    warmup_updates=2, updates=4, learning_rate=0.05, momentum=0.9, weight_decay=0.0, seed=1, threads=1,
)  # fmt: skip


def make(**changes):
    return dataclasses.replace(ORDER, **changes)


def cell_of(engine, order):
    size = order.processes
    return Cell(f"{engine}-{size}", engine, size, size, size, 1, order.batch_size, 1, order.batch_size * size, ())
