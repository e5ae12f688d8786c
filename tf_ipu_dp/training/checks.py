"""Consistency checks: instances, the folder they share, the checkpoint to resume from, and the weights.

A difference raises a UsageError that names it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
import zlib
from datetime import datetime
from importlib import metadata as importlib_metadata
from pathlib import Path
from typing import Dict, List, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf

from tf_ipu_dp import __version__, cli, sdk_types, user_code
from tf_ipu_dp.config import train_flags
from tf_ipu_dp.config.train_flags import TrainConfig
from tf_ipu_dp.datasets import sources
from tf_ipu_dp.datasets.info import OWN
from tf_ipu_dp.distributed.world import World
from tf_ipu_dp.planning.plan import RunPlan
from tf_ipu_dp.runs import checkpoints, disk_space, run_folder
from tf_ipu_dp.runs.manifest import Manifest, Variable
from tf_ipu_dp.runs.plan_record import PlanRecord
from tf_ipu_dp.runs.records import Record
from tf_ipu_dp.sdk import Sdk
from tf_ipu_dp.training import preflight

# A network file system may show a new file to other hosts some seconds late.
_VISIBLE_WITHIN_S = 15.0


def own_layers(run: RunPlan) -> Tuple[Tuple[str, str], ...]:
    """Returns the layers of an own model, by which a checkpoint knows it."""
    own = run.model.architecture.own
    return own.layers if own else ()


def own_code(cfg: TrainConfig) -> Dict[str, str]:
    """Returns hashes of the user's files, by the flag that names them."""
    return {name: user_code.code_digest(reference) for name, reference in cfg.own_code.items()}


def compare_instances(cfg: TrainConfig, run: RunPlan, sdk: Sdk, source: sources.Source, world: World) -> None:
    """Raises a UsageError if instances have different flags, data or versions, before any of them trains a step."""
    if world.instances == 1:
        return
    may_differ = train_flags.names_per_instance()
    flags = {f"--{name}": text for name, text in preflight.resolved_flags(cfg, run).items() if name not in may_differ}
    # Besides the flags, the plan depends on variables of the launcher, which may differ between instances.
    topology = {f"{name} of the plan": str(value) for name, value in dataclasses.asdict(run.topology).items()}
    shapes = {"the plan's model": f"{zlib.crc32(json.dumps(PlanRecord.of(run).to_json()).encode()):08x}"}
    code = {f"the code of --{name}={cfg.own_code[name]}": digest for name, digest in own_code(cfg).items()}
    data = {"the data": sources.fingerprint(source)}
    world.compare({**_versions_to_compare(sdk), **data, **code, **flags, **topology, **shapes})


@dataclasses.dataclass(frozen=True)
class _LeadersFolder(Record):
    """What the leader tells the other instances of the run's folder."""

    path: str
    owner: str  # as it stands in the folder, by which the others recognise it
    problem: str  # why there is none


def open_folder(cfg: TrainConfig, run: RunPlan, world: World) -> run_folder.RunFolder:
    """Returns the run's folder. The leader locks it and writes to it; the others only know its path."""
    folder, problem = None, ""
    if world.is_leader:
        try:
            folder = run_folder.open_folder(
                cfg.run_dir,
                name=preflight.folder_name(cfg),
                now=datetime.now(),
                needed_bytes=disk_space.needed_bytes(cfg, run),
            )
        except cli.UsageError as error:
            problem = str(error)
    path = str(folder.path.resolve()) if folder else ""
    own = _LeadersFolder(path, folder.read_owner() if folder else "", problem)
    leaders = _LeadersFolder.from_json(json.loads(world.broadcast_from_leader(json.dumps(own.to_json()))))
    if leaders.problem:
        raise cli.UsageError(leaders.problem)
    visible = folder or run_folder.RunFolder(Path(leaders.path))
    deadline = time.monotonic() + _VISIBLE_WITHIN_S
    while visible.read_owner() != leaders.owner and time.monotonic() < deadline:
        time.sleep(0.05)
    without = world.hosts_where(visible.read_owner() != leaders.owner)
    if without:
        raise cli.UsageError(
            f"The run's folder {leaders.path} is not the same on {cli.alternatives(without)}: all hosts must share "
            "it. Choose a shared folder with --run_dir."
        )
    return visible


def find_checkpoint(
    store: checkpoints.Store, cfg: TrainConfig, run: RunPlan, variables: Sequence[Variable], world: World
) -> Optional[checkpoints.Checkpoint]:
    """Returns the checkpoint that all instances resume from, if any; UsageError if it does not fit the run."""
    found = store.newest()
    steps = [int(step) for (step,) in world.gather_numbers([found.manifest.step if found else 0])]
    if len(set(steps)) > 1:
        raise cli.UsageError(
            f"The instances see different checkpoints in {store.folder}: the newest good one is of step "
            f"{cli.alternatives(steps)}. All hosts must share the folder and be able to read it."
        )
    if found is None:
        if store.steps():
            raise cli.UsageError(
                f"None of the checkpoints in {store.folder} can be read, and the run would start over beside them. "
                "Use another --run_dir."
            )
        return None
    if not cfg.resume:
        raise preflight.refuse_to_start_over(store.folder.parent, found.manifest.step)
    iterations = run.epochs.device_iterations
    if found.manifest.step % run.epochs.updates_per_epoch % iterations:
        raise cli.UsageError(
            f"--device_iterations={iterations} does not fit {found.path}: step {found.manifest.step:,} is in the "
            f"middle of an execution of {iterations} updates. Use --device_iterations=1, or a divisor of "
            f"{found.manifest.step % run.epochs.updates_per_epoch}."
        )
    _require_fit(found, cfg, run, variables, train_flags.names_tied_to_weights())
    return found


def changed_updates(found: checkpoints.Checkpoint, cfg: TrainConfig, run: RunPlan) -> List[str]:
    """Returns which flags change how a resumed run is updated from now on, in parts of a sentence."""
    saved = {**train_flags.default_texts(), **found.manifest.flags}
    now = preflight.resolved_flags(cfg, run)
    names = train_flags.names_of_later_updates()
    return [
        f"--{name} was {saved.get(name, 'not given')} and is {now.get(name, 'not given')}"
        for name in names
        if saved.get(name) != now.get(name)
    ]


def require_same_model(
    found: checkpoints.Checkpoint, cfg: TrainConfig, run: RunPlan, variables: Sequence[Variable]
) -> None:
    """Raises a UsageError for a checkpoint of another model or data set; how it was trained does not matter."""
    _require_fit(found, cfg, run, variables, train_flags.names_tied_for_evaluation())


def manifest_at(
    step: int, cfg: TrainConfig, run: RunPlan, sdk: Sdk, variables: Sequence[Variable], now: datetime
) -> Manifest:
    """Returns the manifest of a checkpoint, by which a run that resumes from it is checked."""
    epoch, update = divmod(step, run.epochs.updates_per_epoch)
    return Manifest(
        step=step,
        epoch=epoch,
        samples_into_epoch=update * run.batch.global_batch_size,
        flags=preflight.resolved_flags(cfg, run),
        plan=PlanRecord.of(run),
        variables=tuple(variables),
        # Order and augmentation depend only on these; no other random numbers are used after initialisation.
        random_state={"seed": cfg.seed, "epoch": epoch, "update": update},
        layers=own_layers(run),
        code=own_code(cfg),
        versions=_versions(sdk),
        time=now.isoformat(timespec="seconds"),
    )


def compare_weights(weights: Sequence[sdk_types.Variable], world: World) -> Optional[str]:
    """Returns the first variable that differs, and on which instance; None if all weights are equal.

    Updates are the same on all instances, so a difference has another cause, such as faulty memory.
    """
    return world.compare_digests(
        [(weight.name, zlib.crc32(np.ascontiguousarray(weight.numpy()).data)) for weight in weights]
    )


def _require_fit(
    found: checkpoints.Checkpoint, cfg: TrainConfig, run: RunPlan, variables: Sequence[Variable], tied: Sequence[str]
) -> None:
    # Other variables follow from another model, so they are only named where no flag differs.
    preflight.require_same_flags(found.path, found.manifest, cfg, run, tied)
    if cfg.has_own_model or run.dataset.origin == OWN:
        _require_same_own(found, cfg, run, variables, same_samples="global_batch_size" in tied)
    differences = checkpoints.differences(found.manifest, found.manifest.flags, variables, ())
    if differences:
        release = found.manifest.versions.get("tf_ipu_dp", "of an earlier version")
        raise cli.UsageError(
            f"{found.path} does not fit: {'; '.join(differences)}. The flags are the same, so --model={cfg.model} was "
            f"another model in the code that trained it (tf_ipu_dp {release}). Use that code, or another --run_dir."
        )


def _require_same_own(
    found: checkpoints.Checkpoint, cfg: TrainConfig, run: RunPlan, variables: Sequence[Variable], *, same_samples: bool
) -> None:
    """Raises a UsageError for a checkpoint of an own model whose layers, or of own data whose shapes, have changed."""
    saved, now = found.manifest.plan.dataset, PlanRecord.of(run).dataset
    names = ("inputs", "targets", "train_samples") if same_samples else ("inputs", "targets")
    data = [f"{name} were {getattr(saved, name)} and are {getattr(now, name)}" for name in names
            if getattr(saved, name) != getattr(now, name)]  # fmt: skip
    if data:
        raise cli.UsageError(
            f"{found.path} does not fit the data of --dataset={cfg.dataset}: its {'; '.join(data)}. Use the data that "
            f"it was trained on, or begin another --run_dir with --init_from={found.path}."
        )
    layers = checkpoints.layer_differences(found.manifest.layers, own_layers(run))
    layers = layers or checkpoints.differences(found.manifest, found.manifest.flags, variables, ())
    if layers:
        raise cli.UsageError(
            f"{found.path} does not fit --model={cfg.model}, whose code has changed: {'; '.join(layers)}. Use the code "
            f"that trained it, or begin another --run_dir with --init_from={found.path}."
        )


_SAME = {"model": "; the layers are the same", "dataset": "; the shapes are the same"}


def changed_code(found: checkpoints.Checkpoint, cfg: TrainConfig) -> List[str]:
    """Returns a sentence for each file of the user that is not what it was when a checkpoint was saved."""
    now = own_code(cfg)
    return [
        f"The code of --{name}={cfg.own_code[name]} has changed since step {found.manifest.step:,} was saved"
        f"{_SAME.get(name, '')}."
        for name, digest in found.manifest.code.items()
        if name in now and now[name] != digest
    ]


def _versions(sdk: Sdk) -> Dict[str, str]:
    return {
        "tf_ipu_dp": __version__,
        "python": ".".join(map(str, sys.version_info[:3])),
        "tensorflow": tf.__version__,
        "numpy": np.__version__,
        "sdk": sdk.name,
    }


def _versions_to_compare(sdk: Sdk) -> Dict[str, str]:
    """Returns the versions that all instances must share, including a checksum of this package's code."""
    found = _versions(sdk)
    for name in ("keras", "tf-keras", "horovod", "tensorflow-datasets"):
        with contextlib.suppress(importlib_metadata.PackageNotFoundError):
            found[name] = importlib_metadata.version(name)
    code = 0
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        code = zlib.crc32(path.read_bytes(), code)
    return {**{f"the version of {name}": text for name, text in found.items()}, "the code of tf_ipu_dp": f"{code:08x}"}
