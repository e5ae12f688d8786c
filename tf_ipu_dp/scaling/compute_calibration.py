"""What a short measurement says about the compute of an update, and how processes that share cores slow it down. Pure.

A shape is what one process does in an update: so many micro batches of one size on so many replicas, beside so many
other processes on the same machine. The processes of its measurement do not exchange gradients.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, Dict, List, Optional, Sequence, Tuple

from tf_ipu_dp.runs.records import Record
from tf_ipu_dp.scaling.records import Cell

OURS = "tf_ipu_dp"  # names of our own engines begin with it


@dataclasses.dataclass(frozen=True)
class Shape(Record):
    """What one process computes in an update, and how many such processes the machine runs."""

    micro_batch_size: int
    micro_batches: int  # of all replicas of the process
    replicas: int  # of the process
    processes: int

    @property
    def samples(self) -> int:
        return self.micro_batch_size * self.micro_batches


@dataclasses.dataclass(frozen=True)
class ShapeTime(Record):
    """Seconds of one update of a shape, without any exchange of gradients."""

    shape: Shape
    compute_s: float
    input_wait_s: float
    optimizer_s: float
    overhead_s: float
    deviation_s: float = 0.0  # of the time of single updates
    low: float = 1.0  # between these factors of the time lie 8 of 10 measured seconds
    high: float = 1.0

    @property
    def total_s(self) -> float:
        return self.compute_s + self.input_wait_s + self.optimizer_s + self.overhead_s

    def scaled(self, factor: float) -> ShapeTime:
        """Returns the time with all of its parts longer by a factor."""
        names = ("compute_s", "input_wait_s", "optimizer_s", "overhead_s", "deviation_s")
        return dataclasses.replace(self, **{name: factor * getattr(self, name) for name in names})


@dataclasses.dataclass(frozen=True)
class SharedExchange(Record):
    """An update of a job of instances that share this machine's cores, and the exchange in it.

    Horovod's threads then wait for cores, and the instances for each other: the exchange takes longer than alone. And
    they take cores from the rest of the update: it takes longer than in processes that exchange nothing.
    Instances on one host exchange gradients through shared memory, those of several hosts never.
    """

    FEWEST: ClassVar[int] = 2  # instances of such a job

    shape: Shape
    seconds: float  # of the exchange, waiting included
    update_s: float  # all of it
    in_memory: bool = False  # not through Horovod


@dataclasses.dataclass(frozen=True)
class ComputeCalibration(Record):
    """The times of some shapes of one model on one machine."""

    date: str
    model: str
    cores: int
    emulated: bool  # IPUs on this machine's cores: then processes share them
    bucket_bytes: Tuple[int, ...]  # that one update all-reduces between processes
    times: Tuple[ShapeTime, ...]
    facts: Dict[str, str] = dataclasses.field(default_factory=dict)
    shared_exchanges: Tuple[SharedExchange, ...] = ()  # none: no cell has instances that share cores

    def time_of(self, shape: Shape) -> Optional[ShapeTime]:
        """Returns the time of a shape: measured, or on a line through measured ones; None if nothing is near it."""
        for each in self.times:
            if each.shape == shape:
                return each
        alike = [each for each in self.times if each.shape.processes == shape.processes]
        same_batch = [each for each in alike if each.shape.micro_batch_size == shape.micro_batch_size]
        if same_batch:
            return _on_a_line(same_batch, shape, [each.shape.micro_batches for each in same_batch], shape.micro_batches)
        if alike:
            return _on_a_line(alike, shape, [each.shape.samples for each in alike], shape.samples)
        crowd = _crowd_of(shape, [each.shape for each in self.times], self.cores) if self.emulated else None
        if crowd is None:
            return None
        found, turns = self.time_of(crowd), shape.processes / crowd.processes
        assert found is not None
        longer = {name: getattr(found, name) * turns for name in ("compute_s", "optimizer_s", "overhead_s")}
        return dataclasses.replace(found, shape=shape, **longer)

    def shared_exchange_of(self, processes: int) -> Optional[SharedExchange]:
        """Returns that of the job with so many processes, or with the next fewer; None if none was measured."""
        found = {each.shape.processes: each for each in self.shared_exchanges if each.shape.processes <= processes}
        return found[max(found)] if found else None

    @property
    def exchanges_in_memory(self) -> bool:
        """Whether the instances of one host were seen to exchange gradients through shared memory."""
        return any(each.in_memory for each in self.shared_exchanges)

    def slowdown_of(self, processes: int) -> float:
        """By which factor an update takes longer, without its exchange, in so many instances that share cores."""
        job = self.shared_exchange_of(processes)
        alone = self.time_of(job.shape) if job else None
        return max((job.update_s - job.seconds) / alone.total_s, 1.0) if job and alone and alone.total_s else 1.0

    def line_of(self, micro_batch_size: int) -> Optional[Tuple[float, float]]:
        """Returns the seconds of an update's compute in one process alone, as a fixed part and one per micro batch.

        The lines of other micro batch sizes are scaled; None if no process alone was measured. One point alone has no
        fixed part.
        """
        alone = [each for each in self.times if each.shape.processes == 1] or list(self.times)
        if not alone:
            return None
        same = [each for each in alone if each.shape.micro_batch_size == micro_batch_size] or alone
        fixed, per_sample = fit_line([each.shape.samples for each in same], [each.compute_s for each in same])
        return fixed, per_sample * micro_batch_size


def shape_of(cell: Cell, *, on_one_machine: bool) -> Shape:
    """Returns what one process of a cell does; `on_one_machine`: its hosts are emulated, and share the cores."""
    replicas = max(cell.replicas // cell.instances, 1)
    processes = cell.instances if on_one_machine else -(-cell.instances // max(cell.hosts, 1))
    return Shape(cell.micro_batch_size, cell.gradient_accumulation * replicas, replicas, processes)


def shapes_to_measure(shapes: Sequence[Shape], most_per_group: int = 4, *, cores: Optional[int] = None) -> List[Shape]:
    """Returns the shapes to measure: all, but of very many sizes only the outer ones and some between them.

    With the `cores` that processes share: of many more processes than cores, only those that no others stand for.
    """
    found: List[Shape] = []
    crowds = {each: _crowd_of(each, shapes, cores) for each in shapes} if cores else {}
    shapes = [each for each in shapes if not crowds.get(each)]
    for processes in sorted({each.processes for each in shapes}):
        group = sorted({each for each in shapes if each.processes == processes}, key=dataclasses.astuple)
        group.sort(key=lambda each: each.samples)
        if len(group) > most_per_group:
            places = {round(place * (len(group) - 1) / (most_per_group - 1)) for place in range(most_per_group)}
            group = [group[place] for place in sorted(places)]
        found += group
    return found


def jobs_to_measure(processes: Sequence[int], cores: int) -> List[int]:
    """Returns how many instances the jobs have from which the exchanges of so many processes are predicted.

    Two, and the fewest that take turns on the cores: there, a late instance may have waited for a core.
    """
    shared = [each for each in processes if each > 1]
    crowds = [each for each in shared if each >= 2 * cores]
    return sorted({SharedExchange.FEWEST, *([min(crowds)] if crowds else [])}) if shared else []


def fit_line(places: Sequence[float], values: Sequence[float]) -> Tuple[float, float]:
    """Returns the fixed part and the slope of a line through points, none below 0. One point has no fixed part."""
    count = len(places)
    middle, mean = math.fsum(places) / count, math.fsum(values) / count
    spread = math.fsum((place - middle) ** 2 for place in places)
    slope = 0.0
    if spread > 0:
        slope = math.fsum((place - middle) * (value - mean) for place, value in zip(places, values)) / spread
    fixed = mean - slope * middle
    if spread <= 0 or fixed < 0:
        return 0.0, mean / middle if middle else 0.0
    return (mean, 0.0) if slope < 0 else (fixed, slope)


def _crowd_of(shape: Shape, others: Sequence[Shape], cores: int) -> Optional[Shape]:
    """Returns the same work in fewer processes that already take turns on the cores; None if there is none.

    Twice the processes on the same cores take twice as long, and twice the memory and time to measure.
    """
    fewer = [
        each
        for each in others
        if dataclasses.replace(each, processes=shape.processes) == shape
        and 2 * cores <= each.processes < shape.processes
    ]
    return max(fewer, key=lambda each: each.processes) if fewer else None


def _on_a_line(times: Sequence[ShapeTime], shape: Shape, places: Sequence[float], place: float) -> ShapeTime:
    """Returns the time at a place between or beyond measured ones; all else is that of the nearest."""
    ordered = sorted(zip(places, range(len(times))))
    nearest = times[min(ordered, key=lambda each: abs(each[0] - place))[1]]
    # Between the two neighbours, or through the two outermost points.
    above = min(max(1, sum(1 for each, _ in ordered if each < place)), len(ordered) - 1) if len(ordered) > 1 else 0
    near = ordered[above - 1 : above + 1] if above else ordered
    fixed, slope = fit_line([each for each, _ in near], [times[number].compute_s for _, number in near])
    compute = fixed + slope * place
    return dataclasses.replace(nearest, shape=shape, compute_s=compute)
