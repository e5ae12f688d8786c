"""What instances write when a checkpoint is saved: the leader to the run's folder, the others nothing to any disk."""

from __future__ import annotations

import os
import tempfile
import types

import pytest
import tensorflow as tf

from tf_ipu_dp import cli
from tf_ipu_dp.runs.run_folder import RunFolder
from tf_ipu_dp.training.saver import Saver


def make_saver(folder, *, is_leader):
    state = tf.train.Checkpoint(weight=tf.Variable(tf.ones([1000])))
    session = types.SimpleNamespace(world=types.SimpleNamespace(is_leader=is_leader), state=state)
    store = types.SimpleNamespace(warn=pytest.fail)
    return Saver(None, None, None, session, RunFolder(folder), store)


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
