"""What is done after a failure: restart, restart on fewer instances, or stop."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_ipu_dp.config import train_flags, values
from tf_ipu_dp.datasets import info
from tf_ipu_dp.distributed import failures, job, restart
from tf_ipu_dp.planning import errors, plan
from tf_ipu_dp.runs import saved_flags

FASHION = info.DATASETS["fashion_mini"]
POWERS = st.integers(0, 4).map(lambda exponent: 2**exponent)


def plan_job(*words, **known):
    return job.plan_job(saved_flags.complete(words), FASHION, **known)


def failed(step=0, instance=1, status=None, line="boom", transient=True, host="a"):
    return restart.FailedAttempt(failures.FirstFailure(instance, host, status, (line,), transient), step)


@settings(max_examples=150)
@given(
    instances=POWERS, local=POWERS, micro=st.sampled_from([1, 3, 8]), accumulation=st.integers(1, 6),
    stages=st.integers(1, 3), typed=st.sampled_from(["accumulation", "batch", "none"]),
)  # fmt: skip
def test_fewer_instances_keep_the_global_batch_and_what_each_instance_has(
    instances, local, micro, accumulation, stages, typed
):
    unit = plan.accumulation_unit(stages, "grouped")
    ipus = instances * local * plan.ipus_per_replica(stages)
    total = micro * instances * local * unit * (1 if typed == "none" else accumulation)
    words = [f"--ipus={ipus}", f"--instances={instances}", f"--micro_batch_size={micro}", f"--pipeline_stages={stages}"]
    if typed == "accumulation":
        words.append(f"--gradient_accumulation={accumulation * unit}")
    elif typed == "batch":
        words.append(f"--global_batch_size={total}")
    try:
        planned = plan_job(*words)
    except errors.PlanError:
        assert total > FASHION.train_samples
        return
    wanted = restart.plan_fewer_instances(planned, FASHION, ())
    if instances == 1:
        assert wanted is None
        return
    fewer = job.replan_job(saved_flags.complete(words), wanted, FASHION)
    assert fewer.plan.batch.global_batch_size == planned.plan.batch.global_batch_size == total
    assert fewer.plan.topology.instances == instances // 2
    assert fewer.plan.topology.local_replicas == planned.plan.topology.local_replicas
    assert fewer.plan.batch.micro_batch_size == micro
    # How many updates make an execution depends on the work of an instance.
    length = planned.plan.epochs.device_iterations
    assert dataclasses.replace(fewer.plan.epochs, device_iterations=length) == planned.plan.epochs
    # Each instance plans again from its words, and has to come to the same.
    assert train_flags.parse(fewer.words) == fewer.config
    assert plan.plan_run(fewer.config, FASHION) == fewer.plan


def test_a_lost_host_is_left_out_and_the_hosts_that_stay_share_the_instances():
    planned = plan_job("--hosts=a,b,c,d", "--instances=8", "--ipus=8")
    wanted = restart.plan_fewer_instances(planned, FASHION, ["b"])
    assert (wanted.instances, wanted.ipus, str(wanted.hosts)) == (4, 4, "a,c")
    assert restart.plan_fewer_instances(planned, FASHION, ["a", "b", "c"]).hosts == values.Hosts(1, ("d",))
    assert restart.plan_fewer_instances(planned, FASHION, ["a", "b", "c", "d"]) is None
    assert restart.plan_fewer_instances(plan_job("--hosts=2"), FASHION, ()).hosts == values.Hosts(1)


@pytest.mark.parametrize(
    ("past", "unreachable", "most", "action"),
    [
        ([failed()], [], 0, "stop"),
        ([failed()], [], 1, "restart"),
        ([failed(transient=False)], [], 3, "stop"),
        ([failed()], ["b"], 3, "shrink"),
        ([failed(status=137, step=8), failed(status=137, step=16)], [], 3, "restart"),
        ([failed(status=137, instance=0), failed(status=137, instance=1, step=8)], [], 3, "restart"),
        ([failed(status=137, instance=0)] * 2, [], 3, "restart"),
        ([failed(status=137, instance=0)] * 3, [], 3, "shrink"),
        ([failed(status=137, instance=0)] * 4, [], 3, "stop"),
        ([failed(status=137, step=step) for step in range(8, 80, 8)], [], 1, "restart"),
        ([*[failed(status=137, step=8)] * 3, failed(status=137, step=16)], [], 3, "restart"),
        ([failed(status=137, step=16), failed(status=137, step=8), failed(status=137, step=16)], [], 3, "shrink"),
        ([failed(status=137)], [], 1, "restart"),
        ([failed(status=137)] * 2, [], 1, "stop"),
        ([failed(step=8), failed(step=8)], [], 3, "stop"),
        ([failed(step=8, line="at 0x7f step 9"), failed(step=8, line="at 0x1c step 8")], [], 3, "stop"),
        ([failed(step=8), failed(step=8, line="other", instance=0)], [], 3, "restart"),
        ([failed(step=8), failed(step=16, instance=0)], [], 1, "restart"),
    ],
)
def test_the_answer_to_a_failure_depends_on_the_attempts_before(past, unreachable, most, action):
    assert restart.decide(past, unreachable, most).action == action


def test_a_restart_is_announced_in_one_sentence_with_what_changes():
    planned = plan_job("--ipus=8", "--gradient_accumulation=2")
    wanted = restart.plan_fewer_instances(planned, FASHION, ())
    fewer = job.replan_job(planned.command, wanted, FASHION)
    last = failed(step=120, status=137, host="b")
    assert restart.render_restart(last, "", planned, fewer) == (
        "instance 1 on b was killed by SIGKILL; restarting from step 120 on 1 instance x 4 replicas, "
        "accumulation 4 instead of 2 (global batch 512 kept)."
    )
    assert restart.render_restart(dataclasses.replace(last, saved_step=0), "c cannot be reached", planned, planned) == (
        "instance 1 on b was killed by SIGKILL; c cannot be reached; restarting from the beginning on "
        "2 instances x 4 replicas."
    )
    hosts = plan_job("--ipus=8", "--instances=4", "--hosts=a,b", "--micro_batch_size=8")
    wanted = dataclasses.replace(hosts.config, instances=1, hosts=None, micro_batch_size=16)
    other = job.replan_job(hosts.command, wanted, FASHION)
    assert (
        restart.render_restart(last, "", hosts, other)
        .split("on 1 instance x 8 replicas")[1]
        .startswith(" without a and b, micro batch 16 instead of 8")
    )


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.integers(1, 5))
def test_kills_after_which_every_attempt_gets_further_never_end_a_run(steps, most):
    past = [failed(status=137, step=step) for step in sorted(set(steps), reverse=False) if step]
    for count in range(1, len(past) + 1):
        assert restart.decide(past[:count], (), most).action == "restart"


def test_a_first_attempt_that_does_not_get_past_the_checkpoint_it_started_from_made_no_progress():
    attempts = [failed(status=137, step=40), failed(status=137, step=40)]
    assert restart.count_without_progress(attempts[:1], 40) == restart.count_without_progress(attempts[:1]) == 1
    assert restart.count_without_progress(attempts, 40) == 2
    assert restart.count_without_progress([*attempts, failed(step=44)], 40) == 1
