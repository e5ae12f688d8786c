"""A simulation as data: what is asked for, and the series of trials that come out. Pure, numpy.

Three modes: `closed` is the formula without noise, `exact` goes through all steps of all ranks, `fast` does not.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, List, Optional, Tuple

import numpy as np

from tf_ipu_dp import cli
from tf_ipu_dp.collectives import exact, fast, formulas, horovod_model, noise, overlap, results
from tf_ipu_dp.collectives.disturbances import Disturbances
from tf_ipu_dp.collectives.topology import Topology

Array = Any  # numpy has no types that hold for both releases

CLOSED, EXACT, FAST, AUTO = "closed", "exact", "fast", "auto"
MODES = (AUTO, CLOSED, EXACT, FAST)
MAX_TRIALS = 1_000_000
# Up to so many step times the exact mode takes about a second, and more than so many are refused.
_QUICK_DRAWS = 20_000_000
_MAX_DRAWS = 20_000_000_000


@dataclasses.dataclass(frozen=True)
class Compute:
    """The rest of a training step, which may hide collectives."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    optimizer_s: float = 0.0
    jitter: noise.Law = dataclasses.field(default_factory=noise.Law)  # of each replica

    @property
    def is_none(self) -> bool:
        """Whether only collectives are simulated."""
        return self.forward_s == self.backward_s == self.optimizer_s == 0


@dataclasses.dataclass(frozen=True)
class Simulation:
    """One number of ranks and one size, in one or more buckets.

    Buckets are equal, or those of `bucket_bytes`, in the order in which the backward pass makes them.
    """

    ranks: int
    bytes: int
    topology: Topology
    algorithm: str = formulas.AUTO
    disturbances: Disturbances = dataclasses.field(default_factory=Disturbances)
    mode: str = AUTO
    trials: int = 1000
    seed: int = 0
    buckets: int = 1
    torus: Optional[Tuple[int, int]] = None
    pieces: Optional[int] = None
    horovod: Optional[horovod_model.HorovodModel] = None
    compute: Compute = dataclasses.field(default_factory=Compute)
    bucket_bytes: Tuple[int, ...] = ()  # they add up to `bytes`

    @property
    def bucket_sizes(self) -> Tuple[float, ...]:
        """The bytes of each bucket."""
        return tuple(map(float, self.bucket_bytes)) or (self.bytes / self.buckets,) * self.buckets


@dataclasses.dataclass(frozen=True, eq=False)
class Outcome:
    """The trials, how they were calculated, and where the undisturbed time goes."""

    series: results.Series
    algorithm: str
    mode: str
    cost: formulas.Cost  # of all buckets
    step: Optional[overlap.Step] = None

    @property
    def noise_s(self) -> float:
        """How much the median is above the undisturbed time."""
        return float(np.median(self.series.seconds)) - self.cost.total_s


def simulate(asked: Simulation) -> Outcome:
    """Returns the trials of a simulation; the same seed gives the same trials."""
    asked.disturbances.check(asked.ranks)
    if asked.buckets > asked.bytes:
        raise cli.UsageError(f"{asked.bytes:,} bytes cannot be cut into {asked.buckets:,} buckets. Use fewer.")
    if asked.bucket_bytes and (sum(asked.bucket_bytes) != asked.bytes or min(asked.bucket_bytes) < 1):
        raise cli.UsageError(
            f"Buckets of {sum(asked.bucket_bytes):,} bytes in all are not the {asked.bytes:,} bytes to send."
        )
    sizes = asked.bucket_sizes
    plans = {size: _make_plan(asked, size) for size in sizes}
    largest = plans[max(sizes)]
    recursions = {size: exact.make_recursion(plan) for size, plan in plans.items()}
    mode = choose_mode(asked, sum(recursions[size].draws for size in sizes))
    rng = np.random.default_rng([asked.seed, asked.ranks, asked.bytes])
    found = [_trials(mode, recursions[size], asked, rng) for size in sizes]
    engine = np.sum([each.seconds for each in found], axis=0)
    timeouts = np.sum([each.timeouts for each in found], axis=0)
    costs = [dataclasses.astuple(formulas.cost(plans[size])) for size in sizes]
    whole = formulas.Cost(*(math.fsum(part) for part in zip(*costs)))
    seconds = engine
    if asked.horovod is not None and asked.ranks > 1:
        share = math.fsum(edge.share for edge in largest.topology.ring_edges()[-1:])
        added, more = _sample_horovod(asked.horovod, asked, len(engine), share, rng)
        seconds, timeouts = engine + added, timeouts + more
    single = len(sizes) == 1 and asked.horovod is None
    lossy = asked.disturbances.loss
    facts = results.SeriesFacts(
        asked.ranks,
        asked.bytes,
        _link_rate(largest),
        label=largest.algorithm,
        shortest_timeout_s=lossy.timeout_s,
    )
    series = results.Series(
        facts,
        seconds,
        rank_seconds=found[0].rank_seconds if single else None,
        engine_s=engine if asked.horovod is not None else None,
        timeouts=None if lossy.is_none else timeouts,
    )
    step = (
        None if asked.compute.is_none else _sample_step(asked, [each.seconds for each in found], seconds - engine, rng)
    )
    return Outcome(series, largest.algorithm, mode, whole, step)


def choose_mode(asked: Simulation, draws_per_trial: int) -> str:
    """Returns the mode to use; UsageError if the exact mode would take hours."""
    draws = draws_per_trial * asked.trials
    if asked.mode == EXACT and draws > _MAX_DRAWS:
        raise cli.UsageError(
            f"The exact mode would calculate {draws:,} steps for {asked.ranks:,} replicas and {asked.trials:,} trials. "
            f"Use --mode=fast, or fewer than {_MAX_DRAWS:,} steps."
        )
    if asked.mode != AUTO:
        return asked.mode
    if asked.disturbances.are_none or asked.ranks == 1:
        return CLOSED
    return EXACT if draws <= _QUICK_DRAWS else FAST


def _trials(mode: str, recursion: exact.Recursion, asked: Simulation, rng: Any) -> exact.Trials:
    if mode == CLOSED or asked.ranks == 1:
        # All trials are equal, unless something else is drawn for them.
        count = asked.trials if asked.horovod is not None or not asked.compute.is_none else 1
        return exact.Trials(np.full(count, recursion.undisturbed_s), np.zeros(count, dtype=np.int64))
    run = exact.simulate if mode == EXACT else fast.simulate
    return run(recursion, asked.disturbances, asked.trials, rng)


def _make_plan(asked: Simulation, size: float) -> formulas.Plan:
    return formulas.make_plan(
        asked.algorithm, asked.ranks, size, asked.topology, torus=asked.torus, pieces=asked.pieces
    )


def _sample_horovod(
    model: horovod_model.HorovodModel, asked: Simulation, count: int, lossy_share: float, rng: Any
) -> Tuple[Array, Array]:
    """Returns Horovod's own time of each trial, and the timeouts that its negotiation met."""
    negotiation = horovod_model.negotiation_seconds(model, asked.ranks, asked.topology)
    parts = horovod_model.add(model, asked.ranks, float(asked.bytes), asked.topology, 0.0)
    packets = round(lossy_share * horovod_model.single_packets(asked.ranks))
    timeouts, delays = asked.disturbances.loss.sample_negotiation(rng, count, packets)
    return horovod_model.sample_wait(model, negotiation, count, rng) + parts.overhead_s + delays, timeouts


def _sample_step(asked: Simulation, buckets: List[Array], overhead: Array, rng: Any) -> overlap.Step:
    compute = asked.compute
    trials = len(buckets[0])
    slowest = compute.jitter.slowest(rng, asked.ranks, trials)
    ready = slowest[:, None] * overlap.even_ready_times(compute.forward_s, compute.backward_s, asked.bucket_sizes)
    seconds = np.stack(buckets, axis=1)
    seconds[:, 0] += overhead
    return overlap.step_times(ready, seconds, slowest * (compute.forward_s + compute.backward_s), compute.optimizer_s)


def _link_rate(plan: formulas.Plan) -> Optional[float]:
    """Returns the bandwidth of the slowest link; None where a collective uses links of several kinds for its parts."""
    flat = plan.algorithm not in (formulas.HIERARCHICAL, formulas.TORUS) or len(plan.topology.levels) == 1
    rates = [level.bytes_per_s for level in plan.topology.levels if not level.pieces and level.bytes_per_s < 1e15]
    return min(rates) if flat and rates else None
