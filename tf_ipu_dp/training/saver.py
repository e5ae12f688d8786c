"""Saves the state of a training session: the leader writes checkpoints, all instances take part.

Training goes on as soon as the state is written. A thread then hashes the files and waits for the disk, which takes
longer: half of the time of an MLP's checkpoint, and most of that of a large model's.
"""

from __future__ import annotations

import os
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime, timezone
from typing import Optional

import numpy as np
import tensorflow as tf

from tf_ipu_dp import cli
from tf_ipu_dp.config.train_flags import TrainConfig
from tf_ipu_dp.planning.plan import RunPlan
from tf_ipu_dp.runs import run_folder
from tf_ipu_dp.runs.checkpoints import Checkpoint, Store
from tf_ipu_dp.runs.run_folder import RunFolder
from tf_ipu_dp.sdk import Sdk
from tf_ipu_dp.training import checks
from tf_ipu_dp.training.session import TrainingSession


class Saver:
    """Checkpoints of one run."""

    def __init__(
        self, cfg: TrainConfig, plan: RunPlan, sdk: Sdk, session: TrainingSession, folder: RunFolder, store: Store
    ) -> None:
        self._cfg, self._plan, self._sdk = cfg, plan, sdk
        self._session, self._folder, self._store = session, folder, store
        self.best = Store(folder.best, 1, store.warn)
        self.saved_step = 0  # of the last checkpoint that was begun
        self._durable_step = 0
        self._begun: Optional[Future[Checkpoint]] = None

    @property
    def last_saved(self) -> str:
        """Returns a sentence that names the last checkpoint. Does not wait for one that is being written."""
        step = self._durable_step
        return f"The last checkpoint is of step {step:,}." if step else "There is no checkpoint."

    def resume_at(self, step: int) -> None:
        """Takes over the checkpoint that a run resumes from."""
        self.saved_step = self._durable_step = step

    def write_trial(self) -> None:
        """Writes the state once and deletes it: a disk that is too small fails now and not after an epoch.

        For TensorFlow the first write is also several times slower than later ones.
        """
        try:
            self._write_and_delete()
        except (OSError, tf.errors.OpError) as error:
            raise cli.UsageError(
                f"A checkpoint cannot be written to {self._folder.path} ({cli.first_line(str(error))}). "
                "Free some space, or choose another folder with --run_dir."
            ) from error

    def weights_are_finite(self) -> bool:
        """Whether the weights of all instances are finite; only those are worth saving."""
        is_finite = all(np.isfinite(weight).all() for weight in self._session.model.get_weights())
        return all(answer for (answer,) in self._session.world.gather_numbers([is_finite]))

    def save(self, step: int) -> None:
        """Begins to save a checkpoint of a step; called by all instances."""
        self._save_to(self._store, step)
        self.saved_step = step

    def save_best(self, step: int) -> None:
        """Begins to save the checkpoint of a step in place of the best one before; called by all instances."""
        self._save_to(self.best, step)

    def check(self) -> None:
        """Raises CheckpointError if the checkpoint that was begun last has turned out not to be possible."""
        if self._begun and self._begun.done():
            self.finish()

    def finish(self) -> None:
        """Waits until the checkpoint that was begun last is on the disk; CheckpointError if it cannot be written."""
        begun, self._begun = self._begun, None
        if begun:
            step = begun.result().manifest.step
            self._durable_step = max(self._durable_step, step)

    def _save_to(self, store: Store, step: int) -> None:
        manifest = checks.manifest_at(
            step, self._cfg, self._plan, self._sdk, self._session.variables(), datetime.now(timezone.utc)
        )
        if self._session.world.is_leader:
            self.finish()
            finish = store.begin(manifest, lambda prefix: self._session.state.write(str(prefix)))
            writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
            self._begun = writer.submit(finish)
            writer.shutdown(wait=False)  # its thread ends when the checkpoint is written
        else:
            self._write_and_delete()

    def _write_and_delete(self) -> None:
        """Writes the state and deletes it: reading it may need all instances, but only the leader saves it.

        The others write to TensorFlow's file system in memory, so that they need no disk and leave nothing behind.
        """
        if not self._session.world.is_leader:
            memory = f"ram://trial-{os.getpid()}"
            self._session.state.write(f"{memory}/state")
            tf.io.gfile.rmtree(memory)
            return
        with tempfile.TemporaryDirectory(prefix=run_folder.TRIAL, dir=str(self._folder.path)) as temporary:
            self._session.state.write(f"{temporary}/state")
