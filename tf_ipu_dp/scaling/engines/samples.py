"""The training samples that all engines share, as arrays in files, and which of them an update takes. numpy only.

Update u takes the positions u*G ... (u+1)*G - 1 of the epoch's order, of which each process takes its own part, as in
`tf_ipu_dp.train`. Images are normalised in the same way too, and never augmented.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from tf_ipu_dp import cli
from tf_ipu_dp.datasets import lookup
from tf_ipu_dp.datasets.info import DatasetInfo
from tf_ipu_dp.datasets.order import permutation
from tf_ipu_dp.planning import architectures
from tf_ipu_dp.planning.architectures import Architecture
from tf_ipu_dp.scaling.engines.protocol import Order

_IMAGES, _LABELS = "images.npy", "labels.npy"


@dataclasses.dataclass(frozen=True)
class Samples:
    """A training split. Sample i is row i modulo the number of rows; a normalised pixel is pixel * factor + offset."""

    images: Any  # uint8 [rows, height, width, channels]
    labels: Any  # int64 [rows]
    factor: Any  # float32 [channels]
    offset: Any  # float32 [channels]


def find_dataset(order: Order) -> DatasetInfo:
    """Returns the facts of the order's data set; UsageError if its training samples cannot be shared in memory."""
    facts = lookup.find(order.dataset, order.data_dir, order.image_size)
    if facts.streamed or facts.made_on_device:
        kind = "streamed from files" if facts.streamed else "made on the device"
        raise cli.UsageError(
            f"--dataset={facts.name} is {kind}, and engines other than tf_ipu_dp take their samples from memory. "
            f"Use --dataset=synthetic --image_size={facts.height}, or leave those engines out."
        )
    return facts


def describe_model(order: Order) -> Architecture:
    """Returns the order's model for the images of its data set."""
    facts = find_dataset(order)
    return architectures.describe(
        order.model,
        height=facts.height,
        width=facts.width,
        channels=facts.channels,
        classes=facts.classes,
        norm=order.norm,
    )


def write_arrays(images: Any, labels: Any, folder: Path) -> None:
    """Writes the arrays of a training split into a folder."""
    np.save(folder / _IMAGES, np.asarray(images, np.uint8))
    np.save(folder / _LABELS, np.asarray(labels, np.int64))


def load(order: Order) -> Samples:
    """Returns the samples in the order's folder."""
    facts, folder = find_dataset(order), Path(order.samples)
    mean, deviation = np.array(facts.mean), np.array(facts.deviation)
    return Samples(
        np.load(folder / _IMAGES),
        np.load(folder / _LABELS),
        (1 / (255 * deviation)).astype(np.float32),
        (-mean / deviation).astype(np.float32),
    )


def rows_of_updates(order: Order, rank: int, rows: int) -> Any:
    """Returns which rows a process takes in all updates, warm-up included: [updates, samples of the process]."""
    global_batch = order.batch_size * order.processes
    samples = find_dataset(order).train_samples
    per_epoch = samples // global_batch
    if not per_epoch:
        raise cli.UsageError(
            f"--dataset={order.dataset} has {samples} training samples, fewer than one global batch of {global_batch}. "
            f"Use a global batch of at most {samples}."
        )
    updates = order.warmup_updates + order.updates
    epochs = [
        permutation(order.seed, epoch, samples)[: per_epoch * global_batch] for epoch in range(-(-updates // per_epoch))
    ]
    by_process = np.concatenate(epochs).reshape(-1, order.processes, order.batch_size)
    return by_process[:updates, rank] % rows
