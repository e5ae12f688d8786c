"""Finds a data set before it is opened: its sizes, and where tensorflow-datasets has prepared it.

Reads two small JSON files at most, without TensorFlow and without tensorflow-datasets.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Dict, List, Mapping, NoReturn, Optional, Tuple

from tf_ipu_dp import cli
from tf_ipu_dp.datasets.info import DATASETS, SIZE_WHERE_IMAGES_DIFFER, TFDS, DatasetInfo

_MAX_BYTES_IN_MEMORY = 2 * 2**30
_FILES = ("dataset_info.json", "features.json")


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A set of labelled images as tensorflow-datasets has written it to disk."""

    folder: Path
    train_samples: int
    validation_split: str
    validation_samples: int
    image_key: str
    label_key: str
    # None where the images differ in size.
    height: Optional[int]
    width: Optional[int]
    channels: int
    classes: int
    class_names: Tuple[str, ...] = ()


def find(name: str, data_dir: Optional[str], image_size: Optional[int]) -> DatasetInfo:
    """Returns the facts of a data set; UsageError for a name that is neither known nor prepared in the data folder.

    A known set that is not prepared has its published facts, so that a run can be planned without the data.
    """
    known = _find_known(name)
    prepared = None if known and known.origin != TFDS else read_prepared(name, data_dir)
    if prepared:
        facts = _describe_prepared(name, prepared, known)
    elif known:
        facts = known
    else:
        refuse_missing(name, data_dir)
    return dataclasses.replace(facts, height=image_size, width=image_size) if image_size else facts


def read_prepared(name: str, data_dir: Optional[str]) -> Optional[Prepared]:
    """Returns what is on disk for a name like `set`, `set/config` or `set:1.2.3`; None if nothing is.

    The newest version is used. UsageError for a set that is not an image classification.
    """
    folder = _locate(name, data_dir)
    if not folder:
        return None
    try:
        info, features = (json.loads((folder / file).read_text(encoding="utf-8")) for file in _FILES)
        return _parse_description(name, folder, info, features)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, cli.UsageError):
            raise
        raise cli.UsageError(
            f"--dataset={name} cannot be read: {folder} does not have the files that tensorflow-datasets writes "
            f"({type(error).__name__}: {error}). Delete that folder and prepare it with "
            f"{_prepare_command(name, data_dir)}."
        ) from error


def refuse_missing(name: str, data_dir: Optional[str], reason: str = "") -> NoReturn:
    """Raises a UsageError with the folder that was searched and the command that prepares the set."""
    root = data_folder(data_dir)
    base = _split_name(name)[0]
    near = get_close_matches(base, sorted({*DATASETS, *prepared_names(data_dir)} - {base}), n=1, cutoff=0.7)
    is_typo = bool(near) and base not in DATASETS
    prepare = f"Did you mean --dataset={near[0]}? If not, prepare" if is_typo else "Prepare"
    raise cli.UsageError(
        f"--dataset={name} was not found in {root}{reason and ' and ' + reason}. "
        f"{prepare} it with {_prepare_command(name, data_dir)}, or give the folder that has it with --data_dir."
    )


def is_known(name: str, data_dir: Optional[str]) -> bool:
    """Whether a name is that of a known set, or of one that tensorflow-datasets has prepared."""
    return _find_known(name) is not None or _locate(name, data_dir) is not None


def is_prepared_folder(name: str) -> bool:
    """Whether a path is the folder of a set, or of a version of one, that tensorflow-datasets has prepared."""
    return _prepared_folder(name) is not None


def can_be_downloaded(name: str) -> bool:
    """Whether tensorflow-datasets can download a known set."""
    known = _find_known(name)
    return known is not None and known.origin == TFDS and known.downloadable


def prepared_names(data_dir: Optional[str]) -> List[str]:
    """Returns the sets that tensorflow-datasets has prepared, image sets or not."""
    return [
        folder.name
        for folder in _folders(data_folder(data_dir))
        if _versions(folder) or any(_versions(configuration) for configuration in _folders(folder))
    ]


def data_folder(data_dir: Optional[str]) -> Path:
    """Returns the folder in which tensorflow-datasets keeps its sets."""
    return cli.expand_path(data_dir or os.environ.get("TFDS_DATA_DIR") or Path("~") / "tensorflow_datasets")


def _find_known(name: str) -> Optional[DatasetInfo]:
    """Returns the published facts of a set; None for its other configurations, which are not known."""
    base, configuration, version = _split_name(name)
    facts = DATASETS.get(base)
    if not facts or configuration or (version and facts.origin != TFDS):
        return None
    return dataclasses.replace(facts, name=name)


def _describe_prepared(name: str, prepared: Prepared, known: Optional[DatasetInfo]) -> DatasetInfo:
    fixed = prepared.height is not None and prepared.width is not None
    samples = prepared.train_samples + prepared.validation_samples
    pixels = (prepared.height or 0) * (prepared.width or 0) * prepared.channels
    mean, deviation = typical_statistics(prepared.channels)
    size = SIZE_WHERE_IMAGES_DIFFER
    facts = DatasetInfo(
        name,
        prepared.train_samples,
        prepared.validation_samples,
        height=(prepared.height if fixed else None) or size,
        width=(prepared.width if fixed else None) or size,
        channels=prepared.channels,
        classes=prepared.classes,
        mean=mean,
        deviation=deviation,
        streamed=not fixed or samples * pixels > _MAX_BYTES_IN_MEMORY,
        # Shifting or mirroring could change the class of an unknown set's small images.
        augment="none" if fixed else "imagenet",
        class_names=prepared.class_names,
        taken_for="a set of tensorflow-datasets" if is_prepared_folder(name) else "",
    )
    if known and known.channels == facts.channels:
        facts = dataclasses.replace(facts, mean=known.mean, deviation=known.deviation, augment=known.augment)
    return facts


def typical_statistics(channels: int) -> Tuple[Tuple[float, ...], Tuple[float, ...]]:
    """Returns mean and deviation of photographs; exact ones would need a pass over the data for little gain."""
    photographs = DATASETS["imagenet2012"]
    if channels == len(photographs.mean):
        return photographs.mean, photographs.deviation
    return (0.449,) * channels, (0.226,) * channels


def _split_name(name: str) -> Tuple[str, str, str]:
    """Splits `set/config:1.2.3` into its three parts; the last two may be empty."""
    path, _, version = name.partition(":")
    base, _, configuration = path.partition("/")
    return base, configuration, version


def _locate(name: str, data_dir: Optional[str]) -> Optional[Path]:
    """Returns the folder of the set's newest or named version."""
    given = _prepared_folder(name)
    if given:
        return given
    base, configuration, version = _split_name(name)
    parent = data_folder(data_dir) / base / configuration
    versions = _versions(parent)
    if not versions and not configuration:
        # Only the code of a set knows its default configuration: take the one that is prepared.
        configurations = [folder for folder in _folders(parent) if _versions(folder)]
        if len(configurations) > 1:
            names = cli.alternatives(f"--dataset={base}/{folder.name}" for folder in configurations)
            raise cli.UsageError(f"--dataset={name} is prepared in several configurations in {parent}. Use {names}.")
        versions = _versions(configurations[0]) if configurations else []
    if version:
        versions = [folder for folder in versions if folder.name == version]
    return max(versions, key=_version_number) if versions else None


def _prepared_folder(name: str) -> Optional[Path]:
    """Returns the folder of a prepared set that is given by its path, or by that of the folder with its versions."""
    if "/" not in name:
        return None
    path = cli.expand_path(name)
    if all((path / file).is_file() for file in _FILES):
        return path
    versions = _versions(path)
    return max(versions, key=_version_number) if versions else None


def _versions(parent: Path) -> List[Path]:
    return [
        folder
        for folder in _folders(parent)
        if re.fullmatch(r"\d+\.\d+\.\d+", folder.name) and all((folder / file).is_file() for file in _FILES)
    ]


def _version_number(folder: Path) -> Tuple[int, ...]:
    return tuple(int(part) for part in folder.name.split("."))


def _folders(parent: Path) -> List[Path]:
    try:
        return sorted(path for path in parent.iterdir() if path.is_dir())
    except OSError:
        return []


def _prepare_command(name: str, data_dir: Optional[str]) -> str:
    base, configuration, version = _split_name(name)
    full = base + (f"/{configuration}" if configuration else "") + (f":{version}" if version else "")
    where = f", data_dir={str(data_dir)!r}" if data_dir else ""
    code = f"import tensorflow_datasets as tfds; tfds.builder({full!r}{where}).download_and_prepare()"
    return f'python -c "{code}"'


def _parse_description(name: str, folder: Path, info: Mapping[str, Any], features: Mapping[str, Any]) -> Prepared:
    splits = {split["name"]: sum(map(int, split.get("shardLengths", []))) for split in info.get("splits", [])}
    validation = next((split for split in ("test", "validation") if splits.get(split)), None)
    if not splits.get("train") or not validation:
        raise cli.UsageError(
            f"--dataset={name} in {folder} has the splits {cli.alternatives(splits) or 'none'}; training takes a train "
            "split, and also a test or validation split. Choose another set."
        )
    if info.get("fileFormat", "tfrecord") != "tfrecord":
        raise cli.UsageError(
            f"--dataset={name} in {folder} is stored as {info['fileFormat']}. Prepare it with file_format='tfrecord'."
        )
    columns: Dict[str, Any] = features.get("featuresDict", {}).get("features", {})
    image_key = _find_column(columns, info, "image", position=0)
    label_key = _find_column(columns, info, "classLabel", position=1)
    if not image_key or not label_key:
        missing = "images" if not image_key else "class labels"
        raise cli.UsageError(
            f"--dataset={name} in {folder} is not an image classification: it has no {missing}, only "
            f"{', '.join(columns) or 'other data'}. Choose a set with an image and a label."
        )
    image = columns[image_key]["image"]
    if image.get("dtype", "uint8") != "uint8":
        raise cli.UsageError(
            f"--dataset={name} in {folder} has images of {image['dtype']}; only 8-bit ones (uint8) can be read. "
            "Choose another set."
        )
    shape = [int(size) for size in image.get("shape", {}).get("dimensions", (-1, -1, 3))]
    height, width, channels = (size if size > 0 else None for size in shape)
    class_names = _read_class_names(folder, label_key)
    label = columns[label_key]["classLabel"]
    classes = label.get("numClasses") or len(class_names) or label["numClasses"]
    return Prepared(
        folder,
        splits["train"],
        validation,
        splits[validation],
        image_key,
        label_key,
        height,
        width,
        channels or 3,
        int(classes),
        class_names if len(class_names) == int(classes) else (),
    )


def _find_column(columns: Mapping[str, Any], info: Mapping[str, Any], kind: str, position: int) -> Optional[str]:
    """Returns the feature that the set names as its input (0) or target (1), else the only one of its kind."""
    items = info.get("supervisedKeys", {}).get("tuple", {}).get("items", [])
    named = items[position].get("featureKey") if len(items) == 2 else None
    fitting = [key for key, column in columns.items() if kind in column]
    if named in fitting:
        return str(named)
    usual = "image" if kind == "image" else "label"
    return usual if usual in fitting else fitting[0] if len(fitting) == 1 else None


def _read_class_names(folder: Path, label_key: str) -> Tuple[str, ...]:
    """Returns the names of the classes in the order of their labels; none for a set whose classes have no names."""
    try:
        lines = (folder / f"{label_key}.labels.txt").read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        return ()
    return tuple(line for line in lines if line)
