from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf_ipu_dp import cli
from tf_ipu_dp.config import train_flags
from tf_ipu_dp.datasets import info
from tf_ipu_dp.planning import plan
from tf_ipu_dp.scaling import modes
from tf_ipu_dp.scaling.records import MODES

NAMES = ("tf_ipu_dp", "tf_ipu_dp_mpi", "horovod", "ddp", "keras")
POWERS = st.lists(st.sampled_from([1, 2, 4, 8, 16]), min_size=1, unique=True).map(sorted)


def layout(cell):
    return cell.replicas, cell.instances, cell.micro_batch_size, cell.gradient_accumulation, cell.global_batch_size


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("1,2,4", (1, 2, 4)), ("4,1,4", (1, 4)), ("16..512", (16, 32, 64, 128, 256, 512)), ("3..20,1", (1, 3, 6, 12, 20))],
)
def test_sizes_are_a_list_or_a_range_that_doubles(text, sizes):
    assert modes.parse_sizes(text) == sizes


@pytest.mark.parametrize("text", ["", "0", "1,,2", "two", "-1", "1..", "1.5", "2000000"])
def test_what_is_no_list_of_sizes_is_refused(text):
    with pytest.raises(cli.UsageError) as error:
        modes.parse_sizes(text)
    assert str(error.value) == (
        f"--sizes={text} is not a list of sizes from 1 to 1,048,576. Write 1,2,4 or 16..512, which doubles."
    )


def test_an_empty_range_is_refused():
    with pytest.raises(cli.UsageError, match=r"16 is less than 512\. Write 16\.\.512\."):
        modes.parse_sizes("512..16")


@given(first=st.integers(1, 5000), last=st.integers(1, 5000))
def test_a_range_begins_and_ends_where_it_says_and_at_most_doubles(first, last):
    first, last = sorted((first, last))
    sizes = modes.parse_sizes(f"{first}..{last}")
    assert (sizes[0], sizes[-1]) == (first, last)
    assert all(small < large <= 2 * small for small, large in zip(sizes, sizes[1:]))


def test_an_unknown_engine_is_refused_with_the_nearest():
    assert modes.parse_engines("ddp, tf_ipu_dp,ddp", NAMES) == ("ddp", "tf_ipu_dp")
    with pytest.raises(cli.UsageError) as error:
        modes.parse_engines("tf_ipu_dp,dpd", NAMES)
    assert str(error.value) == "--engines=tf_ipu_dp,dpd: dpd is not an engine. Did you mean ddp?"
    with pytest.raises(cli.UsageError, match=r"nccl is not an engine\. Use tf_ipu_dp, .* or keras\."):
        modes.parse_engines("nccl", NAMES)


def test_a_batch_sweep_is_one_replica_whose_micro_batch_is_the_size(cells_of):
    cells = cells_of("batch", [16, 512])
    assert [layout(cell) for cell in cells] == [(1, 1, 16, 1, 16), (1, 1, 512, 1, 512)]
    assert [cell.key for cell in cells] == ["tf_ipu_dp-16", "tf_ipu_dp-512"]


def test_weak_scaling_keeps_the_samples_of_a_replica(cells_of):
    cells = cells_of("weak", [1, 2, 4], "--micro_batch_size=64", "--gradient_accumulation=2")
    assert [layout(cell) for cell in cells] == [(1, 1, 64, 2, 128), (2, 2, 64, 2, 256), (4, 4, 64, 2, 512)]
    cells = cells_of("weak", [1, 2], replicas_per_instance=4)
    assert [layout(cell)[:2] for cell in cells] == [(4, 1), (8, 2)]


def test_sizes_may_count_replicas_in_one_instance_or_in_several(cells_of):
    assert [layout(cell)[:2] for cell in cells_of("weak", [1, 4], unit="replicas")] == [(1, 1), (4, 1)]
    cells = cells_of("weak", [1, 4], "--instances=2", "--ipus=4", unit="replicas")
    assert [layout(cell)[:2] for cell in cells] == [(1, 1), (4, 2)]


def test_strong_scaling_keeps_the_global_batch_and_solves_the_accumulation(cells_of):
    cells = cells_of("strong", [1, 2, 4], "--global_batch_size=512", "--micro_batch_size=64")
    assert [layout(cell) for cell in cells] == [(1, 1, 64, 8, 512), (2, 2, 64, 4, 512), (4, 4, 64, 2, 512)]


def test_a_comparison_has_one_replica_replicas_in_one_instance_and_the_same_over_several(cells_of):
    cells = cells_of("compare", [8], "--instances=4", "--ipus=8")
    assert [layout(cell)[:2] for cell in cells] == [(1, 1), (8, 1), (8, 4)]
    assert [cell.key for cell in cells] == [
        "tf_ipu_dp-1-alone", "tf_ipu_dp-8-in_1_instance", "tf_ipu_dp-8-in_4_instances",
    ]  # fmt: skip


def test_the_same_replicas_are_spread_over_instances(cells_of):
    cells = cells_of("instances", [1, 2, 4], "--ipus=4")
    assert [layout(cell)[:2] for cell in cells] == [(4, 1), (4, 2), (4, 4)]
    assert len({cell.global_batch_size for cell in cells}) == 1


def test_other_engines_compute_their_part_of_the_same_global_batch_in_one_pass(cells_of):
    cells = cells_of("strong", [1, 4], "--global_batch_size=512", engines=("tf_ipu_dp", "ddp", "keras"))
    found = {cell.key: layout(cell) for cell in cells}
    assert found == {
        "tf_ipu_dp-1": (1, 1, 32, 16, 512), "tf_ipu_dp-4": (4, 4, 32, 4, 512),
        "ddp-1": (1, 1, 512, 1, 512), "ddp-4": (4, 4, 128, 1, 512),
        "keras-1": (1, 1, 512, 1, 512),
    }  # fmt: skip


def test_plain_keras_has_one_process_and_one_cell_for_each_global_batch(cells_of):
    cells = cells_of("weak", [1, 2, 4], engines=("keras",))
    assert [layout(cell) for cell in cells] == [(1, 1, 32, 1, 32), (1, 1, 64, 1, 64), (1, 1, 128, 1, 128)]


def test_instances_are_spread_over_as_many_hosts_as_there_are(cells_of):
    assert [cell.hosts for cell in cells_of("weak", [1, 2, 4, 8], hosts=4)] == [1, 2, 4, 4]
    assert [cell.hosts for cell in cells_of("weak", [1, 2, 4], hosts=3)] == [1, 2, 2]


@given(mode=st.sampled_from(MODES), sizes=POWERS, engines=st.sets(st.sampled_from(NAMES), min_size=1).map(sorted))
def test_a_planned_cell_has_flags_that_the_planner_turns_into_the_same_layout(mode, sizes, engines):
    words = ["--model=mlp", *(["--global_batch_size=512"] if mode == "strong" else ["--ipus=16"])]
    config = train_flags.parse(words)
    dataset = info.DATASETS[config.dataset]
    request = modes.Request(mode, tuple(sizes), "instances", 1, tuple(engines), config, dataset)
    cells = modes.plan_cells(request, lambda name: name.startswith("tf_ipu_dp"))
    assert len({cell.key for cell in cells}) == len(cells)
    assert {cell.engine for cell in cells} == set(engines)
    for cell in cells:
        assert cell.micro_batch_size * cell.gradient_accumulation * cell.replicas == cell.global_batch_size
        if cell.words:
            run = plan.plan_run(train_flags.parse(["--model=mlp", *cell.words]), dataset)
            planned = (run.topology.replicas, run.topology.instances, run.batch.micro_batch_size)
            assert (*planned, run.batch.accumulation, run.batch.global_batch_size) == layout(cell)


def test_a_size_that_cannot_be_planned_is_refused_with_the_nearest_that_can(cells_of):
    with pytest.raises(cli.UsageError) as error:
        cells_of("weak", [1, 3, 4])
    assert str(error.value) == (
        "--sizes: 3 instances cannot be planned: --ipus=3 is not possible: IPUs come in powers of two. Nearest sizes "
        "that can: 2 and 4."
    )
    with pytest.raises(cli.UsageError) as error:
        cells_of("strong", [1, 16], "--global_batch_size=256")
    assert "--sizes: 16 instances cannot be planned: --global_batch_size=256" in str(error.value)
    assert str(error.value).endswith("Nearest sizes that can: 8.")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("strong", [1]), "--mode=strong keeps the global batch. Give it, for example --global_batch_size=512."),
        (
            ("weak", [1], "--global_batch_size=64"),
            "--global_batch_size=64 has no place in --mode=weak, where an update of each replica has the samples of a "
            "replica. Use --micro_batch_size and --gradient_accumulation.",
        ),
        (
            ("batch", [1], "--global_batch_size=64"),
            "--global_batch_size=64 has no place in --mode=batch, where an update of each replica has one micro batch. "
            "Use --sizes.",
        ),
        (
            ("strong", [1], "--global_batch_size=64", "--gradient_accumulation=2"),
            "--gradient_accumulation=2 has no place in --mode=strong, which calculates it for every size. Leave it "
            "out.",
        ),
    ],
)
def test_flags_that_contradict_the_mode_are_refused(cells_of, words, sentence):
    with pytest.raises(cli.UsageError) as error:
        cells_of(*words)
    assert str(error.value) == sentence


def test_what_only_our_engine_does_is_refused_beside_others(cells_of):
    with pytest.raises(cli.UsageError) as error:
        cells_of("weak", [1], "--optimizer=lars", engines=("tf_ipu_dp", "ddp"))
    assert str(error.value) == ("--optimizer=lars is not what ddp can do. Leave it out, or use --engines=tf_ipu_dp.")
    assert cells_of("weak", [1], "--optimizer=lars")


def test_other_engines_are_spread_over_hosts_too(cells_of):
    found = cells_of("weak", [1, 2, 4], "--hosts=a,b", engines=("ddp",), hosts=2)
    assert [cell.hosts for cell in found] == [1, 2, 2]


def test_the_words_of_all_cells_are_the_flags_that_differ_and_that_no_cell_sets():
    config = train_flags.parse(["--model=mlp", "--ipus=4", "--epochs=3", "--seed=7", "--dataset=cifar10"])
    assert modes.common_words(config, is_compared=False) == ("--model=mlp", "--dataset=cifar10", "--seed=7")
    # Other engines train on the samples as they are.
    assert "--augment=none" in modes.common_words(config, is_compared=True)


@given(
    seconds=st.floats(0.1, 1000), update_s=st.none() | st.floats(1e-5, 100), iterations=st.integers(1, 16),
    updates=st.none() | st.integers(1, 1000),
)  # fmt: skip
def test_a_run_has_whole_executions_a_warm_up_and_about_the_seconds(seconds, update_s, iterations, updates):
    length = modes.plan_length(seconds, update_s, iterations, updates)
    assert length.warmup >= 1 and length.warmup % iterations == 0 and length.updates % iterations == 0
    if updates is not None:
        assert updates <= length.updates < updates + iterations
    elif update_s is not None:
        assert 3 <= length.updates < 20_000 + iterations
        if 3 * update_s <= seconds and seconds / update_s < 20_000:
            assert seconds <= length.updates * update_s + 1e-6 < seconds + (1 + iterations) * update_s + 1e-5
