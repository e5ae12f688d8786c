from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_rules import CONFIGS, LAUNCHES, assert_obeys_the_rules, parse_dict

from tf_ipu_dp import cli
from tf_ipu_dp.config import train_flags
from tf_ipu_dp.datasets import info
from tf_ipu_dp.planning import errors, plan, steps
from tf_ipu_dp.planning.plan import LaunchedTopology


def parse(*words):
    return train_flags.parse(words)


def plan_words(*words, launched=None):
    cfg = parse(*words)
    return plan.plan_run(cfg, info.DATASETS[cfg.dataset], launched)


def refusal(*words, launched=None):
    with pytest.raises(errors.PlanError) as caught:
        plan_words(*words, launched=launched)
    return caught.value


@settings(max_examples=300)
@given(CONFIGS, LAUNCHES)
def test_every_accepted_plan_obeys_the_rules_and_every_suggested_fix_solves_its_problem(given_flags, launched):
    cfg = parse_dict(given_flags)
    dataset = info.DATASETS[cfg.dataset]
    try:
        run = plan.plan_run(cfg, dataset, launched)
    except errors.PlanError as error:
        for problem in error.problems:
            for fix in problem.fixes:
                try:
                    plan.plan_run(fix.apply(cfg), dataset, launched)
                except errors.PlanError as next_error:
                    assert problem.rule not in [left.rule for left in next_error.problems], (fix, str(next_error))
    else:
        assert_obeys_the_rules(run)
        if cfg.updates_per_epoch is None:
            assert run.epochs.dropped_samples_per_epoch < run.batch.global_batch_size
        else:
            assert run.epochs.updates_per_epoch == cfg.updates_per_epoch


@settings(max_examples=150)
@given(CONFIGS)
def test_without_a_launcher_every_problem_comes_with_fixes_that_its_text_shows(given_flags):
    cfg = parse_dict(given_flags)
    try:
        plan.plan_run(cfg, info.DATASETS[cfg.dataset])
    except errors.PlanError as error:
        for problem in error.problems:
            assert problem.fixes, str(problem)
            for fix in problem.fixes:
                for name, value in fix.changes:
                    assert f"--{name}" in str(problem)
                    assert value is None or str(value) in str(problem)


@pytest.mark.slow
def test_thousands_of_random_command_lines_end_in_a_plan_or_in_sentences():
    rng = random.Random(20)
    names = [name for names in train_flags.GROUPS.values() for name in names] + [
        "ipu",
        "flagfile",
        "nojson",
        "",
        "help_me",
    ]
    values = ["0", "1", "2", "3", "8", "64", "-1", "3.5", "x", "", "1e3", "10" * 40, "9" * 5000, "a,b", ",", "200steps",
              "0steps", "grouped", "emulator", "true", "é", "\x00", "--", "cifar10", "mermaid", "²"]  # fmt: skip
    plans = refusals = 0
    for _ in range(3_000):
        words = []
        for _ in range(rng.randrange(6)):
            name, value = rng.choice(names), rng.choice(values)
            flag = f"--{name}"
            words += rng.choice([[f"{flag}={value}"], [flag, value], [flag], [value], [f"-{name}={value}"]])
        try:
            cfg = train_flags.parse(words)
            run = plan.plan_run(cfg, info.DATASETS.get(cfg.dataset, info.DATASETS["mnist"]))
        except cli.UsageError as error:
            refusals += 1
            assert error.sentences and all(error.sentences)
        else:
            plans += 1
            if run.topology.ipus < 10_000:
                assert_obeys_the_rules(run)
    assert plans > 30 and refusals > 300


@pytest.mark.parametrize(("stages", "taken"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8), (9, 16)], ids=str)
def test_a_replica_takes_the_next_power_of_two_of_ipus(stages, taken):
    assert plan.ipus_per_replica(stages) == taken


def test_the_reference_run_over_two_stages_and_eight_replicas_has_three_executions_per_epoch():
    run = plan_words(
        "--dataset=cifar10", "--ipus=16", "--pipeline_stages=2", "--instances=4", "--micro_batch_size=64",
        "--gradient_accumulation=8", "--device_iterations=4",
    )  # fmt: skip
    assert run.topology.replicas == 8
    assert run.batch.global_batch_size == 4096
    assert (run.epochs.updates_per_epoch, run.epochs.executions_per_epoch) == (12, 3)
    assert run.epochs.dropped_samples_per_epoch == 50_000 - 12 * 4096
    assert run.keras == plan.KerasSteps(
        steps_per_execution=32,
        steps_per_epoch=192,
        last_epoch_steps=192,
        validation_steps=40,
        validation_steps_per_execution=20,
    )


def test_a_global_batch_that_does_not_divide_names_the_nearest_and_the_micro_batches_that_do():
    error = refusal("--ipus=16", "--micro_batch_size=18", "--global_batch_size=3520")
    assert error.sentences == (
        "--global_batch_size=3520 is not a multiple of 288 = micro batch 18 x 16 replicas. "
        "Use --global_batch_size=3456 or 3744, or --micro_batch_size=1, 2, 4, 5, 10, 11, 20, 22, 44, 55, 110 or 220.",
    )


def test_the_accumulation_is_solved_from_the_global_batch():
    assert plan_words("--ipus=8", "--global_batch_size=1024").batch.accumulation == 4


@pytest.mark.parametrize(("schedule", "accumulation"), [("grouped", 8), ("interleaved", 4), ("sequential", 1)])
def test_without_a_batch_flag_the_accumulation_is_the_least_that_the_schedule_takes(schedule, accumulation):
    run = plan_words("--ipus=4", "--pipeline_stages=4", f"--pipeline_schedule={schedule}")
    assert run.batch.accumulation == accumulation


def test_all_problems_are_reported_at_once():
    error = refusal("--ipus=6", "--instances=3", "--hosts=5")
    assert [problem.rule for problem in error.problems] == ["ipus", "instances", "hosts"]
    twice = ("--global_batch_size=64", "--gradient_accumulation=3")
    assert [problem.rule for problem in refusal("--ipus=6", *twice).problems] == ["ipus", "batch_twice"]
    pipelined = refusal("--ipus=8", "--instances=3", "--pipeline_stages=2", "--gradient_accumulation=3")
    assert [problem.rule for problem in pipelined.problems] == ["instances", "accumulation"]
    assert "Use --ipus=4 or 8." in error.sentences[0]
    assert "Use --instances=1, 2 or 4, or --ipus=8 --instances=8." in error.sentences[1]


@given(st.integers(0, 10**9), st.integers(1, 4096), st.integers(1, 5000), st.lists(st.integers(0, 5000), max_size=3))
def test_an_execution_is_long_enough_where_what_must_be_a_multiple_of_it_allows_that(macs, samples, updates, others):
    chosen = steps.choose_device_iterations(macs, samples, updates, [updates, *others])
    possible = [
        number
        for number in range(1, 33)
        if number == 1 or (number * 8 <= updates and not any(each % number for each in (updates, *others)))
    ]
    assert chosen in possible
    enough = [number for number in possible if number * samples * macs * 3 >= 2 * 10**9]
    assert chosen == (1 if not macs else min(enough, default=max(possible)))


def test_small_models_make_several_updates_in_an_execution_unless_told_otherwise():
    def chosen(*words, **more):
        run = plan.plan_run(parse(*words), info.DATASETS["fashion_mini"], **more)
        return run.epochs.device_iterations

    assert chosen("--model=resnet50", "--ipus=8") == 1
    assert chosen("--model=mlp", "--ipus=1") == 32
    assert chosen("--model=mlp", "--ipus=1", "--device_iterations=2") == 2
    assert chosen("--model=mlp", "--ipus=1", "--log_every=10", "--checkpoint_every=4") == 2
    assert chosen("--model=mlp", "--ipus=1", "--epochs=7steps") == 1
    assert chosen("--model=mlp", "--ipus=1", "--callbacks=mine.py:make") == 1
    assert chosen("--model=mlp", "--ipus=1", resumable=(96, 120)) == 8
    assert chosen("--model=mlp", "--ipus=1", resumable=(13,)) == 1


def test_device_iterations_that_do_not_divide_the_epoch_are_refused_with_the_divisors_near_it():
    assert refusal("--dataset=cifar10", "--ipus=1", "--micro_batch_size=50", "--device_iterations=7").sentences == (
        "--device_iterations=7 does not divide the epoch's 1000 weight updates (50000 samples / global batch 50). "
        "Use --device_iterations=4, 5, 8 or 10, or --updates_per_epoch=994.",
    )


def test_a_duration_in_steps_may_end_within_an_epoch_but_not_within_an_execution():
    run = plan_words("--ipus=8", "--epochs=40steps", "--device_iterations=8")
    assert (run.epochs.full_epochs, run.epochs.last_epoch_updates, run.epochs.updates) == (1, 8, 40)
    assert_obeys_the_rules(run)
    assert "Use --epochs=40steps or 48steps" in str(refusal("--ipus=8", "--epochs=44steps", "--device_iterations=8"))


def test_fewer_steps_than_an_epoch_are_one_short_epoch():
    run = plan_words("--epochs=10steps", "--device_iterations=5")
    assert (run.epochs.updates_per_epoch, run.epochs.updates, run.epochs.epochs) == (256, 10, 1)
    assert run.keras.steps_per_epoch == run.keras.last_epoch_steps == 10
    assert "Use --epochs=5steps or 10steps, or --device_iterations=1 or 7." in str(
        refusal("--epochs=7steps", "--device_iterations=5")
    )


@given(st.integers(1, 50), st.integers(0, 20), st.integers(0, 49), st.integers(0, 1000), st.integers(1, 30))
def test_calls_of_fit_cover_a_run_in_epochs_of_one_length_each(per_epoch, full, last, first, most_epochs):
    epochs = steps.Epochs(per_epoch, 0, 1, full, min(last, per_epoch - 1))
    while first < epochs.updates:
        end = epochs.end_of_fit(first, most_epochs)
        lengths = {min((epoch + 1) * per_epoch, end) - max(epoch * per_epoch, first)
                   for epoch in range(first // per_epoch, -(-end // per_epoch))}  # fmt: skip
        assert first < end <= epochs.updates and len(lengths) == 1
        assert -(-end // per_epoch) - first // per_epoch <= most_epochs
        first = end


def test_samples_that_do_not_fill_a_batch_are_counted():
    run = plan_words("--micro_batch_size=3000")
    assert (run.epochs.updates_per_epoch, run.epochs.dropped_samples_per_epoch) == (2, 2192)


def test_a_batch_larger_than_the_data_set_is_refused_with_what_fits():
    text = str(refusal("--ipus=8", "--gradient_accumulation=64"))
    assert "16384 samples" in text and "--gradient_accumulation=32" in text and "--micro_batch_size=16" in text


def test_global_batch_and_accumulation_exclude_each_other():
    text = str(refusal("--global_batch_size=64", "--gradient_accumulation=2"))
    assert "both set the global batch" in text and "eave --global_batch_size out" in text


POPRUN = LaunchedTopology("poprun", replicas=8, ipus_per_replica=2, instances=4, instance=0, hosts=2)


def test_under_poprun_the_topology_is_poprun_s():
    topology = plan_words(launched=POPRUN).topology
    assert (topology.ipus, topology.pipeline_stages, topology.replicas) == (16, 2, 8)
    assert (topology.instances, topology.hosts.count, topology.launcher) == (4, 2, "poprun")


def test_under_poprun_flags_that_agree_are_taken_and_host_names_kept():
    words = ("--ipus=16", "--pipeline_stages=2", "--instances=4", "--hosts=a,b")
    assert plan_words(*words, launched=POPRUN).topology.hosts.names == ("a", "b")


@pytest.mark.parametrize(
    ("flag", "asked", "real"), [("ipus", 8, 16), ("instances", 2, 4), ("hosts", 4, 2), ("pipeline_stages", 4, 2)]
)
def test_under_poprun_a_flag_that_disagrees_is_refused_with_both_values(flag, asked, real):
    (problem,) = refusal(f"--{flag}={asked}", launched=POPRUN).problems
    assert f"--{flag}={asked}" in problem.sentence and str(real) in problem.sentence
    assert f"--{flag}={real}" in str(problem) and f"leave --{flag} out" in str(problem)


@pytest.mark.parametrize(
    ("replicas", "per_replica", "advice"),
    [(6, 1, "--num-replicas 4 or 8"), (2, 3, "--ipus-per-replica 2 or 4"), (6, 3, "--ipus-per-replica 2 or 4")],
)
def test_what_poprun_cannot_have_started_on_hardware_is_refused_in_its_own_options(replicas, per_replica, advice):
    launched = LaunchedTopology("poprun", replicas, per_replica, replicas, 0)
    (problem,) = refusal(launched=launched).problems
    assert advice in str(problem) and f"= {replicas * per_replica}, but" in str(problem)


def test_a_batch_too_large_for_the_data_set_keeps_as_many_replicas_as_it_can():
    assert "Use --ipus=256, or --ipus=8192 --micro_batch_size=1." in str(refusal("--ipus=65536"))


def test_the_largest_job_that_can_be_asked_for_is_planned_without_listing_it():
    run = plan_words("--ipus=1048576", "--micro_batch_size=1", "--dataset=imagenet2012")
    assert run.topology.replica(2**20 - 1).ipu_ids == range(2**20 - 1, 2**20)


def test_named_hosts_are_cut_to_the_number_that_works():
    assert "Use --hosts=a or a,b." in str(refusal("--ipus=4", "--instances=2", "--hosts=a,b,c"))


def test_validation_shards_differ_by_one_sample_at_most():
    shards = [len(plan.Validation(10, 4, 4).shard(instance)) for instance in range(4)]
    assert sum(shards) == 10 and max(shards) - min(shards) == 1


def test_a_model_is_cut_where_the_work_is_even_or_where_it_is_said():
    run = plan_words("--ipus=2", "--pipeline_stages=2", "--model=resnet50")
    assert abs(run.model.share(0) - 0.5) < 0.05
    given = plan_words("--ipus=2", "--pipeline_splits=conv2_block2", "--model=resnet50")
    assert [blocks[0].name for blocks in given.model.stages] == ["stem", "conv2_block2"]
    assert given.topology.pipeline_stages == 2


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--pipeline_stages=8", "--ipus=8", "--model=mlp"], "Use --pipeline_stages=4, or --model=resnet20."),
        (["--pipeline_stages=2", "--ipus=2", "--pipeline_splits=a,b"], "makes 3 stages, but --pipeline_stages=2"),
        (["--ipus=2", "--pipeline_splits=nope", "--model=resnet8"], "resnet8 has no block 'nope'"),
        (["--device_iterations=4", "--checkpoint_every=6"], "Use --checkpoint_every=4 or 8, or leave"),
    ],
    ids=str,
)
def test_what_does_not_fit_the_model_or_the_executions_is_refused(words, text):
    assert text in str(refusal(*words))


def test_images_that_are_too_small_for_the_models_are_refused():
    tiny = dataclasses.replace(info.DATASETS["mnist"], height=16, width=16)
    with pytest.raises(errors.PlanError, match=r"16 x 16; models take 28 x 28 or more\. Add --image_size=28"):
        plan.plan_run(parse(), tiny)


def test_batch_norm_in_a_pipeline_is_noted_and_group_norm_is_the_default_there():
    pipelined = ("--ipus=2", "--pipeline_stages=2")
    assert plan_words().model.architecture.norm == "batch"
    assert plan_words(*pipelined).model.architecture.norm == "group" and not plan_words(*pipelined).notes
    assert "Use --norm=group" in plan_words(*pipelined, "--norm=batch").notes[0]


@pytest.mark.parametrize(
    ("words", "rate"),
    [
        ([], 0.05),
        (["--optimizer=adam"], 0.001),
        (["--learning_rate=0.2", "--lr_scaling=linear"], 0.8),
        (["--learning_rate=0.2", "--lr_scaling=sqrt"], 0.4),
        (["--learning_rate=0.2", "--lr_scaling=linear", "--lr_base_batch=1024"], 0.2),
    ],
    ids=str,
)
def test_the_learning_rate_is_resolved_from_the_global_batch(words, rate):
    assert plan_words("--ipus=8", "--micro_batch_size=128", *words).recipe.learning_rate == pytest.approx(rate)


def test_warm_up_drops_and_loss_scaling_are_resolved():
    run = plan_words("--ipus=8", "--lr_schedule=step", "--epochs=10")
    assert run.epochs.updates_per_epoch == 32
    assert (run.recipe.warmup_updates, run.recipe.drops, run.recipe.loss_scale) == (16, (160, 240), 1.0)
    run = plan_words("--ipus=8", "--lr_schedule=step", "--lr_drop_epochs=1,2.5", "--warmup_epochs=2", "--epochs=4")
    assert (run.recipe.warmup_updates, run.recipe.drops) == (64, (32, 80))
    assert plan_words("--precision=16.16").recipe.loss_scale == 128
    assert plan_words("--precision=16.32", "--loss_scaling=dynamic").recipe.loss_scale is None
    assert plan_words("--epochs=10steps").recipe.warmup_updates == 1
