"""What a path of --dataset is, from its name and the names in it: no TensorFlow, no numpy, no file is read."""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path
from typing import Iterator, List, NoReturn

from tf_ipu_dp import cli
from tf_ipu_dp.datasets import lookup

IMAGES = {".jpg", ".jpeg", ".png", ".gif", ".bmp"}
TRAIN_FOLDERS = ("train", "training")
VALIDATION_FOLDERS = ("validation", "val", "valid", "test")


def require_known(path: Path, name: str) -> None:
    """Raises a UsageError for a path that is none of the kinds that can be read without code."""
    if path.suffix.lower() in (".npz", ".csv"):
        if not path.is_file():
            _refuse(name, "is not a file on this host")
        return
    if not path.is_dir():
        _refuse(name, "is neither a folder nor an .npz or .csv file on this host")
    prepared = lookup.prepared_names(str(path))
    if prepared:
        _refuse(name, f"has sets that tensorflow-datasets has prepared. Name one: --dataset={Path(name) / prepared[0]}")
    train = next((path / each for each in TRAIN_FOLDERS if (path / each).is_dir()), path)
    classes = class_folders(train)
    if not classes:
        _refuse(
            name,
            "has no folders of images, one for each class; a path is such a folder, an .npz or .csv file, or a set "
            "that tensorflow-datasets has prepared",
        )
    if len(classes) < 2:
        _refuse(name, f"has one class only, {classes[0].name!r}; training takes two or more")
    for folder in classes:  # before all that is in them is looked at: it may be a whole file system
        if not any(_is_image(each) for each in _walk(folder)):
            _refuse(name, f"has no images of the class {folder.name!r}: {folder} has none")


def class_folders(folder: Path) -> List[Path]:
    """Returns the folders of classes, by name."""
    return sorted(each for each in folder.iterdir() if each.is_dir() and not each.name.startswith("."))


def image_files(folder: Path) -> List[Path]:
    """Returns the images in a folder and below it, by name."""
    return sorted(each for each in _walk(folder) if _is_image(each))


def content_key(path: Path) -> str:
    """Returns a hash of names, sizes and times of the files of a path, which changes with its content."""
    key = hashlib.sha256()
    for each in sorted(_walk(path)) if path.is_dir() else [path]:
        with contextlib.suppress(OSError):
            seen = each.stat()
            key.update(f"{each}\0{seen.st_size}\0{seen.st_mtime_ns}\n".encode())
    return key.hexdigest()[:16]


def _walk(folder: Path) -> Iterator[Path]:
    """Yields the files in a folder and below it, without what cannot be looked at."""
    for place, _, names in os.walk(folder):
        yield from (Path(place, name) for name in names if os.path.isfile(f"{place}/{name}"))  # noqa: PTH113 - no error


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in IMAGES


def _refuse(name: str, what: str) -> NoReturn:
    raise cli.UsageError(f"--dataset={name} {what}.")
