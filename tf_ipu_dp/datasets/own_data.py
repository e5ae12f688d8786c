"""The data of users: what a function of --dataset returns, or a path has, as splits and the facts of a data set.

Arrays are checked before anything is trained: their structure, lengths, numbers that are not finite, labels that are no
class. 8-bit images with class numbers are treated like those of the built-in sets: they are normalised, and can be
augmented. All other arrays reach the model as they are, in the types that IPUs have: 64-bit numbers become 32-bit ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from typing import Any, List, NoReturn, Optional, Tuple, Union

import numpy as np
import tensorflow as tf

from tf_ipu_dp import cli, user_code
from tf_ipu_dp.config.train_flags import TrainConfig
from tf_ipu_dp.datasets import lookup, own_files
from tf_ipu_dp.datasets.augment import resize
from tf_ipu_dp.datasets.info import OWN, DatasetInfo, Group, Structure, TensorInfo
from tf_ipu_dp.datasets.memory import ArraySplit, InMemorySplit
from tf_ipu_dp.datasets.streams import StreamSplit
from tf_ipu_dp.task import Data

_TYPES = {"float64": "float32", "int64": "int32", "uint32": "int32", "uint64": "int32"}
_EXPECTED = (
    "It returns ((inputs, targets), (validation inputs, validation targets)) of arrays, tf_ipu_dp.Data(...), or two "
    "tf.data datasets of single samples."
)
_NAMED_CLASSES = 3  # of those without samples; the others are counted
_Split = Union[InMemorySplit, ArraySplit, StreamSplit]


@dataclasses.dataclass(frozen=True)
class OwnData:
    """The data of a user, opened."""

    facts: DatasetInfo
    train: _Split
    validation: _Split


def load(cfg: TrainConfig) -> OwnData:
    """Calls the function, or reads the path, that --dataset names; UsageError with one sentence for what is wrong."""
    name = cfg.dataset
    if not user_code.is_reference(name):
        data, taken_for = own_files.read(cli.expand_path(name), cfg)
        return _Reader(name, cfg, data).read(taken_for)
    offered = {
        "seed": cfg.seed,
        "data_dir": cfg.data_dir,
        "image_size": cfg.image_size,
        "validation_split": cfg.validation_split,
    }
    returned = user_code.call_by_name(user_code.load_function(name), offered, name)
    return _Reader(name, cfg, _as_data(returned, name)).read("")


def _as_data(returned: Any, name: str) -> Data:
    if isinstance(returned, Data):
        return returned
    if isinstance(returned, (tuple, list)) and len(returned) == 2:
        if all(isinstance(part, (tuple, list)) and len(part) in (2, 3) for part in returned):
            return Data(*returned)
        if all(isinstance(part, tf.data.Dataset) for part in returned):
            return Data(*returned)
    raise cli.UsageError(f"--dataset={name} returned {describe_value(returned)}. {_EXPECTED}")


def describe_value(value: Any) -> str:
    """Returns what a function returned, in a few words."""
    if value is None:
        return "None"
    if isinstance(value, (tuple, list)):
        inner = ", ".join(describe_value(each) for each in value[:4])
        return f"a {type(value).__name__} of {len(value)} ({inner}{', ...' if len(value) > 4 else ''})"
    if isinstance(value, dict):
        return f"a dictionary with {cli.alternatives(list(map(str, value))[:4])}"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"an array of {' x '.join(map(str, value.shape))} {value.dtype}"
    return f"a {type(value).__name__}"


class _Reader:
    """Turns one `Data` into splits, and refuses what cannot be trained on."""

    def __init__(self, name: str, cfg: TrainConfig, data: Data) -> None:
        self._name, self._cfg, self._data = name, cfg, data

    def read(self, taken_for: str) -> OwnData:
        data = self._data
        if isinstance(data.train, tf.data.Dataset):
            return self._read_streams()
        train = self._arrays("training", data.train)
        if data.validation is None:
            train, validation = self._hold_out(train)
        elif isinstance(data.validation, tf.data.Dataset):
            self._refuse("has arrays to train on and a stream for validation. Use the same for both")
        else:
            validation = self._arrays("validation", data.validation)
        described = [_describe(each) for each in train[:2]]
        for part, before, now in zip(("inputs", "targets"), described, (_describe(each) for each in validation[:2])):
            if before != now:
                self._refuse(f"has {part} of {before} for training, but of {now} for validation")
        classes = self._count_classes(train[1], validation[1])
        counts = (_rows(train[0]), _rows(validation[0]))
        if classes and _is_images(train[0]):
            return self._read_images(train, validation, classes, counts, taken_for)
        if classes:
            train, validation = ((each[0], np.reshape(each[1], [-1]), each[2]) for each in (train, validation))
        inputs, targets = (_describe(each) for each in train[:2])
        facts = self._facts(
            counts,
            classes,
            inputs=inputs,
            targets=None if classes else targets,
            weighted=_has_weights(train, validation),
        )
        taken_for = taken_for or f"arrays, {inputs} to {f'{classes} classes' if classes else targets}"
        taken_for += _describe_more(train, facts)
        return OwnData(
            dataclasses.replace(facts, taken_for=taken_for),
            ArraySplit.from_arrays(*train),
            ArraySplit.from_arrays(*validation),
        )

    def _read_images(
        self, train: Any, validation: Any, classes: int, counts: Tuple[int, int], taken_for: str
    ) -> OwnData:
        images = [each[0] if each[0].ndim == 4 else each[0][..., None] for each in (train, validation)]
        height, width, channels = images[0].shape[1:]
        size = self._cfg.image_size
        mean, deviation = lookup.typical_statistics(channels)
        facts = dataclasses.replace(
            self._facts(counts, classes, weighted=_has_weights(train, validation)),
            height=size or height,
            width=size or width,
            channels=channels,
            mean=mean,
            deviation=deviation,
        )
        taken_for = taken_for or f"images of {height} x {width} x {channels} in {classes} classes"
        facts = dataclasses.replace(facts, taken_for=taken_for + _describe_more(train, facts))
        splits = [
            InMemorySplit.from_arrays(_resized(each, facts), np.reshape(part[1], [-1]), part[2])
            for each, part in zip(images, (train, validation))
        ]
        return OwnData(facts, *splits)

    def _facts(
        self,
        counts: Tuple[int, int],
        classes: int,
        *,
        inputs: Optional[Structure] = None,
        targets: Optional[Structure] = None,
        streamed: bool = False,
        weighted: bool = False,
    ) -> DatasetInfo:
        names = tuple(map(str, self._data.class_names))
        if names and len(names) != classes:
            self._refuse(f"has {len(names)} class_names for {classes} classes")
        given = dict(self._data.facts)
        if not _is_plain(given):
            self._refuse("has facts that are not numbers, texts or lists of these")
        return DatasetInfo(
            self._name, *counts, 0, 0, 0, classes, streamed=streamed, origin=OWN, class_names=names,
            inputs=inputs, targets=targets, given=tuple(sorted(given.items())), weighted=weighted,
        )  # fmt: skip

    def _arrays(self, part: str, pair: Any) -> Tuple[Any, Any, Any]:
        """Returns inputs, targets and weights, which are None if there are none."""
        if not isinstance(pair, (tuple, list)) or len(pair) not in (2, 3):
            raise cli.UsageError(
                f"--dataset={self._name} returned {describe_value(pair)} for {part}. It is a pair (inputs, targets) of "
                "arrays, or of dictionaries or tuples of them; the weights of the samples can be the third."
            )
        names = [f"the {part} {what}" for what in ("inputs", "targets", "weights")]
        inputs, targets, *others = (self._normalise(what, each) for what, each in zip(names, pair))
        weights = self._weights(names[2], others[0]) if others else None
        counts = sorted({int(leaf.shape[0]) for leaf in tf.nest.flatten((inputs, targets, *others))})
        if len(counts) > 1:
            listed = any(isinstance(each, list) and len(each) in counts for each in pair)
            self._refuse(
                f"has arrays of {cli.alternatives(counts)} samples for {part}; all need the same number"
                + (". Several inputs or targets are a tuple or a dictionary of arrays, not a list" if listed else "")
            )
        if not counts or not counts[0]:
            self._refuse(f"has no samples for {part}")
        return inputs, targets, weights

    def _weights(self, what: str, given: Any) -> Any:
        if not isinstance(given, np.ndarray) or given.ndim != 1:
            self._refuse(f"has {_describe(given)} for each sample in {what}; a weight is one number")
        if given.size and given.min() < 0:
            self._refuse(f"has {given.min():g} among {what}; a weight is 0 or more")
        return given.astype(np.float32, copy=False)

    def _normalise(self, what: str, value: Any) -> Any:
        """Returns arrays of the types that IPUs have, in the structure that they came in."""
        if isinstance(value, dict):
            return {str(key): self._normalise(f"{what} {key!r}", each) for key, each in value.items()}
        if isinstance(value, tuple):
            return tuple(self._normalise(what, each) for each in value)
        if isinstance(value, tf.RaggedTensor) or (isinstance(value, list) and not _has_rows_of_one_shape(value)):
            self._refuse(
                f"has rows of different lengths in {what}. Fill them up, for instance with "
                "tf.keras.utils.pad_sequences; several inputs or targets are a tuple or a dictionary, not a list"
            )
        array: Any = np.asarray(value)
        if array.dtype.kind not in "fiub":
            self._refuse(
                f"has {array.dtype} in {what}, and models take numbers. Turn texts into numbers in the function, for "
                "instance with tf.keras.layers.TextVectorization"
            )
        if not array.ndim:
            self._refuse(f"has one number as {what}, not an array with a row for each sample")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            bad = np.flatnonzero(~np.isfinite(array.reshape(len(array), -1)).all(axis=1))
            self._refuse(
                f"has NaN or infinite numbers in {what}: in {len(bad):,} of {len(array):,} samples, the first is "
                f"number {bad[0]:,}"
            )
        kept = _TYPES.get(array.dtype.name, array.dtype.name)
        if array.dtype.kind in "iu" and kept != array.dtype.name and array.size:
            limits = np.iinfo(kept)
            if array.min() < limits.min or array.max() > limits.max:
                self._refuse(f"has numbers in {what} that do not fit 32 bits, which is the most that IPUs compute with")
        return array.astype(kept, copy=False)

    def _count_classes(self, targets: Any, validation: Any) -> int:
        """Returns how many classes the targets have; 0 if they are not class numbers."""
        given = self._data.classes or len(self._data.class_names)
        if not _is_labels(targets):
            if given:
                self._refuse(
                    f"has {given} classes, but targets of {_describe(targets)}: class numbers are whole numbers"
                )
            return 0
        lowest = min(int(targets.min()), int(validation.min()))
        highest = max(int(targets.max()), int(validation.max()))
        classes = given or highest + 1
        if lowest < 0 or highest >= classes:
            wrong = lowest if lowest < 0 else highest
            self._refuse(f"has the label {wrong} among labels that are 0 to {classes - 1} for {classes} classes")
        return int(classes)

    def _hold_out(self, train: Tuple[Any, Any, Any]) -> Tuple[Any, Any]:
        rows, share = _rows(train[0]), self._cfg.validation_split
        count = round(rows * share)
        if not 0 < count < rows:
            self._refuse(
                f"has no validation part, and --validation_split={share:g} of {rows:,} samples leaves "
                f"{'none to train on' if count else 'none to validate'}"
            )
        order = held_out_order(rows, self._cfg.seed)
        chosen = (np.sort(order[count:]), np.sort(order[:count]))
        kept, held = (
            tf.nest.map_structure(lambda each, which=which: None if each is None else each[which], train)
            for which in chosen
        )
        return kept, held

    def _read_streams(self) -> OwnData:
        data = self._data
        if not isinstance(data.validation, tf.data.Dataset):
            self._refuse("streams training samples, but has no stream for validation. Return two tf.data datasets")
        counts: List[int] = []
        structures: List[Any] = []
        weighted = False
        for part, stream, length in (
            ("training", data.train, data.train_samples),
            ("validation", data.validation, data.validation_samples),
        ):
            spec = stream.element_spec
            if not isinstance(spec, tuple) or len(spec) not in (2, 3):
                self._refuse(f"streams {part} elements that are not pairs (inputs, targets), or these with a weight")
            if len(spec) == 3 and not (hasattr(spec[2], "shape") and spec[2].shape == [] and spec[2].dtype.is_floating):
                self._refuse(f"streams {part} samples whose third member is not a weight, one floating-point number")
            shapes = [each.shape for each in tf.nest.flatten(spec)]
            if not all(shape.is_fully_defined() for shape in shapes):
                self._refuse(
                    f"streams {part} batches. Leave out .batch(): batches are made of single samples"
                    if all(shape.rank and shape[0] is None for shape in shapes)
                    else f"streams {part} samples whose shapes differ or are not known; all samples need the same "
                    "shape. Pad them, and give shapes that are not known with tf.ensure_shape"
                )
            known = length if length is not None else int(stream.cardinality())
            if known < 1:
                self._refuse(
                    f"streams {part} samples without a known length. Return tf_ipu_dp.Data(..., "
                    f"{'train' if part == 'training' else part}_samples=N)"
                )
            counts.append(int(known))
            structures.append(tuple(_describe_spec(each) for each in spec[:2]))
            weighted |= len(spec) == 3
        if structures[0] != structures[1]:
            self._refuse("streams samples of other shapes or types for validation than for training")
        inputs, targets = structures[0]
        is_labels = isinstance(targets, TensorInfo) and not targets.shape and targets.dtype.startswith(("int", "uint"))
        classes = int(data.classes or len(data.class_names) or 0)
        if classes and not is_labels:
            self._refuse(f"has {classes} classes, but targets of {targets}: class numbers are whole numbers")
        facts = self._facts(
            (counts[0], counts[1]), classes, inputs=inputs, targets=None if classes else targets, streamed=True,
            weighted=weighted,
        )  # fmt: skip
        about = f"a stream, {inputs} to {targets}{', weighted' if weighted else ''}"
        facts = dataclasses.replace(facts, taken_for=about)
        streams = zip((data.train, data.validation), counts)
        return OwnData(facts, *(StreamSplit(_cast(each), count, self._name, classes) for each, count in streams))

    def _refuse(self, what: str) -> NoReturn:
        raise cli.UsageError(f"--dataset={self._name} {what}.")


def held_out_order(rows: int, seed: int) -> Any:
    """Returns the order in which samples are held out for validation; the same on every host."""
    return np.random.RandomState([seed, 0x7E57]).permutation(rows)


def _has_weights(train: Any, validation: Any) -> bool:
    return train[2] is not None or validation[2] is not None


def _describe_more(train: Any, facts: DatasetInfo) -> str:
    """Returns what the line about own data adds: weights, and classes of which nothing can be learned."""
    words = ", weighted" if facts.weighted else ""
    if facts.classes:
        empty = np.flatnonzero(np.bincount(np.reshape(train[1], [-1]), minlength=facts.classes) == 0).tolist()
        names = [facts.class_names[each] if facts.class_names else str(each) for each in empty[:_NAMED_CLASSES]]
        more = f" and {len(empty) - len(names):,} more" if len(empty) > len(names) else ""
        if empty:
            what = "class" if len(empty) == 1 else "classes"
            words += f", without training samples of the {what} {', '.join(names)}{more}"
    return words


def _is_images(inputs: Any) -> bool:
    """Whether inputs are 8-bit images: [n, h, w] or [n, h, w, c] with 1 to 4 channels."""
    if not isinstance(inputs, np.ndarray) or inputs.dtype != np.uint8:
        return False
    return inputs.ndim == 3 or (inputs.ndim == 4 and inputs.shape[-1] <= 4)


def _is_labels(targets: Any) -> bool:
    if not isinstance(targets, np.ndarray) or targets.dtype.kind not in "iu":
        return False
    return targets.ndim == 1 or (targets.ndim == 2 and targets.shape[1] == 1)


def _resized(images: Any, facts: DatasetInfo) -> Any:
    if images.shape[1:3] == (facts.height, facts.width):
        return images
    parts = [resize(images[first : first + 256], facts.height, facts.width) for first in range(0, len(images), 256)]
    return np.concatenate(parts)


def _rows(inputs: Any) -> int:
    return int(tf.nest.flatten(inputs)[0].shape[0])


def _describe(value: Any) -> Structure:
    if isinstance(value, dict):
        names = sorted(value)  # as tf.nest orders them
        return Group(tuple(names), tuple(_describe(value[name]) for name in names))
    if isinstance(value, tuple):
        return Group((), tuple(_describe(each) for each in value))
    return TensorInfo(tuple(int(size) for size in value.shape[1:]), value.dtype.name)


def _describe_spec(spec: Any) -> Structure:
    if isinstance(spec, dict):
        names = sorted(spec)
        return Group(tuple(names), tuple(_describe_spec(spec[name]) for name in names))
    if isinstance(spec, tuple):
        return Group((), tuple(_describe_spec(each) for each in spec))
    return TensorInfo(tuple(spec.shape), _TYPES.get(spec.dtype.name, spec.dtype.name))


def _cast(stream: Any) -> Any:
    """Returns a stream in the types that IPUs have."""
    names = {tf.as_dtype(given): tf.as_dtype(kept) for given, kept in _TYPES.items()}

    def cast(*sample: Any) -> Any:
        return tf.nest.map_structure(lambda each: tf.cast(each, names.get(each.dtype, each.dtype)), sample)

    if any(each.dtype in names for each in tf.nest.flatten(stream.element_spec)):
        return stream.map(cast)
    return stream


def _has_rows_of_one_shape(rows: List[Any]) -> bool:
    """Whether numpy makes an array of a list; of rows of different lengths it makes none, or one of objects."""
    with contextlib.suppress(ValueError, Warning), warnings.catch_warnings():
        warnings.simplefilter("error")  # before release 1.24 numpy only warns
        return np.asarray(rows).dtype.kind != "O" or not any(isinstance(row, (list, np.ndarray)) for row in rows)
    return False


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(each) for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))
