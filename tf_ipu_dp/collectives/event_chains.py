"""What rare delays add to an all-reduce: the heaviest chain of events that each wait for the one before. Pure, numpy.

Without noise all ranks are in step, so a delay anywhere moves the end. Delays add up if one can be felt at the other:
on a ring, if the later one is at most as many ranks further as there are steps between. The result equals the exact
recursion's, at the cost of the events instead of all steps of all ranks.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, List, Optional, Sequence, Tuple

import numpy as np

from tf_ipu_dp.collectives import formulas
from tf_ipu_dp.collectives.exact import Recursion, TimedPhase, double_trees

Array = Any  # numpy has no types that hold for both releases
Generator = Any
Weights = Callable[[Array], Array]  # of the phases in which events happen, their delays in seconds


@dataclasses.dataclass(frozen=True, eq=False)
class Events:
    """Events of many trials: one column per trial, sorted by step; empty places have the weight 0."""

    step: Array  # counted through all phases
    rank: Array
    piece: Array
    part: Array  # the direction of a two-way ring, or which of two trees
    weight: Array


def draw(recursion: Recursion, rates: Sequence[float], weights: Weights, trials: int, rng: Generator) -> Events:
    """Returns random events; `rates` are the events per message of each phase."""
    expected = np.array([rate * messages_of(recursion, phase) for rate, phase in zip(rates, recursion.phases)])
    counts = rng.poisson(expected.sum(), trials)
    return draw_counted(recursion, rates, weights, counts, rng)


def draw_counted(
    recursion: Recursion, rates: Sequence[float], weights: Weights, counts: Array, rng: Generator
) -> Events:
    """Returns as many events in each trial as `counts` says."""
    most = int(counts.max()) if len(counts) else 0
    shape = (most, len(counts))
    expected = np.array([rate * messages_of(recursion, phase) for rate, phase in zip(rates, recursion.phases)])
    cumulative = np.cumsum(expected) / expected.sum()
    phase = np.minimum(np.searchsorted(cumulative, rng.random(shape), side="right"), len(cumulative) - 1)
    steps = np.array([each.steps for each in recursion.phases])
    first = np.concatenate([[0], np.cumsum(steps)[:-1]])
    step = first[phase] + np.floor(rng.random(shape) * steps[phase]).astype(np.int64)
    ranks = _rank_counts(recursion)
    rank = np.floor(rng.random(shape) * ranks[phase]).astype(np.int64)
    piece: Array = np.zeros(shape, dtype=np.int64)
    if recursion.algorithm == formulas.BINOMIAL_TREE:
        rank = _binomial_receivers(recursion, phase, rank)
    elif recursion.algorithm == formulas.DOUBLE_TREE:
        piece = np.floor(rng.random(shape) * recursion.pieces).astype(np.int64)
        step = phase
    parts = 2 if recursion.algorithm == formulas.DOUBLE_TREE else recursion.directions
    part = np.floor(rng.random(shape) * parts).astype(np.int64)
    weight = weights(phase) * (np.arange(most)[:, None] < counts)
    return _sorted(recursion, Events(step, rank, piece, part, weight))


def heaviest(recursion: Recursion, events: Events) -> Array:
    """Returns the delay of each trial: the largest sum of weights along a chain."""
    most, trials = events.weight.shape
    if not most:
        return np.zeros(trials)
    follows = _order(recursion, events)
    best = events.weight.copy()
    for j in range(1, most):
        before = np.where(follows(j), best[:j], 0.0).max(axis=0)
        best[j] += np.where(events.weight[j] > 0, before, 0.0)
    return best.max(axis=0)


def messages_of(recursion: Recursion, phase: TimedPhase) -> float:
    """Returns the messages of a phase over all ranks, steps, directions and trees."""
    if recursion.algorithm == formulas.BINOMIAL_TREE:
        return float(len(range(0, recursion.ranks - 2**phase.dimension, 2 ** (phase.dimension + 1))))
    if recursion.algorithm == formulas.DOUBLE_TREE:
        return 2.0 * (recursion.ranks - 1) * recursion.pieces
    ranks = recursion.folded if phase.dimension < 0 else int(np.prod(recursion.shape))
    return float(ranks * phase.steps * recursion.directions)


def _rank_counts(recursion: Recursion) -> Array:
    if recursion.algorithm == formulas.BINOMIAL_TREE:
        return np.array([messages_of(recursion, phase) for phase in recursion.phases])
    inside = int(np.prod(recursion.shape))
    return np.array([recursion.folded if phase.dimension < 0 else inside for phase in recursion.phases])


def _binomial_receivers(recursion: Recursion, phase: Array, pair: Array) -> Array:
    distance = np.array([2**each.dimension for each in recursion.phases])[phase]
    down = phase >= len(recursion.phases) // 2
    return pair * 2 * distance + np.where(down, distance, 0)


def _sorted(recursion: Recursion, events: Events) -> Events:
    key = events.step
    if recursion.algorithm == formulas.DOUBLE_TREE:
        # Children before parents on the way up, parents before children on the way down; then by piece.
        depth = np.stack([_depths(parents) for parents in double_trees(recursion.ranks)])[events.part, events.rank]
        height = int(depth.max()) + 1 if depth.size else 1
        along = np.where(events.step == 0, height - depth, height + 1 + depth)
        key = along * recursion.pieces + events.piece
    order = np.argsort(np.where(events.weight > 0, key, np.iinfo(np.int64).max), axis=0, kind="stable")
    return Events(
        *(np.take_along_axis(getattr(events, field.name), order, axis=0) for field in dataclasses.fields(Events))
    )


def _order(recursion: Recursion, events: Events) -> Callable[[int], Array]:
    if recursion.algorithm == formulas.BINOMIAL_TREE:
        return _binomial_order(recursion, events)
    if recursion.algorithm == formulas.DOUBLE_TREE:
        return _double_tree_order(recursion, events)
    if set(recursion.shape) <= {2}:
        return _exchange_order(recursion, events)
    return _grid_order(recursion, events)


def _grid_order(recursion: Recursion, events: Events) -> Callable[[int], Array]:
    """Event j follows i if along each dimension there are enough steps between them to get from rank to rank."""
    passed = _steps_passed(recursion)
    places: List[Tuple[Array, Array, int]] = []
    inside = 1
    for dimension, count in enumerate(recursion.shape):
        if count > 1:
            coordinate = (events.rank // inside % count).astype(np.int32)
            places.append((coordinate, passed[dimension][events.step], count))
        inside *= count
    two_way = events.part if recursion.directions > 1 else None

    def follows(j: int) -> Array:
        found = events.step[:j] < events.step[j]
        for coordinate, steps, count in places:
            distance = coordinate[j] - coordinate[:j]
            distance += (distance < 0) * np.int32(count)
            found &= distance <= steps[j] - steps[:j]
        return found if two_way is None else found & (two_way[:j] == two_way[j])

    return follows


def _exchange_order(recursion: Recursion, events: Events) -> Callable[[int], Array]:
    """The same with bits as dimensions: ranks may differ in the bits that were exchanged between the events."""
    steps = len(recursion.phases)
    exchanged: Array = np.zeros((steps, steps), dtype=np.int64)
    for first in range(steps):
        for last in range(first + 1, steps):
            bit = recursion.phases[last].dimension
            exchanged[first, last] = exchanged[first, last - 1] | (1 << bit if bit >= 0 else 0)

    def follows(j: int) -> Array:
        differ = events.rank[:j] ^ events.rank[j]
        allowed = exchanged[events.step[:j], np.broadcast_to(events.step[j], differ.shape)]
        return (events.step[:j] < events.step[j]) & ((differ & ~allowed) == 0)

    return follows


def _binomial_order(recursion: Recursion, events: Events) -> Callable[[int], Array]:
    half = len(recursion.phases) // 2
    bits = np.array([phase.dimension for phase in recursion.phases])[events.step]
    down = events.step >= half

    def follows(j: int) -> Array:
        later = events.step[:j] < events.step[j]
        # A rank on the way up passes its data to the rank that has the same upper bits and no others.
        up_up = (events.rank[:j] >> (bits[j] + 1)) == (events.rank[j] >> (bits[j] + 1))
        # Sender and receiver of a delayed message on the way down are both late for all that they send afterwards.
        shift = bits[:j] + 1
        down_down = (events.rank[:j] >> shift) == (events.rank[j] >> shift)
        return later & np.where(down[:j], down_down, down[j] | up_up)

    return follows


def _double_tree_order(recursion: Recursion, events: Events) -> Callable[[int], Array]:
    trees = double_trees(recursion.ranks)
    depth = np.stack([_depths(parents) for parents in trees])
    # above[tree, d, rank]: the rank at depth d on the way from the root to this rank.
    above = np.stack([_ancestors(parents, depth[number]) for number, parents in enumerate(trees)])
    own_depth = depth[events.part, events.rank]

    def follows(j: int) -> Array:
        part, i_rank, j_rank = (
            events.part[:j],
            events.rank[:j],
            np.broadcast_to(events.rank[j], (j, len(events.rank[j]))),
        )
        same_tree = part == events.part[j]
        in_order = events.piece[:j] <= events.piece[j]
        j_depth = np.broadcast_to(own_depth[j], i_rank.shape)
        j_above_i = above[part, j_depth, i_rank] == j_rank
        i_above_j = above[part, own_depth[:j], j_rank] == i_rank
        i_down, j_down = events.step[:j] == 1, events.step[j] == 1
        along = np.where(i_down, j_down & i_above_j & in_order, j_down | (j_above_i & in_order))
        return same_tree & along

    return follows


def _steps_passed(recursion: Recursion) -> Array:
    """Returns how many steps along each dimension were done when each step is done."""
    moved: Array = np.zeros((len(recursion.shape), recursion.steps), dtype=np.int32)
    first = 0
    for phase in recursion.phases:
        moved[phase.dimension, first : first + phase.steps] = 1
        first += phase.steps
    return np.cumsum(moved, axis=1, dtype=np.int32)


def _depths(parents: Sequence[int]) -> Array:
    parent = np.asarray(parents)
    depth: Array = np.zeros(len(parent), dtype=np.int64)
    above = parent.copy()
    while (above >= 0).any():
        depth += above >= 0
        above = np.where(above >= 0, parent[above], -1)
    return depth


def _ancestors(parents: Sequence[int], depth: Array) -> Array:
    parent = np.asarray(parents)
    height = int(depth.max())
    table: Array = np.full((height + 1, len(parent)), -1, dtype=np.int64)
    current: Optional[Array] = np.arange(len(parent))
    while current is not None:
        at_depth = np.where(current >= 0, depth[current], 0)
        valid = current >= 0
        table[at_depth[valid], np.flatnonzero(valid)] = current[valid]
        current = np.where(valid, parent[current], -1)
        if not (current >= 0).any():
            current = None
    return table
