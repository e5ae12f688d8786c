"""Writes a training split as arrays for the programs of other engines: `... export_samples ORDER FOLDER`.

A process of its own, because it imports TensorFlow: engines that do without would carry it along.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Sequence

from tf_ipu_dp import cli
from tf_ipu_dp.scaling.engines import order_files, samples

_IMAGES_AT_ONCE = 256


def main(words: Sequence[str]) -> int:
    """Reads the data set of an order and writes its training split into a folder; returns the exit code."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    order_path, folder = map(Path, words)
    order = order_files.read_order(order_path)

    def export() -> int:
        import numpy as np

        from tf_ipu_dp.datasets import augment, sources
        from tf_ipu_dp.datasets.memory import InMemorySplit

        facts = samples.find_dataset(order)
        split = sources.open_source(facts, data_dir=order.data_dir, seed=order.seed).train
        assert isinstance(split, InMemorySplit)  # find_dataset refuses the others
        starts = range(0, split.labels.shape[0], _IMAGES_AT_ONCE)
        parts = [split.images[start : start + _IMAGES_AT_ONCE] for start in starts]
        resized = [augment.resize(part, facts.height, facts.width).numpy() for part in parts]
        samples.write_arrays(np.concatenate(resized), split.labels.numpy(), folder)
        return 0

    return cli.run("export_samples", export, sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
