"""The time of a job's gradient all-reduce, predicted from a calibration or on a topology. Pure."""

from __future__ import annotations

import dataclasses
import math
from typing import Optional, Sequence, Tuple

import numpy as np

from tf_ipu_dp import cli
from tf_ipu_dp.collectives import formulas, horovod_model, topology
from tf_ipu_dp.collectives.calibration import Calibration

TRAINING, MEASUREMENT, ENGINE = "training", "measurement", "engine"
_LOW, _HIGH = 0.1, 0.9


@dataclasses.dataclass(frozen=True)
class Breakdown:
    """Where the time goes."""

    latency_s: float
    bandwidth_s: float
    reduction_s: float
    horovod_s: float


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The median of an all-reduce of all buckets, and between which times 8 of 10 lie."""

    seconds: float
    low_s: float
    high_s: float
    breakdown: Breakdown
    algorithm: str


@dataclasses.dataclass(frozen=True)
class Link:
    """The network between hosts, where it is not the one of the calibration. None: as calibrated."""

    bytes_per_s: Optional[float] = None  # of the slowest host: it bounds a ring, whatever the others do
    one_way_delay_s: Optional[float] = None
    placement: str = topology.BLOCK
    emulated: bool = True  # whether all hosts share the cores of the machine that was calibrated


def all_reduce_seconds(
    bytes_list: Sequence[int],
    ranks: int,
    hosts: int = 1,
    calibration: Optional[Calibration] = None,
    network: Optional[topology.Topology] = None,
    *,
    link: Optional[Link] = None,
    algorithm: str = formulas.RING,
    seen_by: str = TRAINING,
) -> Prediction:
    """Returns the predicted time of the all-reduces of buckets, one after the other.

    Either a calibration or a topology is needed. `seen_by` training, which comes at any moment of Horovod's cycle, by a
    measurement, where all ranks come right after a barrier, or by the engine, without Horovod's own time.
    """
    if (calibration is None) == (network is None):
        raise cli.UsageError("A prediction needs either a calibration or a topology.")
    if not bytes_list:
        raise cli.UsageError("A prediction needs the bytes of at least one bucket.")
    if calibration is not None:
        link = link or Link()
        network = calibration.topology(
            ranks,
            hosts,
            link_bytes_per_s=link.bytes_per_s,
            one_way_delay_s=link.one_way_delay_s,
            placement=link.placement,
            emulated=link.emulated,
        )
    assert network is not None
    plans = [formulas.make_plan(algorithm, ranks, float(size), network) for size in bytes_list]
    costs = [formulas.cost(plan) for plan in plans]
    engine = math.fsum(cost.total_s for cost in costs)
    horovod = 0.0
    if calibration is not None and seen_by != ENGINE and ranks > 1:
        horovod = _horovod_seconds(calibration.horovod, bytes_list, ranks, network, seen_by == MEASUREMENT)
    median = engine + horovod
    low, high = _spread(calibration)
    breakdown = Breakdown(
        math.fsum(cost.latency_s for cost in costs),
        math.fsum(cost.bandwidth_s for cost in costs),
        math.fsum(cost.reduction_s for cost in costs),
        horovod,
    )
    return Prediction(median, median * low, median * high, breakdown, plans[0].algorithm)


def _horovod_seconds(
    model: horovod_model.HorovodModel,
    bytes_list: Sequence[int],
    ranks: int,
    network: topology.Topology,
    after_barrier: bool,
) -> float:
    """Returns the cycle and the negotiation once, as buckets that are ready together share them, and all copies."""
    parts = horovod_model.add(model, ranks, float(sum(bytes_list)), network, 0.0, after_barrier=after_barrier)
    return parts.total_s


def _spread(calibration: Optional[Calibration]) -> Tuple[float, float]:
    if calibration is None or len(calibration.jitter_factors) < 2:
        return 1.0, 1.0
    low, high = np.quantile(np.asarray(calibration.jitter_factors), (_LOW, _HIGH))
    return float(min(low, 1.0)), float(max(high, 1.0))
