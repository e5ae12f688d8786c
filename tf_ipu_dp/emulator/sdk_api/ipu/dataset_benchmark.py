"""`tensorflow.python.ipu.dataset_benchmark`: measures how fast a dataset produces elements, without a device."""

from __future__ import annotations

import json
import numbers
import time
from typing import Any, Dict, List

import numpy as np
import tensorflow as tf

from tf_ipu_dp.emulator.sdk_api.ipu import ipu_infeed_queue

_GB = 1e9


def dataset_benchmark(
    dataset: Any,
    number_of_epochs: int,
    elements_per_epochs: int,
    print_stats: bool = True,
    apply_debug_options: bool = True,
    do_memcpy: bool = True,
) -> Any:
    """Returns the measurements as JSON text in a string tensor of shape [1]; `epochs` lists one object for each epoch.

    Like the SDK, it returns an exception for bad arguments instead of raising it. Reading past the end of the dataset
    raises `OutOfRangeError`.
    """
    del apply_debug_options  # synthetic data, which the emulator does not have
    for name, value in (("number_of_epochs", number_of_epochs), ("elements_per_epochs", elements_per_epochs)):
        if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < 1:
            return ValueError(f"{name} must be an int of 1 or more, not {value!r}.")
    if not isinstance(dataset, (tf.data.Dataset, tf.compat.v1.data.Dataset)):
        return TypeError(f"dataset must be a tf.data.Dataset, not {type(dataset).__name__}.")
    for spec in tf.nest.flatten(dataset.element_spec):
        if spec.shape.rank is not None and 0 in spec.shape.as_list():
            raise tf.errors.InvalidArgumentError(None, None, f"A feed cannot carry the empty shape {spec.shape}.")
    structure = dataset.element_spec

    def measure(elements: Any) -> Any:
        epochs = _measure(elements, int(number_of_epochs), int(elements_per_epochs), do_memcpy)
        if print_stats:
            for number, epoch in enumerate(epochs, start=1):
                print(f"Epoch {number}: {epoch['elements_per_second']:.1f} elements/s, {epoch['bandwidth']:.3f} GB/s")
        return tf.constant([json.dumps({"epochs": epochs})])

    if tf.executing_eagerly():
        try:
            return measure(dataset)
        except StopIteration:
            message = f"The dataset has fewer than {number_of_epochs} x {elements_per_epochs} elements."
            raise tf.errors.OutOfRangeError(None, None, message) from None
    # A graph turns StopIteration into the same error.
    text = tf.py_function(
        lambda variant: measure(tf.data.experimental.from_variant(variant, structure)),
        [tf.data.experimental.to_variant(dataset)],
        tf.string,
    )
    text.set_shape([1])
    return text


def infeed_benchmark(
    infeed_queue: Any,
    number_of_epochs: int,
    elements_per_epochs: int,
    print_stats: bool = True,
    do_memcpy: bool = True,
) -> Any:
    """Measures the dataset of an infeed queue; see `dataset_benchmark`."""
    if not isinstance(infeed_queue, ipu_infeed_queue.IPUInfeedQueue):
        return TypeError(f"infeed_queue must be an IPUInfeedQueue, not {type(infeed_queue).__name__}.")
    return dataset_benchmark(
        infeed_queue._dataset, number_of_epochs, elements_per_epochs, print_stats, do_memcpy=do_memcpy
    )


def _measure(dataset: Any, number_of_epochs: int, elements: int, copy: bool) -> List[Dict[str, float]]:
    with ipu_infeed_queue.on_host():
        iterator = iter(dataset)
    epochs = []
    for _ in range(number_of_epochs):
        processed_bytes = 0
        begin = time.perf_counter()
        for _ in range(elements):
            for tensor in tf.nest.flatten(next(iterator)):
                value = tensor.numpy()
                processed_bytes += np.copy(value).nbytes if copy else np.asarray(value).nbytes
        elapsed_s = time.perf_counter() - begin
        epochs.append(
            {
                "elements_processed": float(elements),
                "total_bytes_processed": float(processed_bytes),
                "time_elapsed": elapsed_s,
                "elements_per_second": elements / elapsed_s,
                "bandwidth": processed_bytes / _GB / elapsed_s,
            }
        )
    return epochs


__all__ = ["dataset_benchmark", "infeed_benchmark"]
