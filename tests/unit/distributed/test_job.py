"""What a launch starts: what was typed, and what the plan adds to it."""

from __future__ import annotations

import pytest

from tf_ipu_dp.datasets import info
from tf_ipu_dp.distributed import job
from tf_ipu_dp.planning import errors, plan
from tf_ipu_dp.runs import saved_flags

FASHION = info.DATASETS["fashion_mini"]


def plan_job(*words, **known):
    return job.plan_job(saved_flags.complete(words), FASHION, **known)


def test_what_was_not_typed_is_planned_and_passed_to_train():
    assert plan_job().words == ("--ipus=2", "--instances=2")
    assert plan_job("--hosts=a,b,c,d").plan.topology.instances == 4
    planned = plan_job("--pipeline_stages=3", "--instances=2")
    assert planned.words == ("--pipeline_stages=3", "--instances=2", "--ipus=8")
    assert planned.layout == "2 instances x 1 replica"
    with pytest.raises(errors.PlanError) as caught:
        plan_job("--instances=3")
    assert str(caught.value) == "--instances=3 cannot share 4 replicas evenly. Use --instances=1, 2 or 4."


def test_a_saved_run_keeps_its_global_batch_with_the_flag_that_was_typed():
    saved = plan.Batch(32, 2, 8)
    assert plan_job("--ipus=8", "--gradient_accumulation=2", saved=saved).words[2:] == ("--instances=2",)
    assert "--gradient_accumulation=4" in plan_job("--ipus=4", "--gradient_accumulation=2", saved=saved).words
    assert "--global_batch_size=512" in plan_job("--ipus=4", saved=saved).words
    assert "--global_batch_size=512" not in plan_job("--ipus=16", "--instances=4", saved=saved).words
    with pytest.raises(errors.PlanError, match=r"--ipus=4, 8 or 16, or --micro_batch_size=4, 8 or 16\."):
        plan_job("--ipus=32", saved=saved)
