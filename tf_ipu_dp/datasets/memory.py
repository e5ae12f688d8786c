"""Splits that are kept in memory, as 8-bit images or other arrays, and the pipelines that gather samples by index."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
import zlib
from typing import Any, Callable, ClassVar, Dict, List, Optional, Tuple, TypeVar

import numpy as np
import tensorflow as tf

from tf_ipu_dp.datasets.augment import RANDOM_NUMBERS, augment_batch
from tf_ipu_dp.datasets.info import Structure, map_structure
from tf_ipu_dp.datasets.order import TrainingShard, random_numbers
from tf_ipu_dp.planning.plan import RunPlan

# Several small micro batches are prepared in one call: a call costs as much as about 30 images of 28 x 28.
_MAX_SAMPLES_PER_CALL = 256
_MAX_BYTES_PER_CALL = 4 * 2**20

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _without_autograph(function: _Function) -> _Function:
    """Prevents autograph from converting a function that has no branches on tensors: it would dominate the start."""
    unconverted: _Function = tf.autograph.experimental.do_not_convert(function)
    return unconverted


class IndexedSplit:
    """A split whose samples are gathered by their numbers, so that their order is exact on any layout."""

    epochs_per_dataset: ClassVar[int] = sys.maxsize  # their order is computed when an epoch begins

    def make_training(
        self, shard: TrainingShard, seed: int, augment: str, normalise: Any, threads: Dict[str, Any]
    ) -> Any:
        """Returns the micro batches (inputs, targets) of a shard, with weights as a third member if there are any."""
        size = shard.run.batch.micro_batch_size
        counts = {shard.micro_batches_in(epoch) for epoch in shard.epochs}
        group = _micro_batches_per_call(functools.reduce(math.gcd, counts), size, normalise.sample_bytes)
        numbers = RANDOM_NUMBERS[augment]

        def order_epoch(epoch: Any) -> Tuple[Any, Any]:
            samples = shard.samples_in(seed, int(epoch)).reshape(-1, group * size)
            return samples, random_numbers(seed, int(epoch), samples, numbers)

        @_without_autograph
        def list_groups(epoch: Any) -> Any:
            samples, random = tf.numpy_function(order_epoch, [epoch], [tf.int32, tf.float32])
            samples.set_shape([None, group * size])
            random.set_shape([None, group * size, numbers])
            return tf.data.Dataset.from_tensor_slices((samples, random))

        @_without_autograph
        def prepare(samples: Any, random: Any) -> Tuple[Any, ...]:
            return _split_into_micro_batches(self._gather_for_training(samples, random, augment, normalise), group)

        groups = tf.data.Dataset.range(shard.epochs.start, shard.epochs.stop).flat_map(list_groups)
        return groups.map(prepare, **threads).unbatch()

    def make_validation(self, run: RunPlan, instance: int, normalise: Any, threads: Dict[str, Any]) -> Any:
        """Returns the micro batches (inputs, targets) of an instance's part, then padding: samples of zeros."""
        size, slots = run.batch.micro_batch_size, run.validation.slots_per_instance
        part = run.validation.shard(instance)
        group = _micro_batches_per_call(slots // size, size, normalise.sample_bytes)
        samples: Any = np.full([slots], -1, np.int32)
        samples[: len(part)] = part

        @_without_autograph
        def prepare(samples: Any) -> Tuple[Any, ...]:
            return _split_into_micro_batches(self._gather_for_validation(samples, normalise), group)

        return tf.data.Dataset.from_tensor_slices(samples.reshape(-1, group * size)).map(prepare, **threads).unbatch()

    def _gather_for_training(self, samples: Any, random: Any, augment: str, normalise: Any) -> Tuple[Any, ...]:
        raise NotImplementedError

    def _gather_for_validation(self, samples: Any, normalise: Any) -> Tuple[Any, Any]:
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class InMemorySplit(IndexedSplit):
    """The images of a split in memory. Sample i is row i modulo the number of rows."""

    images: Any  # uint8 [rows, height, width, channels]
    labels: Any  # int32 [rows]
    weights: Optional[Any] = None  # float32 [rows]

    @classmethod
    def from_arrays(cls, images: Any, labels: Any, weights: Optional[Any] = None) -> InMemorySplit:
        """Returns a split with copies of the arrays, which can be freed; constants would keep them alive."""
        kept = None if weights is None else tf.identity(weights)
        return cls(tf.identity(images), tf.identity(labels.astype(np.int32)), kept)

    def read_targets(self, part: range) -> Any:
        """Returns the labels of a range of samples."""
        rows = np.arange(part.start, part.stop, dtype=np.int32) % self.labels.shape[0]
        return tf.gather(self.labels, rows).numpy()

    def read_weights(self, part: range) -> Optional[Any]:
        """Returns the weights of a range of samples; None if they have none."""
        return None if self.weights is None else self.weights[part.start : part.stop].numpy()

    def checksum(self, total: int) -> int:
        """Returns a checksum of the samples, continued from another."""
        for tensor in (self.images, self.labels, *_present(self.weights)):
            total = zlib.crc32(np.ascontiguousarray(tensor).data, total)
        return total

    def _gather_for_training(self, samples: Any, random: Any, augment: str, normalise: Any) -> Tuple[Any, ...]:
        images, labels = self._gather(samples)
        images = augment_batch(images, random, augment, normalise.height, normalise.width)
        return (normalise(images), labels, *(tf.gather(each, samples) for each in _present(self.weights)))

    def _gather_for_validation(self, samples: Any, normalise: Any) -> Tuple[Any, Any]:
        images, labels = self._gather(tf.maximum(samples, 0))
        images = tf.where((samples >= 0)[:, None, None, None], images, tf.zeros_like(images))
        return normalise(images), tf.where(samples >= 0, labels, 0)

    def _gather(self, samples: Any) -> Tuple[Any, Any]:
        rows = samples % self.labels.shape[0]
        return tf.gather(self.images, rows), tf.gather(self.labels, rows)


@dataclasses.dataclass(frozen=True)
class ArraySplit(IndexedSplit):
    """The samples of a split in memory, of any structure: arrays, or dictionaries and tuples of them."""

    inputs: Any
    targets: Any
    weights: Optional[Any] = None

    @classmethod
    def from_arrays(cls, inputs: Any, targets: Any, weights: Optional[Any] = None) -> ArraySplit:
        """Returns a split with copies of the arrays, all of which have the same number of rows."""
        inputs, targets = (tf.nest.map_structure(tf.identity, each) for each in (inputs, targets))
        return cls(inputs, targets, None if weights is None else tf.identity(weights))

    def read_targets(self, part: range) -> Any:
        """Returns the targets of a range of samples, in their structure."""
        return tf.nest.map_structure(lambda tensor: tensor[part.start : part.stop].numpy(), self.targets)

    def read_weights(self, part: range) -> Optional[Any]:
        """Returns the weights of a range of samples; None if they have none."""
        return None if self.weights is None else self.weights[part.start : part.stop].numpy()

    def checksum(self, total: int) -> int:
        """Returns a checksum of the samples, continued from another."""
        for tensor in tf.nest.flatten((self.inputs, self.targets, *_present(self.weights))):
            total = zlib.crc32(np.ascontiguousarray(tensor).data, total)
        return total

    def _gather_for_training(self, samples: Any, random: Any, augment: str, normalise: Any) -> Tuple[Any, ...]:
        del random, augment
        inputs, targets = self._gather(samples)
        return (normalise(inputs), targets, *(tf.gather(each, samples) for each in _present(self.weights)))

    def _gather_for_validation(self, samples: Any, normalise: Any) -> Tuple[Any, Any]:
        def clear(tensor: Any) -> Any:
            is_sample = tf.reshape(samples >= 0, [-1, *[1] * (len(tensor.shape) - 1)])
            return tf.where(is_sample, tensor, tf.zeros_like(tensor))

        inputs, targets = tf.nest.map_structure(clear, self._gather(tf.maximum(samples, 0)))
        return normalise(inputs), targets

    def _gather(self, samples: Any) -> Tuple[Any, Any]:
        inputs, targets = tf.nest.map_structure(lambda tensor: tf.gather(tensor, samples), (self.inputs, self.targets))
        return inputs, targets


class FloatCaster:
    """Casts the floating-point inputs of samples of any structure to the precision of the run."""

    def __init__(self, inputs: Structure, dtype: str) -> None:
        self._dtype = tf.as_dtype(dtype)
        sizes: List[int] = []
        map_structure(lambda tensor: sizes.append(math.prod(tensor.shape) * tf.as_dtype(tensor.dtype).size), inputs)
        self.sample_bytes = max(sum(sizes), 1)

    def __call__(self, inputs: Any) -> Any:
        return tf.nest.map_structure(
            lambda tensor: tf.cast(tensor, self._dtype) if tensor.dtype.is_floating else tensor, inputs
        )


def _micro_batches_per_call(count: int, size: int, sample_bytes: int) -> int:
    """Returns how many micro batches to prepare in one call: the largest divisor of their number within the limits."""
    samples = min(_MAX_SAMPLES_PER_CALL, _MAX_BYTES_PER_CALL // sample_bytes)
    return max(n for n in range(1, max(samples // size, 1) + 1) if count % n == 0)


def _split_into_micro_batches(batch: Tuple[Any, ...], group: int) -> Tuple[Any, ...]:
    divided: Tuple[Any, ...] = tf.nest.map_structure(
        lambda tensor: tf.reshape(tensor, [group, tensor.shape[0] // group, *tensor.shape[1:]]), batch
    )
    return divided


def _present(weights: Optional[Any]) -> Tuple[Any, ...]:
    return () if weights is None else (weights,)
