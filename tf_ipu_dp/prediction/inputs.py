"""The inputs of predictions: images, arrays, tables, and folders of them, read in order, in parts that fit into memory.

No TensorFlow: images are decoded by a function that is passed in. numpy is imported to read arrays. Files are foreign
input: nothing in them is executed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import zipfile
from concurrent import futures
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

from tf_ipu_dp import cli
from tf_ipu_dp.datasets import tables
from tf_ipu_dp.datasets.info import DatasetInfo, Structure, TensorInfo

PROBABILITIES = "probabilities"  # what the output of a classification is called
IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif")
ARRAYS = (".npy", ".npz")
TABLE = ".csv"
_TYPES = (*IMAGES, *ARRAYS, TABLE)
# The names that an array of images has in the files of Keras and others.
_USUAL_KEYS = ("x", "images", "inputs", "x_test", "test_images", "arr_0")
_MAX_NAMED = 3
_MAX_BYTES = 1 << 28


@dataclasses.dataclass(frozen=True)
class InputSpec:
    """One input of a model: a sample's shape and type."""

    name: str
    shape: Tuple[Optional[int], ...]
    dtype: str
    columns: Tuple[str, ...] = ()  # the titles that it has in a table, where these are known

    @property
    def is_image(self) -> bool:
        return self.dtype == "uint8" and len(self.shape) == 3

    @property
    def bytes(self) -> int:
        """The size of one sample, at most; unknown lengths count as one."""
        count = 1 if self.dtype in ("uint8", "int8", "bool") else 8
        for length in self.shape:
            count *= length or 1
        return count

    def describe(self) -> str:
        """Returns `28 x 28 x 1 uint8`."""
        return f"{' x '.join('any' if each is None else str(each) for each in self.shape) or 'one'} {self.dtype}"


@dataclasses.dataclass(frozen=True)
class Part:
    """Some samples in order: their names, and an array for each input of the model."""

    names: List[str]
    arrays: Dict[str, Any]


@dataclasses.dataclass(frozen=True)
class InputFile:
    """A file with one image, or with an array of any number of samples."""

    path: Path
    samples: int
    is_image: bool


def image_specs(facts: DatasetInfo) -> Tuple[InputSpec, ...]:
    """Returns the input of a model of images, as files have it; nothing for other models."""
    shape = (facts.height, facts.width, facts.channels)
    return (InputSpec("image", shape, "uint8"),) if facts.mean else ()


def array_specs(inputs: Structure, columns: Tuple[str, ...] = ()) -> Tuple[InputSpec, ...]:
    """Returns the inputs of a model that takes arrays: by name in a dictionary, else as numpy.savez names them."""
    found: List[InputSpec] = []

    def add(item: Structure, name: str) -> None:
        if isinstance(item, TensorInfo):
            found.append(InputSpec(name or f"arr_{len(found)}", item.shape, item.dtype, columns))
            return
        for place, each in enumerate(item.items):
            part = item.names[place] if item.names else str(place) if name else ""
            add(each, f"{name}_{part}" if name and part else part)

    add(inputs, "")
    return tuple(found)


def most_samples(specs: Sequence[InputSpec]) -> int:
    """Returns how many samples fit into the memory that one part of the inputs may take."""
    return max(_MAX_BYTES // sum(spec.bytes for spec in specs), 1)


Decode = Callable[[bytes], Any]  # the bytes of an image file to an array; ValueError if that is not possible


def find_files(words: Sequence[str], specs: Sequence[InputSpec]) -> List[InputFile]:
    """Returns the files that the arguments name, in their order; those of a folder in the order of their paths."""
    found: List[InputFile] = []
    for word in words:
        path = cli.expand_path(word)
        if path.is_dir():
            files = [each for each in _walk(path) if each.suffix.lower() in _TYPES]
            if not files:
                raise cli.UsageError(f"{path} has no input in it. Files of these types are: {', '.join(_TYPES)}.")
            found += [_examine(each, specs) for each in files]
        elif not path.exists():
            raise cli.UsageError(
                f"There is no file {path}. Give images, .npy, .npz or .csv files, or a folder of them."
            )
        elif path.suffix.lower() not in _TYPES:
            raise cli.UsageError(f"{path} is of a type that cannot be read. Types are: {', '.join(_TYPES)}.")
        else:
            found.append(_examine(path, specs))
    if not sum(each.samples for each in found):
        raise cli.UsageError(f"{', '.join(map(str, words))}: there is no sample in it. Give arrays that have rows.")
    return found


class InputReader:
    """Reads files in parts of at most so many samples. `skipped` counts those that could not be decoded."""

    def __init__(self, specs: Sequence[InputSpec], decode: Decode, *, skip_bad: bool) -> None:
        self._specs, self._decode, self._skip_bad = specs, decode, skip_bad
        self.skipped: List[str] = []

    def read(self, files: Sequence[InputFile], size: int) -> Iterator[Part]:
        """Yields all samples once, in order; every part but the last has `size` of them."""
        import numpy as np

        names: List[str] = []
        pending: Dict[str, List[Any]] = {spec.name: [] for spec in self._specs}
        for part in self._read_blocks(files, size):
            begin = 0
            while begin < len(part.names):
                end = min(begin + size - len(names), len(part.names))
                names += part.names[begin:end]
                for name, array in part.arrays.items():
                    pending[name].append(array[begin:end])
                begin = end
                if len(names) == size:
                    yield Part(names, {name: np.concatenate(arrays) for name, arrays in pending.items()})
                    names, pending = [], {name: [] for name in pending}
        if names:
            yield Part(names, {name: np.concatenate(arrays) for name, arrays in pending.items()})

    def _read_blocks(self, files: Sequence[InputFile], size: int) -> Iterator[Part]:
        images: List[Path] = []
        for file in files:
            if file.is_image:
                images.append(file.path)
            if images and (len(images) == size or not file.is_image):
                yield from self._read_images(images)
                images = []
            if not file.is_image:
                arrays = _load(file.path, self._specs)
                yield Part([f"{file.path}[{row}]" for row in range(file.samples)], arrays)
        if images:
            yield from self._read_images(images)

    def _read_images(self, paths: Sequence[Path]) -> Iterator[Part]:
        import numpy as np

        with futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            found = list(pool.map(self._read_image, paths))
        bad = [(path, reason) for path, (_, reason) in zip(paths, found) if reason]
        if bad and not self._skip_bad:
            first = ", ".join(f"{path} ({reason})" for path, reason in bad[:_MAX_NAMED])
            more = f" and {len(bad) - _MAX_NAMED:,} more" if len(bad) > _MAX_NAMED else ""
            raise cli.UsageError(
                f"{cli.count(len(bad), 'image')} cannot be decoded: {first}{more}. Remove them, or add "
                "--skip_bad_samples, which leaves them out."
            )
        self.skipped += [str(path) for path, _ in bad]
        good = [(path, image) for path, (image, reason) in zip(paths, found) if not reason]
        if good:
            yield Part([str(path) for path, _ in good], {self._specs[0].name: np.stack([image for _, image in good])})

    def _read_image(self, path: Path) -> Tuple[Any, str]:
        try:
            return self._decode(path.read_bytes()), ""
        except OSError as error:
            return None, error.strerror or str(error)
        except ValueError as error:
            return None, cli.first_line(str(error))


def _examine(path: Path, specs: Sequence[InputSpec]) -> InputFile:
    if path.suffix.lower() in (*ARRAYS, TABLE):
        arrays = _load(path, specs)
        return InputFile(path, len(next(iter(arrays.values()))), is_image=False)
    if len(specs) != 1 or not specs[0].is_image:
        takes = "; ".join(f"{spec.name}: {spec.describe()}" for spec in specs)
        raise cli.UsageError(f"{path} is an image, but the model takes no image ({takes}). Give a .npz or .npy file.")
    return InputFile(path, 1, is_image=True)


def _load(path: Path, specs: Sequence[InputSpec]) -> Dict[str, Any]:
    """Returns the arrays of a file, one for each input of the model, all of the same number of rows."""
    import numpy as np

    if path.suffix.lower() == TABLE:
        return _load_table(path, specs)
    try:
        loaded = np.load(path, mmap_mode="r" if path.suffix.lower() == ".npy" else None, allow_pickle=False)
        arrays = {key: loaded[key] for key in loaded.files} if hasattr(loaded, "files") else {"": loaded}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise cli.UsageError(
            f"{path} cannot be read as an array ({cli.first_line(str(error))}). Write it with numpy.save or "
            "numpy.savez; arrays of Python objects are not read."
        ) from None
    if len(specs) == 1:
        return {specs[0].name: _fit(_choose(path, arrays, specs[0]), specs[0], path)}
    by_place = {f"arr_{place}" for place in range(len(specs))}  # as numpy.savez names arrays without names
    if set(arrays) == by_place:
        arrays = {spec.name: arrays[f"arr_{place}"] for place, spec in enumerate(specs)}
    missing = [spec.name for spec in specs if spec.name not in arrays]
    if missing:
        raise cli.UsageError(
            f"{path} has no array {cli.alternatives(missing)}. A model of {len(specs)} inputs takes a .npz file with "
            f"the arrays {', '.join(spec.name for spec in specs)}."
        )
    fitted = {spec.name: _fit(arrays[spec.name], spec, path) for spec in specs}
    rows = {name: len(array) for name, array in fitted.items()}
    if len(set(rows.values())) > 1:
        counts = ", ".join(f"{name} {count:,}" for name, count in rows.items())
        raise cli.UsageError(f"{path} has arrays of different lengths: {counts}. Each needs one row per sample.")
    return fitted


def _load_table(path: Path, specs: Sequence[InputSpec]) -> Dict[str, Any]:
    """Returns the numbers of a .csv file, with a row for each sample; the columns of training by their titles."""
    import numpy as np

    spec = specs[0]
    if len(specs) > 1 or len(spec.shape) != 1:
        takes = "; ".join(f"{spec.name}: {spec.describe()}" for spec in specs)
        raise cli.UsageError(f"{path} is a table, but the model takes {takes}. Give a .npz or .npy file.")
    table = tables.read_table(path, str(path))
    titles = list(spec.columns or table.columns)
    missing = [title for title in titles if title not in table.columns]
    if missing:
        tables.refuse(
            str(path), f"has no column {missing[0]!r}, which the model was trained with, only "
            f"{tables.name_some(list(table.columns))}"
        )  # fmt: skip
    if spec.shape[0] not in (None, len(titles)):
        tables.refuse(str(path), f"has {len(titles)} columns, but the model takes {spec.describe()}")
    numbers: Any = np.stack([np.array(table.numbers(title)) for title in titles], 1)
    return {spec.name: numbers.astype(spec.dtype)}


def _choose(path: Path, arrays: Dict[str, Any], spec: InputSpec) -> Any:
    """Returns the array of a file that a model with one input takes."""
    if len(arrays) == 1:
        return next(iter(arrays.values()))
    for key in (spec.name, *_USUAL_KEYS):
        if key in arrays:
            return arrays[key]
    raise cli.UsageError(
        f"{path} has the arrays {', '.join(sorted(arrays))}, and it is not clear which to take. Call it {spec.name}."
    )


def _fit(array: Any, spec: InputSpec, path: Path) -> Any:
    """Returns an array with a row for each sample; a lone sample and grey images without channels are accepted."""
    import numpy as np

    shape = spec.shape
    if spec.is_image and array.ndim >= 2 and shape[2] == 1 and array.shape[-2:] == shape[:2]:
        array = array[..., None]
    if array.ndim == len(shape):
        array = array[None]
    fits = array.ndim == len(shape) + 1 and all(want in (None, has) for want, has in zip(shape, array.shape[1:]))
    if not fits:
        raise cli.UsageError(
            f"{path} has the shape {' x '.join(map(str, array.shape))}, but the model takes samples of "
            f"{spec.describe()}. Give an array with a row for each sample."
        )
    if array.dtype != np.dtype(spec.dtype):
        if not np.can_cast(array.dtype, spec.dtype, "same_kind") or spec.is_image:
            raise cli.UsageError(
                f"{path} is of type {array.dtype}, but the model takes {spec.describe()}. Convert it with "
                f"array.astype('{spec.dtype}')" + (", with pixels from 0 to 255." if spec.is_image else ".")
            )
        array = array.astype(spec.dtype)
    return array


def _walk(folder: Path) -> List[Path]:
    found = []
    with contextlib.suppress(OSError):
        for place, folders, files in os.walk(folder, followlinks=False):
            folders[:] = [name for name in folders if not name.startswith(".")]
            found += [Path(place, name) for name in files if not name.startswith(".")]
    return sorted(found)
