"""Trials of an all-reduce on any number of ranks: the fast mode. Pure, numpy.

- Jitter of all steps makes the whole longer by a factor that settles quickly with the number of ranks. It is measured,
  for the same algorithm and the same noise, by the exact recursion on fewer ranks.
- What is rare (lost packets, the far tail of heavy-tailed jitter) is drawn as events; the heaviest chain counts.
- The last of many ranks to start is one draw from the distribution of the largest.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, List, Tuple

import numpy as np

from tf_ipu_dp.collectives import event_chains, exact, formulas, noise
from tf_ipu_dp.collectives.disturbances import NO_JITTER, NO_LATENESS, NO_LOSS, Disturbances
from tf_ipu_dp.collectives.exact import Recursion, TimedPhase, Trials
from tf_ipu_dp.collectives.loss import Loss

Array = Any  # numpy has no types that hold for both releases
Generator = Any

_MAX_DRAWS = 6_000_000  # of the exact recursion
_MAX_DRAWS_IF_MIXED = 20_000_000  # jitter with large or rare delays: all in one recursion, where that is possible
_MAX_STEPS = 600_000_000  # of the exact recursion, over all ranks and trials, if there is no jitter to draw for them
_ENOUGH_TRIALS = 1_000  # from which the recursion's own distribution is used as it is
_MIN_TRIALS = 48
_RING_RANKS = (64, 128)  # the factor of a ring has nearly settled
_TREE_RANKS = (256, 1024)
_LARGE_RING = 128
_MAX_PAIRS = 40_000_000  # of events that are compared
_MAX_EVENTS = 600
_FEW_EVENTS = 100.0
_DENSE_EVENTS = 0.03  # per message
_TAIL_EVENTS = 2.0  # per trial, beyond the ceiling of heavy-tailed jitter


def simulate(recursion: Recursion, disturbances: Disturbances, trials: int, rng: Generator) -> Trials:
    """Returns trials of an all-reduce under noise."""
    has_delays = not (disturbances.loss.is_none and disturbances.start.is_none)
    is_mixed = disturbances.jitter.is_heavy_tailed or (has_delays and not disturbances.jitter.is_none)
    affordable = (_MAX_DRAWS_IF_MIXED if is_mixed else _MAX_DRAWS) // max(1, recursion.draws)
    if affordable >= min(trials, _ENOUGH_TRIALS if is_mixed else 4 * _ENOUGH_TRIALS):
        return _resample(exact.simulate(recursion, disturbances, min(trials, affordable), rng), trials, rng)
    losses = _Losses(recursion, disturbances.loss)
    sparse = losses.expected <= _MAX_EVENTS or (_is_large_ring(recursion) and losses.densest < _DENSE_EVENTS)
    dense = dataclasses.replace(
        disturbances,
        loss=NO_LOSS if sparse else disturbances.loss,
        start=NO_LATENESS,
        trial_jitter=NO_JITTER,
    )
    seconds = _sample_disturbed(recursion, dense, trials, rng)
    seconds = seconds + disturbances.start.latest(rng, recursion.ranks, trials)
    timeouts = rng.poisson(losses.expected_timeouts, trials)
    if sparse and losses.expected:
        delays, timeouts = _sample_losses(recursion, disturbances, losses, trials, rng)
        seconds = seconds + delays
    return Trials(seconds * disturbances.trial_jitter.sample(rng, trials), timeouts)


def _sample_losses(
    recursion: Recursion, disturbances: Disturbances, losses: _Losses, trials: int, rng: Generator
) -> Tuple[Array, Array]:
    """Returns the delay by lost packets and the number of timeouts in each trial."""
    alone = dataclasses.replace(disturbances, jitter=NO_JITTER, start=NO_LATENESS, trial_jitter=NO_JITTER)
    affordable = min(_MAX_STEPS // recursion.draws, trials)
    is_slowed = bool(disturbances.slow_ranks or disturbances.slow_links)
    if _is_grid(recursion) and affordable >= _ENOUGH_TRIALS and (losses.expected > _FEW_EVENTS or is_slowed):
        found = exact.simulate(recursion, alone, affordable, rng)
        found = dataclasses.replace(found, seconds=found.seconds - _without_losses(recursion, alone, rng))
        found = _resample(found, trials, rng)
        return found.seconds, found.timeouts
    return losses.sample(trials, rng)


def _without_losses(recursion: Recursion, disturbances: Disturbances, rng: Generator) -> float:
    if not (disturbances.slow_ranks or disturbances.slow_links):
        return recursion.undisturbed_s
    found = exact.simulate(recursion, dataclasses.replace(disturbances, loss=NO_LOSS), 8, rng)
    return float(found.seconds.mean())


def _sample_disturbed(recursion: Recursion, dense: Disturbances, trials: int, rng: Generator) -> Array:
    """Returns the seconds of trials without what is sparse."""
    if dense.are_none:
        return np.full(trials, recursion.undisturbed_s)
    smaller = _smaller(recursion)
    tail = _TAIL_EVENTS / recursion.draws
    jitter = dense.jitter
    if jitter.is_heavy_tailed:
        dense = dataclasses.replace(
            dense, jitter=dataclasses.replace(jitter, ceiling=float(jitter.upper_quantile(tail)))
        )
    seconds = recursion.undisturbed_s * _sample_factor(recursion, smaller, dense, trials, rng)
    if not jitter.is_heavy_tailed:
        return seconds
    steps = np.array([phase.cost.total_s * phase.scale for phase in recursion.phases])

    def weights(phase: Array) -> Array:
        factors = jitter.upper_quantile(tail * (1 - rng.random(phase.shape)))
        return np.maximum(factors - dense.jitter.ceiling, 1e-12) * steps[phase]

    events = event_chains.draw(recursion, [tail] * len(recursion.phases), weights, trials, rng)
    return seconds + event_chains.heaviest(recursion, events)


def _sample_factor(
    recursion: Recursion, smaller: List[Recursion], dense: Disturbances, trials: int, rng: Generator
) -> Array:
    """Returns how many times its undisturbed time the collective takes, from the same on fewer ranks."""
    samples = []
    for each in smaller:
        count = min(max(_MIN_TRIALS, _MAX_DRAWS // 2 // each.draws), max(trials, _MIN_TRIALS), 4 * _ENOUGH_TRIALS)
        samples.append(exact.simulate(each, dense, count, rng).seconds / each.undisturbed_s)
    largest = samples[-1]
    mean, deviation = float(largest.mean()), float(largest.std())
    is_front = _is_grid(recursion) and set(recursion.shape) != {2}
    if len(samples) > 1:
        # The mean of a growing front settles with steps^(-2/3); the largest of n draws grows with sqrt(log n).
        low, high, wanted = (
            each.steps ** (-2 / 3) if is_front else math.sqrt(math.log2(each.ranks)) for each in (*smaller, recursion)
        )
        mean += (mean - float(samples[0].mean())) * (wanted - high) / (high - low)
    if is_front:
        deviation *= (smaller[-1].steps / recursion.steps) ** (2 / 3)
    return _skewed(rng, mean, deviation, _skewness(largest), trials)


def _smaller(recursion: Recursion) -> List[Recursion]:
    """Returns the recursion on fewer ranks; of patterns whose number of steps grows with log n, on two sizes."""
    if recursion.draws * _MIN_TRIALS <= _MAX_DRAWS // 2:
        return [recursion]
    if recursion.algorithm in formulas.TREES:
        return [_smaller_tree(recursion, ranks) for ranks in _TREE_RANKS]
    if set(recursion.shape) == {2}:
        return [_smaller_exchange(recursion, ranks.bit_length() - 1) for ranks in _TREE_RANKS]
    if len(recursion.shape) == 1:
        return [_smaller_grid(recursion, ranks) for ranks in _RING_RANKS]
    return [_smaller_grid(recursion, 16)]


def _smaller_grid(recursion: Recursion, limit: int) -> Recursion:
    """Returns rings of fewer ranks whose phases have the same share of the time."""
    shape = tuple(min(count, limit) for count in recursion.shape)
    phases = []
    for phase in recursion.phases:
        steps = max(1, round(phase.steps * (shape[phase.dimension] - 1) / (recursion.shape[phase.dimension] - 1)))
        phases.append(dataclasses.replace(phase, steps=steps, scale=phase.scale * phase.steps / steps))
    if len(shape) == 1:  # all phases shrink alike
        phases = [dataclasses.replace(phase, scale=old.scale) for phase, old in zip(phases, recursion.phases)]
    return dataclasses.replace(recursion, ranks=math.prod(shape), shape=shape, phases=tuple(phases))


def _smaller_exchange(recursion: Recursion, bits: int) -> Recursion:
    """Returns the exchange without the ranks beyond a power of two and without its smallest messages."""
    kept = tuple(phase for phase in recursion.phases if 0 <= phase.dimension < bits)
    return dataclasses.replace(recursion, ranks=2**bits, shape=(2,) * bits, phases=kept, folded=0)


def _smaller_tree(recursion: Recursion, ranks: int) -> Recursion:
    depth = (ranks - 1).bit_length()
    if recursion.algorithm == formulas.BINOMIAL_TREE:
        phases = tuple(phase for phase in recursion.phases if phase.dimension < depth)
    else:
        phases = tuple(dataclasses.replace(phase, steps=depth - 1 + recursion.pieces) for phase in recursion.phases)
    return dataclasses.replace(recursion, ranks=ranks, shape=(ranks,), phases=phases)


def _is_grid(recursion: Recursion) -> bool:
    return recursion.algorithm not in formulas.TREES


def _is_large_ring(recursion: Recursion) -> bool:
    return _is_grid(recursion) and max(recursion.shape) >= _LARGE_RING


class _Losses:
    """The events of lost packets: timeouts, probes and recoveries."""

    def __init__(self, recursion: Recursion, loss: Loss) -> None:
        self._recursion = recursion
        self._loss = loss
        # One row per phase: timeouts, probes and recoveries per message.
        self._rates = np.array([_message_rates(loss, phase) for phase in recursion.phases]).reshape(-1, 3)
        messages = np.array([event_chains.messages_of(recursion, phase) for phase in recursion.phases])
        self.expected_timeouts = float((self._rates[:, 0] * messages).sum())
        self.expected = float((self._rates.sum(axis=1) * messages).sum())
        self.densest = float(self._rates.sum(axis=1).max()) if len(messages) else 0.0

    def sample(self, trials: int, rng: Generator) -> Tuple[Array, Array]:
        """Returns the delay by lost packets and the number of timeouts in each trial."""
        timeouts = rng.poisson(self.expected_timeouts, trials)
        if self.expected > _MAX_EVENTS:
            return self._sample_many(trials, rng), timeouts
        counts = rng.poisson(self.expected, trials)
        # Whether one rank is above another in a tree takes longer to look up.
        pairs = _MAX_PAIRS // (6 if self._recursion.algorithm == formulas.DOUBLE_TREE else 1)
        affordable = int(pairs // max(1.0, self.expected**2 / 2))
        if affordable < trials:
            return np.quantile(self._heaviest(counts[:affordable], rng)[0], noise.even_uniform(rng, trials)), timeouts
        return self._heaviest(counts, rng)

    def _heaviest(self, counts: Array, rng: Generator) -> Tuple[Array, Array]:
        """Returns the delay by so many events in each trial, and how many of them were timeouts."""
        loss = self._loss
        shares = np.cumsum(self._rates, axis=1) / np.maximum(self._rates.sum(axis=1, keepdims=True), 1e-300)

        def weights(phase: Array) -> Array:
            kind = rng.random(phase.shape)
            delays = loss.sample_timeout_delay(rng, phase.shape)
            small = np.where(kind < shares[phase, 1], loss.probe_s, loss.stream_recovery_s)
            return np.where(kind < shares[phase, 0], delays, small)

        delays, timeouts = [], []
        block = max(1, int(2_000_000 // max(1.0, self.expected)))
        for first in range(0, len(counts), block):
            some = counts[first : first + block]
            events = event_chains.draw_counted(self._recursion, self._rates.sum(axis=1), weights, some, rng)
            delays.append(event_chains.heaviest(self._recursion, events))
            timeouts.append((events.weight >= loss.timeout_s).sum(axis=0))
        return np.concatenate(delays), np.concatenate(timeouts)

    def _sample_many(self, trials: int, rng: Generator) -> Array:
        """Returns the delays by more events than can be compared, from those of fewer.

        The longest chain of E random points grows as a E^(1/2) + b E^(1/6), and its fluctuations as E^(1/6).
        """
        few, many, repeats = _MAX_EVENTS // 4, _MAX_EVENTS, 100
        small, large = (self._heaviest(np.full(repeats, count), rng)[0] for count in (few, many))
        matrix = np.array([[count**0.5, count ** (1 / 6)] for count in (few, many)])
        a, b = np.linalg.solve(matrix, [small.mean(), large.mean()])
        mean = a * self.expected**0.5 + b * self.expected ** (1 / 6)
        deviation = float(large.std()) * (self.expected / many) ** (1 / 6)
        return _skewed(rng, float(mean), deviation, _skewness(large), trials)


def _message_rates(loss: Loss, phase: TimedPhase) -> Tuple[float, float, float]:
    probes, recoveries = loss.small_rates(phase.message_bytes, phase.messages, phase.lossy_share)
    return loss.timeout_probability(phase.message_bytes, phase.messages, phase.lossy_share), probes, recoveries


def _resample(found: Trials, trials: int, rng: Generator) -> Trials:
    """Returns more trials with the distribution of those that were calculated, if these are too few."""
    if len(found.seconds) >= trials:
        return found
    order = np.argsort(found.seconds, kind="stable")
    place = noise.even_uniform(rng, trials) * (len(order) - 1)
    low = np.minimum(np.floor(place).astype(np.int64), len(order) - 2)
    seconds = found.seconds[order]
    between = seconds[low] + (place - low) * (seconds[low + 1] - seconds[low])
    return Trials(between, found.timeouts[order][low])


def _skewness(values: Array) -> float:
    deviation = float(values.std())
    return float(((values - values.mean()) ** 3).mean()) / deviation**3 if deviation > 0 else 0.0


def _skewed(rng: Generator, mean: float, deviation: float, skewness: float, trials: int) -> Array:
    """Returns draws with three given moments: from a shifted gamma distribution, or a normal one without skewness."""
    if deviation == 0:
        return np.full(trials, mean)
    if skewness < 0.1:
        return rng.normal(mean, deviation, trials)
    shape = 4 / min(skewness, 2.0) ** 2
    return mean + deviation * (rng.gamma(shape, 1.0, trials) - shape) / math.sqrt(shape)
