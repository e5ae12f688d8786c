from __future__ import annotations

import collections

from hypothesis import given
from hypothesis import strategies as st

from tf_ipu_dp.scaling.order import plan_order
from tf_ipu_dp.scaling.records import Cell

COUNTS = st.dictionaries(st.sampled_from(["tf_ipu_dp", "ddp", "horovod", "keras"]), st.integers(1, 5), min_size=1)


def cells_of(counts):
    return [
        Cell(f"{engine}-{size}", engine, size, 1, 1, 1, 1, 1, 1, ())
        for engine, count in counts.items()
        for size in range(count)
    ]


@given(counts=COUNTS, repeats=st.integers(1, 4), seed=st.integers(0, 1000))
def test_every_cell_has_its_turn_in_every_repeat_before_the_next_begins(counts, repeats, seed):
    cells = cells_of(counts)
    order = plan_order(cells, repeats, seed)
    assert [repeat for _, repeat in order] == [repeat for repeat in range(repeats) for _ in cells]
    assert collections.Counter((cell.key, repeat) for cell, repeat in order) == collections.Counter(
        (cell.key, repeat) for cell in cells for repeat in range(repeats)
    )


@given(counts=COUNTS, seed=st.integers(0, 1000))
def test_no_engine_follows_itself_as_long_as_the_others_suffice(counts, seed):
    order = [cell.engine for cell, _ in plan_order(cells_of(counts), 1, seed)]
    twice = sum(first == second for first, second in zip(order, order[1:]))
    most = max(counts.values())
    assert twice == max(2 * most - sum(counts.values()) - 1, 0)


@given(counts=COUNTS, repeats=st.integers(1, 4), seed=st.integers(0, 1000))
def test_the_same_seed_gives_the_same_order_and_more_repeats_only_append(counts, repeats, seed):
    cells = cells_of(counts)
    order = plan_order(cells, repeats, seed)
    assert plan_order(cells, repeats, seed) == order
    assert plan_order(cells, repeats + 1, seed)[: len(order)] == order


def test_the_sizes_are_shuffled_and_differ_between_repeats():
    cells = cells_of({"tf_ipu_dp": 6})
    order = plan_order(cells, 3, 1)
    repeats = [[cell.size for cell, each in order if each == repeat] for repeat in range(3)]
    assert len(set(map(tuple, repeats))) == 3 and [0, 1, 2, 3, 4, 5] not in repeats
