"""What has to agree before a run begins and goes on: the instances, the folder they share, the checkpoint, the weights.

What does not is refused in a sentence that says who or what differs.
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
from typing import Any, Dict, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf

from tf_ipu_dp import __version__, cli
from tf_ipu_dp.config import recipe, train_flags
from tf_ipu_dp.config.schema import LossScaling, TrainConfig
from tf_ipu_dp.datasets import sources
from tf_ipu_dp.distributed.world import World
from tf_ipu_dp.planning import report
from tf_ipu_dp.planning.plan import RunPlan
from tf_ipu_dp.runs import checkpoints, run_folder
from tf_ipu_dp.sdk import Sdk

# A network's file system may show others what was written some seconds later.
_SHARED_WITHIN_S = 15.0
# Beside checkpoints and export: metrics, TensorBoard, small files.
_ROOM_BYTES = 32 * 2**20

Variables = Sequence[Tuple[str, Tuple[int, ...], str]]  # names, shapes and types of the weights


def compare_instances(cfg: TrainConfig, run: RunPlan, sdk: Sdk, source: sources.Source, world: World) -> None:
    """Refuses a job whose instances were not started alike, before any of them has made a step."""
    if world.instances == 1:
        return
    own = train_flags.names_per_instance()
    flags = {f"--{name}": text for name, text in _resolved_flags(cfg, run).items() if name not in own}
    # The flags decide the plan, but for what a launcher or the environment has told one instance only.
    topology = {f"{name} of the plan": str(value) for name, value in dataclasses.asdict(run.topology).items()}
    shapes = {"the plan's model": f"{zlib.crc32(report.render_json(run).encode()):08x}"}
    world.compare({**_versions_of_all(sdk), "the data": sources.fingerprint(source), **flags, **topology, **shapes})


def open_folder(cfg: TrainConfig, run: RunPlan, world: World) -> run_folder.RunFolder:
    """Returns the run's folder: instance 0's to hold and to write, and only its name for the others."""
    folder, problem = None, ""
    if world.is_leader:
        name = f"{cfg.model}-{cfg.dataset.replace('/', '-')}"
        try:
            folder = run_folder.open_folder(
                cfg.run_dir, name=name, now=datetime.now(), needed_bytes=_needed_bytes(cfg, run)
            )
        except cli.UsageError as error:
            problem = str(error)
    mark = folder.read_holder() if folder else ""
    answer = world.broadcast_from_leader(
        {"path": str(folder.path.resolve()) if folder else "", "problem": problem, "mark": mark}
    )
    if answer["problem"]:
        raise cli.UsageError(answer["problem"])
    seen = folder or run_folder.RunFolder(Path(answer["path"]))
    deadline = time.monotonic() + _SHARED_WITHIN_S
    while seen.read_holder() != answer["mark"] and time.monotonic() < deadline:
        time.sleep(0.05)
    without = world.hosts_where(seen.read_holder() != answer["mark"])
    if without:
        raise cli.UsageError(
            f"The run's folder {answer['path']} is not the same on {cli.alternatives(without)}: all hosts have to "
            "share it. Choose a shared one with --run_dir."
        )
    return seen


def find_checkpoint(
    store: checkpoints.Store, cfg: TrainConfig, run: RunPlan, variables: Variables, world: World
) -> Optional[checkpoints.Checkpoint]:
    """Returns the checkpoint that all instances go on from, if there is one; refuses one that does not fit the run."""
    found = store.newest()
    steps = [int(step) for (step,) in world.gather_numbers([found.manifest.step if found else 0])]
    if len(set(steps)) > 1:
        raise cli.UsageError(
            f"The instances see different checkpoints in {store.folder}: the newest good one is of step "
            f"{cli.alternatives(steps)}. All hosts have to share the folder, and to be able to read it."
        )
    if found is None:
        if store.steps():
            raise cli.UsageError(
                f"None of the checkpoints in {store.folder} can be read, and the run would begin again beside "
                "them. Use another --run_dir."
            )
        return None
    if not cfg.resume:
        raise cli.UsageError(
            f"--noresume would start over in {store.folder.parent}, which has a checkpoint of step "
            f"{found.manifest.step:,}. Use another --run_dir, or leave --noresume out."
        )
    iterations = run.epochs.device_iterations
    if found.manifest.step % run.epochs.updates_per_epoch % iterations:
        raise cli.UsageError(
            f"--device_iterations={iterations} does not fit {found.path}: it was made {found.manifest.step:,} "
            f"updates into the run, in the middle of an execution of so many. Use --device_iterations=1, or a "
            "divisor of that number."
        )
    _require_fit(found, cfg, run, variables, train_flags.names_tied_to_weights())
    return found


def require_same_model(found: checkpoints.Checkpoint, cfg: TrainConfig, run: RunPlan, variables: Variables) -> None:
    """Refuses to measure a checkpoint of another model or data set; how it was trained does not matter."""
    _require_fit(found, cfg, run, variables, train_flags.names_tied_for_evaluation())


def manifest_at(
    step: int, cfg: TrainConfig, run: RunPlan, sdk: Sdk, variables: Variables, now: datetime
) -> checkpoints.Manifest:
    """Returns what a checkpoint of a step is compared by when a run wants to go on from it."""
    epoch, update = divmod(step, run.epochs.updates_per_epoch)
    return checkpoints.Manifest(
        step=step,
        epoch=epoch,
        samples_into_epoch=update * run.batch.global_batch_size,
        flags=_resolved_flags(cfg, run),
        plan=json.loads(report.render_json(run)),
        variables=tuple(variables),
        # Order and augmentation are functions of these; nothing else is drawn once the weights are there.
        random_state={"seed": cfg.seed, "epoch": epoch, "update": update},
        versions=_versions(sdk),
        time=now.isoformat(timespec="seconds"),
    )


def compare_weights(weights: Sequence[Any], world: World) -> Optional[str]:
    """Returns the first variable that differs between the instances, and whose it is; None where all are equal.

    The update is the same on all instances; weights that differ were changed by something else.
    """
    return world.compare_digests(
        [(weight.name, zlib.crc32(np.ascontiguousarray(weight.numpy()).data)) for weight in weights]
    )


def _require_fit(
    found: checkpoints.Checkpoint, cfg: TrainConfig, run: RunPlan, variables: Variables, tied: Sequence[str]
) -> None:
    differences = checkpoints.differences(found.manifest, _resolved_flags(cfg, run), variables, tied)
    if differences:
        raise cli.UsageError(
            f"{found.path} does not fit: {'; '.join(differences)}. Use the run's own flags "
            f"(--flagfile={found.path.parent.parent / 'run.flags'}), or another --run_dir."
        )


def _resolved_flags(cfg: TrainConfig, run: RunPlan) -> Dict[str, str]:
    """Returns the flags as texts, with what the plan resolved in the place of what was left open."""
    values = {field.name: getattr(cfg, field.name) for field in dataclasses.fields(cfg)}
    values.update(
        norm=run.model.architecture.norm,
        image_size=run.dataset.height,
        augment=run.augment,
        global_batch_size=run.batch.global_batch_size,
        learning_rate=run.recipe.learning_rate,
        loss_scaling=LossScaling(run.recipe.loss_scale),
        updates_per_epoch=run.epochs.updates_per_epoch,
    )
    return {name: cli.typed(value) for name, value in values.items() if value is not None}


def _versions(sdk: Sdk) -> Dict[str, str]:
    return {
        "tf_ipu_dp": __version__,
        "python": ".".join(map(str, sys.version_info[:3])),
        "tensorflow": tf.__version__,
        "numpy": np.__version__,
        "sdk": sdk.name,
    }


def _versions_of_all(sdk: Sdk) -> Dict[str, str]:
    """Returns what a job's instances must have in common, the code itself included."""
    found = _versions(sdk)
    for name in ("keras", "horovod", "tensorflow-datasets"):
        with contextlib.suppress(importlib_metadata.PackageNotFoundError):
            found[name] = importlib_metadata.version(name)
    code = 0
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        code = zlib.crc32(path.read_bytes(), code)
    return {**{f"the version of {name}": text for name, text in found.items()}, "the code of tf_ipu_dp": f"{code:08x}"}


def _needed_bytes(cfg: TrainConfig, run: RunPlan) -> int:
    """Weights and up to two slots for each, in every checkpoint that is kept and the one being written; the export."""
    copies = 1 + recipe.OPTIMIZERS[cfg.optimizer].slots
    made = -(-run.epochs.updates // run.checkpoint_every)
    kept = min(cfg.keep_checkpoints, made) + 1
    return 4 * run.model.architecture.parameters * (copies * kept + cfg.export) + _ROOM_BYTES
