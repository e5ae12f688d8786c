"""Splits in the files of tensorflow-datasets: read while training where they are streamed, else loaded into memory.

A streamed set is sharded by its files; within the files of an instance, order and augmentation depend only on seed,
epoch and sample.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import zlib
from pathlib import Path
from typing import Any, ClassVar, Dict, Optional, Tuple

import numpy as np
import tensorflow as tf

from tf_ipu_dp import cli
from tf_ipu_dp.datasets import augment as augmentation
from tf_ipu_dp.datasets.augment import RANDOM_NUMBERS, Normaliser
from tf_ipu_dp.datasets.download import import_tfds
from tf_ipu_dp.datasets.lookup import Prepared
from tf_ipu_dp.datasets.memory import InMemorySplit
from tf_ipu_dp.datasets.order import TrainingShard, permutation, random_numbers
from tf_ipu_dp.planning.plan import RunPlan

_FILES_READ_AT_ONCE = 16
_SHUFFLED_RECORDS = 2048


@dataclasses.dataclass(frozen=True)
class TFRecordSplit:
    """A split in the files of tensorflow-datasets."""

    epochs_per_dataset: ClassVar[int] = sys.maxsize  # their order is computed when an epoch begins

    splits: Any  # of the set: read by slices like train[10:20]
    split: str
    features: Any
    image_key: str
    label_key: str
    size: Optional[Tuple[int, int]]  # height and width, if all images have the same
    _labels: Dict[range, Any] = dataclasses.field(default_factory=dict, repr=False, compare=False)  # already read

    def make_training(
        self, shard: TrainingShard, seed: int, augment: str, normalise: Any, threads: Dict[str, Any]
    ) -> Any:
        """Returns the micro batches (images, labels) of a shard."""
        run, instances = shard.run, shard.run.topology.instances
        samples = run.dataset.train_samples
        part = range(samples * shard.instance // instances, samples * (shard.instance + 1) // instances)
        per_update = run.batch.global_batch_size // instances
        pieces = _FilePieces(self, part)

        def order_epoch(epoch: Any) -> Tuple[Any, ...]:
            updates = shard.updates_in(int(epoch))
            random = random_numbers(seed, int(epoch), np.arange(part.start, part.stop), RANDOM_NUMBERS[augment])
            shuffle_seed = np.random.RandomState([seed, int(epoch), shard.instance]).randint(2**31 - 1)
            skip, take = updates.start * per_update, len(updates) * per_update
            order = permutation(seed, int(epoch), pieces.count)
            return order, random, np.array([shuffle_seed, skip, take], np.int64)

        def read_epoch(epoch: Any) -> Any:
            order, random, numbers = tf.numpy_function(order_epoch, [epoch], [tf.int32, tf.float32, tf.int64])
            order.set_shape([None])
            random.set_shape([None, RANDOM_NUMBERS[augment]])
            numbers.set_shape([3])
            shuffle_seed, skip, take = numbers[0], numbers[1], numbers[2]
            dataset = tf.data.Dataset.from_tensor_slices(order).interleave(
                pieces.read, cycle_length=min(_FILES_READ_AT_ONCE, pieces.count), **threads
            )
            dataset = dataset.shuffle(_SHUFFLED_RECORDS, seed=shuffle_seed, reshuffle_each_iteration=False)
            return dataset.skip(skip).take(take).map(lambda i, record: (record, random[i - part.start]))

        def decode(record: Any, random: Any) -> Tuple[Any, Any, Any]:
            return (*self._decode(record, normalise, random if augment == "imagenet" else None), random)

        def prepare(images: Any, labels: Any, random: Any) -> Tuple[Any, Any]:
            if augment != "imagenet":
                images = augmentation.augment_batch(images, random, augment, normalise.height, normalise.width)
            return normalise(images), labels

        dataset = tf.data.Dataset.range(shard.epochs.start, shard.epochs.stop).flat_map(read_epoch)
        dataset = dataset.map(decode, **threads).batch(run.batch.micro_batch_size, drop_remainder=True)
        return dataset.map(prepare, **threads)

    def make_validation(self, run: RunPlan, instance: int, normalise: Any, threads: Dict[str, Any]) -> Any:
        """Returns the micro batches (images, labels) of an instance's part, then padding: black images of label 0."""
        part = run.validation.shard(instance)
        decoded = self._read_in_order(part).map(lambda _, record: self._decode(record, normalise, None), **threads)
        empty = tf.nest.map_structure(lambda spec: tf.zeros(spec.shape, spec.dtype), decoded.element_spec)
        padding = tf.data.Dataset.from_tensors(empty).repeat(run.validation.slots_per_instance - len(part))
        batched = decoded.concatenate(padding).batch(run.batch.micro_batch_size, drop_remainder=True)
        return batched.map(lambda images, labels: (normalise(images), labels), **threads)

    def read_targets(self, part: range) -> Any:
        """Returns the labels of a range of samples; its files are read once, without decoding the images."""
        if part not in self._labels:
            dataset = self._read_in_order(part).map(lambda _, record: self._parse(record)[1]).batch(1024)
            self._labels[part] = np.concatenate([np.zeros([0], np.int32), *[batch.numpy() for batch in dataset]])
        return self._labels[part]

    def read_weights(self, part: range) -> None:
        """Returns None: the samples of tensorflow-datasets have no weights."""
        del part

    def checksum(self, total: int) -> int:
        """Returns a checksum of the names and sizes of the files, continued from another."""
        info = self.splits[self.split]
        files = sorted((Path(path).name, tf.io.gfile.stat(str(path)).length) for path in info.filepaths)
        return zlib.crc32(repr((info.num_examples, files)).encode(), total)

    def load(self, samples: int, channels: int) -> InMemorySplit:
        """Returns the split in memory, in the order of its files."""
        assert self.size
        images: Any = np.empty((samples, *self.size, channels), np.uint8)
        labels: Any = np.empty([samples], np.int32)

        def decode(_: Any, record: Any) -> Tuple[Any, Any]:
            encoded, label = self._parse(record)
            return tf.io.decode_image(encoded, channels=channels, expand_animations=False), label

        begin = 0
        for some_images, some_labels in self._read_in_order(range(samples)).map(decode, tf.data.AUTOTUNE).batch(512):
            end = begin + int(some_labels.shape[0])
            images[begin:end], labels[begin:end] = some_images, some_labels
            begin = end
        if begin < samples:
            raise cli.UsageError(
                f"The files of the split {self.split} have {begin} of the {samples} samples that they should have. "
                "Prepare the set again."
            )
        return InMemorySplit.from_arrays(images, labels)

    def _read_in_order(self, part: range) -> Any:
        """Returns the (number, record) of a range of samples, in their order."""
        pieces = _FilePieces(self, part)
        return tf.data.Dataset.range(pieces.count).flat_map(pieces.read)

    def _parse(self, record: Any) -> Tuple[Any, Any]:
        """Returns the encoded image and the label of a record."""
        import tensorflow_datasets as tfds

        example = self.features.deserialize_example(record, decoders={self.image_key: tfds.decode.SkipDecoding()})
        return example[self.image_key], tf.cast(example[self.label_key], tf.int32)

    def _decode(self, record: Any, normalise: Normaliser, random: Optional[Any]) -> Tuple[Any, Any]:
        """Returns one image and its label.

        With random numbers it is a random crop; else the whole image or, where sizes differ, its centre.
        """
        encoded, label = self._parse(record)
        channels = normalise.channels
        if random is None and self.size:
            image = tf.io.decode_image(encoded, channels=channels, expand_animations=False)
            return tf.ensure_shape(image, [*self.size, channels]), label
        if channels in (1, 3):
            image = tf.cond(
                tf.io.is_jpeg(encoded),
                lambda: _decode_part_of_jpeg(encoded, normalise, random),
                lambda: _decode_and_cut(encoded, normalise, random),
            )
        else:
            image = _decode_and_cut(encoded, normalise, random)
        image = augmentation.resize(image[None], normalise.height, normalise.width)[0]
        if random is not None:
            image = tf.where(augmentation.is_mirrored(random), image[:, ::-1], image)
        return tf.ensure_shape(image, [normalise.height, normalise.width, channels]), label


def open_splits(name: str, prepared: Prepared) -> Tuple[TFRecordSplit, TFRecordSplit]:
    """Returns the training and the validation split of a set that tensorflow-datasets has prepared."""
    tfds = import_tfds(name)
    info = tfds.builder_from_directory(str(prepared.folder)).info
    keys = (prepared.image_key, prepared.label_key)
    features = tfds.features.FeaturesDict({key: info.features[key] for key in keys})
    size = (prepared.height, prepared.width) if prepared.height and prepared.width else None
    train, validation = (
        TFRecordSplit(info.splits, split, features, *keys, size) for split in ("train", prepared.validation_split)
    )
    return train, validation


class _FilePieces:
    """The files, and parts of files, that hold a range of a split's samples."""

    def __init__(self, split: TFRecordSplit, part: range) -> None:
        instructions = split.splits[f"{split.split}[{part.start}:{part.stop}]"].file_instructions if part else []
        self.count = len(instructions)
        self._paths = tf.constant([str(piece.filename) for piece in instructions], tf.string)
        # For each piece: records to skip, records to read, and the index of the first of these in the split.
        firsts = itertools.accumulate([part.start, *(piece.take for piece in instructions)])
        spans = [(piece.skip, piece.take, first) for piece, first in zip(instructions, firsts)]
        self._spans: Any = np.array(spans, np.int64).reshape(-1, 3)

    def read(self, piece: Any) -> Any:
        """Returns a piece's (number of the sample in the split, record)."""
        span = tf.gather(self._spans, piece)
        # Not unstack: tf.data's optimizer crashes on a skip or take by one of several outputs of an operation.
        skip, take, first = span[0], span[1], span[2]
        return tf.data.TFRecordDataset(tf.gather(self._paths, piece)).skip(skip).take(take).enumerate(first)


def _decode_part_of_jpeg(encoded: Any, normalise: Normaliser, random: Optional[Any]) -> Any:
    """Decodes only a part of an image, which saves most of the time for a small part."""
    box = _choose_box(tf.io.extract_jpeg_shape(encoded), normalise, random)
    return tf.io.decode_and_crop_jpeg(encoded, box, channels=normalise.channels)


def _decode_and_cut(encoded: Any, normalise: Normaliser, random: Optional[Any]) -> Any:
    image = tf.io.decode_image(encoded, channels=normalise.channels, expand_animations=False)
    top, left, height, width = tf.unstack(_choose_box(tf.shape(image), normalise, random))
    return image[top : top + height, left : left + width]


def _choose_box(shape: Any, normalise: Normaliser, random: Optional[Any]) -> Any:
    height, width = tf.cast(shape[0], tf.float32), tf.cast(shape[1], tf.float32)
    if random is not None:
        return tf.cast(augmentation.random_box(random, height, width), tf.int32)
    return tf.cast(augmentation.centre_box(height, width, normalise.height, normalise.width), tf.int32)
