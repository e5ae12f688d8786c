"""The data of `fit`, `evaluate` and `predict` as micro batches for the local replicas, and the SDK's rules for them."""

from __future__ import annotations

import collections.abc
import dataclasses
import logging
import math
import sys
from typing import Any, Callable, Optional

import numpy as np
import tensorflow as tf

from tf_ipu_dp.emulator.keras import pipelines
from tf_ipu_dp.emulator.sdk_api.ipu import ipu_infeed_queue


@dataclasses.dataclass(frozen=True)
class ReplicaData:
    """A dataset of micro batches for the local replicas."""

    dataset: Any
    steps: int  # of each replica
    total: int  # of all replicas


def shard_over_replicas(
    model: Any,
    x: Any,
    y: Any,
    sample_weight: Any,
    batch_size: Any,
    steps: Any,
    shuffle: Any = False,
    class_weight: Any = None,
) -> ReplicaData:
    """Converts the data of `fit`, `evaluate` or `predict` to micro batches that the local replicas read in turn.

    `steps` counts the micro batches of all local replicas. It may be a tensor, and so may `batch_size`.
    """
    adapters = data_adapter()
    batch_size, steps = (None if given is None else int(given) for given in (batch_size, steps))
    dataset = _as_dataset(adapters, x, y, sample_weight, batch_size, steps, shuffle)
    if class_weight:
        dataset = dataset.map(adapters._make_class_weight_map_fn(class_weight))
    if any(spec.dtype == tf.float64 for spec in tf.nest.flatten(dataset.element_spec)):
        dataset = _map(dataset, _to_float32)
    ipu_infeed_queue.check_dataset(dataset)
    pipelines.prepare(model, input_specs(dataset))
    replicas = local_replicas(model)

    length = int(dataset.cardinality().numpy())
    if steps is None and length == tf.data.INFINITE_CARDINALITY:
        raise ValueError("The dataset has no end: give the number of steps.")
    if steps is None and length == tf.data.UNKNOWN_CARDINALITY:
        raise ValueError("The length of the dataset is not known: give the number of steps.")
    total = length if steps is None else steps
    per_replica, rest = divmod(total, replicas)
    if not per_replica:
        raise ValueError(f"{total} steps are not enough for one step on each of {replicas} replicas.")
    if rest and steps is None:
        logging.getLogger("tensorflow").warning(
            "The last %d of %d micro batches are dropped: they do not fill a step of %d replicas.",
            rest,
            total,
            replicas,
        )
    if steps is not None and 0 <= length < per_replica:
        raise ValueError(f"The dataset has {length} elements, which is not enough for {per_replica} steps per replica.")
    per_execution = min(steps_per_execution(model), per_replica)
    if per_replica % per_execution:
        raise ValueError(f"{per_replica} steps per replica are not a multiple of steps_per_execution={per_execution}.")
    if total == length:
        # So that every epoch starts with the first element: Keras counts steps per replica and would continue.
        dataset = dataset.take(per_replica * replicas).repeat()
    return ReplicaData(dataset, per_replica, total)


def local_replicas(model: Any) -> int:
    """Returns how many replicas of the model this process's device holds."""
    ipus, width = model._distribution_strategy.ipus(), pipelines.ipus_per_replica(model)
    if ipus % width:
        raise tf.errors.InternalError(
            None, None, f"The device's {ipus} IPUs are not a multiple of the {width} that the pipeline needs."
        )
    return ipus // width


def steps_per_execution(model: Any) -> int:
    """Returns the steps per replica in one execution, as set by `compile`."""
    variable = model._steps_per_execution
    return 1 if variable is None else int(variable.numpy())


def input_specs(dataset: Any) -> Any:
    """Returns the specs of what a model is called with."""
    element = dataset.element_spec
    return element[0] if isinstance(element, tuple) else element


def data_adapter() -> Any:
    """Returns Keras' module of data adapters. Its place depends on the release."""
    return sys.modules[tf.keras.Model.__module__].data_adapter


def _as_dataset(
    adapters: Any, x: Any, y: Any, sample_weight: Any, batch_size: Optional[int], steps: Optional[int], shuffle: Any
) -> Any:
    if isinstance(x, tf.data.Dataset):
        return x
    if isinstance(x, (collections.abc.Iterator, tf.keras.utils.Sequence)) or callable(x):
        raise ValueError(
            "Python generators and Sequences cannot be used with an IPU strategy: use a tf.data.Dataset, whose length "
            "and shapes are known."
        )
    kind = adapters.select_data_adapter(x, y)
    if kind is adapters.ListsOfScalarsDataAdapter:
        x, y, sample_weight = (None if part is None else np.asarray(part) for part in (x, y, sample_weight))
        kind = adapters.select_data_adapter(x, y)
    samples = {int(tensor.shape[0]) for tensor in tf.nest.flatten((x, y, sample_weight)) if tensor is not None}
    # As Keras derives it.
    batch = batch_size or (math.ceil(max(samples) / steps) if steps else 32)
    if len(samples) == 1 and next(iter(samples)) % batch:
        raise ValueError(
            f"{next(iter(samples))} samples do not fill batches of {batch}: the last batch would be a partial one."
        )
    adapter = kind(
        x, y, batch_size=batch, epochs=1, sample_weights=sample_weight, shuffle=shuffle,
        distribution_strategy=tf.distribute.get_strategy(),
    )  # fmt: skip
    dataset = adapter.get_dataset()
    dataset = _map(dataset, lambda tensor: tf.ensure_shape(tensor, [batch, *tensor.shape[1:]]))
    count = next(iter(samples)) // batch
    return dataset.apply(tf.data.experimental.assert_cardinality(count))


def _map(dataset: Any, change: Callable[[tf.Tensor], tf.Tensor]) -> Any:
    """Changes every tensor of every element. `Dataset.map` passes the parts of a tuple as separate arguments."""
    is_tuple = isinstance(dataset.element_spec, tuple)
    return dataset.map(lambda *element: tf.nest.map_structure(change, element if is_tuple else element[0]))


def _to_float32(tensor: tf.Tensor) -> tf.Tensor:
    return tf.cast(tensor, tf.float32) if tensor.dtype == tf.float64 else tensor
