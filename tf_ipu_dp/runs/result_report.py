"""The result of a run as a table."""

from __future__ import annotations

import textwrap
from typing import Optional

from tf_ipu_dp import cli
from tf_ipu_dp.runs.records import RunResult


def render_result(result: RunResult, width: int) -> str:
    """Returns the table that ends a run."""
    times = result.times
    training = None if times.input_wait_s is None else times.executing_s - times.input_wait_s
    rate = result.samples_per_s
    scores = result.scores
    rows = [
        ("Updates", f"{result.updates:,}", f"of {result.planned_updates:,}"),
        ("Compiling", _seconds(times.compile_s), "s, with the first execution"),
        ("Training", _seconds(times.executing_s if training is None else training), "s"),
        ("Input wait", _seconds(times.input_wait_s), "s"),
        ("Evaluation", _seconds(times.evaluation_s), "s"),
        ("Other", _seconds(times.other_s), "s"),
        ("Total", _seconds(times.total_s), "s"),
        ("Throughput", _number(rate, 0), "samples/s"),
        (
            "Per replica",
            _number(rate and rate / result.replicas, 1),
            f"samples/s, {cli.count(result.replicas, 'replica')}",
        ),
        ("IPU utilisation", _number(result.utilisation_pct, 1), "%"),
    ]
    if scores:
        rows += [
            ("Loss", _number(scores.loss, 4), f"on {scores.samples:,} validation samples"),
            ("Accuracy", _number(100 * scores.top1, 2), "%"),
            ("Top 5", _number(100 * scores.top5, 2), "%"),
        ]
    title = f"{result.model} on {result.dataset}, in {result.run_dir}"
    ending = f"Stopped: {result.stopped}" if result.stopped else result.verdict
    table = cli.render_table(("", "", ""), rows, width, right=(1,))
    # Paths are to be copied, so that words stay whole.
    last = textwrap.fill(ending, max(width, cli.LEAST_WIDTH), break_long_words=False, break_on_hyphens=False)
    return f"\n{title}\n\n{table}\n{last}\n"


def _number(value: Optional[float], digits: int) -> str:
    """None means that it is not reported."""
    return "-" if value is None else f"{value:,.{digits}f}"


def _seconds(value: Optional[float]) -> str:
    return _number(value, 1)
