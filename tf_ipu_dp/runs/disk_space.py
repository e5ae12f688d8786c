"""The disk space that a run needs for its folder. Pure."""

from __future__ import annotations

from tf_ipu_dp.config import recipe
from tf_ipu_dp.config.train_flags import TrainConfig
from tf_ipu_dp.planning.plan import RunPlan

# Beside checkpoints and export: metrics, TensorBoard, small files.
_OTHER_FILES_BYTES = 32 * 2**20


def needed_bytes(cfg: TrainConfig, run: RunPlan) -> int:
    """Returns the size of the kept checkpoints, the one being written, the export and the other files."""
    copies = 1 + recipe.OPTIMIZERS[cfg.optimizer].slots
    made = -(-run.epochs.updates // run.checkpoint_every)
    kept = min(cfg.keep_checkpoints, made) + 1 + bool(cfg.early_stop)
    return 4 * run.model.architecture.parameters * (copies * kept + cfg.export) + _OTHER_FILES_BYTES
