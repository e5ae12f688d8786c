"""What a study comes to, in two or three sentences: where it stops paying, what limits it, what to change. Pure."""

from __future__ import annotations

import dataclasses
from typing import Dict, List, Optional, Sequence, Tuple

from tf_ipu_dp import cli
from tf_ipu_dp.config import train_flags
from tf_ipu_dp.planning import topology
from tf_ipu_dp.scaling.analysis import EMULATOR, Analysis, Row, cell_place
from tf_ipu_dp.scaling.compute_calibration import OURS
from tf_ipu_dp.scaling.records import BATCH, COMPARE, INSTANCES, STRONG, UpdateParts

COMPUTE, INPUT, COLLECTIVE, STRAGGLER, OVERHEAD, CORES = (
    "compute", "input", "the collective", "the slowest instance", "overhead", "the cores of this machine",
)  # fmt: skip
LIMITS = (COMPUTE, INPUT, COLLECTIVE, STRAGGLER, OVERHEAD, CORES)

_LEAST_LOSS = 0.02  # of an update: less is no loss


@dataclasses.dataclass(frozen=True)
class Thresholds:
    """Efficiencies: from `good` on nothing is to be gained; below `poor` a larger size does not pay."""

    good: float
    expected: float
    poor: float


# A synthesis of published results: 8 devices of one host, 4 to 16 hosts, 8 times more devices for the same batch.
ONE_HOST, SEVERAL_HOSTS, SAME_BATCH = (
    Thresholds(0.95, 0.85, 0.75),
    Thresholds(0.9, 0.8, 0.65),
    Thresholds(0.85, 0.8, 0.65),
)


def render(analysis: Analysis) -> str:
    """Returns the verdict on a study."""
    rows = _rows_to_judge(analysis)
    if not rows:
        reasons = [row.reason for row in analysis.rows if row.reason]
        return f"Nothing was measured: {reasons[0]}" if reasons else "Nothing was measured."
    if analysis.study.mode == BATCH:
        sentences = _judge_batch(analysis, rows)
    elif analysis.study.mode in (COMPARE, INSTANCES):
        sentences = _judge_layouts(analysis, rows)
    else:
        sentences = _judge_sizes(analysis, rows)
    return " ".join(sentences)


def thresholds_of(analysis: Analysis, row: Row) -> Thresholds:
    """Returns what a row's efficiency is measured against."""
    if analysis.study.mode == STRONG:
        return SAME_BATCH
    return SEVERAL_HOSTS if row.cell.hosts > 1 else ONE_HOST


def find_limit(base: Row, row: Row) -> Optional[str]:
    """Returns the one thing that limits a row; None if the engine does not report where its time goes.

    Of several sizes, it is what has grown most against the baseline, for the same samples of a replica. Of one size,
    or if nothing has grown, it is the largest part.
    """
    if row.parts is None:
        return CORES if row.core_limited else None
    seconds = _by_limit(row.parts, core_limited=row.core_limited)
    if base.parts is not None and base.cell.key != row.cell.key:
        ideal = _ideal_share(base, row)
        before = _by_limit(base.parts, core_limited=row.core_limited)
        grown = {name: value - before.get(name, 0.0) * ideal for name, value in seconds.items()}
        largest = max(grown, key=lambda name: grown[name])
        if grown[largest] > _LEAST_LOSS * row.parts.total_s:
            return largest
    plain = _by_limit(row.parts, core_limited=False)
    return max(plain, key=lambda name: plain[name])


def stops_paying(analysis: Analysis, rows: Sequence[Row]) -> Optional[Row]:
    """Returns the first row, by size, whose efficiency is poor; None if all of them pay."""
    for row in rows:
        if row.efficiency is not None and row.efficiency < thresholds_of(analysis, row).poor:
            return row
    return None


def _judge_sizes(analysis: Analysis, every: Sequence[Row]) -> List[str]:
    unit = analysis.study.unit.rstrip("s")
    rows = [row for row in every if not row.core_limited]
    limited = [row for row in every if row.core_limited]
    if limited and len(rows) < 2:
        sizes = cli.alternatives([str(row.cell.size) for row in limited]).replace(" or ", " and ")
        first = (
            f"This says nothing about scaling: at {sizes} {analysis.study.unit} the cores of this machine are shared."
        )
        return [first, *_limit_and_rate(analysis, every, every[0], limited[-1])]
    poor, largest = stops_paying(analysis, rows), rows[-1]
    judged = poor or largest
    size = cli.count(judged.cell.size, unit)
    if len(rows) == 1 or judged.efficiency is None:
        first = f"Only {size} was measured, which says nothing about scaling."
    elif poor is None:
        grade = _grade(judged.efficiency, thresholds_of(analysis, judged))
        first = f"It pays up to {size}, the largest measured: efficiency {_percent(judged.efficiency)}, {grade}."
    else:
        before = [row for row in rows if row.cell.size < poor.cell.size]
        until = f"It stops paying after {cli.count(before[-1].cell.size, unit)}" if before else "It does not pay"
        first = f"{until}: at {size} the efficiency is {_percent(judged.efficiency)}."
    return [first, *_limit_and_rate(analysis, rows, rows[0], judged)]


def _judge_layouts(analysis: Analysis, rows: Sequence[Row]) -> List[str]:
    best = max(rows, key=_rate)
    # R1 asks for the layout: one replica is the measure of the others, not a competitor.
    most = max(row.cell.replicas for row in rows)
    alike = [row for row in rows if row.cell.replicas == most]
    fastest, slowest = max(alike, key=_rate), min(alike, key=_rate)
    if fastest.cell.key == slowest.cell.key:
        first = f"{_layout(best)} is the fastest layout of those measured: {_rate(best):,.0f} samples/s."
    else:
        more = _rate(fastest) / _rate(slowest) - 1
        first = f"{_layout(fastest)} is the best layout of {cli.count(most, 'replica')}: "
        first += f"{_percent(more)} more samples/s than {_layout(slowest)}."
    if fastest.core_limited:
        first = f"On the cores of this machine, {first[0].lower()}{first[1:]}"
    return [first, *_limit_and_rate(analysis, rows, rows[0], fastest)]


def _judge_batch(analysis: Analysis, rows: Sequence[Row]) -> List[str]:
    knee = analysis.knee
    at_knee = [row for row in rows if knee is not None and row.cell.size == knee.size]
    judged = at_knee[0] if at_knee else max(rows, key=_rate)
    if knee is None:
        first = f"The best batch measured is {judged.cell.size:,}."
    elif knee.size == knee.best_size:
        first = f"The batch of {knee.size:,} is the fastest; smaller ones reach less than {_percent(knee.share)} of it."
    else:
        first = (
            f"Beyond a batch of {knee.size:,} a larger one does not pay: it has at least {_percent(knee.share)} of the "
            f"best rate, which {knee.best_size:,} has."
        )
    return [first, *_limit_and_rate(analysis, rows, judged, judged)]


def _limit_and_rate(analysis: Analysis, rows: Sequence[Row], base: Row, judged: Row) -> List[str]:
    limit = find_limit(base, judged)
    if limit is None:
        second = f"What limits it is not known, since {judged.cell.engine} does not report where its time goes."
    else:
        second = f"What limits it is {limit}{_share(limit, judged)}: {_advise(analysis, rows, limit, judged)}."
    if judged.core_limited and limit != CORES:
        second = second[:-1] + "; the instances also share the cores of this machine, so this is not a scaling result."
    elif limit == CORES:
        second = second[:-1] + "; this is not a scaling result."
    device, rate = _per_device_hour(analysis, judged)
    third = f"One {device} trains {rate:,.0f} samples an hour"
    return [second, f"{third}{_against_others(analysis, judged)}."]


def _advise(analysis: Analysis, rows: Sequence[Row], limit: str, judged: Row) -> str:
    """Returns what to change, with what the study says that it would bring."""
    paying = [row for row in rows if judged.core_limited or stops_paying(analysis, [row]) is None]
    fastest = max(paying or rows, key=_rate)
    other = ""
    if fastest.cell.key != judged.cell.key:
        what = "fastest measured" if len(paying) == len(rows) else "fastest that pays"
        other = f"{cell_place(analysis.study, fastest.cell)}, the {what} ({_rate(fastest):,.0f} samples/s)"
    parts = judged.parts
    if limit == CORES or parts is None:
        return f"measure with --hosts on machines of their own, or use {other or 'fewer instances'} here"
    if limit == COMPUTE:
        if analysis.study.mode == BATCH:
            return f"take {other}, if memory lasts" if other else "larger batches, or more replicas, may help"
        return "more replicas help, and so does a larger --micro_batch_size while memory lasts"
    if limit == COLLECTIVE:
        doubled_s = 2 * (parts.compute_s + parts.input_wait_s) + parts.collective_s + parts.waiting_s
        doubled_s += parts.optimizer_s + parts.overhead_s
        cell = judged.cell
        flag = f"--gradient_accumulation={2 * cell.gradient_accumulation}"
        if analysis.study.mode == STRONG:
            flag = f"--global_batch_size={2 * cell.global_batch_size}"
        more = _percent(2 * parts.total_s / doubled_s - 1)
        advice = f"{flag} would reduce gradients half as often, for about {more} more samples/s"
        return f"{advice}, or use {other}" if other else advice
    change, saved_s = {
        INPUT: ("try --eight_bit_io, or more --instances, each of which feeds fewer replicas", parts.input_wait_s),
        STRAGGLER: (
            "see in the run's exchange_times.json which instance is last, and give it the same cores and data as the "
            "others",
            parts.waiting_s,
        ),
        OVERHEAD: ("raise --device_iterations, so that more updates are made between two calls", parts.overhead_s),
    }[limit]
    left_s = parts.total_s - saved_s
    return f"{change}, for at most {_percent(saved_s / left_s)} more samples/s" if left_s > 0 else change


def _by_limit(parts: UpdateParts, *, core_limited: bool) -> Dict[str, float]:
    # Where instances share cores, the slow passes, and the waiting for those whose turn came last, are of the cores.
    found = {
        INPUT: parts.input_wait_s,
        COLLECTIVE: parts.collective_s,
        OVERHEAD: parts.overhead_s + parts.optimizer_s,
    }
    if core_limited:
        return {CORES: parts.compute_s + parts.waiting_s, **found}
    return {COMPUTE: parts.compute_s, STRAGGLER: parts.waiting_s, **found}


def _ideal_share(base: Row, row: Row) -> float:
    """Returns what an update of the row would take of the baseline's, if it scaled ideally."""
    samples = row.cell.global_batch_size / row.cell.replicas
    before = base.cell.global_batch_size / base.cell.replicas
    return samples / before if before else 1.0


def _share(limit: str, row: Row) -> str:
    if row.parts is None or not row.parts.total_s:
        return ""
    seconds = _by_limit(row.parts, core_limited=limit == CORES).get(limit, 0.0)
    what = "with the waiting for them, " if limit == CORES else ""
    return f" ({what}{_percent(seconds / row.parts.total_s)} of an update)"


def _against_others(analysis: Analysis, judged: Row) -> str:
    """Returns how many times the rate of the other engines at the same size is reached."""
    others: List[Tuple[str, float]] = [
        (row.cell.engine, _rate(judged) / _rate(row))
        for row in analysis.rows
        if row.cell.engine != judged.cell.engine and row.cell.size == judged.cell.size and _rate(row) > 0
    ]
    times = [f"{ratio:.2f} times {engine}" for engine, ratio in others]
    return f", at the rate of {' and '.join(times)}" if times else ""


def _rows_to_judge(analysis: Analysis) -> List[Row]:
    """Returns the measured rows of our own engine, or of the first that has any, the smallest size first."""
    done = [row for row in analysis.rows if row.samples_per_s is not None]
    engines = sorted(
        {row.cell.engine for row in done}, key=lambda name: (name != OURS, not name.startswith(OURS), name)
    )
    own = [row for row in done if row.cell.engine == engines[0]] if engines else []
    return sorted(own, key=lambda row: (row.cell.size, row.cell.replicas, row.cell.instances))


def _grade(efficiency: float, limits: Thresholds) -> str:
    if efficiency >= limits.good:
        return "good"
    return "as expected" if efficiency >= limits.expected else "less than expected"


def _rate(row: Row) -> float:
    return row.samples_per_s.median if row.samples_per_s is not None else 0.0


def _layout(row: Row) -> str:
    replicas = max(row.cell.replicas // row.cell.instances, 1)
    return f"{cli.count(row.cell.instances, 'instance')} x {cli.count(replicas, 'replica')}"


def _per_device_hour(analysis: Analysis, row: Row) -> Tuple[str, float]:
    """Returns what trains, and its samples an hour: an IPU, an emulated one, or a process of another engine."""
    rate = 3600 * _rate(row) / row.cell.replicas
    sdk = analysis.study.facts.get("sdk")
    if not row.cell.engine.startswith(OURS):
        return f"process of {row.cell.engine}", rate
    if sdk is None:  # a study of an earlier version does not say what it ran on
        return "replica", rate
    stages = train_flags.parse([*analysis.study.words, *row.cell.words]).requested_stages or 1
    return "emulated IPU" if sdk == EMULATOR else "IPU", rate / topology.ipus_per_replica(stages)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
