"""Opens data sets, and makes the micro batches of one instance.

Order and augmentation of the samples do not depend on the number of instances and replicas. That is exact for sets in
memory; for a streamed set it holds within the files of one instance.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Dict, Optional, Union

import numpy as np
import tensorflow as tf

from tf_ipu_dp import cli
from tf_ipu_dp.config.train_flags import TrainConfig
from tf_ipu_dp.datasets import built_in, download, lookup, own_data, tfrecords
from tf_ipu_dp.datasets.augment import Normaliser
from tf_ipu_dp.datasets.info import SHIPPED, SYNTHETIC, DatasetInfo
from tf_ipu_dp.datasets.memory import ArraySplit, FloatCaster, IndexedSplit, InMemorySplit
from tf_ipu_dp.datasets.order import TrainingShard
from tf_ipu_dp.datasets.streams import StreamSplit
from tf_ipu_dp.datasets.tfrecords import TFRecordSplit
from tf_ipu_dp.planning.plan import RunPlan


@dataclasses.dataclass(frozen=True)
class Source:
    """An opened data set."""

    facts: DatasetInfo
    train: Union[InMemorySplit, ArraySplit, StreamSplit, TFRecordSplit]
    validation: Union[InMemorySplit, ArraySplit, StreamSplit, TFRecordSplit]


@dataclasses.dataclass(frozen=True)
class InputSpeed:
    """How fast an input pipeline produces micro batches while nothing else computes."""

    samples: int
    elapsed_s: float
    samples_per_s: float
    bytes_per_s: float


def open_own(facts: DatasetInfo, cfg: TrainConfig) -> Source:
    """Opens the data set of a function or path of the user, which may have other facts than those known before."""
    found = own_data.load(cfg)
    return Source(dataclasses.replace(found.facts, own_model=facts.own_model), found.train, found.validation)


def open_source(facts: DatasetInfo, *, data_dir: Optional[str], seed: int) -> Source:
    """Opens a data set: loads it into memory, or finds its files if it is streamed.

    A known set that is not prepared is downloaded if the network responds within seconds; otherwise a UsageError names
    the command that prepares it. `seed` is for synthetic images.
    """
    if facts.origin == SHIPPED:
        return Source(facts, *built_in.open_shipped(facts))
    if facts.origin == SYNTHETIC:
        return Source(facts, *built_in.make_synthetic(facts, seed))
    prepared = lookup.read_prepared(facts.name, data_dir) or download.download(facts.name, data_dir)
    found, planned = ((it.train_samples, it.validation_samples, it.channels, it.classes) for it in (prepared, facts))
    if found != planned:
        raise cli.UsageError(
            f"--dataset={facts.name} in {prepared.folder} has other training images, validation images, channels and "
            f"classes ({found}) than the run was planned with ({planned}). Start the run again."
        )
    train, validation = tfrecords.open_splits(facts.name, prepared)
    if facts.streamed:
        return Source(facts, train, validation)
    channels = facts.channels
    return Source(facts, train.load(facts.train_samples, channels), validation.load(facts.validation_samples, channels))


def make_training(  # noqa: PLR0913
    source: Source,
    run: RunPlan,
    *,
    instance: int,
    first_update: int,
    last_update: int,
    seed: int,
    augment: str,
    eight_bit_io: bool,
    prefetch: bool,
    deterministic: bool,
    dtype: str,
) -> Any:
    """Returns the micro batches (inputs, targets) of one instance for some updates, the last one exclusive.

    Weights of the samples are a third member, where there are any. Updates are counted from the start of the run.
    `deterministic` matters to streamed sets only; those in memory are always in order.
    """
    augment = source.facts.augment if augment == "auto" else augment
    shard = TrainingShard(run, instance, first_update, last_update)
    normalise = _make_normaliser(source.facts, eight_bit_io, dtype)
    threads = _threads(prefetch, deterministic or isinstance(source.train, IndexedSplit))
    dataset = source.train.make_training(shard, seed, augment, normalise, threads)
    return _finish_pipeline(dataset, shard.micro_batches, prefetch)


def make_validation(
    source: Source, run: RunPlan, *, instance: int, eight_bit_io: bool, prefetch: bool, dtype: str
) -> Any:
    """Returns the micro batches (inputs, targets) of an instance's part of the validation, in order.

    The slots after the last sample are padding, samples of zeros, which the caller must ignore.
    """
    normalise = _make_normaliser(source.facts, eight_bit_io, dtype)
    dataset = source.validation.make_validation(run, instance, normalise, _threads(prefetch))
    micro_batches = run.validation.slots_per_instance // run.batch.micro_batch_size
    return _finish_pipeline(dataset, micro_batches, prefetch)


def targets_of_validation(source: Source, run: RunPlan, instance: int) -> Any:
    """Returns the targets of an instance's part of the validation, without padding: labels are int32.

    They belong to the first predictions made for `make_validation`.
    """
    return source.validation.read_targets(run.validation.shard(instance))


def weights_of_validation(source: Source, run: RunPlan, instance: int) -> Optional[Any]:
    """Returns the weights of an instance's part of the validation, without padding; None if it has none."""
    return source.validation.read_weights(run.validation.shard(instance))


def fingerprint(source: Source) -> str:
    """Returns a checksum of the data: of the samples in memory, or of the names and sizes of files."""
    try:
        return f"{source.validation.checksum(source.train.checksum(0)):08x}"
    except tf.errors.OpError as error:
        raise cli.UsageError(
            f"--dataset={source.facts.name} is not complete on this host ({error.message}). Prepare it again."
        ) from error


def measure(dataset: Any, ipu: Any, *, elements: int, samples_per_element: int) -> InputSpeed:
    """Returns the speed of a pipeline over some elements, by the SDK's benchmark, after as many to warm up."""
    result = ipu.dataset_benchmark.dataset_benchmark(
        dataset.repeat(), number_of_epochs=2, elements_per_epochs=elements, print_stats=False
    )
    if isinstance(result, Exception):  # the SDK returns errors in the arguments
        raise result
    numbers = json.loads(np.ravel(result.numpy())[0])["epochs"][-1]
    samples, elapsed_s = elements * samples_per_element, float(numbers["time_elapsed"])
    return InputSpeed(samples, elapsed_s, samples / elapsed_s, float(numbers["total_bytes_processed"]) / elapsed_s)


def _make_normaliser(facts: DatasetInfo, eight_bit_io: bool, dtype: str) -> Union[Normaliser, FloatCaster]:
    return Normaliser(facts, eight_bit_io, dtype) if facts.inputs is None else FloatCaster(facts.inputs, dtype)


def _threads(prefetch: bool, deterministic: bool = True) -> Dict[str, Any]:
    """Returns the threading arguments for the methods of tf.data."""
    return {"num_parallel_calls": tf.data.AUTOTUNE, "deterministic": deterministic} if prefetch else {}


def _finish_pipeline(dataset: Any, micro_batches: int, prefetch: bool) -> Any:
    """Returns a pipeline of known length that Keras does not shard again, with prefetching if requested."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    dataset = dataset.apply(tf.data.experimental.assert_cardinality(micro_batches)).with_options(options)
    return dataset.prefetch(tf.data.AUTOTUNE) if prefetch else dataset
