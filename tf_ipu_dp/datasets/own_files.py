"""Data sets of users without any code: a folder of images for each class, .npz with Keras' names, .csv.

Which of them a path is, is decided by `describe_path` without numpy or TensorFlow; the rest reads the files.
"""

from __future__ import annotations

import re
import zipfile
import zlib
from pathlib import Path
from typing import Any, Dict, List, NoReturn, Sequence, Tuple

import numpy as np
import tensorflow as tf

from tf_ipu_dp import cli
from tf_ipu_dp.config.train_flags import TrainConfig
from tf_ipu_dp.datasets import tables
from tf_ipu_dp.datasets.info import COLUMNS, SIZE_WHERE_IMAGES_DIFFER
from tf_ipu_dp.datasets.own_paths import TRAIN_FOLDERS, VALIDATION_FOLDERS, class_folders, image_files
from tf_ipu_dp.task import Data

_MAX_BYTES = 2 * 2**30
_WHOLE = re.compile(r"[+-]?\d+")  # written without a point
_ONLY_NUMBERS = (
    "All columns but the label are numbers; fill in or encode others in a function that returns arrays: "
    "--dataset=FILE.py:function"
)
_NAMED = 3  # bad files that are named; the others are counted


def read(path: Path, cfg: TrainConfig) -> Tuple[Data, str]:
    """Returns the data of a path, and what it was taken for; UsageError with one sentence if it cannot be used."""
    if path.is_dir():
        return _read_folder(path, cfg)
    if path.suffix.lower() == ".npz":
        return _read_npz(path, cfg.dataset)
    return _read_csv(path, cfg)


def _read_npz(path: Path, name: str) -> Tuple[Data, str]:
    if path.is_file() and not zipfile.is_zipfile(path):
        _refuse(name, "cannot be read (it is not what numpy.savez writes)")
    try:
        with np.load(path, allow_pickle=False) as arrays:
            found = {key: arrays[key] for key in arrays.files}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        _refuse(name, f"cannot be read ({cli.first_line(str(error))})")
    if not {"x_train", "y_train"} <= set(found):
        _refuse(name, f"has {cli.alternatives(found) or 'no arrays'}; it needs x_train and y_train, as in Keras")
    validation = next(((found[f"x_{each}"], found[f"y_{each}"]) for each in ("test", "validation", "val")
                       if {f"x_{each}", f"y_{each}"} <= set(found)), None)  # fmt: skip
    names = tuple(map(str, found["class_names"])) if "class_names" in found else ()
    split = "" if validation else ", validation held out"
    return Data((found["x_train"], found["y_train"]), validation, class_names=names), f"arrays of an .npz file{split}"


def _read_csv(path: Path, cfg: TrainConfig) -> Tuple[Data, str]:
    name, label = f"--dataset={cfg.dataset}", cfg.label_column
    table = tables.read_table(path, name)
    titles = [title for title in table.columns if title != label]
    if label not in table.columns:
        tables.refuse(
            name, f"has no column {label!r}, only {tables.name_some(titles)}. Name the one to learn with --label_column"
        )
    if not titles:
        tables.refuse(name, f"has no column besides {label!r}")
    inputs: Any = np.stack([np.array(table.numbers(title, _ONLY_NUMBERS)) for title in titles], 1).astype(np.float32)
    targets, names = _labels(table, label)
    kind = f"{len(names)} classes" if names else "a number" if targets.dtype.kind == "f" else "class numbers"
    about = f"a table of {cli.count(len(titles), 'column')} to {kind}, validation held out"
    return Data((inputs, targets), class_names=names, facts={COLUMNS: titles}), about


def _labels(table: tables.Table, title: str) -> Tuple[Any, Tuple[str, ...]]:
    """Returns whole numbers as class numbers, other numbers as numbers, and texts as the numbers of their names.

    Whole numbers that are not below the number of samples are numbers, too.
    """
    words = table.columns[title]
    empty = next((place for place, word in enumerate(words) if not word), None)
    if empty is not None:
        tables.refuse(table.name, f"has no {title!r} in line {table.lines[empty]}")
    numbers = [tables.to_number(word) for word in words]
    if all(number is not None for number in numbers):
        found: Any = np.array(numbers, np.float64)
        if not all(_WHOLE.fullmatch(word) for word in words) or found.max() >= len(words):
            return found.astype(np.float32), ()  # also whole numbers like prices: of most there would be no sample
        if found.min() < 0:
            place = table.lines[int(found.argmin())]
            tables.refuse(
                table.name,
                f"has the label {found.min():.0f} in line {place}, and class numbers begin with 0. Numbers that are no "
                f"classes are written with a point, like {found.min():.1f}",
            )
        return found.astype(np.int32), ()
    names = tuple(sorted(set(words)))
    places = {each: place for place, each in enumerate(names)}
    return np.array([places[word] for word in words], np.int32), names


def _read_folder(path: Path, cfg: TrainConfig) -> Tuple[Data, str]:
    parts = [next((path / each for each in names if (path / each).is_dir()), None)
             for names in (TRAIN_FOLDERS, VALIDATION_FOLDERS)]  # fmt: skip
    train, validation = parts if all(parts) else (path, None)
    assert train
    names = tuple(folder.name for folder in class_folders(train))
    files = {part: _list_files(part, names, cfg) for part in (train, validation) if part}
    decoded = _decode_all([file for listed in files.values() for file, _ in listed], cfg)
    data = [_stack(files[part], decoded) if part else None for part in (train, validation)]
    about = f"a folder of images in {len(names)} classes{'' if validation else ', validation held out'}"
    left_out = sum(map(len, files.values())) - len(decoded)
    if left_out:
        about += f", without {cli.count(left_out, 'image')} that cannot be decoded"
    return Data(data[0], data[1], classes=len(names), class_names=names), about


def _list_files(part: Path, names: Sequence[str], cfg: TrainConfig) -> List[Tuple[Path, int]]:
    found: List[Tuple[Path, int]] = []
    for label, name in enumerate(names):
        files = image_files(part / name)
        if not files:
            _refuse(cfg.dataset, f"has no images of the class {name!r}: {part / name} has none")
        found += [(file, label) for file in files]
    extra = sorted({folder.name for folder in class_folders(part)} - set(names))
    if extra:
        _refuse(cfg.dataset, f"has the class {extra[0]!r} in {part}, but not among those to train on")
    return found


def _decode_all(files: Sequence[Path], cfg: TrainConfig) -> Dict[Path, Any]:
    """Returns the images, all of one size, by file; those that cannot be decoded are refused, or left out."""
    images: Dict[Path, Any] = {}
    bad: List[Path] = []
    for file in files:
        try:
            images[file] = tf.io.decode_image(file.read_bytes(), channels=0, expand_animations=False).numpy()
        except (tf.errors.InvalidArgumentError, OSError):
            bad.append(file)
    if bad and not cfg.skip_bad_samples:
        named = ", ".join(map(str, bad[:_NAMED])) + (" ..." if len(bad) > _NAMED else "")
        _refuse(
            cfg.dataset,
            f"has {cli.count(len(bad), 'image')} of {len(files):,} that cannot be decoded: {named}. Remove them, or "
            "add --skip_bad_samples",
        )
    if not images:
        _refuse(cfg.dataset, "has no image that can be decoded")
    sizes = {image.shape[:2] for image in images.values()}
    channels = max(image.shape[2] if image.shape[2] in (1, 3) else 3 for image in images.values())
    same = sizes.pop() if len(sizes) == 1 else (SIZE_WHERE_IMAGES_DIFFER, SIZE_WHERE_IMAGES_DIFFER)
    height, width = (cfg.image_size, cfg.image_size) if cfg.image_size else same
    if len(images) * height * width * channels > _MAX_BYTES:
        _refuse(
            cfg.dataset,
            f"takes {len(images) * height * width * channels / 2**30:.1f} GiB at {height} x {width}, and a folder is "
            f"kept in memory, up to {_MAX_BYTES / 2**30:.0f} GiB. Use a smaller --image_size, or a function that "
            "streams",
        )
    return {file: _fit(image, height, width, channels) for file, image in images.items()}


def _fit(image: Any, height: int, width: int, channels: int) -> Any:
    """Returns the middle of an image in the proportions of a size, in that size."""
    if image.shape[2] in (2, 4):  # the last channel is how opaque it is
        image = image[..., :-1]
    if image.shape[2] != channels:
        image = np.repeat(image[..., :1], channels, axis=2)
    if image.shape[:2] == (height, width):
        return image
    scale = min(image.shape[0] / height, image.shape[1] / width)
    rows, columns = max(round(scale * height), 1), max(round(scale * width), 1)
    top, left = (image.shape[0] - rows) // 2, (image.shape[1] - columns) // 2
    part = image[top : top + rows, left : left + columns]
    return tf.cast(tf.round(tf.image.resize(part, [height, width], antialias=True)), tf.uint8).numpy()


def _stack(files: Sequence[Tuple[Path, int]], images: Dict[Path, Any]) -> Tuple[Any, Any]:
    kept = [(images[file], label) for file, label in files if file in images]
    if not kept:
        return np.zeros([0, 1, 1, 1], np.uint8), np.zeros([0], np.int32)
    return np.stack([image for image, _ in kept]), np.array([label for _, label in kept], np.int32)


def _refuse(name: str, what: str) -> NoReturn:
    raise cli.UsageError(f"--dataset={name} {what}.")
