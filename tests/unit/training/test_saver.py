"""What instances write when a checkpoint is saved: the leader to the run's folder, the others nothing to any disk."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
import types

import pytest
import sample_records
import tensorflow as tf

from tf_ipu_dp import cli
from tf_ipu_dp.runs import checkpoints, safe_files
from tf_ipu_dp.runs.run_folder import RunFolder
from tf_ipu_dp.training import checks
from tf_ipu_dp.training.saver import Saver


def make_saver(folder, *, is_leader):
    state = tf.train.Checkpoint(weight=tf.Variable(tf.ones([1000])))
    session = types.SimpleNamespace(world=types.SimpleNamespace(is_leader=is_leader), state=state, variables=lambda: ())
    store = checkpoints.Store(folder / "checkpoints", 3, pytest.fail)
    return Saver(None, None, None, session, RunFolder(folder), store)


def manifest_at(step, *unused):
    return checkpoints.Manifest(
        step=step, epoch=0, samples_into_epoch=0, flags={}, plan=sample_records.make_plan("--ipus=1"), variables=(),
        random_state={}, versions={}, time="2026-01-05T10:00:00Z",
    )  # fmt: skip


def test_instances_other_than_the_leader_need_no_temporary_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    for _ in range(3):
        make_saver(tmp_path / "of the leader", is_leader=False).write_trial()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(tf.errors.NotFoundError):
        tf.io.gfile.listdir(f"ram://trial-{os.getpid()}")


def test_the_leader_tries_the_run_s_folder_and_names_it(tmp_path):
    make_saver(tmp_path, is_leader=True).write_trial()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(cli.UsageError, match=r"A checkpoint cannot be written to .*missing"):
        make_saver(tmp_path / "missing", is_leader=True).write_trial()


def test_training_goes_on_while_a_checkpoint_waits_for_the_disk_and_does_not_change_it(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "manifest_at", manifest_at)
    disk, sync_tree = threading.Event(), safe_files.sync_tree

    def sync_slowly(path):
        assert disk.wait(60)
        sync_tree(path)

    monkeypatch.setattr(safe_files, "sync_tree", sync_slowly)
    saver = make_saver(tmp_path, is_leader=True)
    weight, store = saver._session.state.weight, saver._store
    saver.save(8)
    weight.assign(weight + 1)  # the next update
    saver.check()
    assert (saver.saved_step, saver.last_saved, store.newest()) == (8, "There is no checkpoint.", None)
    disk.set()
    saver.save(16)
    assert saver.last_saved == "The last checkpoint is of step 8."
    saver.finish()
    saver.finish()
    assert saver.last_saved == "The last checkpoint is of step 16."
    assert store.steps() == [8, 16]
    for path, value in zip(sorted(store.folder.glob("step-*")), (1.0, 2.0)):
        saved = tf.train.load_checkpoint(str(path / "state"))
        assert (saved.get_tensor("weight/.ATTRIBUTES/VARIABLE_VALUE") == value).all()
    for thread in threading.enumerate():  # none waits for further checkpoints
        if thread.name.startswith("checkpoint"):
            thread.join(timeout=60)
            assert not thread.is_alive()


def test_a_checkpoint_that_cannot_be_finished_ends_the_training_with_its_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "manifest_at", manifest_at)

    def refuse(path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(safe_files, "sync_tree", refuse)
    saver = make_saver(tmp_path, is_leader=True)
    saver.save(8)
    with pytest.raises(checkpoints.CheckpointError, match="The checkpoint of step 8 cannot be written to"):
        saver.finish()
    assert saver.last_saved == "There is no checkpoint."
    saver.save_best(16)
    with pytest.raises(checkpoints.CheckpointError, match="The checkpoint of step 16 cannot be written to"):
        saver.save(24)
