from __future__ import annotations

import re
from pathlib import Path

import pytest
from scaling_stand_ins import PARTS

from tf_ipu_dp.config import train_flags
from tf_ipu_dp.datasets import info
from tf_ipu_dp.planning import plan
from tf_ipu_dp.scaling import modes, study_flags

FILES = sorted((Path(__file__).resolve().parents[2] / "flags").glob("*.flags"))
# Of a study: flags of `scaling`, which trains.
STUDIES = [path for path in FILES if "tf_ipu_dp.scaling --flagfile=" in path.read_text(encoding="utf-8")]
RUNS = [path for path in FILES if path not in STUDIES]


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
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


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_the_flag_file_of_a_study_can_be_planned_and_says_how_many_runs_it_has(path):
    options = study_flags.parse([f"--flagfile={path}"], PARTS)
    cells = modes.plan_cells(options.request, PARTS.is_ours)
    text = path.read_text(encoding="utf-8")
    assert f"python -m tf_ipu_dp.scaling --flagfile=flags/{path.name} --study_dir=" in text
    planned = re.search(r"Planned: (\d+) cells x (\d+) repeats = (\d+) runs", text)
    assert planned is not None
    numbers = (len(cells), options.repeats, len(cells) * options.repeats)
    assert tuple(map(int, planned.groups())) == numbers
    assert (options.config.model, options.request.engines) == ("resnet50", ("tf_ipu_dp", "ddp", "horovod"))


def test_there_are_flag_files():
    assert RUNS and [path.stem for path in STUDIES] == ["r3_batch", "r3_strong", "r3_weak"]
