"""What a study would measure at sizes and on fabrics that nobody has here: a prediction with a band. Pure.

Every replica computes as one alone does here, or as the user says. The all-reduce is that of the topology, with the
fastest algorithm, and nothing of it overlaps with compute. Each update waits for the slowest replica: the more there
are, the later it is.
"""

from __future__ import annotations

import dataclasses
from typing import List, Optional, Sequence, Tuple

from tf_ipu_dp import cli
from tf_ipu_dp.collectives import formulas, topology
from tf_ipu_dp.collectives import predict as collective_model
from tf_ipu_dp.scaling.compute_calibration import OURS, ComputeCalibration, Shape
from tf_ipu_dp.scaling.prediction import expected_maximum
from tf_ipu_dp.scaling.records import STRONG, THIS_CPU, Cell, Extrapolation, Study, UpdateParts

DEFAULT_FABRICS = ("pod64x1024", "ethernet-10g")


@dataclasses.dataclass(frozen=True)
class Replica:
    """Seconds of one replica alone in an update, as a fixed part and a part per sample."""

    fixed_s: float
    sample_s: float
    input_wait_s: float = 0.0
    optimizer_s: float = 0.0
    overhead_s: float = 0.0
    deviation_s: float = 0.0  # of the time of single updates
    low: float = 1.0  # factors of the time between which 8 of 10 lie
    high: float = 1.0

    def seconds(self, samples: float) -> float:
        """Returns the time of an update without any exchange."""
        others_s = self.input_wait_s + self.optimizer_s + self.overhead_s
        return self.fixed_s + self.sample_s * samples + others_s


def extrapolate(
    study: Study,
    compute: Optional[ComputeCalibration],
    sizes: Sequence[int],
    fabrics: Sequence[str] = DEFAULT_FABRICS,
    *,
    compute_ms: Optional[float] = None,
    bucket_bytes: Sequence[int] = (),
) -> List[Extrapolation]:
    """Returns a prediction for each fabric and size, which counts replicas.

    `compute_ms` is the time of one micro batch on the device to predict for, for example an IPU; it replaces all that
    was calibrated of a replica. The bytes of an update are the calibration's unless they are given. In mode strong the
    global batch stays; otherwise the samples of a replica do.
    """
    cell = _smallest_cell(study)
    samples = cell.global_batch_size // cell.replicas
    if compute_ms is not None:
        replica, whose = _given(compute_ms, cell.micro_batch_size), f"compute of {compute_ms:g} ms a micro batch"
    else:
        replica = _calibrated(compute, cell)
        whose = THIS_CPU if compute and compute.emulated else "compute as calibrated"
    buckets = tuple(bucket_bytes) or (compute.bucket_bytes if compute else ())
    if not buckets:
        raise cli.UsageError("An extrapolation needs the bytes of a model's gradients: calibrate, or give them.")
    whole = cell.global_batch_size if study.mode == STRONG else None
    largest = max(sizes, default=1)
    if whole is not None and largest > whole:
        raise cli.UsageError(
            f"--predict goes to {largest:,} replicas, but mode strong keeps the global batch of {whole:,} samples, "
            f"which is one each for {whole:,}. Use sizes up to {whole:,}, or a larger --global_batch_size."
        )
    found = []
    for fabric in fabrics:
        network = topology.preset(fabric)
        for size in sizes:
            if size <= network.capacity:
                made = _predict(replica, fabric, network, size, buckets, samples, whole)
                found.append(dataclasses.replace(made, compute=whose))
    if not found and sizes:
        raise cli.UsageError(
            f"None of the sizes from {min(sizes):,} to {largest:,} fits on {cli.alternatives(fabrics)}. "
            "Use smaller ones, or --predict_on=pod64x1024."
        )
    return found


def doublings(text: str) -> Tuple[int, ...]:
    """Returns the sizes of a text like 16..65536, in doublings, or like 16,64,256; ValueError for another text."""
    first, dots, last = text.replace(",", " ").partition("..")
    if not dots:
        sizes = [int(word) for word in first.split()]
    else:
        begin, end = int(first), int(last)
        if not 1 <= begin <= end:
            raise ValueError(f"{begin}..{end} does not ascend from at least 1")
        sizes = [begin << place for place in range((end // begin).bit_length())]
    if not sizes or min(sizes) < 1:
        raise ValueError("a size is at least 1")
    return tuple(sizes)


def _predict(
    replica: Replica,
    fabric: str,
    network: topology.Topology,
    size: int,
    buckets: Sequence[int],
    samples: int,
    whole: Optional[int],
) -> Extrapolation:
    own = samples if whole is None else whole / size
    exchange_s = 0.0
    if size > 1:
        exchange_s = collective_model.all_reduce_seconds(
            buckets, size, network=network, algorithm=formulas.AUTO
        ).seconds
    # In a band: calm replicas without waiting, and slow ones.
    waiting_s = replica.deviation_s * expected_maximum(size)
    alone_s = replica.seconds(own)
    parts = UpdateParts(
        compute_s=replica.fixed_s + replica.sample_s * own,
        input_wait_s=replica.input_wait_s,
        collective_s=exchange_s,
        waiting_s=waiting_s,
        optimizer_s=replica.optimizer_s,
        overhead_s=replica.overhead_s,
    )
    one_alone = (samples if whole is None else whole) / replica.seconds(samples if whole is None else whole)
    rate = own * size / parts.total_s
    return Extrapolation(
        fabric=fabric,
        size=size,
        samples_per_s=rate,
        low=own * size / (alone_s * replica.high + exchange_s + waiting_s),
        high=own * size / (alone_s * replica.low + exchange_s),
        efficiency=rate / (size * one_alone),
        parts=parts,
    )


def _smallest_cell(study: Study) -> Cell:
    ours = [cell for cell in study.cells if cell.engine.startswith(OURS)]
    if not ours:
        raise cli.UsageError("An extrapolation needs a cell of tf_ipu_dp: other engines are not predicted.")
    return min(ours, key=lambda cell: (cell.replicas, cell.instances))


def _given(compute_ms: float, micro_batch_size: int) -> Replica:
    if not compute_ms > 0:
        raise cli.UsageError(f"--compute_ms={compute_ms:g} is not a time. Give that of one micro batch on the device.")
    return Replica(0.0, compute_ms / 1e3 / micro_batch_size)


def _calibrated(compute: Optional[ComputeCalibration], cell: Cell) -> Replica:
    if compute is None:
        raise cli.UsageError("An extrapolation needs the calibrated compute, or --compute_ms.")
    line = compute.line_of(cell.micro_batch_size)
    shape = Shape(cell.micro_batch_size, cell.gradient_accumulation, 1, 1)
    time = compute.time_of(shape)
    if line is None or time is None:
        raise cli.UsageError(
            "No process alone was calibrated, so that the compute of one replica is not known. Add size 1 to --sizes, "
            "or give --compute_ms."
        )
    fixed_s, micro_batch_s = line
    return Replica(
        fixed_s,
        micro_batch_s / cell.micro_batch_size,
        time.input_wait_s,
        time.optimizer_s,
        time.overhead_s,
        time.deviation_s,
        time.low,
        time.high,
    )
