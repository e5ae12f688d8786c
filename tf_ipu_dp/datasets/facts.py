"""The facts that a job is planned with: of its data set, and of a model and data of the user's own.

What users' code makes is known only once it has run, with TensorFlow. That happens in a process of its own, once, and
what was learned is kept in the user's cache, by the content of the files and by the flags that they get: the next plan
takes no time. Training itself compares what it finds with these facts, so stale ones do no harm.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional

from tf_ipu_dp import __version__, cli, user_code
from tf_ipu_dp.config import parsers
from tf_ipu_dp.config.train_flags import TrainConfig
from tf_ipu_dp.datasets import lookup, own_paths
from tf_ipu_dp.datasets.info import DatasetInfo
from tf_ipu_dp.planning.architectures import Architecture

_LEARNER = "tf_ipu_dp.training.learn"
# Flags that change what is learned.
LEARNED_BY = (
    "model", "norm", "dataset", "data_dir", "image_size", "seed", "validation_split", "label_column",
    "skip_bad_samples", "freeze",
)  # fmt: skip
_MAX_KEPT = 500  # files of the cache
Learn = Callable[[TrainConfig], DatasetInfo]


def find(
    cfg: TrainConfig, *, stages: Optional[int] = None, learn_here: Optional[Learn] = None, may_load: bool = True
) -> DatasetInfo:
    """Returns the facts of a run's data, with its model if that is the user's own.

    `stages` are those that a launcher has decided. `learn_here` is called for functions that only this process has.
    Without `may_load` no code of users is run: what is not in the cache is a UsageError.
    """
    own_path = is_own_path(cfg)
    if not cfg.planned_code and not own_path:
        return lookup.find(cfg.dataset, cfg.data_dir, cfg.image_size)
    cfg = dataclasses.replace(cfg, norm=cfg.norm_for(stages or cfg.requested_stages or 1))
    if own_path:
        own_paths.require_known(cli.expand_path(cfg.dataset), cfg.dataset)
    if learn_here and any(map(user_code.is_of_this_program, cfg.planned_code.values())):
        return learn_here(cfg)
    found = _read(_cache_path(cfg, own_path))
    if not found:
        if not may_load:
            what = cli.alternatives(cfg.planned_code.values()) or cfg.dataset
            raise cli.UsageError(f"{what} has not been planned here yet.")
        found = _learn(cfg)
        keep(cfg, found)
    if own_path or "dataset" in cfg.planned_code:
        return found
    named = lookup.find(cfg.dataset, cfg.data_dir, cfg.image_size)
    return dataclasses.replace(named, own_model=found.own_model)


def is_own_path(cfg: TrainConfig) -> bool:
    """Whether --dataset is a path of the user's own, and not a name or a set of tensorflow-datasets."""
    name = cfg.dataset
    if user_code.is_reference(name) or lookup.is_prepared_folder(name):
        return False
    if parsers.is_path(name):
        return True
    return not lookup.is_known(name, cfg.data_dir) and Path(name).exists()


def keep(cfg: TrainConfig, found: DatasetInfo) -> None:
    """Keeps facts for the next plan; a cache that cannot be written is no reason to fail."""
    cfg = dataclasses.replace(cfg, norm=cfg.norm_for(cfg.requested_stages or 1))
    path = _cache_path(cfg, is_own_path(cfg))
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        for old in sorted(path.parent.glob("*.json"), key=lambda each: each.stat().st_mtime)[:-_MAX_KEPT]:
            old.unlink()
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            json.dump(to_json(found), file)
        Path(file.name).replace(path)


def to_json(found: DatasetInfo) -> Dict[str, Any]:
    """Returns facts as JSON."""
    return {"dataset": found.to_json(), "model": found.own_model.to_json() if found.own_model else None}


def from_json(value: Mapping[str, Any]) -> DatasetInfo:
    """Returns the facts in JSON; KeyError, TypeError or ValueError if they are damaged."""
    model = Architecture.from_json(value["model"]) if value["model"] else None
    return dataclasses.replace(DatasetInfo.from_json(value["dataset"]), own_model=model)


def _learn(cfg: TrainConfig) -> DatasetInfo:
    """Lets a process of its own run the user's code, and returns what it reports."""
    user_code.require_files(cfg.planned_code)  # that process imports TensorFlow, which takes seconds
    named = [*cfg.planned_code.values(), *([cfg.dataset] if is_own_path(cfg) else [])]
    what = cli.alternatives(named).replace(" or ", " and ")
    print(f"reading {what}, once: what is learned is kept for the next plan...", file=sys.stderr, flush=True)
    words = [cli.flag_text(name, getattr(cfg, name)) for name in LEARNED_BY if getattr(cfg, name) is not None]
    command = [sys.executable, "-m", _LEARNER, *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    try:
        value = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError) as error:
        raise cli.UsageError(
            f"{what} could not be read: the process that ran its code ended with exit code {done.returncode}."
        ) from error
    if value.get("problems"):
        raise cli.UsageError(*value["problems"])
    return from_json(value)


def _cache_path(cfg: TrainConfig, own_path: bool) -> Path:
    parts: List[Any] = [__version__, [cli.typed(getattr(cfg, name)) for name in LEARNED_BY]]
    parts += [user_code.code_digest(reference) for reference in cfg.planned_code.values()]
    if own_path:
        path = cli.expand_path(cfg.dataset).resolve()
        parts += [str(path), own_paths.content_key(path)]
    elif not user_code.is_reference(cfg.dataset):
        parts.append(repr(lookup.find(cfg.dataset, cfg.data_dir, cfg.image_size)))
    parts += [str(user_code.source_file(reference)) for reference in cfg.planned_code.values()]
    parts.append(str(Path.cwd()))  # functions may read files from here
    name = hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:32]
    root = os.environ.get("XDG_CACHE_HOME") or str(cli.expand_path("~/.cache"))
    return Path(root) / "tf_ipu_dp" / "learned" / f"{name}.json"


def _read(path: Path) -> Optional[DatasetInfo]:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        return from_json(json.loads(path.read_text(encoding="utf-8")))
    return None
