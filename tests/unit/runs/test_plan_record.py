"""plan.json as a typed record."""

from __future__ import annotations

import json

from tf_ipu_dp.config import train_flags
from tf_ipu_dp.datasets import info
from tf_ipu_dp.planning import plan
from tf_ipu_dp.runs.plan_record import PlanRecord


def plan_words(*words):
    cfg = train_flags.parse(words)
    return plan.plan_run(cfg, info.DATASETS[cfg.dataset])


def test_the_batch_of_a_run_is_read_from_its_plan():
    run = plan_words("--ipus=8", "--gradient_accumulation=3")
    assert PlanRecord.of(run).job_batch == run.batch


def test_a_plan_made_before_a_flag_of_the_recipe_existed_has_its_default():
    record = PlanRecord.of(plan_words("--ipus=8", "--momentum=0.5", "--l2=0.25"))
    value = record.to_json()
    del value["recipe"]["momentum"]
    recipe = PlanRecord.from_json(value).recipe
    assert (recipe.momentum, recipe.l2) == (0.9, 0.25)


def test_the_json_has_every_replica_and_numbers_with_units_in_the_keys():
    run = plan_words("--ipus=8", "--pipeline_stages=3", "--instances=2", "--epochs=20steps")
    value = json.loads(json.dumps(PlanRecord.of(run).to_json()))
    assert value["topology"]["idle_ipus"] == 2
    assert value["batch"] == {
        "micro_batch_samples": 32,
        "accumulation_micro_batches": 6,
        "global_batch_samples": 384,
    }
    assert value["training"]["updates"] == 20
    assert value["training"]["dropped_samples_per_epoch"] == 8192 % 384
    assert value["replicas"][1] == {
        "replica": 1,
        "instance": 1,
        "host": 0,
        "stage_ipu_ids": [4, 5, 6],
        "idle_ipu_ids": [7],
    }
    assert value["keras"]["steps_per_epoch"] == value["training"]["micro_batches_per_epoch_per_instance"] == 120
