"""Trials of an all-reduce, step by step and rank by rank: the exact mode. Pure, numpy.

A rank begins a step when it and the rank that sends to it have finished the step before:
t[r, s + 1] = max(t[r, s], t[sender, s]) + cost[r, s]. Trials are calculated in chunks, so that memory is bounded.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Iterator, List, Optional, Sequence, Tuple

import numpy as np

from tf_ipu_dp.collectives import formulas
from tf_ipu_dp.collectives.disturbances import Disturbances
from tf_ipu_dp.collectives.topology import StepCost

Array = Any  # numpy has no types that hold for both releases
Generator = Any
_Step = Tuple[Array, Optional[Tuple[Array, Array]]]

_MAX_CHUNK = 1 << 17  # elements of one array, which then stays in the cache
# Ranks of which the time of each is kept.
_MAX_RANKS_KEPT = 64
# Delays per message from which they are drawn for each message.
_DENSE_LOSS = 0.2


@dataclasses.dataclass(frozen=True)
class TimedPhase:
    """A phase with the time of its steps."""

    dimension: int
    steps: int
    cost: StepCost
    message_bytes: float
    messages: int
    lossy_share: float  # of the messages go over the links that lose packets
    link_bytes_per_s: float
    scale: float = 1.0  # of the time of each step, delays included


@dataclasses.dataclass(frozen=True)
class Recursion:
    """What the exact mode goes through: a plan, with times instead of links."""

    algorithm: str
    ranks: int
    shape: Tuple[int, ...]
    phases: Tuple[TimedPhase, ...]
    directions: int
    folded: int
    pieces: int
    base_s: float

    @property
    def draws(self) -> int:
        """Step times per trial."""
        if self.algorithm == formulas.BINOMIAL_TREE:
            return 2 * (self.ranks - 1)
        if self.algorithm == formulas.DOUBLE_TREE:
            return 4 * self.ranks * self.pieces
        return self.directions * self.ranks * self.steps

    @property
    def steps(self) -> int:
        """Steps one after the other."""
        return sum(phase.steps for phase in self.phases)

    @property
    def undisturbed_s(self) -> float:
        """The time without noise."""
        return self.base_s + math.fsum(phase.steps * phase.cost.total_s * phase.scale for phase in self.phases)


@dataclasses.dataclass(frozen=True, eq=False)
class Trials:
    """Seconds and timeouts of each trial, and the seconds of each rank where they are kept."""

    seconds: Array
    timeouts: Array
    rank_seconds: Optional[Array] = None


def make_recursion(plan: formulas.Plan) -> Recursion:
    """Returns the recursion of a plan."""
    last = len(plan.topology.levels) - 1
    phases = []
    for phase, cost in zip(plan.phases, plan.step_costs):
        lossy = math.fsum(edge.share for edge in phase.edges if edge.level == last)
        rate = phase.message_bytes / cost.bandwidth_s if cost.bandwidth_s else math.inf
        phases.append(TimedPhase(phase.dimension, phase.steps, cost, phase.message_bytes, phase.messages, lossy, rate))
    base = plan.topology.engine.base_s if plan.ranks > 1 else 0.0
    return Recursion(
        plan.algorithm, plan.ranks, plan.shape, tuple(phases), plan.directions, plan.folded, plan.pieces, base
    )


def simulate(recursion: Recursion, disturbances: Disturbances, trials: int, rng: Generator) -> Trials:
    """Returns trials of an all-reduce under noise."""
    chunk = max(1, min(trials, _MAX_CHUNK // max(1, recursion.ranks * recursion.pieces)))
    parts: List[Tuple[Array, Array]] = []
    keep = recursion.ranks <= _MAX_RANKS_KEPT
    seconds = []
    for first in range(0, trials, chunk):
        noise = _Noise(recursion, disturbances, min(chunk, trials - first), rng)
        ends, timeouts = _simulate_chunk(recursion, noise)
        seconds.append(ends.max(axis=1))
        parts.append((ends if keep else ends[:, :0], timeouts))
    kept = np.concatenate([ends for ends, _ in parts])
    return Trials(np.concatenate(seconds), np.concatenate([count for _, count in parts]), kept if keep else None)


class _Noise:
    """Draws the times of steps for one chunk of trials."""

    def __init__(self, recursion: Recursion, disturbances: Disturbances, trials: int, rng: Generator) -> None:
        self._disturbances = disturbances
        self._rng = rng
        self.trials = trials
        self.timeouts: Array = np.zeros(trials, dtype=np.int64)
        self._slowness = self._choose(recursion.ranks, disturbances.slow_ranks, disturbances.slow_factor)
        self._slow_links = self._choose(recursion.ranks, disturbances.slow_links, 1.0, chosen=True)
        self.trial_factor = disturbances.trial_jitter.sample(rng, trials)

    def starts(self, ranks: int) -> Array:
        return self._disturbances.start.sample(self._rng, (self.trials, ranks))

    def steps(self, phase: TimedPhase, receivers: Array, senders: Array) -> Iterator[_Step]:
        """Yields the times of the receivers in each step of a phase; rare delays apart, so that most cost nothing."""
        rates = self._loss_rates(phase)
        if sum(rates) > _DENSE_LOSS:
            for _ in range(phase.steps):
                yield self.step(phase, receivers, senders), None
            return
        undisturbed = self._undisturbed(phase, receivers, senders) * phase.scale
        shape = (self.trials, len(receivers))
        block = max(1, int(_MAX_CHUNK // max(1.0, sum(rates) * shape[0] * shape[1])))
        for first in range(0, phase.steps, block):
            for events in self._draw_events(phase, rates, shape, min(block, phase.steps - first)):
                times = undisturbed
                if not self._disturbances.jitter.is_none:
                    times = times * self._disturbances.jitter.sample(self._rng, shape)
                yield times, events

    def _loss_rates(self, phase: TimedPhase) -> Tuple[float, float, float]:
        loss = self._disturbances.loss
        timeouts = loss.timeout_probability(phase.message_bytes, phase.messages, phase.lossy_share)
        return (timeouts, *loss.small_rates(phase.message_bytes, phase.messages, phase.lossy_share))

    def _draw_events(
        self, phase: TimedPhase, rates: Tuple[float, float, float], shape: Tuple[int, int], steps: int
    ) -> Iterator[Optional[Tuple[Array, Array]]]:
        """Yields the rare delays of each step: their places, trial and rank as one number, and the delays."""
        if not sum(rates):
            yield from [None] * steps
            return
        loss, rng = self._disturbances.loss, self._rng
        cells = shape[0] * shape[1]
        counts = [int(rng.poisson(rate * cells * steps)) for rate in rates]
        delays = np.concatenate(
            [
                loss.sample_timeout_delay(rng, counts[0]),
                np.full(counts[1], loss.probe_s),
                np.full(counts[2], loss.stream_recovery_s if counts[2] else 0.0),
            ]
        )
        place = np.floor(rng.random(sum(counts)) * (float(cells) * steps)).astype(np.int64)
        step, cell = np.divmod(place, cells)
        self.timeouts += np.bincount(cell[: counts[0]] // shape[1], minlength=shape[0])
        order = np.argsort(step, kind="stable")
        cell, delays = cell[order], delays[order] * phase.scale
        ends = np.searchsorted(step[order], np.arange(steps + 1))
        for first, last in zip(ends[:-1], ends[1:]):
            yield (cell[first:last], delays[first:last]) if last > first else None

    def step(self, phase: TimedPhase, receivers: Array, senders: Array, pieces: int = 1) -> Array:
        """Returns the times of the steps of receivers: one row per trial, pieces last where there are several."""
        shape = (self.trials, len(receivers)) if pieces == 1 else (self.trials, len(receivers), pieces)
        times = self._undisturbed(phase, receivers, senders)
        if pieces > 1 and np.ndim(times):
            times = times[:, :, None]
        if not self._disturbances.jitter.is_none:
            times = times * self._disturbances.jitter.sample(self._rng, shape)
        times = self._add_losses(phase, times, shape)
        return np.broadcast_to(times * phase.scale, shape)

    def _undisturbed(self, phase: TimedPhase, receivers: Array, senders: Array) -> Array:
        times: Array = phase.cost.total_s
        if self._slow_links is not None and phase.cost.bandwidth_s:
            slow = phase.message_bytes / self._disturbances.slow_link_bytes_per_s
            extra = max(0.0, slow - phase.cost.bandwidth_s) if phase.lossy_share else 0.0
            times = times + extra * self._slow_links[:, senders]
        return times if self._slowness is None else times * self._slowness[:, receivers]

    def _add_losses(self, phase: TimedPhase, times: Array, shape: Tuple[int, ...]) -> Array:
        loss = self._disturbances.loss
        small = loss.sample_small_delays(self._rng, shape, phase.message_bytes, phase.messages, phase.lossy_share)
        if small is not None:
            times = times + small
        probability = loss.timeout_probability(phase.message_bytes, phase.messages, phase.lossy_share)
        if probability:
            hit = self._rng.random(shape) < probability
            delays = np.zeros(shape)
            delays[hit] = loss.sample_timeout_delay(self._rng, int(hit.sum()))
            self.timeouts += hit.reshape(self.trials, -1).sum(axis=1)
            times = times + delays
        return times

    def _choose(self, ranks: int, count: int, factor: float, *, chosen: bool = False) -> Optional[Array]:
        """Returns the factors of all ranks, or which were chosen, drawn anew for each trial; None if none is."""
        if not count or (factor == 1 and not chosen):
            return None
        order = np.argsort(self._rng.random((self.trials, ranks)), axis=1)
        return order < count if chosen else np.where(order < count, factor, 1.0)


def _simulate_chunk(recursion: Recursion, noise: _Noise) -> Tuple[Array, Array]:
    ends = run(recursion, noise, noise.starts(recursion.ranks))
    return (ends + recursion.base_s) * noise.trial_factor[:, None], noise.timeouts


def run(recursion: Recursion, noise: _Noise, starts: Array) -> Array:
    """Returns when each rank of each trial ends; `noise` draws the times of steps."""
    if recursion.algorithm == formulas.BINOMIAL_TREE:
        return _run_binomial_tree(recursion, noise, starts)
    if recursion.algorithm == formulas.DOUBLE_TREE:
        return _run_double_tree(recursion, noise, starts)
    return _run_grid(recursion, noise, starts)


def _run_grid(recursion: Recursion, noise: _Noise, starts: Array) -> Array:
    count = math.prod(recursion.shape)
    ranks = np.arange(count)
    grid = tuple(reversed(recursion.shape))
    results = []
    for direction in range(recursion.directions):
        way = 1 if direction == 0 else -1
        times, extra = starts[:, :count].copy(), starts[:, count:].copy()
        spare = np.empty_like(times)
        for number, phase in enumerate(recursion.phases):
            if phase.dimension < 0:
                times, extra = _fold(recursion, phase, noise, times, extra, back=number > 0)
                spare = np.empty_like(times)
                continue
            axis = len(grid) - phase.dimension
            senders = np.roll(ranks.reshape(grid), way, axis - 1).ravel()
            for step, events in noise.steps(phase, ranks, senders):
                _wait_for_neighbours(times.reshape(-1, *grid), axis, way, spare.reshape(-1, *grid))
                times, spare = spare, times
                times += step
                if events is not None:
                    np.add.at(times.reshape(-1), *events)
        results.append(np.concatenate([times, extra], axis=1))
    return np.maximum.reduce(results)


def _wait_for_neighbours(times: Array, axis: int, way: int, out: Array) -> None:
    """Writes the maximum of each rank's time and its neighbour's along an axis."""

    def part(first: Optional[int], last: Optional[int]) -> Tuple[Any, ...]:
        return (*[slice(None)] * axis, slice(first, last))

    upper, lower, first, last = part(1, None), part(None, -1), part(0, 1), part(-1, None)
    if way < 0:
        upper, lower, first, last = lower, upper, last, first
    np.maximum(times[upper], times[lower], out=out[upper])
    np.maximum(times[first], times[last], out=out[first])


def _fold(
    recursion: Recursion, phase: TimedPhase, noise: _Noise, times: Array, extra: Array, *, back: bool
) -> Tuple[Array, Array]:
    inner = np.arange(recursion.folded)
    outer = inner + math.prod(recursion.shape)
    pair = np.maximum(times[:, : recursion.folded], extra)
    pair = pair + (noise.step(phase, outer, inner) if back else noise.step(phase, inner, outer))
    if back:
        return times, pair
    return np.concatenate([pair, times[:, recursion.folded :]], axis=1), extra


def _run_binomial_tree(recursion: Recursion, noise: _Noise, starts: Array) -> Array:
    """Both ends of a message are busy until it has arrived."""
    times = starts.copy()
    half = len(recursion.phases) // 2
    for number, phase in enumerate(recursion.phases):
        distance = 2**phase.dimension
        parents = np.arange(0, recursion.ranks - distance, 2 * distance)
        children = parents + distance
        receivers, senders = (parents, children) if number < half else (children, parents)
        done = np.maximum(times[:, parents], times[:, children]) + noise.step(phase, receivers, senders)
        times[:, parents] = done
        times[:, children] = done
    return times


def _run_double_tree(recursion: Recursion, noise: _Noise, starts: Array) -> Array:
    up, down = recursion.phases
    ends = [_run_tree(parents, recursion.pieces, up, down, noise, starts) for parents in double_trees(recursion.ranks)]
    return np.maximum(*ends)


def _run_tree(
    parents: Sequence[int], pieces: int, up: TimedPhase, down: TimedPhase, noise: _Noise, starts: Array
) -> Array:
    """Reduces piece after piece to the root, then broadcasts piece after piece."""
    parent = np.asarray(parents)
    levels = _by_depth(parent)
    times = np.repeat(starts[:, :, None], pieces, axis=2)
    for nodes in reversed(levels[1:]):
        above = np.unique(parent[nodes])
        ready = np.full((noise.trials, len(above), pieces), -np.inf)
        place = np.searchsorted(above, parent[nodes])
        for child, where in zip(nodes, place):
            np.maximum(ready[:, where], times[:, child], out=ready[:, where])
        ready = np.maximum(ready, times[:, above])
        times[:, above] = _one_after_the_other(ready, _with_pieces(noise.step(up, above, above, pieces), pieces))
    root = levels[0]
    times[:, root] = times[:, root, -1:]
    for nodes in levels[1:]:
        ready = np.maximum(times[:, parent[nodes]], times[:, nodes])
        steps = _with_pieces(noise.step(down, nodes, parent[nodes], pieces), pieces)
        times[:, nodes] = _one_after_the_other(ready, steps)
    return times[:, :, -1]


def _with_pieces(steps: Array, pieces: int) -> Array:
    return steps[:, :, None] if pieces == 1 else steps


def _one_after_the_other(ready: Array, steps: Array) -> Array:
    """Returns when pieces are done that are worked on in order: done[j] = max(done[j - 1], ready[j]) + steps[j]."""
    total = np.cumsum(steps, axis=2)
    return total + np.maximum.accumulate(ready - (total - steps), axis=2)


def double_trees(ranks: int) -> Tuple[List[int], List[int]]:
    """Returns the parents of two binary trees (-1: the root); the leaves of one are inner ranks of the other."""
    first = [_tree_parent(rank, ranks) for rank in range(ranks)]
    if ranks % 2 == 0:
        swap = [ranks - 1 - rank for rank in range(ranks)]
    else:
        swap = [(rank + 1) % ranks for rank in range(ranks)]
    second = [-1] * ranks
    for rank, parent in enumerate(first):
        second[swap[rank]] = swap[parent] if parent >= 0 else -1
    return first, second


def _tree_parent(rank: int, ranks: int) -> int:
    """Returns the parent in the tree in which odd ranks are leaves; rank 0 is the root."""
    if rank == 0:
        return -1
    bit = rank & -rank
    up = (rank ^ bit) | (bit << 1)
    return up if up < ranks else rank ^ bit


def _by_depth(parent: Array) -> List[Array]:
    """Returns the ranks of each depth, the root first."""
    depth: Array = np.zeros(len(parent), dtype=int)
    above = parent.copy()
    while (above >= 0).any():
        depth += above >= 0
        above = np.where(above >= 0, parent[above], -1)
    return [np.flatnonzero(depth == each) for each in range(depth.max() + 1)]
