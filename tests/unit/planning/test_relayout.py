from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_rules import CONFIGS, LAUNCHES, POWERS, assert_obeys_the_rules, parse_dict

from tf_ipu_dp.config import train_flags
from tf_ipu_dp.datasets import info
from tf_ipu_dp.planning import errors, plan, relayout
from tf_ipu_dp.planning.plan import LaunchedTopology


@settings(max_examples=300)
@given(given_flags=CONFIGS, launched=LAUNCHES, micro=st.integers(1, 64), accumulation=POWERS, replicas=POWERS)
def test_a_run_resumes_with_its_global_batch_or_is_refused_with_what_keeps_it(
    given_flags, launched, micro, accumulation, replicas
):
    cfg, saved = parse_dict(given_flags), plan.Batch(micro, min(accumulation, 64), min(replicas, 64))
    dataset = info.DATASETS[cfg.dataset]
    try:
        kept = relayout.keep_global_batch(cfg, dataset, saved, launched)
    except errors.PlanError as error:
        for problem in error.problems:
            assert problem.rule != "batch_twice" or given_flags.keys() >= {"global_batch_size", "gradient_accumulation"}
            for fix in problem.fixes:
                again = relayout.keep_global_batch(fix.apply(cfg), dataset, saved, launched)
                run = plan.plan_run(again, dataset, launched)
                assert run.batch.global_batch_size == saved.global_batch_size
                assert all(f"--{name}" in str(problem) for name, _ in fix.changes)
    else:
        run = plan.plan_run(kept, dataset, launched)
        assert_obeys_the_rules(run)
        assert run.batch.global_batch_size == saved.global_batch_size
        batch_flags = {"global_batch_size": cfg.global_batch_size, "gradient_accumulation": cfg.gradient_accumulation}
        assert dataclasses.replace(kept, **batch_flags) == cfg


@settings(max_examples=200)
@given(given_flags=CONFIGS, launched=LAUNCHES, total=st.integers(1, 2048))
def test_every_layout_is_planned_with_the_global_batch_and_none_with_the_same_micro_batch_is_left_out(
    given_flags, launched, total
):
    cfg = parse_dict(given_flags)
    dataset = info.DATASETS[cfg.dataset]
    found = relayout.layouts(cfg, dataset, total, launched)
    assert len(set(found)) == len(found)
    for layout in found:
        run = plan.plan_run(layout.apply(cfg), dataset, launched)
        assert run.batch.global_batch_size == total
        assert (run.topology.ipus, run.topology.instances) == (layout.ipus, layout.instances)
        assert (run.batch.micro_batch_size, run.batch.accumulation) == (layout.micro_batch_size, layout.accumulation)
    for instances in [] if launched else [1, 2, 4, 8]:
        asked = dataclasses.replace(
            cfg, ipus=cfg.ipus or 1, instances=instances, global_batch_size=total, gradient_accumulation=None
        )
        try:
            run = plan.plan_run(asked, dataset)
        except errors.PlanError:
            continue
        expected = relayout.Layout(run.topology.ipus, instances, cfg.micro_batch_size, run.batch.accumulation)
        assert expected in found


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--ipus=6"], "--ipus=6 is not possible: IPUs come in powers of two; the run was trained with global batch "
         "512. Use --ipus=4 or 8."),
        (["--ipus=32", "--instances=8"], "--ipus=32 --micro_batch_size=32 cannot keep the global batch of 512 that the "
         "run was trained with. Use --ipus=8 or 16, or --micro_batch_size=4, 8 or 16, or --ipus=4 --instances=4."),
        (["--ipus=4", "--micro_batch_size=48"], "--ipus=4 --micro_batch_size=48 cannot keep the global batch of 512 "
         "that the run was trained with. Use --micro_batch_size=16, 32 or 64."),
        (["--ipus=16", "--pipeline_stages=3"], "--ipus=16 --pipeline_stages=3 --micro_batch_size=32 cannot keep the "
         "global batch of 512 that the run was trained with. Use --pipeline_schedule=sequential."),
        (["--ipus=4", "--gradient_accumulation=3"], "--gradient_accumulation=3 makes a global batch of 384, but the "
         "run was trained with global batch 512. Leave --gradient_accumulation out."),
    ],
)  # fmt: skip
def test_what_cannot_keep_a_runs_global_batch_is_refused_with_what_can(words, sentence):
    with pytest.raises(errors.PlanError) as caught:
        relayout.keep_global_batch(train_flags.parse(words), info.DATASETS["fashion_mini"], plan.Batch(32, 2, 8))
    assert str(caught.value) == sentence


def test_under_poprun_a_refusal_to_keep_the_global_batch_names_the_replicas_that_could():
    launched = LaunchedTopology("poprun", 32, 1, 4, 0)
    with pytest.raises(errors.PlanError) as caught:
        relayout.keep_global_batch(train_flags.parse([]), info.DATASETS["fashion_mini"], plan.Batch(32, 2, 8), launched)
    assert str(caught.value) == (
        "32 replicas (started by poprun; 4, 8 or 16 would work) with --micro_batch_size=32 cannot keep the global "
        "batch of 512 that the run was trained with. Use --micro_batch_size=4, 8 or 16."
    )
