from __future__ import annotations

import re
from pathlib import Path

import pytest

from tf_ipu_dp.config import train_flags
from tf_ipu_dp.datasets import info
from tf_ipu_dp.planning import plan

FILES = sorted((Path(__file__).resolve().parents[2] / "flags").glob("*.flags"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_flag_file_can_be_planned_and_says_on_top_how_to_run_it_and_what_came_out(path):
    cfg = train_flags.parse([f"--flagfile={path}"])
    run = plan.plan_run(cfg, info.DATASETS[cfg.dataset])
    text = path.read_text(encoding="utf-8")
    assert f"--flagfile=flags/{path.name}" in text
    planned = re.search(r"global batch (\d+), (\d+) updates per epoch in (\d+) executions, (\d+) samples dropped", text)
    assert planned is not None
    epochs = run.epochs
    numbers = (epochs.updates_per_epoch, epochs.executions_per_epoch, epochs.dropped_samples_per_epoch)
    assert tuple(map(int, planned.groups())) == (run.batch.global_batch_size, *numbers)


def test_there_are_flag_files():
    assert FILES
