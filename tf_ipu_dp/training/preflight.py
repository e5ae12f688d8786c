"""What can be refused before TensorFlow is imported: the run's folder and checkpoints, missing data, busy IPUs.

No TensorFlow: these refusals come at once. What only the real attempt shows, like a full download, is refused later.
"""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path
from typing import Callable

from tf_ipu_dp import cli, missing_packages, sdk, user_code
from tf_ipu_dp.config import parsers
from tf_ipu_dp.config.train_flags import TrainConfig
from tf_ipu_dp.datasets import download
from tf_ipu_dp.monitoring import holders
from tf_ipu_dp.planning.plan import RunPlan, Topology
from tf_ipu_dp.runs import checkpoints, disk_space, run_folder


def check(cfg: TrainConfig, run: RunPlan) -> None:
    """Raises a UsageError for what would stop a run on this host at its start."""
    if not (cfg.evaluate or cfg.input_only):
        run_folder.check_folder(
            cfg.run_dir, name=folder_name(cfg), now=datetime.now(), needed_bytes=disk_space.needed_bytes(cfg, run)
        )
        _check_init_from(cfg)
        for tracker in cfg.track or ():
            missing_packages.require(tracker)
    if cfg.evaluate:
        find_checkpoint(cfg, lambda _: None)  # warnings come when it is evaluated
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


def refuse_ipus(topology: Topology, error: sdk.AttachError, sdk_choice: str) -> cli.UsageError:
    """Returns the error for IPUs that cannot be attached, with what helps."""
    advice = ""  # the reason itself includes it
    if isinstance(error, sdk.TooFewIpusError):
        advice = " Use fewer --ipus."
    elif isinstance(error, sdk.BusyIpusError):
        advice = f" {holders.describe_holders(sdk_choice)}"
    reason = cli.first_line(str(error)).rstrip(".")
    return cli.UsageError(f"--ipus={topology.ipus} cannot be attached: {reason}.{advice}")


def _check_init_from(cfg: TrainConfig) -> None:
    """Refuses weights that are nowhere; a run that resumes does not need them any more."""
    if cfg.init_from is None or (cfg.run_dir and run_folder.RunFolder(Path(cfg.run_dir)).has_checkpoints()):
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
