"""Folders of runs for tests, written by the package itself."""

from __future__ import annotations

import dataclasses
import os
import time

import pytest
import sample_records

from tf_ipu_dp.config import train_flags
from tf_ipu_dp.runs.records import Scores, StopReason
from tf_ipu_dp.runs.run_folder import RunFolder


@pytest.fixture
def make_run(tmp_path):
    """Returns a function that writes the folder of a run below `runs`, as a run of these flags would."""

    def make(name, *words, accuracy=0.5, result=True, stopped=None, age_s=0.0, steps=(32, 64)):
        path = tmp_path / "runs" / name
        folder = RunFolder(path)
        path.mkdir(parents=True)
        (path / ".lock").write_text("process 1 on nowhere\n", encoding="utf-8")
        folder.write_start(train_flags.parse(words), sample_records.make_plan(*words))
        for step in steps:
            folder.append_metrics(sample_records.make_training(step, loss=2.0 / step, samples_per_s=100.0))
            share = accuracy * step / steps[-1]
            folder.append_metrics(dataclasses.replace(sample_records.make_validation(step, 1 / step), accuracy=share))
        if result:
            scores = Scores(samples=2048, loss=0.3, top1=accuracy, top5=1.0)
            cfg = train_flags.parse(words)
            folder.write_result(
                sample_records.make_result(run_dir=str(path), model=cfg.model, dataset=cfg.dataset, scores=scores,
                                           stopped=stopped)
            )  # fmt: skip
        if age_s:
            for entry in (*path.rglob("*"), path):
                os.utime(entry, (time.time() - age_s,) * 2)
        return path

    return make


@pytest.fixture
def interrupted():
    return StopReason(StopReason.SIGNAL, True, "SIGTERM after step 64.", "resume it")
