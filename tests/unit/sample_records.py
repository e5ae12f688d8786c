"""Records of a run for tests: a plan, lines of metrics, a result."""

from __future__ import annotations

import dataclasses

from tf_ipu_dp.config import train_flags
from tf_ipu_dp.datasets import info
from tf_ipu_dp.planning import plan
from tf_ipu_dp.runs import records
from tf_ipu_dp.runs.plan_record import PlanRecord

TIMES = records.RunTimes(
    total_s=100.0,
    compile_s=20.0,
    executing_s=60.0,
    between_s=1.0,
    bookkeeping_s=1.0,
    evaluation_s=8.0,
    input_wait_s=3.0,
    startup_s=9.5,
)


def make_plan(*words):
    cfg = train_flags.parse(words)
    return PlanRecord.of(plan.plan_run(cfg, info.DATASETS[cfg.dataset]))


def make_training(step, *instances, **changes):
    record = records.TrainingRecord(step, step / 64, 0.5, 0.75, 0.01, instances=instances)
    return dataclasses.replace(record, **changes)


def make_validation(step, loss=0.5):
    return records.ValidationRecord(step, step / 64, loss, 0.75, 0.99, 0.5)


def make_result(**changes):
    result = records.RunResult(
        run_dir="runs/a",
        model="cnn",
        dataset="fashion_mini",
        replicas=8,
        updates=160,
        planned_updates=160,
        times=TIMES,
        samples_per_s=1000.0,
        utilisation_pct=91.94,
        scores=records.Scores(samples=2048, loss=0.3428, top1=0.8765, top5=0.9985),
        verdict=records.Verdict("none", "No bottleneck: the device was busy 92 % of training.", 92.0),
    )
    return dataclasses.replace(result, **changes)
