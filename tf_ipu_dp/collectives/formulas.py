"""What an all-reduce costs, by algorithm: its phases, their time on a topology, lower bounds, automatic choice. Pure.

Ranks are laid out in a grid (`shape`). A phase is a number of steps along one dimension of it: in each step every rank
sends one message to the next rank of its ring. Recursive doubling and halving have dimensions of two ranks.
Trees have phases as well, but their ranks do not all take part in each step.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import numpy as np

from tf_ipu_dp import cli
from tf_ipu_dp.collectives.topology import Edge, StepCost, Topology

Array = Any  # numpy has no types that hold for both releases

RING, TWO_WAY_RING = "ring", "two_way_ring"
RECURSIVE_DOUBLING, HALVING_DOUBLING = "recursive_doubling", "halving_doubling"
BINOMIAL_TREE, DOUBLE_TREE = "binomial_tree", "double_tree"
HIERARCHICAL, TORUS = "hierarchical", "torus"
AUTO = "auto"
ALGORITHMS = (
    RING,
    TWO_WAY_RING,
    RECURSIVE_DOUBLING,
    HALVING_DOUBLING,
    BINOMIAL_TREE,
    DOUBLE_TREE,
    HIERARCHICAL,
    TORUS,
)
TREES = (BINOMIAL_TREE, DOUBLE_TREE)
_MAX_PIECES = 1 << 16


@dataclasses.dataclass(frozen=True)
class Phase:
    """Steps of one kind, one after the other."""

    dimension: int
    steps: int
    message_bytes: float
    reduces: bool
    edges: Tuple[Edge, ...]
    messages: int = 1  # that carry the chunk of one step


@dataclasses.dataclass(frozen=True)
class Plan:
    """How an algorithm all-reduces so many bytes on so many ranks of a topology."""

    algorithm: str
    ranks: int
    bytes: float
    topology: Topology
    shape: Tuple[int, ...]
    phases: Tuple[Phase, ...]
    directions: int = 1  # rings that run at the same time
    folded: int = 0  # ranks that hand their data to another rank first and get the result last
    pieces: int = 1  # of a pipelined tree

    @property
    def step_costs(self) -> Tuple[StepCost, ...]:
        """The time of one step of each phase."""
        return tuple(
            self.topology.step(each.edges, each.message_bytes, reduces=each.reduces, messages=each.messages)
            for each in self.phases
        )

    @property
    def steps(self) -> int:
        """Steps one after the other."""
        return sum(phase.steps for phase in self.phases)


@dataclasses.dataclass(frozen=True)
class Cost:
    """The time of a collective without noise, by cause."""

    latency_s: float
    bandwidth_s: float
    reduction_s: float

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.latency_s + self.bandwidth_s + self.reduction_s


def cost(plan: Plan) -> Cost:
    """Returns the time of an all-reduce without noise."""
    parts = list(zip(plan.phases, plan.step_costs))
    base = plan.topology.engine.base_s if plan.ranks > 1 else 0.0
    return Cost(
        base + math.fsum(phase.steps * each.latency_s for phase, each in parts),
        math.fsum(phase.steps * each.bandwidth_s for phase, each in parts),
        math.fsum(phase.steps * each.reduction_s for phase, each in parts),
    )


def all_reduce_seconds(algorithm: str, ranks: Array, sizes: Array, topology: Topology) -> Array:
    """Returns the times of all-reduces; ranks and sizes are numbers or arrays, which are broadcast."""

    def one(count: Any, size: Any) -> float:
        return cost(make_plan(algorithm, int(count), float(size), topology)).total_s

    found = np.vectorize(one, otypes=[float])(ranks, sizes)
    return found if found.ndim else float(found)


def lower_bound(ranks: int, size: float, latency_s: float, s_per_byte: float, reduction_s_per_byte: float) -> Cost:
    """Returns what no all-reduce over one port per rank can do better, by cause."""
    share = (ranks - 1) / ranks
    return Cost(_ceil_log2(ranks) * latency_s, 2 * share * size * s_per_byte, share * size * reduction_s_per_byte)


def make_plan(
    algorithm: str,
    ranks: int,
    size: float,
    topology: Topology,
    *,
    torus: Optional[Tuple[int, int]] = None,
    pieces: Optional[int] = None,
) -> Plan:
    """Returns how an algorithm goes about it; UsageError if it cannot be used on so many ranks."""
    if not size > 0:
        raise cli.UsageError(f"An all-reduce of {size:g} bytes is not possible. Use at least 1.")
    check_algorithm(algorithm)
    topology = topology.sized(ranks)
    if algorithm == AUTO:
        return choose(ranks, size, topology)
    if ranks == 1:
        return Plan(algorithm, 1, size, topology, (1,), ())
    if algorithm == TORUS:
        return _torus(ranks, size, topology, torus)
    if algorithm == DOUBLE_TREE:
        return _double_tree(ranks, size, topology, pieces)
    return _BUILDERS[algorithm](ranks, size, topology)


def check_algorithm(name: str) -> None:
    """Raises UsageError with the nearest name if there is no such algorithm."""
    known = (*ALGORITHMS, AUTO)
    if name in known:
        return
    near = difflib.get_close_matches(name.replace("-", "_"), known, n=1)
    advice = f"Did you mean {near[0]}?" if near else f"Use {cli.alternatives(known)}."
    raise cli.UsageError(f"{name} is not an algorithm. {advice}")


def choose(ranks: int, size: float, topology: Topology) -> Plan:
    """Returns the plan that takes the least time without noise."""
    plans = list(possible_plans(ranks, size, topology))
    return min(plans, key=lambda plan: cost(plan).total_s)


def possible_plans(ranks: int, size: float, topology: Topology) -> Iterator[Plan]:
    """Yields the plan of each algorithm that can be used on so many ranks."""
    for algorithm in ALGORITHMS:
        try:
            yield make_plan(algorithm, ranks, size, topology)
        except cli.UsageError:
            if algorithm not in (HIERARCHICAL, TORUS):
                raise


def other_collective_seconds(name: str, ranks: int, size: float, topology: Topology) -> float:
    """Returns the time of a ring reduce-scatter or all-gather of an array, a broadcast, or an all-to-all."""
    topology = topology.sized(ranks)
    if ranks == 1:
        return 0.0
    edges = topology.ring_edges()
    base = topology.engine.base_s
    chunk = size / ranks
    if name in ("reduce_scatter", "all_gather", "all_to_all"):
        # Each rank of an all-to-all sends to every other one, so that all ranks of a group leave it.
        used = topology.dimension_edges(len(topology.levels) - 1) if name == "all_to_all" else edges
        return base + (ranks - 1) * topology.step(used, chunk, reduces=name == "reduce_scatter").total_s
    if name in ("broadcast", "reduce"):
        steps = [
            topology.step(topology.exchange_edges(2**k, all_ranks=False), size, reduces=name == "reduce").total_s
            for k in range(_ceil_log2(ranks))
        ]
        return base + math.fsum(steps)
    raise cli.UsageError(
        f"{name} is not a collective. Use reduce_scatter, all_gather, all_to_all, broadcast or reduce."
    )


def _ring(ranks: int, size: float, topology: Topology) -> Plan:
    return Plan(RING, ranks, size, topology, (ranks,), _ring_phases(ranks, size, topology, 1.0))


def _two_way_ring(ranks: int, size: float, topology: Topology) -> Plan:
    # Where a rank has one port, both directions share it and nothing is gained.
    sharing = 2 / min(2, *(level.ports for level in topology.levels))
    phases = _ring_phases(ranks, size / 2, topology, sharing)
    return Plan(TWO_WAY_RING, ranks, size, topology, (ranks,), phases, directions=2)


def _ring_phases(ranks: int, size: float, topology: Topology, sharing: float) -> Tuple[Phase, ...]:
    edges = tuple(dataclasses.replace(edge, streams=edge.streams * sharing) for edge in topology.ring_edges())
    messages = topology.engine.messages_per_step(ranks, size)
    return tuple(Phase(0, ranks - 1, size / ranks, reduces, edges, messages) for reduces in (True, False))


def _recursive_doubling(ranks: int, size: float, topology: Topology) -> Plan:
    bits = ranks.bit_length() - 1
    phases = [Phase(bit, 1, size, True, topology.exchange_edges(2**bit, all_ranks=True)) for bit in range(bits)]
    return _folded(RECURSIVE_DOUBLING, ranks, size, topology, phases)


def _halving_doubling(ranks: int, size: float, topology: Topology) -> Plan:
    bits = ranks.bit_length() - 1
    halving = [
        Phase(bit, 1, size / 2 ** (bit + 1), True, topology.exchange_edges(2**bit, all_ranks=True))
        for bit in range(bits)
    ]
    doubling = [dataclasses.replace(phase, reduces=False) for phase in reversed(halving)]
    return _folded(HALVING_DOUBLING, ranks, size, topology, halving + doubling)


def _folded(algorithm: str, ranks: int, size: float, topology: Topology, phases: Sequence[Phase]) -> Plan:
    """Returns the plan of an exchange on the next lower power of two; the ranks beyond it hand over their data."""
    bits = ranks.bit_length() - 1
    folded = ranks - 2**bits
    if folded:
        edges = topology.exchange_edges(2**bits, all_ranks=True)
        phases = [Phase(-1, 1, size, True, edges), *phases, Phase(-1, 1, size, False, edges)]
    return Plan(algorithm, ranks, size, topology, (2,) * bits, tuple(phases), folded=folded)


def _binomial_tree(ranks: int, size: float, topology: Topology) -> Plan:
    up = [
        Phase(bit, 1, size, True, topology.exchange_edges(2**bit, all_ranks=False)) for bit in range(_ceil_log2(ranks))
    ]
    down = [dataclasses.replace(phase, reduces=False) for phase in reversed(up)]
    return Plan(BINOMIAL_TREE, ranks, size, topology, (ranks,), tuple(up + down))


def _double_tree(ranks: int, size: float, topology: Topology, pieces: Optional[int]) -> Plan:
    """Two binary trees with half of the data each; an inner rank of one is a leaf of the other.

    An inner rank gets a piece from each of two children, so that a step moves as much as a whole tree would.
    """
    depth = _ceil_log2(ranks)
    edges = topology.exchange_edges(ranks // 2, all_ranks=False)
    if pieces is None:
        whole = topology.step(edges, size, reduces=True)
        pieces = best_pieces(depth, whole.latency_s, whole.bandwidth_s + whole.reduction_s)
    phases = [Phase(0, depth - 1 + pieces, size / pieces, reduces, edges) for reduces in (True, False)]
    return Plan(DOUBLE_TREE, ranks, size, topology, (ranks,), tuple(phases), pieces=pieces)


def best_pieces(depth: int, latency_s: float, transfer_s: float) -> int:
    """Returns into how many pieces a pipelined tree should cut its data."""
    if depth <= 1:
        return 1
    if latency_s <= 0:
        return _MAX_PIECES if transfer_s > 0 else 1
    ideal = min(_MAX_PIECES, max(1.0, math.sqrt((depth - 1) * transfer_s / latency_s)))
    near = {math.floor(ideal), math.ceil(ideal)}
    return min(near, key=lambda k: (depth - 1 + k) * (latency_s + transfer_s / k))


def _hierarchical(ranks: int, size: float, topology: Topology) -> Plan:
    if math.prod(topology.shape) != ranks:
        inside = math.prod(topology.shape[:-1])
        below = ranks // inside * inside
        nearest = cli.alternatives(f"{each:,}" for each in (below, below + inside) if each)
        raise cli.UsageError(
            f"{ranks:,} replicas do not fill groups of {inside:,}, as hierarchical needs on {topology.name}. "
            f"Nearest: {nearest}."
        )
    edges = [topology.dimension_edges(level) for level in range(len(topology.levels))]
    return Plan(HIERARCHICAL, ranks, size, topology, topology.shape, _grid_phases(topology.shape, size, edges))


def _torus(ranks: int, size: float, topology: Topology, shape: Optional[Tuple[int, int]]) -> Plan:
    if shape is None:
        rows = max(each for each in range(1, math.isqrt(ranks) + 1) if ranks % each == 0)
        if rows == 1 and ranks > 3:
            raise cli.UsageError(f"{ranks:,} replicas are a prime number and make no 2-D torus. Use another number.")
        shape = (ranks // rows, rows)
    if math.prod(shape) != ranks:
        raise cli.UsageError(f"A torus of {shape[0]} x {shape[1]} has {math.prod(shape):,} ranks, not {ranks:,}.")
    edges = [topology.exchange_edges(distance, all_ranks=True) for distance in (1, shape[0])]
    inner = topology.ring_edges() if len(topology.levels) > 1 and shape[0] > topology.levels[0].size else edges[0]
    return Plan(TORUS, ranks, size, topology, shape, _grid_phases(shape, size, [inner, edges[1]]))


def _grid_phases(shape: Sequence[int], size: float, edges: Sequence[Tuple[Edge, ...]]) -> Tuple[Phase, ...]:
    """Returns a reduce-scatter along each dimension, then an all-gather along each in reverse."""
    down: List[Phase] = []
    shard = size
    for dimension, count in enumerate(shape):
        shard /= count
        if count > 1:
            down.append(Phase(dimension, count - 1, shard, True, edges[dimension]))
    return tuple(down + [dataclasses.replace(phase, reduces=False) for phase in reversed(down)])


def _ceil_log2(ranks: int) -> int:
    return (ranks - 1).bit_length()


_BUILDERS: Dict[str, Callable[[int, float, Topology], Plan]] = {
    RING: _ring,
    TWO_WAY_RING: _two_way_ring,
    RECURSIVE_DOUBLING: _recursive_doubling,
    HALVING_DOUBLING: _halving_doubling,
    BINOMIAL_TREE: _binomial_tree,
    HIERARCHICAL: _hierarchical,
}
