"""Data sets as micro batches: opened, ordered, changed, normalised.

The order of the samples is a pure function of the seed, the epoch and the position, and what happens to an image is one
of the seed, the epoch and the sample. So neither depends on how many instances and replicas share the work. That holds
to the bit for sets in memory; a streamed set keeps to it within the part of the files that an instance has.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import http.client
import itertools
import json
import math
import sys
import threading
import urllib.request
import zlib
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple, TypeVar, Union

import numpy as np
import tensorflow as tf

from tf_ipu_dp import cli
from tf_ipu_dp.datasets import lookup
from tf_ipu_dp.datasets.info import DatasetInfo
from tf_ipu_dp.planning.plan import RunPlan

_AUTOTUNE = tf.data.AUTOTUNE
_LARGEST_SHIFT = 4
_LEAST_AREA = 0.08
_LARGEST_RATIO = 4 / 3
# What is kept of the shorter side when an image of any size is validated.
_CENTRE = 0.875
_DRAWS = {"none": 0, "crop": 2, "crop_flip": 3, "imagenet": 5}

# Several small micro batches are prepared in one go: the cost per call is that of some 30 images of 28 x 28.
_MOST_SAMPLES_IN_ONE_GO = 256
_MOST_BYTES_IN_ONE_GO = 4 * 2**20

_FILES_READ_AT_ONCE = 16
_SHUFFLED_RECORDS = 2048
_MOST_SYNTHETIC_BYTES = 256 * 2**20
_ANSWERS_WITHIN_S = 5.0


_Function = TypeVar("_Function", bound=Callable[..., Any])


def _as_written(function: _Function) -> _Function:
    """Keeps autograph from converting a function without branches over tensors: that is most of a pipeline's start."""
    kept: _Function = tf.autograph.experimental.do_not_convert(function)
    return kept


@dataclasses.dataclass(frozen=True)
class InMemorySplit:
    """The samples of a split in memory, once. Sample i is row i modulo the number of rows."""

    images: Any  # uint8 [rows, height, width, channels]
    labels: Any  # int32 [rows]


@dataclasses.dataclass(frozen=True)
class TFRecordSplit:
    """A split in the files of tensorflow-datasets."""

    splits: Any  # of the set: read by slices like train[10:20]
    split: str
    features: Any
    image_key: str
    label_key: str
    size: Optional[Tuple[int, int]]  # height and width, if all images have the same


@dataclasses.dataclass(frozen=True)
class Source:
    """An opened data set."""

    facts: DatasetInfo
    train: Union[InMemorySplit, TFRecordSplit]
    validation: Union[InMemorySplit, TFRecordSplit]
    _read_labels: Dict[range, Any] = dataclasses.field(default_factory=dict, repr=False, compare=False)


@dataclasses.dataclass(frozen=True)
class InputSpeed:
    """How fast an input pipeline gives micro batches while nothing else computes."""

    samples: int
    elapsed_s: float
    samples_per_s: float
    bytes_per_s: float


def order(seed: int, epoch: int, samples: int) -> Any:
    """Returns the epoch's permutation of the samples; the same everywhere, as numpy has frozen this generator."""
    return np.random.RandomState([seed, epoch]).permutation(samples).astype(np.int32)


def draw(seed: int, epoch: int, samples: Any, count: int) -> Any:
    """Returns so many numbers from 0 to below 1 for each sample, [..., count]: a hash of seed, epoch and sample."""
    with np.errstate(over="ignore"):
        key = _mixed(_mixed(np.array([seed], np.uint64)) + np.array([epoch], np.uint64))
        which = np.asarray(samples).astype(np.uint64)[..., None] * np.uint64(8) + np.arange(count, dtype=np.uint64)
        return ((_mixed(which + key) >> np.uint64(40)) * 2.0**-24).astype(np.float32)


def open_source(facts: DatasetInfo, *, data_dir: Optional[str], seed: int) -> Source:
    """Opens a data set: loads it into memory, or finds its files if it is streamed.

    A known set that is not prepared is downloaded if the network answers within seconds; otherwise it is refused with
    the command that prepares it. The seed is that of synthetic images.
    """
    if facts.name == "fashion_mini":
        return _open_shipped(facts)
    if facts.name in lookup.OWN:
        return _make_synthetic(facts, seed)
    prepared = lookup.read_prepared(facts.name, data_dir) or _download(facts.name, data_dir)
    there, planned = ((it.train_samples, it.validation_samples, it.channels, it.classes) for it in (prepared, facts))
    if there != planned:
        raise cli.UsageError(
            f"--dataset={facts.name} in {prepared.folder} has other training images, validation images, channels and "
            f"classes ({there}) than the run was planned with ({planned}). Start the run again."
        )
    return _open_prepared(facts, prepared)


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
    """Returns the micro batches (images, labels) of one instance for the updates from the first to before the last.

    Updates are counted from the start of the run. The micro batches come in the order in which the SDK deals them: for
    each update and each accumulation, one for each local replica. `deterministic` matters to streamed sets only; those
    in memory are always in order.
    """
    augment = source.facts.augment if augment == "auto" else augment
    part = _Part(run, instance, first_update, last_update)
    finish = _Finish(source.facts, eight_bit_io, dtype)
    if isinstance(source.train, InMemorySplit):
        dataset = _train_from_memory(source.train, part, seed, augment, finish, _threads(prefetch))
    else:
        dataset = _train_from_files(source.train, part, seed, augment, finish, _threads(prefetch, deterministic))
    return _closed(dataset, sum(map(part.micro_batches, part.epochs)), prefetch)


def make_validation(
    source: Source, run: RunPlan, *, instance: int, eight_bit_io: bool, prefetch: bool, dtype: str
) -> Any:
    """Returns the micro batches (images, labels) of an instance's part of the validation, in the order of the samples.

    The slots after the part's last sample are padding, black images with label 0, which the caller leaves out.
    """
    threads = _threads(prefetch)
    finish = _Finish(source.facts, eight_bit_io, dtype)
    if isinstance(source.validation, InMemorySplit):
        dataset = _validate_from_memory(source.validation, run, instance, finish, threads)
    else:
        dataset = _validate_from_files(source.validation, run, instance, finish, threads)
    micro_batches = run.validation.slots_per_instance // run.batch.micro_batch_size
    return _closed(dataset, micro_batches, prefetch)


def labels_of_validation(source: Source, run: RunPlan, instance: int) -> Any:
    """Returns the labels of an instance's part of the validation as int32, without padding.

    They belong to the first predictions made for `make_validation`. A streamed set is read once for them, without
    decoding its images.
    """
    part, split = run.validation.shard(instance), source.validation
    if isinstance(split, InMemorySplit):
        rows = np.arange(part.start, part.stop, dtype=np.int32) % split.labels.shape[0]
        return tf.gather(split.labels, rows).numpy()
    if part not in source._read_labels:
        dataset = _in_order(split, part).map(lambda _, record: _parse(split, record)[1]).batch(1024)
        batches = [batch.numpy() for batch in dataset]
        source._read_labels[part] = np.concatenate([np.zeros([0], np.int32), *batches])
    return source._read_labels[part]


def fingerprint(source: Source) -> str:
    """Returns a text that differs where the data differs: of the samples in memory, or the names and sizes of files."""
    total = 0
    for split in (source.train, source.validation):
        if isinstance(split, InMemorySplit):
            for tensor in (split.images, split.labels):
                total = zlib.crc32(np.ascontiguousarray(tensor).data, total)
        else:
            info = split.splits[split.split]
            try:
                files = sorted((Path(path).name, tf.io.gfile.stat(str(path)).length) for path in info.filepaths)
            except tf.errors.OpError as error:
                raise cli.UsageError(
                    f"--dataset={source.facts.name} is not complete on this host ({error.message}). Prepare it again."
                ) from error
            total = zlib.crc32(repr((info.num_examples, files)).encode(), total)
    return f"{total:08x}"


def measure(dataset: Any, ipu: Any, *, elements: int, samples_per_element: int) -> InputSpeed:
    """Returns the speed of a pipeline, by the SDK's benchmark, over so many elements after as many to warm up."""
    result = ipu.dataset_benchmark.dataset_benchmark(
        dataset.repeat(), number_of_epochs=2, elements_per_epochs=elements, print_stats=False
    )
    if isinstance(result, Exception):  # the SDK returns what is wrong with the arguments
        raise result
    numbers = json.loads(np.ravel(result.numpy())[0])["epochs"][-1]
    samples, elapsed_s = elements * samples_per_element, float(numbers["time_elapsed"])
    return InputSpeed(samples, elapsed_s, samples / elapsed_s, float(numbers["total_bytes_processed"]) / elapsed_s)


@dataclasses.dataclass(frozen=True)
class _Part:
    """What one instance does of a span of updates."""

    run: RunPlan
    instance: int
    first_update: int
    last_update: int

    @property
    def epochs(self) -> range:
        per_epoch = self.run.epochs.updates_per_epoch
        return range(self.first_update // per_epoch, -(-self.last_update // per_epoch))

    def updates(self, epoch: int) -> range:
        """Returns the updates within an epoch."""
        per_epoch = self.run.epochs.updates_per_epoch
        before = epoch * per_epoch
        return range(max(self.first_update - before, 0), min(self.last_update - before, per_epoch))

    def micro_batches(self, epoch: int) -> int:
        return len(self.updates(epoch)) * self.run.batch.accumulation * self.run.topology.local_replicas

    def samples(self, seed: int, epoch: int) -> Any:
        """Returns the samples of an epoch, [micro batches, micro batch size]."""
        batch, topology = self.run.batch, self.run.topology
        used = self.run.epochs.updates_per_epoch * batch.global_batch_size
        dealt = order(seed, epoch, self.run.dataset.train_samples)[:used]
        dealt = dealt.reshape(-1, batch.accumulation, batch.replicas, batch.micro_batch_size)
        updates, first = self.updates(epoch), self.instance * topology.local_replicas
        mine = dealt[updates.start : updates.stop, :, first : first + topology.local_replicas]
        return mine.reshape(-1, batch.micro_batch_size)


class _Finish:
    """The last step for images of any one size, uint8 [n, h, w, c]: brought to the set's size, normalised."""

    def __init__(self, facts: DatasetInfo, eight_bit_io: bool, dtype: str) -> None:
        self.height, self.width, self.channels = facts.height, facts.width, facts.channels
        self.dtype = tf.uint8 if eight_bit_io else tf.as_dtype(dtype)
        # One factor for each pixel: Eigen is three times slower when it repeats one for each channel.
        mean, deviation = (np.tile(numbers, facts.height * facts.width) for numbers in (facts.mean, facts.deviation))
        self._factor: Any = (1 / (255 * deviation)).astype(np.float32)
        self._offset: Any = (-mean / deviation).astype(np.float32)

    @property
    def sample_bytes(self) -> int:
        return int(self.height * self.width * self.channels * self.dtype.size)

    def __call__(self, images: Any) -> Any:
        images = _resized(images, self.height, self.width)
        if self.dtype == tf.uint8:
            return images
        flat = tf.cast(tf.reshape(images, [-1, self._factor.size]), tf.float32) * self._factor + self._offset
        return tf.cast(tf.reshape(flat, [-1, self.height, self.width, self.channels]), self.dtype)


def _threads(prefetch: bool, deterministic: bool = True) -> Dict[str, Any]:
    """Returns how tf.data is to share work over threads, as arguments of its methods."""
    return {"num_parallel_calls": _AUTOTUNE, "deterministic": deterministic} if prefetch else {}


def _closed(dataset: Any, micro_batches: int, prefetch: bool) -> Any:
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    dataset = dataset.apply(tf.data.experimental.assert_cardinality(micro_batches)).with_options(options)
    return dataset.prefetch(_AUTOTUNE) if prefetch else dataset


def _train_from_memory(
    held: InMemorySplit, part: _Part, seed: int, augment: str, finish: _Finish, threads: Dict[str, Any]
) -> Any:
    size = part.run.batch.micro_batch_size
    counts = {part.micro_batches(epoch) for epoch in part.epochs}
    group = _micro_batches_in_one_go(functools.reduce(math.gcd, counts), size, finish.sample_bytes)
    draws_per_sample = _DRAWS[augment]

    def lay_out(epoch: Any) -> Tuple[Any, Any]:
        samples = part.samples(seed, int(epoch)).reshape(-1, group * size)
        return samples, draw(seed, int(epoch), samples, draws_per_sample)

    @_as_written
    def go_through(epoch: Any) -> Any:
        samples, draws = tf.numpy_function(lay_out, [epoch], [tf.int32, tf.float32])
        samples.set_shape([None, group * size])
        draws.set_shape([None, group * size, draws_per_sample])
        return tf.data.Dataset.from_tensor_slices((samples, draws))

    @_as_written
    def prepare(samples: Any, draws: Any) -> Tuple[Any, Any]:
        images, labels = _gather(held, samples)
        return _grouped(finish(_augmented(images, draws, augment, finish)), labels, group)

    groups = tf.data.Dataset.range(part.epochs.start, part.epochs.stop).flat_map(go_through)
    return groups.map(prepare, **threads).unbatch()


def _validate_from_memory(
    held: InMemorySplit, run: RunPlan, instance: int, finish: _Finish, threads: Dict[str, Any]
) -> Any:
    size, slots, part = run.batch.micro_batch_size, run.validation.slots_per_instance, run.validation.shard(instance)
    group = _micro_batches_in_one_go(slots // size, size, finish.sample_bytes)
    samples: Any = np.full([slots], -1, np.int32)
    samples[: len(part)] = part

    @_as_written
    def prepare(samples: Any) -> Tuple[Any, Any]:
        images, labels = _gather(held, tf.maximum(samples, 0))
        images = tf.where((samples >= 0)[:, None, None, None], images, tf.zeros_like(images))
        return _grouped(finish(images), tf.where(samples >= 0, labels, 0), group)

    return tf.data.Dataset.from_tensor_slices(samples.reshape(-1, group * size)).map(prepare, **threads).unbatch()


def _micro_batches_in_one_go(count: int, size: int, sample_bytes: int) -> int:
    """The largest divisor of a number of micro batches that keeps a group small."""
    samples = min(_MOST_SAMPLES_IN_ONE_GO, _MOST_BYTES_IN_ONE_GO // sample_bytes)
    return max(n for n in range(1, max(samples // size, 1) + 1) if count % n == 0)


def _gather(held: InMemorySplit, samples: Any) -> Tuple[Any, Any]:
    rows = samples % held.labels.shape[0]
    return tf.gather(held.images, rows), tf.gather(held.labels, rows)


def _grouped(images: Any, labels: Any, group: int) -> Tuple[Any, Any]:
    size = labels.shape[0] // group
    return tf.reshape(images, [group, size, *images.shape[1:]]), tf.reshape(labels, [group, size])


def _train_from_files(
    files: TFRecordSplit, part: _Part, seed: int, augment: str, finish: _Finish, threads: Dict[str, Any]
) -> Any:
    run, instances = part.run, part.run.topology.instances
    every = run.dataset.train_samples
    mine = range(every * part.instance // instances, every * (part.instance + 1) // instances)
    per_update = run.batch.global_batch_size // instances
    pieces = _Pieces(files, mine)

    def lay_out(epoch: Any) -> Tuple[Any, ...]:
        updates = part.updates(int(epoch))
        draws = draw(seed, int(epoch), np.arange(mine.start, mine.stop), _DRAWS[augment])
        shuffling = np.random.RandomState([seed, int(epoch), part.instance]).randint(2**31 - 1)
        skip, take = updates.start * per_update, len(updates) * per_update
        return order(seed, int(epoch), pieces.count), draws, np.array([shuffling, skip, take], np.int64)

    def go_through(epoch: Any) -> Any:
        ordered, draws, numbers = tf.numpy_function(lay_out, [epoch], [tf.int32, tf.float32, tf.int64])
        ordered.set_shape([None])
        draws.set_shape([None, _DRAWS[augment]])
        numbers.set_shape([3])
        shuffling, skip, take = numbers[0], numbers[1], numbers[2]
        dataset = tf.data.Dataset.from_tensor_slices(ordered).interleave(
            pieces.read, cycle_length=min(_FILES_READ_AT_ONCE, pieces.count), **threads
        )
        dataset = dataset.shuffle(_SHUFFLED_RECORDS, seed=shuffling, reshuffle_each_iteration=False)
        return dataset.skip(skip).take(take).map(lambda i, record: (record, draws[i - mine.start]))

    def decode(record: Any, draws: Any) -> Tuple[Any, Any, Any]:
        return (*_decoded(files, record, finish, draws if augment == "imagenet" else None), draws)

    def prepare(images: Any, labels: Any, draws: Any) -> Tuple[Any, Any]:
        return finish(images if augment == "imagenet" else _augmented(images, draws, augment, finish)), labels

    dataset = tf.data.Dataset.range(part.epochs.start, part.epochs.stop).flat_map(go_through)
    dataset = dataset.map(decode, **threads).batch(run.batch.micro_batch_size, drop_remainder=True)
    return dataset.map(prepare, **threads)


def _validate_from_files(
    files: TFRecordSplit, run: RunPlan, instance: int, finish: _Finish, threads: Dict[str, Any]
) -> Any:
    part = run.validation.shard(instance)
    decoded = _in_order(files, part).map(lambda _, record: _decoded(files, record, finish, None), **threads)
    empty = tf.nest.map_structure(lambda spec: tf.zeros(spec.shape, spec.dtype), decoded.element_spec)
    padding = tf.data.Dataset.from_tensors(empty).repeat(run.validation.slots_per_instance - len(part))
    batched = decoded.concatenate(padding).batch(run.batch.micro_batch_size, drop_remainder=True)
    return batched.map(lambda images, labels: (finish(images), labels), **threads)


class _Pieces:
    """The files, and parts of files, that hold a range of a split's samples."""

    def __init__(self, files: TFRecordSplit, part: range) -> None:
        instructions = files.splits[f"{files.split}[{part.start}:{part.stop}]"].file_instructions if part else []
        self.count = len(instructions)
        self._paths = tf.constant([str(piece.filename) for piece in instructions], tf.string)
        # For each piece: records to skip, records to read, and the number that the first of these has in the split.
        firsts = itertools.accumulate([part.start, *(piece.take for piece in instructions)])
        spans = [(piece.skip, piece.take, first) for piece, first in zip(instructions, firsts)]
        self._spans: Any = np.array(spans, np.int64).reshape(-1, 3)

    def read(self, piece: Any) -> Any:
        """Returns a piece's (number of the sample in the split, record)."""
        span = tf.gather(self._spans, piece)
        # Not by unstack: tf.data's optimizer crashes on a skip or take by one of an operation's several results.
        skip, take, first = span[0], span[1], span[2]
        return tf.data.TFRecordDataset(tf.gather(self._paths, piece)).skip(skip).take(take).enumerate(first)


def _in_order(files: TFRecordSplit, part: range) -> Any:
    """Returns the (number, record) of a range of samples, in their order."""
    pieces = _Pieces(files, part)
    return tf.data.Dataset.range(pieces.count).flat_map(pieces.read)


def _parse(files: TFRecordSplit, record: Any) -> Tuple[Any, Any]:
    import tensorflow_datasets as tfds

    example = files.features.deserialize_example(record, decoders={files.image_key: tfds.decode.SkipDecoding()})
    return example[files.image_key], tf.cast(example[files.label_key], tf.int32)


def _decoded(files: TFRecordSplit, record: Any, finish: _Finish, draws: Optional[Any]) -> Tuple[Any, Any]:
    """Returns one image: a random part of it if there are draws, else all of it or, where sizes differ, its middle."""
    encoded, label = _parse(files, record)
    if draws is None and files.size:
        image = tf.io.decode_image(encoded, channels=finish.channels, expand_animations=False)
        return tf.ensure_shape(image, [*files.size, finish.channels]), label
    if finish.channels in (1, 3):
        image = tf.cond(
            tf.io.is_jpeg(encoded),
            lambda: _jpeg_part(encoded, finish, draws),
            lambda: _any_part(encoded, finish, draws),
        )
    else:
        image = _any_part(encoded, finish, draws)
    image = _resized(image[None], finish.height, finish.width)[0]
    if draws is not None:
        image = tf.where(draws[4] < 0.5, image, image[:, ::-1])
    return tf.ensure_shape(image, [finish.height, finish.width, finish.channels]), label


def _jpeg_part(encoded: Any, finish: _Finish, draws: Optional[Any]) -> Any:
    """What lies outside the box is not decoded, which saves most of the time for a small one."""
    box = _box(tf.io.extract_jpeg_shape(encoded), finish, draws)
    return tf.io.decode_and_crop_jpeg(encoded, box, channels=finish.channels)


def _any_part(encoded: Any, finish: _Finish, draws: Optional[Any]) -> Any:
    image = tf.io.decode_image(encoded, channels=finish.channels, expand_animations=False)
    top, left, height, width = tf.unstack(_box(tf.shape(image), finish, draws))
    return image[top : top + height, left : left + width]


def _box(shape: Any, finish: _Finish, draws: Optional[Any]) -> Any:
    height, width = tf.cast(shape[0], tf.float32), tf.cast(shape[1], tf.float32)
    if draws is not None:
        return tf.cast(_random_box(draws, height, width), tf.int32)
    scale = _CENTRE * tf.minimum(height / finish.height, width / finish.width)
    size = tf.maximum(tf.round([scale * finish.height, scale * finish.width]), 1)
    return tf.cast(tf.concat([tf.floor(([height, width] - size) / 2), size], 0), tf.int32)


def _random_box(draws: Any, height: Any, width: Any) -> Any:
    """Returns top, left, height and width, whole numbers, of a part of an image, from draws [..., 5]."""
    area = height * width * (_LEAST_AREA + (1 - _LEAST_AREA) * draws[..., 0])
    ratio = tf.exp((2 * draws[..., 1] - 1) * np.log(_LARGEST_RATIO).astype(np.float32))
    box_height = tf.clip_by_value(tf.round(tf.sqrt(area / ratio)), 1, height)
    box_width = tf.clip_by_value(tf.round(tf.sqrt(area * ratio)), 1, width)
    top = tf.minimum(tf.floor(draws[..., 2] * (height - box_height + 1)), height - box_height)
    left = tf.minimum(tf.floor(draws[..., 3] * (width - box_width + 1)), width - box_width)
    return tf.stack([top, left, box_height, box_width], -1)


def _mixed(words: Any) -> Any:
    """The output function of SplitMix64."""
    words = words * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _augmented(images: Any, draws: Any, augment: str, finish: _Finish) -> Any:
    """Returns the images [n, h, w, c] changed as their draws [n, ...] say."""
    if augment == "none":
        return images
    if augment == "imagenet":
        return _random_parts(images, draws, finish)
    height, width = images.shape[1], images.shape[2]
    span = 2 * _LARGEST_SHIFT + 1
    shifts = tf.minimum(tf.cast(draws[:, :2] * span, tf.int32), span - 1)
    rows, columns = tf.range(height) + shifts[:, :1], tf.range(width) + shifts[:, 1:]
    if augment == "crop_flip":
        columns = tf.where(draws[:, 2:] < 0.5, columns, columns[:, ::-1])
    margin = [_LARGEST_SHIFT, _LARGEST_SHIFT]
    padded = tf.pad(images, [[0, 0], margin, margin, [0, 0]])
    return tf.gather(tf.gather(padded, rows, batch_dims=1), columns, axis=2, batch_dims=1)


def _random_parts(images: Any, draws: Any, finish: _Finish) -> Any:
    height, width = float(images.shape[1]), float(images.shape[2])
    top, left, box_height, box_width = tf.unstack(_random_box(draws, height, width), axis=-1)
    left, right = left / (width - 1), (left + box_width - 1) / (width - 1)
    mirrored = draws[:, 4] >= 0.5
    boxes = tf.stack(
        [
            top / (height - 1),
            tf.where(mirrored, right, left),
            (top + box_height - 1) / (height - 1),
            tf.where(mirrored, left, right),
        ],
        -1,
    )
    parts = tf.image.crop_and_resize(images, boxes, tf.range(tf.shape(images)[0]), [finish.height, finish.width])
    return _rounded(parts)


def _resized(images: Any, height: int, width: int) -> Any:
    if tuple(images.shape[1:3]) == (height, width):
        return images
    return _rounded(tf.image.resize(images, [height, width]))


def _rounded(images: Any) -> Any:
    """As 8-bit numbers, so that a run with --eight_bit_io sees the same images as one without."""
    return tf.cast(tf.round(images), tf.uint8)


def _hold(images: Any, labels: Any) -> InMemorySplit:
    # identity() copies and lets go of the array; a constant would keep it alive until later.
    return InMemorySplit(tf.identity(images), tf.identity(labels.astype(np.int32)))


def _open_shipped(facts: DatasetInfo) -> Source:
    with np.load(Path(__file__).parent / "fashion_mini.npz") as arrays:
        train, validation = (
            _hold(arrays[f"{split}_images"][..., None], arrays[f"{split}_labels"]) for split in ("train", "test")
        )
    return Source(facts, train, validation)


def _make_synthetic(facts: DatasetInfo, seed: int) -> Source:
    """A coarse pattern for each class under as much noise. Large images repeat themselves, to stay within memory."""
    random = np.random.RandomState([seed, 0x5EED])
    shape = (facts.height, facts.width, facts.channels)
    coarse: Any = random.randint(0, 256, (facts.classes, 4, 4, facts.channels)).astype(np.uint8)
    rows, columns = (np.arange(size) * 4 // size for size in shape[:2])
    patterns = np.ascontiguousarray(coarse[:, rows][:, :, columns] // 2)
    most = _MOST_SYNTHETIC_BYTES // int(np.prod(shape)) // facts.classes * facts.classes

    def make(samples: int) -> InMemorySplit:
        labels = np.arange(min(samples, max(most, facts.classes))) % facts.classes
        images: Any = np.empty((len(labels), *shape), np.uint8)
        for first in range(0, len(labels), 64):  # few enough to stay in the caches
            some = images[first : first + 64]
            noise: Any = np.frombuffer(random.bytes(some.size), np.uint8).reshape(some.shape)
            np.add(patterns.take(labels[first : first + 64], axis=0), noise >> 1, out=some)
        return _hold(images, labels)

    return Source(facts, make(facts.train_samples), make(facts.validation_samples))


def _open_prepared(facts: DatasetInfo, prepared: lookup.Prepared) -> Source:
    tfds = _tfds(facts.name)
    info = tfds.builder_from_directory(str(prepared.folder)).info
    keys = (prepared.image_key, prepared.label_key)
    features = tfds.features.FeaturesDict({key: info.features[key] for key in keys})
    size = (prepared.height, prepared.width) if prepared.height and prepared.width else None
    train, validation = (
        TFRecordSplit(info.splits, split, features, *keys, size) for split in ("train", prepared.validation_split)
    )
    if facts.streamed:
        return Source(facts, train, validation)
    return Source(
        facts,
        _load(train, facts.train_samples, facts.channels),
        _load(validation, facts.validation_samples, facts.channels),
    )


def _load(files: TFRecordSplit, samples: int, channels: int) -> InMemorySplit:
    """Reads a split into memory, in the order of its files."""
    assert files.size
    images: Any = np.empty((samples, *files.size, channels), np.uint8)
    labels: Any = np.empty([samples], np.int32)

    def decode(_: Any, record: Any) -> Tuple[Any, Any]:
        encoded, label = _parse(files, record)
        return tf.io.decode_image(encoded, channels=channels, expand_animations=False), label

    begin = 0
    for some_images, some_labels in _in_order(files, range(samples)).map(decode, _AUTOTUNE).batch(512):
        end = begin + int(some_labels.shape[0])
        images[begin:end], labels[begin:end] = some_images, some_labels
        begin = end
    if begin < samples:
        raise cli.UsageError(
            f"The files of {files.split} have {begin} of the {samples} samples that they should have. "
            "Prepare the set again."
        )
    return _hold(images, labels)


def _download(name: str, data_dir: Optional[str]) -> lookup.Prepared:
    """Lets tensorflow-datasets prepare a set, one instance at a time; refuses where that cannot work."""
    if not lookup.can_be_downloaded(name):
        lookup.refuse_missing(name, data_dir)
    tfds = _tfds(name)
    # Without this a network that has no way to Google's storage costs more than a minute before anything happens.
    tfds.core.utils.gcs_utils._is_gcs_disabled = True
    root = lookup.data_folder(data_dir)
    try:
        builder = tfds.builder(name, data_dir=str(root))
        if not all(map(_answers, builder.url_infos)):
            lookup.refuse_missing(name, data_dir, "cannot be downloaded from here")
        print(f"downloading {name} to {root} ...", file=sys.stderr, flush=True)
        root.mkdir(parents=True, exist_ok=True)
        # tensorflow-datasets writes to stdout, which carries the result of the run.
        with _alone(root / ".tf_ipu_dp.lock"), contextlib.redirect_stdout(sys.stderr):
            builder.download_and_prepare(download_config=tfds.download.DownloadConfig(try_download_gcs=False))
    except cli.UsageError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        lookup.refuse_missing(name, data_dir, f"its download failed ({type(error).__name__}: {reason})")
    return lookup.read_prepared(name, data_dir) or lookup.refuse_missing(name, data_dir)


def _tfds(name: str) -> Any:
    try:
        import tensorflow_datasets
    except ImportError as error:
        raise cli.UsageError(
            f"--dataset={name} needs tensorflow-datasets, which cannot be imported ({error}). Install it with "
            "python -m pip install tensorflow-datasets, or use --dataset=fashion_mini or synthetic."
        ) from error
    return tensorflow_datasets


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    with path.open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _answers(url: str) -> bool:
    """Whether a download would begin within seconds; tensorflow-datasets itself would try for minutes."""
    answers: List[bool] = []

    def ask() -> None:
        failures = (OSError, http.client.HTTPException)
        with contextlib.suppress(*failures), urllib.request.urlopen(url, timeout=_ANSWERS_WITHIN_S):
            answers.append(True)

    # In a thread, because looking a name up knows no time limit.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_ANSWERS_WITHIN_S)
    return bool(answers)
