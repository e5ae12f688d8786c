"""The data sets that are known by name, and what the planner needs to know of one. Pure.

A new set of tensorflow-datasets is a row in `DATASETS`.
"""

from __future__ import annotations

import dataclasses
from typing import Tuple

# Where the samples come from.
TFDS = "tfds"  # the files of tensorflow-datasets
SHIPPED = "shipped"  # a file of this package, named like the set
SYNTHETIC = "synthetic"  # made from the seed

# Height and width of a set whose images differ, where --image_size says nothing else.
SIZE_WHERE_IMAGES_DIFFER = 224


@dataclasses.dataclass(frozen=True)
class DatasetInfo:
    """What the planner needs to know about a data set."""

    name: str
    train_samples: int
    validation_samples: int
    height: int
    width: int
    channels: int
    classes: int
    # Per channel, of pixels from 0 to 1: images are normalised to mean 0 and deviation 1.
    mean: Tuple[float, ...] = ()
    deviation: Tuple[float, ...] = ()
    # Read from files while training instead of being kept in memory; height and width are then what is cut out.
    streamed: bool = False
    augment: str = "none"  # what --augment=auto means for the set
    origin: str = TFDS
    downloadable: bool = True  # whether tensorflow-datasets can fetch it by itself
    made_on_device: bool = False  # by the SDK where it can; nothing then travels from the host


_CIFAR = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_SVHN = ((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970))
_SYNTHETIC = ((0.5,) * 3, (0.25,) * 3)

# Validation is the test split where a set has one, and ImageNet's validation split.
DATASETS = {
    facts.name: facts
    for facts in (
        DatasetInfo("fashion_mini", 8_192, 2_048, 28, 28, 1, 10, (0.2860,), (0.3530,), origin=SHIPPED),
        DatasetInfo("mnist", 60_000, 10_000, 28, 28, 1, 10, (0.1307,), (0.3081,)),
        DatasetInfo("fashion_mnist", 60_000, 10_000, 28, 28, 1, 10, (0.2860,), (0.3530,)),
        DatasetInfo("cifar10", 50_000, 10_000, 32, 32, 3, 10, *_CIFAR, augment="crop_flip"),
        DatasetInfo("cifar100", 50_000, 10_000, 32, 32, 3, 100, *_CIFAR, augment="crop_flip"),
        DatasetInfo("svhn_cropped", 73_257, 26_032, 32, 32, 3, 10, *_SVHN, augment="crop"),
        # Its files are given out by hand only.
        DatasetInfo(
            "imagenet2012", 1_281_167, 50_000, 224, 224, 3, 1000, *_IMAGENET,
            streamed=True, augment="imagenet", downloadable=False,
        ),
        DatasetInfo("synthetic", 8_192, 2_048, 32, 32, 3, 10, *_SYNTHETIC, origin=SYNTHETIC),
        DatasetInfo(
            "synthetic_device", 8_192, 2_048, 32, 32, 3, 10, *_SYNTHETIC, origin=SYNTHETIC, made_on_device=True
        ),
    )
}  # fmt: skip
