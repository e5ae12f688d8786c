"""What can be refused before TensorFlow is imported: the run's folder and checkpoints, missing data, busy IPUs.

No TensorFlow: these refusals come at once. What only the real attempt shows, like a full download, is refused later.
"""

from __future__ import annotations

import dataclasses
import re
from datetime import datetime
from pathlib import Path
from typing import Callable, Dict, Sequence

from tf_ipu_dp import cli, missing_packages, sdk, user_code
from tf_ipu_dp.config import parsers, train_flags
from tf_ipu_dp.config.train_flags import TrainConfig
from tf_ipu_dp.config.values import LossScaling
from tf_ipu_dp.datasets import download
from tf_ipu_dp.monitoring import holders
from tf_ipu_dp.planning.plan import RunPlan, Topology
from tf_ipu_dp.runs import checkpoints, disk_space, run_folder
from tf_ipu_dp.runs.manifest import Manifest


def check(cfg: TrainConfig, run: RunPlan) -> None:
    """Raises a UsageError for what would stop a run on this host at its start."""
    if not (cfg.evaluate or cfg.input_only):
        run_folder.check_folder(
            cfg.run_dir, name=folder_name(cfg), now=datetime.now(), needed_bytes=disk_space.needed_bytes(cfg, run)
        )
        user_code.require_files(cfg.own_code)
        _check_init_from(cfg)
        _check_saved_flags(cfg, run)
        for tracker in cfg.track or ():
            missing_packages.require(tracker)
    if cfg.evaluate:
        found = find_checkpoint(cfg, lambda _: None)  # warnings come when it is evaluated
        require_same_flags(found.path, found.manifest, cfg, run, train_flags.names_tied_for_evaluation())
    download.require_available(run.dataset, cfg.data_dir)
    if not run.topology.hosts.names:  # other hosts have IPUs of their own
        _check_ipus(cfg, run.topology)


def find_checkpoint(cfg: TrainConfig, warn: Callable[[str], None]) -> checkpoints.Checkpoint:
    """Returns what --evaluate takes: the best checkpoint, which runs with early stopping keep, or else the newest."""
    if cfg.run_dir is None:
        raise cli.UsageError("--evaluate needs a run with a checkpoint. Add --run_dir=runs/NAME.")
    found = checkpoints.find(run_folder.RunFolder(Path(cfg.run_dir)).stores_of(cfg.weights), warn)
    if found is None:
        raise cli.UsageError(f"--run_dir={cfg.run_dir} has no good checkpoint. Train first, without --evaluate.")
    return found


def folder_name(cfg: TrainConfig) -> str:
    """Returns the name of the folder of a run without --run_dir, to which the time is added."""
    return "-".join(_short_name(text) for text in (cfg.model, cfg.dataset))


def _short_name(text: str) -> str:
    """Returns a name for a folder: of functions and paths without their folders."""
    if user_code.is_reference(text):
        place, _, function = text.rpartition(":")
        text = f"{Path(place).stem}-{function}"
    elif parsers.is_path(text):
        text = Path(text).name or "data"
    return re.sub(r"[^\w.:-]+", "-", text).strip("-.") or "data"


def resolved_flags(cfg: TrainConfig, run: RunPlan) -> Dict[str, str]:
    """Returns the flags as texts, with the values that the plan resolved for flags that were not given."""
    values = {field.name: getattr(cfg, field.name) for field in dataclasses.fields(cfg)}
    values.update(
        norm=run.model.architecture.norm,
        image_size=run.dataset.height or None,
        augment=run.augment,
        global_batch_size=run.batch.global_batch_size,
        learning_rate=run.recipe.learning_rate,
        loss_scaling=LossScaling(run.recipe.loss_scale),
        updates_per_epoch=run.epochs.updates_per_epoch,
    )
    return {name: cli.typed(value) for name, value in values.items() if value is not None}


def require_same_flags(path: Path, saved: Manifest, cfg: TrainConfig, run: RunPlan, tied: Sequence[str]) -> None:
    """Raises a UsageError for a checkpoint that was trained with other values of the flags in `tied`."""
    # A release without a flag trained with what is its default now.
    saved = dataclasses.replace(saved, flags={**train_flags.default_texts(), **saved.flags})
    differences = checkpoints.differences(saved, resolved_flags(cfg, run), saved.variables, tied)
    if differences:
        raise cli.UsageError(
            f"{path} does not fit: {'; '.join(differences)}. Leave out what differs (the run's own flags are then "
            "taken), or use another --run_dir."
        )


def refuse_ipus(topology: Topology, error: sdk.AttachError, sdk_choice: str) -> cli.UsageError:
    """Returns the error for IPUs that cannot be attached, with what helps."""
    advice = ""  # the reason itself includes it
    if isinstance(error, sdk.TooFewIpusError):
        advice = " Use fewer --ipus."
    elif isinstance(error, sdk.BusyIpusError):
        advice = f" {holders.describe_holders(sdk_choice)}"
    reason = cli.first_line(str(error)).rstrip(".")
    return cli.UsageError(f"--ipus={topology.ipus} cannot be attached: {reason}.{advice}")


def refuse_to_start_over(run_dir: Path, step: int) -> cli.UsageError:
    """Returns the error for --noresume in the folder of a run that has a checkpoint."""
    return cli.UsageError(
        f"--noresume would start over in {run_dir}, which has a checkpoint of step {step:,}. Use another --run_dir, or "
        "leave --noresume out."
    )


def _check_saved_flags(cfg: TrainConfig, run: RunPlan) -> None:
    """Refuses to resume a run with flags that do not fit its newest checkpoint, and to start over beside one."""
    if cfg.run_dir is None:
        return
    folder = run_folder.RunFolder(cli.expand_path(cfg.run_dir))
    saved = folder.read_newest_manifest()
    if saved is not None:
        if not cfg.resume:
            raise refuse_to_start_over(folder.path, saved.step)
        path = folder.checkpoints / checkpoints.folder_name(saved.step)
        require_same_flags(path, saved, cfg, run, train_flags.names_tied_to_weights())


def _check_init_from(cfg: TrainConfig) -> None:
    """Refuses weights that are nowhere; a run that resumes does not need them any more."""
    if cfg.init_from is None or (cfg.run_dir and run_folder.RunFolder(cli.expand_path(cfg.run_dir)).has_checkpoints()):
        return
    path = cli.expand_path(cfg.init_from)
    # What tf.train.Checkpoint writes is a prefix of several files.
    if not path.exists() and not path.with_name(f"{path.name}.index").exists():
        raise cli.UsageError(
            f"--init_from={cfg.init_from} does not exist. Give the folder of a run, like runs/first, a checkpoint, an "
            ".h5 or .keras file, or a SavedModel."
        )


def _check_ipus(cfg: TrainConfig, topology: Topology) -> None:
    try:
        sdk.check_ipus(cfg.sdk, ipus_per_instance=topology.ipus_per_instance, instances=topology.instances)
    except sdk.AttachError as error:
        raise refuse_ipus(topology, error, cfg.sdk) from error
