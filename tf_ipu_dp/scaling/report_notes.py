"""The sentences below the tables of a study's report. Pure."""

from __future__ import annotations

from typing import List, Sequence

from tf_ipu_dp import cli
from tf_ipu_dp.monitoring.text_layout import printable
from tf_ipu_dp.scaling import statistics
from tf_ipu_dp.scaling.analysis import Analysis, Row, cell_place
from tf_ipu_dp.scaling.records import BATCH, THIS_CPU

CORE_MARK = "*"
GOOD_ERROR = 0.1
OTHERS = 0.05  # of the cores used by others: more is said
CLOSES = 0.03  # the parts of an update add up to its time within this share


def notes(analysis: Analysis) -> List[str]:
    """Returns the sentences that a reader of the first table needs."""
    study, rows = analysis.study, analysis.rows
    done = [row for row in rows if row.is_done]
    found = []
    if analysis.baseline and study.mode == BATCH:
        found.append(f"Efficiency: the rate over {analysis.baseline}.")
    elif analysis.baseline:
        found.append(
            f"Baseline of speed-up and efficiency: {analysis.baseline}. Efficiency is the speed-up over the ratio of "
            "replicas."
        )
    if done:
        found.append(interval_note(done))
    limited = [row for row in rows if row.core_limited]
    if limited:
        cores = study.facts.get("cores", "")
        found.append(
            f"{CORE_MARK} Limited by the {f'{cores} ' if cores.isdigit() else ''}cores of this machine, which the "
            "processes share: no statement about scaling on machines of their own."
        )
    disturbed = [row.others_busy for row in done if row.others_busy is not None and row.others_busy > OTHERS]
    if disturbed:
        found.append(
            f"Other processes used up to {100 * max(disturbed):.0f} % of this machine's cores during "
            f"{cli.count(len(disturbed), 'cell')}: measured times are longer than on an idle machine, and predicted "
            "ones too if they were calibrated beside them."
        )
    found += [knee_sentence(analysis, knee) for knee in analysis.knees]
    for row in done:
        if row.failures:
            lost = cli.count(study.repeats - row.repeats, "repeat is", "repeats are")
            found.append(f"{cell_name(analysis, row)}: {lost} missing. {printable(' '.join(row.failures))}")
    return found


def interval_note(done: Sequence[Row]) -> str:
    """Returns what an interval is, of so many repeats."""
    repeats = min(row.repeats for row in done)
    if repeats >= statistics.MIN_REPEATS:
        return (
            "Median of the repeats, with the interval of its order statistics, which holds the true median with 95 %."
        )
    if repeats == 1:
        return f"One repeat has no interval. 95 % need {statistics.MIN_REPEATS} repeats."
    level = 100 * min(row.samples_per_s.level for row in done if row.samples_per_s is not None)
    return (
        f"Median and range of the repeats. The range of {repeats} holds the true median with {level:.0f} %; "
        f"95 % need {statistics.MIN_REPEATS} repeats."
    )


def knee_sentence(analysis: Analysis, knee: statistics.Knee) -> str:
    """Returns where a larger batch stops paying."""
    sizes = [row.cell.size for row in analysis.rows if row.is_done and row.cell.engine == knee.engine]
    if knee.size == max(sizes):
        return f"{knee.engine}: the rate still rises at the largest batch, {knee.size:,}. Try larger ones for the knee."
    return (
        f"{knee.engine}: the knee is at batch {knee.size:,}, the smallest with at least {100 * knee.share:.0f} % of "
        f"the best rate (batch {knee.best_size:,})."
    )


def part_notes(analysis: Analysis) -> List[str]:
    """Returns how well the parts add up to the measured time."""
    errors = [(abs(row.parts_error), row) for row in analysis.rows if row.parts_error is not None]
    found = [
        "Mean of the instances, in the repeat with the median rate. Waiting: for the last instance to arrive. "
        "Overhead: between executions and between epochs."
    ]
    if errors:
        largest, row = max(errors, key=lambda each: each[0])
        held = "within" if largest <= CLOSES else "not within"
        found.append(
            f"The parts add up to the measured time of an update {held} {100 * CLOSES:.0f} %: the largest difference "
            f"is {100 * largest:.1f} % ({cell_name(analysis, row)})."
        )
    return found


def score_sentence(analysis: Analysis) -> str:
    """Returns how far the predictions were off, over all cells."""
    errors = [(abs(row.error), row) for row in analysis.rows if row.error is not None]
    largest, worst = max(errors, key=lambda each: each[0])
    good = sum(error <= GOOD_ERROR for error, _ in errors)
    return (
        f"Predicted before it was measured, for {cli.count(len(errors), 'cell')}: mean error "
        f"{100 * sum(error for error, _ in errors) / len(errors):.1f} %, largest {100 * largest:.1f} % "
        f"({cell_name(analysis, worst)}); {good} of {len(errors)} within {100 * GOOD_ERROR:.0f} %. "
        "Positive: predicted longer than measured."
    )


def accuracy_notes(analysis: Analysis) -> List[str]:
    """Returns what the factors of a time to accuracy are."""
    return [
        "Hardware: efficiency of the samples/s. Statistical: samples that the baseline needed over those needed here. "
        f"Overhead: the rest, as first epoch, validations and checkpoints. Baseline: {analysis.baseline}."
    ]


def extrapolation_notes(analysis: Analysis) -> List[str]:
    """Returns what a reader of extrapolations must know."""
    found = ["Interval: the band of the prediction."]
    if any(each.compute == THIS_CPU for each in analysis.study.extrapolations):
        found.append(
            "The compute is that of this machine's CPU and not of an IPU, which computes faster: there the same "
            "exchange is a larger share of an update, and the efficiency lower. Give the device's own with "
            "--compute_ms."
        )
    return found


def cell_name(analysis: Analysis, row: Row) -> str:
    """Returns a cell in words: `ddp at 4 instances`."""
    return f"{row.cell.engine} at {cell_place(analysis.study, row.cell)}"
