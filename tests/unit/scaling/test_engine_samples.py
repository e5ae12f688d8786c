"""Which samples the processes of an engine take, compared with those of `tf_ipu_dp.train`."""

from __future__ import annotations

import numpy as np
import pytest
import sample_orders
from hypothesis import given
from hypothesis import strategies as st

from tf_ipu_dp import cli
from tf_ipu_dp.config import train_flags
from tf_ipu_dp.datasets import lookup
from tf_ipu_dp.datasets.order import TrainingShard
from tf_ipu_dp.planning import plan
from tf_ipu_dp.planning.topology import LaunchedTopology
from tf_ipu_dp.scaling.engines import order_files, samples
from tf_ipu_dp.scaling.engines.protocol import Answer

ROWS = 8192  # of the synthetic set


def plan_ours(processes, batch_size):
    words = [f"--ipus={processes}", f"--micro_batch_size={batch_size}", "--dataset=synthetic", "--epochs=3"]
    launched = LaunchedTopology("poprun", processes, 1, processes, 0)
    return plan.plan_run(train_flags.parse(words), lookup.find("synthetic", None, None), launched)


@given(processes=st.sampled_from([1, 2, 4]), batch_size=st.integers(100, 1000), seed=st.integers(0, 2**32 - 1))
def test_every_process_takes_the_samples_of_our_instance_in_the_same_order(processes, batch_size, seed):
    ours = plan_ours(processes, batch_size)
    updates = 2 * ours.epochs.updates_per_epoch + 1  # into a third epoch
    order = sample_orders.make(
        processes=processes, batch_size=batch_size, seed=seed, warmup_updates=1, updates=updates - 1
    )
    for rank in range(processes):
        shard = TrainingShard(ours, rank, 0, updates)
        expected = np.concatenate([shard.samples_in(seed, epoch) for epoch in shard.epochs])
        assert np.array_equal(samples.rows_of_updates(order, rank, ROWS), expected)


def test_samples_beyond_the_rows_in_memory_repeat():
    rows = samples.rows_of_updates(sample_orders.make(), 0, 100)
    assert rows.max() < 100 and np.array_equal(rows, samples.rows_of_updates(sample_orders.make(), 0, ROWS) % 100)


def test_a_global_batch_larger_than_the_data_set_is_refused_with_the_largest_that_fits():
    with pytest.raises(
        cli.UsageError, match=r"fewer than one global batch of 16384. Use a global batch of at most 8192"
    ):
        samples.rows_of_updates(sample_orders.make(batch_size=8192, processes=2), 0, ROWS)


@pytest.mark.parametrize("dataset", ["imagenet2012", "synthetic_device"])
def test_a_data_set_that_is_not_in_memory_is_refused_with_one_that_is(dataset):
    with pytest.raises(cli.UsageError, match="Use --dataset=synthetic --image_size="):
        samples.find_dataset(sample_orders.make(dataset=dataset))


def test_normalised_pixels_are_those_of_our_input(tmp_path):
    from tf_ipu_dp.datasets.augment import Normaliser

    order = sample_orders.make(samples=str(tmp_path))
    images = np.random.RandomState(0).randint(0, 256, (4, 32, 32, 3)).astype(np.uint8)
    samples.write_arrays(images, [1, 2, 3, 4], tmp_path)
    split = samples.load(order)
    expected = Normaliser(samples.find_dataset(order), False, "float32")(images).numpy()
    assert np.array_equal(split.images, images) and split.labels.tolist() == [1, 2, 3, 4]
    assert np.allclose(split.images * split.factor + split.offset, expected, atol=1e-6)


def test_orders_and_answers_survive_their_files(tmp_path):
    order = sample_orders.make(processes=2, weights="w.npz")
    answer = Answer(1, "x", 2.0, 10, 2.3)
    path = order_files.write_order(order, tmp_path)
    order_files.write_answer(answer, path)
    assert order_files.read_order(path) == order
    assert order_files.read_answers(tmp_path, 2) == [None, answer]
    (tmp_path / "answer-0.json").write_text('{"rank": "half"', encoding="utf-8")
    assert order_files.read_answers(tmp_path, 2) == [None, answer]


def test_a_new_order_forgets_the_answers_of_the_last_one(tmp_path):
    path = order_files.write_order(sample_orders.make(), tmp_path)
    order_files.write_answer(Answer(0, "x", 2.0, 10, 2.3), path)
    order_files.write_order(sample_orders.make(), tmp_path)
    assert order_files.read_answers(tmp_path, 1) == [None]
