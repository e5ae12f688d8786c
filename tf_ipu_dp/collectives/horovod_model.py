"""What Horovod adds to the engine's own time: the wait for its cycle, the negotiation, copies into and out of a buffer.

T = wait for the cycle + negotiation + copy in + engine + copy out. Pure.

Horovod wakes up once per cycle. With cached responses, all ranks then agree on what is ready by small ring all-reduces
of a bit vector; a tensor that just missed a cycle waits for the next one.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tf_ipu_dp import cli
from tf_ipu_dp.collectives import formulas
from tf_ipu_dp.collectives.topology import Topology

Array = Any  # numpy has no types that hold for both releases
Generator = Any


@dataclasses.dataclass(frozen=True)
class HorovodModel:
    """Horovod's own parameters."""

    cycle_s: float = 1e-3
    negotiation_rounds: float = 0.85  # time of a cycle's negotiation, in small all-reduces
    negotiation_bytes: int = 16  # of the bit vector
    copy_bytes_per_s: float = 4e9
    fixed_s: float = 0.0  # all else, of an all-reduce that begins right after another one: the cycle's rest, callbacks

    def __post_init__(self) -> None:
        if min(self.cycle_s, self.fixed_s) < 0 or self.negotiation_rounds < 0 or self.negotiation_bytes < 1:
            raise cli.UsageError("Horovod's cycle, rounds and fixed time cannot be negative.")
        if not self.copy_bytes_per_s > 0:
            raise cli.UsageError("Horovod's copies need a rate above 0.")


@dataclasses.dataclass(frozen=True)
class HorovodTime:
    """The parts of a time on average, in seconds."""

    wait_s: float
    negotiation_s: float
    copy_s: float
    engine_s: float
    fixed_s: float

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.wait_s + self.overhead_s + self.engine_s

    @property
    def overhead_s(self) -> float:
        """What Horovod adds after the wait for its cycle."""
        return self.negotiation_s + self.copy_s + self.fixed_s


def single_packets(ranks: int) -> int:
    """Returns the packets of one negotiation that are alone on their way: nothing behind them reports their loss.

    Its few bytes are one segment, which goes around the ring in 2(n-1) messages: Gloo does not send empty segments. The
    receiver announces itself to the sender. Between 2 ranks the notice has data behind it, for both directions have one
    connection; between more it is alone too.
    """
    return 2 * (ranks - 1) * (1 if ranks == 2 else 2)


def negotiation_seconds(model: HorovodModel, ranks: int, topology: Topology) -> float:
    """Returns the time of one negotiation: small ring all-reduces between all ranks."""
    plan = formulas.make_plan(formulas.RING, ranks, float(max(model.negotiation_bytes, 1)), topology)
    return model.negotiation_rounds * formulas.cost(plan).total_s


def add(
    model: HorovodModel, ranks: int, size: float, topology: Topology, engine_s: float, *, after_barrier: bool = False
) -> HorovodTime:
    """Returns the parts of the time that an application sees for an all-reduce of one fused buffer.

    `after_barrier`: all ranks begin right after another collective, as measurements do, and so at the beginning of a
    cycle. Otherwise they come at any moment of it. A cycle lasts at least as long as its negotiation.
    """
    negotiation = negotiation_seconds(model, ranks, topology)
    wait = 0.0 if after_barrier else max(model.cycle_s, negotiation) / 2
    fixed = model.fixed_s if after_barrier else max(0.0, model.fixed_s - model.cycle_s / 2)
    return HorovodTime(wait, negotiation, 2 * size / model.copy_bytes_per_s, engine_s, fixed)


def sample_wait(model: HorovodModel, negotiation_s: float, trials: int, rng: Generator) -> Array:
    """Returns random waits for the next cycle."""
    return np.asarray(rng.random(trials)) * max(model.cycle_s, negotiation_s)
