"""All-reduces as data: who sends which part of the buffer to whom, step by step. Pure, numpy.

`execute` runs a schedule on real arrays, which shows that the algorithms of formulas.py do what they should.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Dict, List, Sequence, Tuple

from tf_ipu_dp.collectives import formulas
from tf_ipu_dp.collectives.exact import double_trees

Array = Any  # numpy has no types that hold for both releases


@dataclasses.dataclass(frozen=True)
class Message:
    """The part [first, last) of the buffer, added to the receiver's or put in its place."""

    sender: int
    receiver: int
    first: int
    last: int
    adds: bool


Step = Tuple[Message, ...]


def make_schedule(plan: formulas.Plan, elements: int) -> List[Step]:
    """Returns the steps of a plan for a buffer of so many elements; the messages of a step are sent at once."""
    if plan.ranks == 1:
        return []
    if plan.algorithm == formulas.BINOMIAL_TREE:
        return _binomial_tree(plan.ranks, elements)
    if plan.algorithm == formulas.DOUBLE_TREE:
        return _double_tree(plan.ranks, elements)
    if plan.algorithm in (formulas.RECURSIVE_DOUBLING, formulas.HALVING_DOUBLING):
        return _exchange(plan, elements)
    if plan.directions == 2:
        middle = elements // 2
        right = _grid(plan.shape, 0, middle)
        left = _grid(plan.shape, middle, elements, reverse=True)
        return [a + b for a, b in zip(right, left)]
    return _grid(plan.shape, 0, elements)


def execute(schedule: Sequence[Step], buffers: Sequence[Array]) -> None:
    """Runs a schedule on one array per rank, in place."""
    for step in schedule:
        sent = [buffers[each.sender][each.first : each.last].copy() for each in step]
        for each, data in zip(step, sent):
            part = buffers[each.receiver][each.first : each.last]
            part[:] = part + data if each.adds else data


def _grid(shape: Sequence[int], first: int, last: int, *, reverse: bool = False) -> List[Step]:
    """Reduce-scatter along each dimension, then all-gather along each in reverse."""
    ranks = math.prod(shape)
    owned: Dict[int, Tuple[int, int]] = dict.fromkeys(range(ranks), (first, last))
    inside = 1
    scatters: List[List[Step]] = []
    gathers: List[List[Step]] = []
    for count in shape:
        place = [rank // inside % count for rank in range(ranks)]
        parts = {rank: _cut(*owned[rank], count) for rank in range(ranks)}
        rings = _Ring(inside, count, place, reverse)
        if count > 1:
            scatters.append([rings.step(parts, step, adds=True) for step in range(count - 1)])
            gathers.append([rings.step(parts, step, adds=False) for step in range(count - 1)])
        owned = {rank: parts[rank][rings.owned(rank)] for rank in range(ranks)}
        inside *= count
    return [step for phase in scatters + gathers[::-1] for step in phase]


@dataclasses.dataclass(frozen=True)
class _Ring:
    """The rings along one dimension of a grid."""

    stride: int
    count: int
    place: Sequence[int]
    reverse: bool

    def step(self, parts: Dict[int, List[Tuple[int, int]]], step: int, *, adds: bool) -> Step:
        way = -1 if self.reverse else 1
        messages = []
        for rank, place in enumerate(self.place):
            following = (place + way) % self.count
            receiver = rank + (following - place) * self.stride
            # A rank ends the reduce-scatter with the part behind its own number, and sends that first afterwards.
            part = (place - way * step + (0 if adds else way)) % self.count
            messages.append(Message(rank, receiver, *parts[rank][part], adds))
        return tuple(messages)

    def owned(self, rank: int) -> int:
        return (self.place[rank] + (-1 if self.reverse else 1)) % self.count


def _exchange(plan: formulas.Plan, elements: int) -> List[Step]:
    inside = 2 ** len(plan.shape)
    pairs = [(rank, rank + inside) for rank in range(plan.folded)]
    into = [tuple(Message(outer, inner, 0, elements, True) for inner, outer in pairs)] if pairs else []
    back = [tuple(Message(inner, outer, 0, elements, False) for inner, outer in pairs)] if pairs else []
    steps: List[Step] = []
    if plan.algorithm == formulas.RECURSIVE_DOUBLING:
        for bit in range(len(plan.shape)):
            steps.append(tuple(Message(rank, rank ^ 2**bit, 0, elements, True) for rank in range(inside)))
        return [*into, *steps, *back]
    owned = dict.fromkeys(range(inside), (0, elements))
    doubling: List[Step] = []
    for bit in range(len(plan.shape)):
        halves = {rank: _cut(*owned[rank], 2) for rank in range(inside)}
        steps.append(
            tuple(Message(rank, rank ^ 2**bit, *halves[rank][1 - (rank >> bit & 1)], True) for rank in range(inside))
        )
        owned = {rank: halves[rank][rank >> bit & 1] for rank in range(inside)}
        doubling.append(tuple(Message(rank, rank ^ 2**bit, *owned[rank], False) for rank in range(inside)))
    return [*into, *steps, *reversed(doubling), *back]


def _binomial_tree(ranks: int, elements: int) -> List[Step]:
    distances = [2**bit for bit in range((ranks - 1).bit_length())]
    pairs = [[(rank, rank + each) for rank in range(0, ranks - each, 2 * each)] for each in distances]
    up = [tuple(Message(child, parent, 0, elements, True) for parent, child in each) for each in pairs]
    down = [tuple(Message(parent, child, 0, elements, False) for parent, child in each) for each in reversed(pairs)]
    return up + down


def _double_tree(ranks: int, elements: int) -> List[Step]:
    middle = elements // 2
    trees = [
        _tree(parents, first, last)
        for parents, (first, last) in zip(double_trees(ranks), ((0, middle), (middle, elements)))
    ]
    return [a + b for a, b in zip(*trees)]


def _tree(parents: Sequence[int], first: int, last: int) -> List[Step]:
    height = (len(parents) - 1).bit_length()
    depth = [0] * len(parents)
    for rank in range(len(parents)):
        above = parents[rank]
        while above >= 0:
            depth[rank] += 1
            above = parents[above]
    levels = [[rank for rank in range(len(parents)) if depth[rank] == each] for each in range(height, 0, -1)]
    up = [tuple(Message(rank, parents[rank], first, last, True) for rank in level) for level in levels]
    down = [tuple(Message(parents[rank], rank, first, last, False) for rank in level) for level in reversed(levels)]
    return up + down


def _cut(first: int, last: int, count: int) -> List[Tuple[int, int]]:
    """Returns parts that differ by at most one element."""
    ends = [first + (last - first) * part // count for part in range(count + 1)]
    return list(zip(ends[:-1], ends[1:]))
