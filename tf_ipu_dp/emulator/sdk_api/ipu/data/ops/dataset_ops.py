"""`tensorflow.python.ipu.data.ops.dataset_ops`."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops


class BufferDataset(dataset_ops.UnaryUnchangedStructureDataset):  # type: ignore[misc]
    """The elements of a dataset that fill complete buffers of `buffer_size`; the remainder is dropped."""

    def __init__(self, input_dataset: Any, buffer_size: int) -> None:
        self._whole = input_dataset.window(buffer_size, drop_remainder=True).flat_map(_elements)
        length = tf.data.experimental.cardinality(input_dataset)
        if tf.executing_eagerly() and length.numpy() != tf.data.UNKNOWN_CARDINALITY:
            whole = length if length < 0 else length // buffer_size * buffer_size
            self._whole = self._whole.apply(tf.data.experimental.assert_cardinality(whole))
        super().__init__(input_dataset, self._whole._variant_tensor)


def _elements(*window: Any) -> Any:
    """Returns the elements of a window, which comes as a dataset in place of each tensor."""
    structure = window[0] if len(window) == 1 else window
    return structure if isinstance(structure, tf.data.Dataset) else tf.data.Dataset.zip(structure)


__all__ = ["BufferDataset"]
