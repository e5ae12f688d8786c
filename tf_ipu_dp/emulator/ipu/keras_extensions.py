"""`tensorflow.python.ipu.keras_extensions`: what both IPU strategies have in common for Keras."""

from __future__ import annotations


class KerasExtensions:
    """A strategy in whose scope Keras models get the IPU's methods."""

    enable_keras_extensions = True
    enable_dataset_iterators = True
