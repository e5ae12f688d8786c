"""Lists what a run can be made of: `python -m tf_ipu_dp.list` shows models, data sets and flag files. No TensorFlow."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import itertools
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence

from absl import flags

from tf_ipu_dp import cli
from tf_ipu_dp.config import parsers
from tf_ipu_dp.datasets import info, lookup
from tf_ipu_dp.planning import architectures

KINDS = ("models", "datasets", "flags")
_EXAMPLES = ("python -m tf_ipu_dp.list", "python -m tf_ipu_dp.list models", "python -m tf_ipu_dp.list --json")
# The images that the sizes of models are given for.
_SHAPE = {"height": 32, "width": 32, "channels": 3, "classes": 10}


@dataclasses.dataclass(frozen=True)
class Model:
    """A value of --model, and its size for images of 32 x 32 x 3 in 10 classes."""

    name: str
    parameters: int
    multiply_adds: int  # of one forward pass


@dataclasses.dataclass(frozen=True)
class Dataset:
    """A value of --dataset. `samples` says where they come from."""

    name: str
    train_samples: int
    validation_samples: int
    image: str
    classes: int
    samples: str


@dataclasses.dataclass(frozen=True)
class FlagFile:
    """A value of --flagfile, and the first sentence of its comment."""

    path: str
    about: str


def main(words: Sequence[str]) -> int:
    """Shows what the words name, or everything."""
    if cli.wants_help(words):
        return cli.show(_help())
    fv = _make_flags()
    kinds = [word for word in words if not word.startswith("-")]
    cli.parse([word for word in words if word.startswith("-")], fv)
    for kind in kinds:
        if kind not in KINDS:
            near = difflib.get_close_matches(kind, KINDS, n=1)
            advice = f"Did you mean {near[0]}?" if near else f"Use {cli.alternatives(KINDS)}."
            raise cli.UsageError(f"{kind} cannot be listed. {advice}")
    found = find(kinds or KINDS, _text(fv["data_dir"].value), Path("flags"))
    if fv["json"].value:
        values = {kind: [dataclasses.asdict(each) for each in found[kind]] for kind in found}
        return cli.show(json.dumps({"schema": 1, **values}, indent=2) + "\n")
    return cli.show(render(found, cli.width_of(sys.stdout)))


def find(kinds: Sequence[str], data_dir: Optional[str], folder: Path) -> Dict[str, List[Any]]:
    """Returns the models, the data sets and the flag files in a folder, as far as they are asked for."""
    finders: Dict[str, Callable[[], List[Any]]] = {
        "models": _models,
        "datasets": lambda: _datasets(data_dir),
        "flags": lambda: _flag_files(folder),
    }
    return {kind: finders[kind]() for kind in KINDS if kind in kinds}


def render(found: Dict[str, List[Any]], width: Optional[int]) -> str:
    """Returns a table for each kind, with the flag that takes its names."""
    tables: Dict[str, Callable[[List[Any], Optional[int]], str]] = {
        "models": _render_models,
        "datasets": _render_datasets,
        "flags": _render_flag_files,
    }
    return "\n".join(tables[kind](found[kind], width) for kind in found)


def _render_models(found: Sequence[Model], width: Optional[int]) -> str:
    rows = [(each.name, f"{each.parameters:,}", f"{each.multiply_adds / 1e6:,.1f}") for each in found]
    header = ("--model", "Parameters", "Million multiply-adds")
    return cli.render_table(header, rows, width, (1, 2)) + "for images of 32 x 32 x 3 in 10 classes\n"


def _render_datasets(found: Sequence[Dataset], width: Optional[int]) -> str:
    header = ("--dataset", "Training", "Validation", "Image", "Classes", "Samples")
    rows = [
        (each.name, f"{each.train_samples:,}", f"{each.validation_samples:,}", each.image, f"{each.classes:,}",
         each.samples)
        for each in found
    ]  # fmt: skip
    return cli.render_table(header, rows, width, (1, 2, 4))


def _render_flag_files(found: Sequence[FlagFile], width: Optional[int]) -> str:
    if not found:
        return "no flag files: there is no flags/*.flags in this directory\n"
    return cli.render_table(("--flagfile", "What it is for"), [(each.path, each.about) for each in found], width)


def _models() -> List[Model]:
    found = (architectures.describe(name, norm="batch", **_SHAPE) for name in architectures.MODELS)
    return [Model(each.name, each.parameters, each.macs) for each in found]


def _datasets(data_dir: Optional[str]) -> List[Dataset]:
    prepared = lookup.prepared_names(data_dir)
    found = list(info.DATASETS.values())
    for name in (name for name in prepared if name not in info.DATASETS):
        with contextlib.suppress(cli.UsageError):  # not an image classification
            found.append(lookup.find(name, data_dir, None))
    return [
        Dataset(
            each.name,
            each.train_samples,
            each.validation_samples,
            f"{each.height} x {each.width} x {each.channels}",
            each.classes,
            _describe_samples(each, each.name in prepared),
        )
        for each in found
    ]


def _describe_samples(facts: info.DatasetInfo, is_prepared: bool) -> str:
    if facts.origin == info.TFDS and not is_prepared:
        return "downloaded by the first run" if lookup.can_be_downloaded(facts.name) else "to be prepared by hand"
    return {info.TFDS: "prepared", info.SHIPPED: "shipped", info.SYNTHETIC: "random numbers"}[facts.origin]


def _flag_files(folder: Path) -> List[FlagFile]:
    found = []
    for path in sorted(folder.glob("*.flags")):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        comment = itertools.takewhile(lambda line: line.startswith("# ") and not line.startswith("#  "), lines)
        sentence = re.match(r"(.*?[.:])( |$)", " ".join(line[2:] for line in comment))
        found.append(FlagFile(str(path), sentence[1].rstrip(".:") if sentence else ""))
    return found


def _text(value: object) -> Optional[str]:
    return None if value is None else os.path.expanduser(str(value))  # noqa: PTH111 - a flag keeps its text


def _make_flags() -> flags.FlagValues:
    fv = flags.FlagValues()  # type: ignore[no-untyped-call, unused-ignore]
    define: Any = flags.DEFINE
    text = "Folder of tensorflow-datasets. Default: its own, ~/tensorflow_datasets."
    define(parsers.PathParser(), "data_dir", None, text, fv, parsers.Serializer())
    flags.DEFINE_bool("json", False, "Print JSON.", flag_values=fv)
    return fv


def _help() -> str:
    return cli.render_help(
        f"python -m tf_ipu_dp.list [--flag=value ...] [{'|'.join(KINDS)} ...]",
        "Lists the models, the data sets, and the flag files of the current directory.",
        {"List": ("data_dir", "json")},
        _make_flags(),
        shutil.get_terminal_size().columns,
        _EXAMPLES,
    )


if __name__ == "__main__":
    sys.exit(cli.run("list", lambda: main(sys.argv[1:]), sys.stderr))
