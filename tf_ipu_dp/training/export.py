"""Writes the trained model for serving: a SavedModel that takes 8-bit images and returns class probabilities."""

from __future__ import annotations

import shutil
from typing import Any, Sequence

from absl import logging

from tf_ipu_dp.config.train_flags import TrainConfig
from tf_ipu_dp.planning.plan import RunPlan
from tf_ipu_dp.runs.run_folder import RunFolder
from tf_ipu_dp.sdk import Sdk
from tf_ipu_dp.training import models, own_models
from tf_ipu_dp.training.session import TrainingSession, make_serving_model

CLASSES = "classes.txt"  # a name per line, in the order of the probabilities


def export_model(session: TrainingSession, plan: RunPlan, sdk: Sdk, folder: RunFolder) -> None:
    """Replaces the run's whole export; called by all instances, because reading weights may need all of them."""
    if session.own:
        exported = own_models.make_export_model(session.own, session.cfg.model, plan)
    else:
        exported = models.make_export_model(
            session.model, plan.model.architecture, plan.dataset.mean, plan.dataset.deviation
        )
    weights = session.model.get_weights()
    if not session.world.is_leader:
        return
    fresh, old = folder.path / ".export", folder.path / ".export-old"
    for path in (fresh, old):
        shutil.rmtree(path, ignore_errors=True)
    before = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)  # Keras warns that a model for serving has no metrics
    try:
        exported.save(str(fresh), save_format="tf", include_optimizer=False)
    finally:
        logging.set_verbosity(before)
    if plan.dataset.class_names:
        (fresh / CLASSES).write_text("".join(f"{name}\n" for name in plan.dataset.class_names), encoding="utf-8")
    if folder.export.exists():
        folder.export.rename(old)
    fresh.rename(folder.export)
    shutil.rmtree(old, ignore_errors=True)
    if sdk.serves_ipus:
        export_for_ipus(session.cfg, plan, sdk, weights, str(folder.export / "ipu"))


def render_export(folder: RunFolder, step: int) -> str:
    """Returns where the export is, and how it is loaded."""
    names = f"; the names of the classes are in {CLASSES}" if (folder.export / CLASSES).exists() else ""
    return "\n".join(
        [
            f"Exported the weights of step {step:,} to {folder.export}. To use them:",
            f"  import tensorflow as tf; model = tf.keras.models.load_model({str(folder.export)!r}, compile=False)",
            f"  probabilities = model.predict(images)  # 8-bit images{names}",
        ]
    )


def export_for_ipus(cfg: TrainConfig, plan: RunPlan, sdk: Sdk, weights: Sequence[Any], path: str) -> None:
    """Writes the compiled program of one replica for serving. The attached IPUs cannot be used any more afterwards."""
    model = make_serving_model(cfg, plan, sdk, weights)
    model.export_for_ipu_serving(path, batch_size=plan.batch.micro_batch_size)
