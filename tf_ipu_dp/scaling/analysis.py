"""What a study's measurements say: a row for each cell, with efficiency against a named baseline. Pure.

Each engine is compared with itself: its baseline is its cell with the fewest replicas that was measured (then the
smallest size), in mode batch the one with the best rate. Efficiency is the rate over the rate of the baseline, over the
ratio of their replicas: an IPU is what is paid for, however many processes feed it.
"""

from __future__ import annotations

import dataclasses
import math
import statistics as python_statistics
from typing import Dict, List, Optional, Sequence, Tuple

from tf_ipu_dp import cli
from tf_ipu_dp.scaling import statistics
from tf_ipu_dp.scaling.compute_calibration import OURS
from tf_ipu_dp.scaling.records import BATCH, COMPARE, Cell, CellPrediction, Measurement, Study, UpdateParts
from tf_ipu_dp.scaling.statistics import Interval, Knee

__all__ = ["Analysis", "Interval", "Knee", "Row", "TimeToAccuracy", "analyse", "cell_place", "engines_of"]

NOT_MEASURED = "not measured yet"
EMULATOR = "emulator"  # the fact `sdk` of a study on emulated IPUs


@dataclasses.dataclass(frozen=True)
class Row:
    """One cell with all of its repeats. None: not measured, or the engine does not report it."""

    cell: Cell
    repeats: int  # that are done
    reason: str  # why none is done; empty otherwise
    samples_per_s: Optional[Interval]
    samples_per_s_per_replica: Optional[float]
    speedup: Optional[float]  # over the baseline of its engine
    efficiency: Optional[float]  # speedup over the ratio of replicas; in mode batch: over the best rate
    parts: Optional[UpdateParts]  # of the repeat with the median rate
    input_wait_share: Optional[float]
    memory_bytes: Optional[int]
    predicted: Optional[CellPrediction]
    error: Optional[float]  # of the predicted time of an update: predicted / measured - 1
    core_limited: bool  # by the cores of this machine: not a statement about scaling
    efficiency_interval: Optional[Interval] = None  # with the repeats of the baseline; None for the baseline itself
    update_s: Optional[float] = None  # median of one update
    failures: Tuple[str, ...] = ()  # reasons of repeats that are not done, while others are
    parts_update_s: Optional[float] = None  # measured time of an update in the repeat that the parts are of
    others_busy: Optional[float] = None  # median share of this machine's cores that was used outside of the study

    @property
    def is_done(self) -> bool:
        return self.samples_per_s is not None

    @property
    def parts_error(self) -> Optional[float]:
        """How far the parts of an update are from its measured time, in the same repeat, as a share of it."""
        measured_s = self.parts_update_s
        return None if self.parts is None or not measured_s else self.parts.total_s / measured_s - 1


@dataclasses.dataclass(frozen=True)
class TimeToAccuracy:
    """Efficiency = hardware x statistical x overhead, against the baseline of the same engine."""

    cell: str
    seconds: Optional[float]  # None: the accuracy was not reached
    epochs: Optional[float]
    efficiency: Optional[float]
    hardware: Optional[float]
    statistical: Optional[float]
    overhead: Optional[float]
    samples: Optional[float] = None  # seen until the accuracy was reached
    is_evaluated: bool = True  # programs of other engines train as long, and do not validate


@dataclasses.dataclass(frozen=True)
class Analysis:
    """A whole study, ready to be shown."""

    study: Study
    rows: Tuple[Row, ...]  # in the study's order of cells
    baseline: str  # the name of what efficiency refers to: "tf_ipu_dp at 1 instance"
    knee: Optional[Knee]  # of the first engine that has one
    time_to_accuracy: Tuple[TimeToAccuracy, ...]
    knees: Tuple[Knee, ...] = ()  # of every engine


def analyse(study: Study, measurements: Sequence[Measurement]) -> Analysis:
    """Returns what the measurements of a study say."""
    repeats = _by_cell(measurements)
    predictions = {each.cell: each for each in study.predictions}
    rows = [_measured_row(study, cell, repeats.get(cell.key, []), predictions.get(cell.key)) for cell in study.cells]
    baselines = _find_baselines(study, rows)
    compared = tuple(_compare(row, baselines.get(row.cell.engine)) for row in rows)
    knees = tuple(_find_knees(study, compared)) if study.mode == BATCH else ()
    return Analysis(
        study, compared, _name_baseline(study, baselines), knees[0] if knees else None,
        tuple(_times_to_accuracy(study, compared, repeats, baselines)), knees,
    )  # fmt: skip


def cell_place(study: Study, cell: Cell) -> str:
    """Returns where a cell stands, in words: `4 instances`, or its layout where its size does not say it."""
    if study.mode == COMPARE:
        return f"{cli.count(cell.replicas, 'replica')} in {cli.count(cell.instances, 'instance')}"
    if study.mode == BATCH:
        return f"batch {cell.size:,}"
    return cli.count(cell.size, study.unit[:-1] if study.unit.endswith("s") else study.unit, study.unit)


def engines_of(rows: Sequence[Row]) -> List[str]:
    """Returns the engines of some rows, in their order."""
    return list(dict.fromkeys(row.cell.engine for row in rows))


def _by_cell(measurements: Sequence[Measurement]) -> Dict[str, List[Measurement]]:
    """Returns the measurements of each cell; of a repeat that was measured again, the last one."""
    found: Dict[str, Dict[int, Measurement]] = {}
    for each in measurements:
        found.setdefault(each.cell, {})[each.repeat] = each
    return {cell: [own[repeat] for repeat in sorted(own)] for cell, own in found.items()}


def _measured_row(
    study: Study, cell: Cell, measured: Sequence[Measurement], predicted: Optional[CellPrediction]
) -> Row:
    """Returns a row that is not compared with its baseline yet."""
    done = [each for each in measured if each.is_done and 0 < each.samples_per_s < math.inf]
    reasons = tuple(dict.fromkeys(each.reason or each.state for each in measured if each not in done))
    core_limited = shares_cores(study, cell) or (predicted is not None and predicted.core_limited)
    if not done:
        reason = reasons[0] if reasons else NOT_MEASURED
        return Row(cell, 0, reason, None, None, None, None, None, None, None, predicted, None, core_limited)
    rate = statistics.median_interval([each.samples_per_s for each in done])
    typical = min(done, key=lambda each: abs(each.samples_per_s - rate.median))
    update_s = python_statistics.median(each.update_s for each in done)
    memory = [each.memory_bytes for each in done if each.memory_bytes is not None]
    waited = typical.input_wait_s
    others = [each.others_busy for each in done if each.others_busy is not None]
    return Row(
        cell=cell,
        repeats=len(done),
        reason="",
        samples_per_s=rate,
        samples_per_s_per_replica=rate.median / cell.replicas,
        speedup=None,
        efficiency=None,
        parts=typical.parts,
        input_wait_share=None if waited is None else waited / typical.seconds,
        memory_bytes=max(memory) if memory else None,
        predicted=predicted,
        error=predicted.update_s / update_s - 1 if predicted is not None and update_s > 0 else None,
        core_limited=core_limited,
        update_s=update_s,
        failures=reasons,
        parts_update_s=None if typical.parts is None else typical.update_s,
        others_busy=python_statistics.median(others) if others else None,
    )


def shares_cores(study: Study, cell: Cell) -> bool:
    """Whether the replicas of a cell share this machine's cores, which one of them alone has for itself.

    It is the same for all engines: emulated IPUs and the processes of other engines compute on the cores.
    """
    on_ipus = cell.engine.startswith(OURS) and study.facts.get("sdk") != EMULATOR
    elsewhere = cell.hosts > 1 and not study.fabric
    here = cell.replicas / cell.hosts if elsewhere else cell.replicas
    return here > 1 and not on_ipus


def _find_baselines(study: Study, rows: Sequence[Row]) -> Dict[str, Row]:
    """Returns the baseline of each engine that has any measurement."""
    found: Dict[str, Row] = {}
    for row in rows:
        if row.samples_per_s is None:
            continue
        other = found.get(row.cell.engine)
        if other is None or _goes_before(study, row, other):
            found[row.cell.engine] = row
    return found


def _goes_before(study: Study, row: Row, other: Row) -> bool:
    if study.mode == BATCH:
        assert row.samples_per_s is not None and other.samples_per_s is not None
        return row.samples_per_s.median > other.samples_per_s.median
    return (row.cell.replicas, row.cell.size) < (other.cell.replicas, other.cell.size)


def _compare(row: Row, base: Optional[Row]) -> Row:
    if base is None or row.samples_per_s is None or base.samples_per_s is None:
        return row
    resources = row.cell.replicas / base.cell.replicas
    ratio = row.samples_per_s.over(base.samples_per_s)
    return dataclasses.replace(
        row,
        speedup=ratio.median,
        efficiency=statistics.efficiency(ratio.median, resources),
        efficiency_interval=None if row is base else ratio.times(1 / resources),
    )


def _name_baseline(study: Study, baselines: Dict[str, Row]) -> str:
    best = "the best rate of " if study.mode == BATCH else ""
    places = {engine: cell_place(study, row.cell) for engine, row in baselines.items()}
    if not places:
        return ""
    if len(places) > 1 and study.mode == BATCH:
        return f"{best}each engine"
    if len(places) > 1 and len(set(places.values())) == 1:
        return f"each engine at {next(iter(places.values()))}"
    return best + ", ".join(f"{engine} at {place}" for engine, place in places.items())


def _find_knees(study: Study, rows: Sequence[Row]) -> List[Knee]:
    found = []
    for engine in study.engines:
        rates = [
            (row.cell.size, row.samples_per_s.median)
            for row in rows if row.cell.engine == engine and row.samples_per_s is not None
        ]  # fmt: skip
        knee = statistics.find_knee(rates, engine)
        if knee is not None:
            found.append(knee)
    return found


def _times_to_accuracy(
    study: Study, rows: Sequence[Row], repeats: Dict[str, List[Measurement]], baselines: Dict[str, Row]
) -> List[TimeToAccuracy]:
    target = study.target_accuracy
    if target is None:
        return []
    reached = {row.cell.key: _reached(row, repeats.get(row.cell.key, []), target) for row in rows}
    found = []
    for row in rows:
        if row.samples_per_s is None:
            continue
        own = reached[row.cell.key]
        if own is None:
            evaluated = row.cell.engine.startswith(OURS)
            found.append(TimeToAccuracy(row.cell.key, None, None, None, None, None, None, is_evaluated=evaluated))
            continue
        trained, epochs = own
        base = reached[baselines[row.cell.engine].cell.key]
        made = TimeToAccuracy(row.cell.key, trained.seconds, epochs, None, None, None, None, trained.samples)
        if base is not None:
            made = dataclasses.replace(made, **dataclasses.asdict(statistics.factors(base[0], trained)))
        found.append(made)
    return found


def _reached(
    row: Row, measured: Sequence[Measurement], target: float
) -> Optional[Tuple[statistics.Trained, Optional[float]]]:
    """Returns what the repeat with the median time needed, and its epochs.

    A repeat that did not reach the accuracy counts as the slowest; of an even number the slower one of the middle.
    """
    first = []
    for each in (each for each in measured if each.is_done):
        passed = [seen for seen in each.validations if seen.accuracy >= target]
        first.append(min(passed, key=lambda seen: seen.elapsed_s) if passed else None)
    ordered = sorted(first, key=lambda seen: math.inf if seen is None else seen.elapsed_s)
    typical = ordered[len(ordered) // 2] if ordered else None
    if typical is None or row.samples_per_s is None or typical.elapsed_s <= 0 or typical.step <= 0:
        return None
    samples = float(typical.step * row.cell.global_batch_size)
    trained = statistics.Trained(row.cell.replicas, row.samples_per_s.median, samples, typical.elapsed_s)
    return trained, typical.epoch
