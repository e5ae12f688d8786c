"""The sets that need no tensorflow-datasets: one that is shipped with the package, and synthetic ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Tuple

import numpy as np

from tf_ipu_dp.datasets.info import DatasetInfo
from tf_ipu_dp.datasets.memory import InMemorySplit

_MAX_SYNTHETIC_BYTES = 256 * 2**20


def open_shipped(facts: DatasetInfo) -> Tuple[InMemorySplit, InMemorySplit]:
    """Returns the training and the validation split of a set in a file beside this one."""
    with np.load(Path(__file__).parent / f"{facts.name}.npz") as arrays:
        train, validation = (
            InMemorySplit.from_arrays(arrays[f"{split}_images"][..., None], arrays[f"{split}_labels"])
            for split in ("train", "test")
        )
    return train, validation


def make_synthetic(facts: DatasetInfo, seed: int) -> Tuple[InMemorySplit, InMemorySplit]:
    """Returns splits that a model can learn: a coarse pattern for each class, with noise of the same strength.

    Large images repeat, to stay within memory.
    """
    random = np.random.RandomState([seed, 0x5EED])
    shape = (facts.height, facts.width, facts.channels)
    coarse: Any = random.randint(0, 256, (facts.classes, 4, 4, facts.channels)).astype(np.uint8)
    rows, columns = (np.arange(size) * 4 // size for size in shape[:2])
    patterns = np.ascontiguousarray(coarse[:, rows][:, :, columns] // 2)
    most = _MAX_SYNTHETIC_BYTES // int(np.prod(shape)) // facts.classes * facts.classes

    def make(samples: int) -> InMemorySplit:
        labels = np.arange(min(samples, max(most, facts.classes))) % facts.classes
        images: Any = np.empty((len(labels), *shape), np.uint8)
        for first in range(0, len(labels), 64):  # few enough to fit the CPU's caches
            some = images[first : first + 64]
            noise: Any = np.frombuffer(random.bytes(some.size), np.uint8).reshape(some.shape)
            np.add(patterns.take(labels[first : first + 64], axis=0), noise >> 1, out=some)
        return InMemorySplit.from_arrays(images, labels)

    return make(facts.train_samples), make(facts.validation_samples)
