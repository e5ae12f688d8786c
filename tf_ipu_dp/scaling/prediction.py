"""The time of one update of each cell, predicted before it is measured: compute of the shape, and the all-reduce. Pure.

    update = compute + input wait + optimizer + overhead   of the shape, measured without exchanges
             + all-reduce                                  of the collective model, as training sees it
             + metrics                                     four times a second, or once per update
             + waiting                                     for cores and for each other

On machines of their own, instances wait for the slowest, which follows from the jitter of the shape. Where they share
cores, short jobs say by how much an exchange takes longer than it does alone, and the rest of the update longer than
without exchanges: one of two instances, and one of so many that they take turns on the cores. In larger jobs they take
longer by the same shares. If instances exchange gradients through shared memory, the job has measured all of the
exchange, which takes more instances than cores as many turns.

Another engine hides some of its exchanges behind compute. What a job of two of its processes takes longer than without
exchanges, over the all-reduce of the model, is the share that is taken to show at all sizes; what a link adds to an
all-reduce is added as it is.
"""

from __future__ import annotations

import dataclasses
import math
from typing import List, Optional, Sequence

from tf_ipu_dp.collectives import predict as collective_model
from tf_ipu_dp.collectives.calibration import Calibration
from tf_ipu_dp.collectives.fabric import Fabric
from tf_ipu_dp.scaling.compute_calibration import OURS, ComputeCalibration, SharedExchange, shape_of
from tf_ipu_dp.scaling.records import Cell, CellPrediction, UpdateParts

# What instances exchange for metrics, stop requests and the times of exchanges.
_METRICS_BYTES = 2200
_METRICS_PER_S = 4.0
_STEP, _FAR = 0.01, 9.0  # of an integral over normal numbers


def predict(
    cells: Sequence[Cell],
    compute: ComputeCalibration,
    collective: Optional[Calibration],
    fabric: Optional[Fabric] = None,
) -> List[CellPrediction]:
    """Returns the predictions of our own engines' cells. `fabric`: the network of emulated hosts.

    A cell has none if its shape is unlike all that were measured, or if it has several instances and the collectives
    of its engine are not calibrated: those of MPI never are.
    """
    found = [predict_cell(cell, compute, collective, fabric) for cell in cells if cell.engine.startswith(OURS)]
    return [each for each in found if each is not None]


def predict_others(
    cells: Sequence[Cell],
    compute: ComputeCalibration,
    collective: Optional[Calibration],
    fabric: Optional[Fabric] = None,
) -> List[CellPrediction]:
    """Returns the predictions of the cells of one other engine, which `compute` was calibrated with."""
    found = [_predict_other(cell, compute, collective, fabric) for cell in cells]
    return [each for each in found if each is not None]


def _predict_other(
    cell: Cell, compute: ComputeCalibration, collective: Optional[Calibration], fabric: Optional[Fabric]
) -> Optional[CellPrediction]:
    shape = shape_of(cell, on_one_machine=fabric is not None)
    time, measured = compute.time_of(shape), compute.shared_exchange_of(SharedExchange.FEWEST)
    if time is None or (cell.instances > 1 and (collective is None or measured is None)):
        return None
    shown_s = link_s = low = high = 0.0
    if cell.instances > 1:
        assert collective is not None and measured is not None
        here = dataclasses.replace(cell, hosts=1)
        alone = _all_reduce(compute.bucket_bytes, here, collective, None)
        two = dataclasses.replace(here, instances=measured.shape.processes)
        share = measured.seconds / _all_reduce(compute.bucket_bytes, two, collective, None).seconds
        shown_s = share * alone.seconds
        low, high = share * alone.low_s, share * alone.high_s
        if cell.hosts > 1:
            linked_s = _all_reduce(compute.bucket_bytes, cell, collective, fabric).seconds
            link_s = max(linked_s - alone.seconds, 0.0)
    parts = UpdateParts(time.total_s, 0.0, shown_s + link_s, 0.0, 0.0, 0.0)
    return CellPrediction(
        cell.key,
        parts.total_s,
        time.total_s * time.low + low + link_s,
        time.total_s * time.high + high + link_s,
        parts,
        core_limited=shape.processes > 1,
    )


def predict_cell(
    cell: Cell, compute: ComputeCalibration, collective: Optional[Calibration], fabric: Optional[Fabric]
) -> Optional[CellPrediction]:
    """Returns the prediction of one cell; None without what it needs."""
    shape = shape_of(cell, on_one_machine=fabric is not None)
    time = compute.time_of(shape)
    if time is None or (cell.instances > 1 and (collective is None or cell.engine != OURS)):
        return None
    shares_cores = compute.emulated and shape.processes > 1
    exchange_s = low_s = high_s = metrics_s = waiting_s = 0.0
    if cell.instances > 1:
        assert collective is not None
        exchange = _all_reduce(compute.bucket_bytes, cell, collective, fabric)
        exchange_s, low_s, high_s = exchange.seconds, exchange.low_s, exchange.high_s
        in_memory = shares_cores and cell.hosts <= 1 and fabric is None and compute.exchanges_in_memory
        if in_memory:
            exchange_s = _exchange_in_memory(cell, compute)
            low_s, high_s = exchange_s * min(time.low, 1.0), exchange_s * max(time.high, 1.0)
        metrics_s = _all_reduce([_METRICS_BYTES], cell, collective, fabric).seconds
        metrics_s *= min(1.0, _METRICS_PER_S * (time.total_s + exchange_s))
        if shares_cores:
            time = time.scaled(compute.slowdown_of(cell.instances))
            waiting_s = 0.0 if in_memory else _waiting_on_shared_cores(cell, compute, collective)
        else:
            waiting_s = time.deviation_s * expected_maximum(cell.instances)
    parts = UpdateParts(
        compute_s=time.compute_s,
        input_wait_s=time.input_wait_s,
        collective_s=exchange_s,
        waiting_s=waiting_s,
        optimizer_s=time.optimizer_s,
        overhead_s=time.overhead_s + metrics_s,
    )
    others_s = waiting_s + metrics_s
    return CellPrediction(
        cell.key,
        parts.total_s,
        time.total_s * min(time.low, 1.0) + low_s + others_s,
        time.total_s * max(time.high, 1.0) + high_s + others_s,
        parts,
        core_limited=shares_cores,
    )


def _exchange_in_memory(cell: Cell, compute: ComputeCalibration) -> float:
    """Returns how long instances of one host take to exchange gradients, waiting for each other included."""
    measured = compute.shared_exchange_of(cell.instances)
    assert measured is not None
    turns = max(cell.instances, compute.cores) / max(measured.shape.processes, compute.cores)
    return measured.seconds * turns


def _waiting_on_shared_cores(cell: Cell, compute: ComputeCalibration, collective: Calibration) -> float:
    """Returns how much longer an exchange takes than without a link's limit and with idle cores."""
    measured = compute.shared_exchange_of(cell.instances)
    if measured is None:
        return 0.0
    here = dataclasses.replace(cell, hosts=1)
    job = dataclasses.replace(here, instances=measured.shape.processes)
    alone_s = _all_reduce(compute.bucket_bytes, job, collective, None).seconds
    return max(measured.seconds / alone_s - 1, 0.0) * _all_reduce(compute.bucket_bytes, here, collective, None).seconds


def expected_maximum(count: int) -> float:
    """Returns the mean of the largest of so many normal numbers, in standard deviations."""
    if count < 2:
        return 0.0
    # The mean is the integral of 1 - P(largest < x) above 0, less that of P(largest < x) below it.
    middles = [(place + 0.5) * _STEP for place in range(round(_FAR / _STEP))]
    above = math.fsum(1 - _share_below(x) ** count for x in middles)
    below = math.fsum(_share_below(-x) ** count for x in middles)
    return _STEP * (above - below)


def _share_below(x: float) -> float:
    """Returns the share of normal numbers below this one."""
    return 0.5 * math.erfc(-x / math.sqrt(2))


def _all_reduce(
    sizes: Sequence[int], cell: Cell, collective: Calibration, fabric: Optional[Fabric]
) -> collective_model.Prediction:
    link = None
    if fabric is not None:
        built = fabric.dilated()  # training is not dilated: it sees the network that is built
        link = collective_model.Link(built.slowest_rate, built.link.delay_s, built.placement)
    return collective_model.all_reduce_seconds(list(sizes), cell.instances, max(cell.hosts, 1), collective, link=link)
