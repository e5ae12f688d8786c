"""The network that a collective runs on: levels of links, the engine's own costs, and presets. Pure.

Level 0 joins the ranks of the smallest groups (a host, a Pod); each further level joins groups of the level below.
Bandwidths are those of one direction.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from typing import Dict, Optional, Sequence, Tuple

import numpy as np

from tf_ipu_dp import cli
from tf_ipu_dp.collectives import quantities

BLOCK, ROUND_ROBIN = "block", "round-robin"
PLACEMENTS = (BLOCK, ROUND_ROBIN)
UNLIMITED = 2**40  # a level that takes any number of groups
GLOO_SEGMENTS = -1
GLOO_SEGMENT_BYTES = 1 << 20
DATASHEET = "The bandwidths are datasheet peaks and the latencies are assumptions: not validated."


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise cli.UsageError(sentence)


@dataclasses.dataclass(frozen=True)
class Piece:
    """Latency and bandwidth of messages up to a size."""

    up_to_bytes: float
    latency_s: float
    bytes_per_s: float


@dataclasses.dataclass(frozen=True)
class Level:
    """Links of one kind, and how many ranks or groups they join."""

    name: str
    size: int
    bytes_per_s: float
    latency_s: float
    shared_by: int = 1  # ranks of a group below that share one link
    ports: int = 1  # 2 where ranks are wired to their neighbours in a 2-D torus, each with a link of its own
    pieces: Tuple[Piece, ...] = ()  # by message size; they replace latency and bandwidth
    # Seconds that software adds to a message, by its bytes; linear between them. Not shared between streams.
    software: Tuple[Tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        _require(self.size >= 1, f"Level {self.name} joins {self.size} groups. It needs at least 1.")
        _require(self.bytes_per_s > 0, f"Level {self.name} has no bandwidth: it must be more than 0.")
        _require(self.latency_s >= 0, f"Level {self.name} has a latency of {self.latency_s} s. It cannot be negative.")
        _require(self.shared_by >= 1 and self.ports >= 1, f"Level {self.name} needs at least 1 rank and 1 port a link.")
        sizes = [piece.up_to_bytes for piece in self.pieces]
        _require(sizes == sorted(set(sizes)), f"The message sizes of level {self.name} do not ascend.")
        for piece in self.pieces:
            _require(
                piece.bytes_per_s > 0 and piece.latency_s >= 0,
                f"Level {self.name} has a latency below 0 or no bandwidth for messages up to {piece.up_to_bytes:g} B.",
            )

    def software_s(self, size: float) -> float:
        """Returns what software adds to a message."""
        if not self.software:
            return 0.0
        sizes, seconds = zip(*self.software)
        if size <= sizes[-1] or len(sizes) == 1:
            return float(np.interp(size, sizes, seconds))
        slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
        return float(seconds[-1] + max(0.0, slope) * (size - sizes[-1]))

    def message(self, size: float) -> Tuple[float, float]:
        """Returns the latency and the time per byte of a message."""
        for piece in self.pieces:
            if size <= piece.up_to_bytes:
                return piece.latency_s, 1 / piece.bytes_per_s
        last = self.pieces[-1] if self.pieces else Piece(math.inf, self.latency_s, self.bytes_per_s)
        return last.latency_s, 1 / last.bytes_per_s


@dataclasses.dataclass(frozen=True)
class Engine:
    """What the software adds to the links. The defaults are those of a textbook."""

    handshake: float = 1.0  # one-way delays per step: Gloo's ready notice makes it about 2.2
    overhead_s: float = 0.0  # per message
    base_s: float = 0.0  # per collective
    reduction_s_per_byte: float = 0.0
    wire_efficiency: float = 1.0  # payload over bytes on the wire
    # Ranks that share one core, where they do: the software of all of them then takes turns in every step.
    ranks_per_core: float = 0.0
    segments: int = 1  # messages per step; GLOO_SEGMENTS: as Gloo cuts its buffer

    def __post_init__(self) -> None:
        _require(self.handshake > 0, f"The handshake factor is {self.handshake:g}. It must be more than 0.")
        _require(0 < self.wire_efficiency <= 1.5, f"A wire efficiency of {self.wire_efficiency:g} is not possible.")
        _require(self.segments >= 1 or self.segments == GLOO_SEGMENTS, "A step has at least 1 segment.")
        smallest = min(self.overhead_s, self.base_s, self.reduction_s_per_byte)
        _require(smallest >= 0, "The engine's overhead, base latency and reduction time cannot be negative.")

    def messages_per_step(self, ranks: int, size: float) -> int:
        """Returns how many messages carry the chunk of one ring step."""
        if self.segments != GLOO_SEGMENTS:
            return self.segments
        return gloo_segments(math.ceil(size), ranks)[0] // ranks


@dataclasses.dataclass(frozen=True)
class Edge:
    """The links that a part of a step's messages use at the same time."""

    level: int
    streams: float  # messages that share one link
    share: float  # of the step's messages


@dataclasses.dataclass(frozen=True)
class Topology:
    """Levels from the inside out."""

    name: str
    levels: Tuple[Level, ...]
    engine: Engine = Engine()
    placement: str = BLOCK
    note: str = ""

    def __post_init__(self) -> None:
        _require(bool(self.levels), "A topology needs at least one level.")
        _require(self.placement in PLACEMENTS, f"The placement {self.placement} is not {cli.alternatives(PLACEMENTS)}.")

    @property
    def capacity(self) -> int:
        """How many ranks fit."""
        return min(math.prod(level.size for level in self.levels), UNLIMITED)

    def sized(self, ranks: int) -> Topology:
        """Returns the part of the topology that a job of so many ranks fills, inner levels first."""
        _require(ranks >= 1, f"A collective of {ranks} ranks is not possible. Use at least 1.")
        _require(
            ranks <= self.capacity,
            f"{ranks:,} replicas do not fit on {self.name}, which has {self.capacity:,}. "
            f"Use at most {self.capacity:,}, or a larger topology.",
        )
        levels = []
        groups = ranks
        for level in self.levels:
            size = min(level.size, groups)
            groups = -(-groups // size)
            levels.append(dataclasses.replace(level, size=size, shared_by=max(1, min(level.shared_by, ranks))))
            if groups == 1:
                break
        return dataclasses.replace(self, levels=tuple(levels))

    @property
    def shape(self) -> Tuple[int, ...]:
        """Ranks or groups that each level joins."""
        return tuple(level.size for level in self.levels)

    def dimension_edges(self, level: int) -> Tuple[Edge, ...]:
        """Returns the links of a step in which all ranks of all groups use one level."""
        return (Edge(level, float(self.levels[level].shared_by), 1.0),)

    def ring_edges(self) -> Tuple[Edge, ...]:
        """Returns the links of a ring over all ranks. In block placement one stream leaves each group."""
        if self.placement == ROUND_ROBIN:
            last = len(self.levels) - 1
            return (Edge(last, float(self.levels[last].shared_by), 1.0),)
        edges = []
        inside = 1
        for number, level in enumerate(self.levels):
            if level.size > 1 or len(self.levels) == 1:
                edges.append(Edge(number, 1.0, (1 - 1 / level.size if level.size > 1 else 1.0) / inside))
            inside *= level.size
        # The edge that closes the ring belongs to the outermost level.
        outer = edges[-1]
        return (*edges[:-1], dataclasses.replace(outer, share=1 - sum(each.share for each in edges[:-1])))

    def exchange_edges(self, distance: int, *, all_ranks: bool) -> Tuple[Edge, ...]:
        """Returns the links between ranks of a given distance; all ranks of a group leave it, or only one does."""
        number = self._level_of(distance)
        level = self.levels[number]
        streams = float(level.shared_by) if all_ranks else 1.0
        if all_ranks and level.ports > 1:
            # Without a switch, messages to ranks further away pass the links between.
            hops = distance // math.prod(self.shape[:number])
            side = max(2, math.isqrt(level.size))
            while hops >= side:
                hops //= side
            streams *= max(1, hops)
        return (Edge(number, streams, 1.0),)

    def _level_of(self, distance: int) -> int:
        last = len(self.levels) - 1
        if self.placement == ROUND_ROBIN:
            for number in range(last, 0, -1):
                if distance % self.levels[number].size:
                    return number
                distance //= self.levels[number].size
            return 0
        inside = 1
        for number, level in enumerate(self.levels):
            inside *= level.size
            if distance < inside:
                return number
        return last

    def step(self, edges: Sequence[Edge], size: float, *, reduces: bool, messages: int = 1) -> StepCost:
        """Returns the time of one step: the slowest of its links counts."""
        return max((self._edge_step(edge, size, reduces, messages) for edge in edges), key=lambda cost: cost.total_s)

    def _edge_step(self, edge: Edge, size: float, reduces: bool, messages: int) -> StepCost:
        delay, per_byte = self.levels[edge.level].message(size)
        engine = self.engine
        software = messages * engine.overhead_s + self.levels[edge.level].software_s(size)
        transfer = size * per_byte * edge.streams / engine.wire_efficiency
        # The notice that precedes a message travels while the message before it is sent.
        latency = delay + software + max(0.0, (engine.handshake - 1) * delay - transfer)
        # While a segment is reduced, the next one is on its way.
        reduction = size * engine.reduction_s_per_byte / messages if reduces else 0.0
        waiting_for_cores = software * engine.ranks_per_core - (latency + transfer + reduction)
        return StepCost(latency + max(0.0, waiting_for_cores), transfer, reduction)


@dataclasses.dataclass(frozen=True)
class StepCost:
    """Where the time of a step goes."""

    latency_s: float
    bandwidth_s: float
    reduction_s: float

    @property
    def total_s(self) -> float:
        """The step's time."""
        return self.latency_s + self.bandwidth_s + self.reduction_s


def gloo_segments(size: int, ranks: int, element_bytes: int = 4) -> Tuple[int, int, int]:
    """Returns how many segments Gloo's ring cuts a buffer into, and the bytes of the first and of the last one."""
    count = max(-(-size // GLOO_SEGMENT_BYTES), 2 * ranks)
    count = -(-count // ranks) * ranks
    segment = -(-size // count)
    segment = -(-segment // element_bytes) * element_bytes
    full, rest = divmod(size, segment)
    return count, segment, rest or segment if full else size


def uniform(
    bytes_per_s: float,
    latency_s: float,
    *,
    ports: int = 1,
    engine: Optional[Engine] = None,
    pieces: Tuple[Piece, ...] = (),
) -> Topology:
    """Returns a network in which all ranks reach each other over equal links."""
    level = Level("link", UNLIMITED, bytes_per_s, latency_s, ports=ports, pieces=pieces)
    return Topology("uniform", (level,), engine or Engine())


def hosts(
    ranks_per_host: int,
    bytes_per_s: float,
    latency_s: float,
    *,
    inside_bytes_per_s: float = 4e9,
    inside_latency_s: float = 20e-6,
    placement: str = BLOCK,
    engine: Optional[Engine] = None,
) -> Topology:
    """Returns hosts on a switch: the ranks of a host share its link."""
    inside = Level("host", ranks_per_host, inside_bytes_per_s, inside_latency_s)
    link = Level("link", UNLIMITED, bytes_per_s, latency_s, shared_by=ranks_per_host)
    levels = (inside, link) if ranks_per_host > 1 else (link,)
    return Topology("hosts", levels, engine or Engine(), placement)


_IPU_LINK = 32e9  # of a 64 GB/s link, which counts both directions
_GW_LINK = 6.25e9  # 2 x 100 Gb/s for the 4 IPUs of a machine
_TEN_GIGABIT, _HUNDRED_GIGABIT = 1.25e9, 12.5e9


def _pod(ipus: int) -> Level:
    # Neighbours in a ring of IPU-Links have links of their own.
    return Level("IPU-Link", ipus, _IPU_LINK, 1e-6, ports=2)


def _gw(pods: int) -> Level:
    return Level("GW-Link", pods, _GW_LINK, 5e-6)


PRESETS: Dict[str, Topology] = {
    "pod16": Topology("pod16", (_pod(16),), note=DATASHEET),
    "pod64": Topology("pod64", (_pod(64),), note=DATASHEET),
    "pod128": Topology("pod128", (_pod(64), _gw(2)), note=DATASHEET),
    "pod256": Topology("pod256", (_pod(64), _gw(4)), note=DATASHEET),
    "pod64x1024": Topology("pod64x1024", (_pod(64), _gw(1024)), note=DATASHEET),
    "ethernet-clos": Topology(
        "ethernet-clos",
        (
            Level("host", 8, 12e9, 5e-6),
            Level("leaf", 32, _HUNDRED_GIGABIT, 10e-6, shared_by=8),
            Level("spine", UNLIMITED, _HUNDRED_GIGABIT, 20e-6, shared_by=16),
        ),
        note="100 Gb/s per host, two hosts to an uplink. Assumed, not validated.",
    ),
    "ethernet-10g": Topology(
        "ethernet-10g", (Level("link", UNLIMITED, _TEN_GIGABIT, 25e-6),), note="Assumed latency, not validated."
    ),
    "ethernet-1g": Topology(
        "ethernet-1g", (Level("link", UNLIMITED, 1.25e8, 50e-6),), note="Assumed latency, not validated."
    ),
    "single-host": Topology(
        "single-host", (Level("memory", 1024, 4e9, 20e-6),), note="Assumed memory bandwidth, not validated."
    ),
}
_OTHER_NAMES = {f"ipu-{name}": name for name in PRESETS if name.startswith("pod")}


def preset(name: str) -> Topology:
    """Returns a preset; UsageError with the nearest name if there is none."""
    known = _OTHER_NAMES.get(name, name)
    if known in PRESETS:
        return PRESETS[known]
    near = difflib.get_close_matches(name, [*PRESETS, *_OTHER_NAMES], n=1)
    advice = f"Did you mean {near[0]}?" if near else f"Use {cli.alternatives(PRESETS)}."
    raise cli.UsageError(f"{name} is not a topology. {advice}")


def parse_levels(text: str) -> Tuple[Level, ...]:
    """Returns the levels of a text like `ipu-link:64:32GB/s:1us,gw-link:1024:6.25GB/s:5us:4`."""
    form = "NAME:SIZE:RATE:LATENCY or NAME:SIZE:RATE:LATENCY:SHARED_BY"
    levels = []
    for part in text.split(","):
        words = [word.strip() for word in part.split(":")]
        if len(words) not in (4, 5):
            raise ValueError(f"{part.strip()!r} is not {form}.")
        sizes = [words[1], *(words[4:] or ["1"])]
        if not all(word.isdigit() and 1 <= int(word) <= UNLIMITED for word in sizes):
            raise ValueError(f"{part.strip()!r} has a size or a number of sharing ranks that is no number from 1 on.")
        rate, latency = quantities.parse_rate(words[2]), quantities.parse_seconds(words[3])
        levels.append(Level(words[0] or "link", int(sizes[0]), rate, latency, shared_by=int(sizes[1])))
    return tuple(levels)


def parse_pieces(text: str) -> Tuple[Piece, ...]:
    """Returns the pieces of a text like `4KiB:20us:1GB/s,64KiB:30us:2GB/s,max:50us:3GB/s`."""
    pieces = []
    for part in text.split(","):
        words = [word.strip() for word in part.split(":")]
        if len(words) != 3:
            raise ValueError(f"{part.strip()!r} is not BYTES:LATENCY:RATE, with max for the largest messages.")
        size = math.inf if words[0] == "max" else float(quantities.parse_bytes(words[0]))
        pieces.append(Piece(size, quantities.parse_seconds(words[1]), quantities.parse_rate(words[2])))
    if [piece.up_to_bytes for piece in pieces] != sorted({piece.up_to_bytes for piece in pieces}):
        raise ValueError(f"The message sizes of {text!r} do not ascend.")
    return tuple(pieces)
