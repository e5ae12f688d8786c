"""The exchanges of gradients of a training run, in a report: their histogram, beside a prediction, and who was last.

Pure, except that `draw` draws on axes of matplotlib.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Dict, List, Optional, Tuple

import numpy as np

from tf_ipu_dp import cli
from tf_ipu_dp.collectives import statistics
from tf_ipu_dp.collectives.quantities import render_seconds
from tf_ipu_dp.collectives.results import Result
from tf_ipu_dp.monitoring import text_layout
from tf_ipu_dp.monitoring.drawings import INK, PALETTE
from tf_ipu_dp.monitoring.text_layout import BOLD, PLAIN, DisplayOptions, Line, printable
from tf_ipu_dp.runs.exchange_times import ExchangeTimes

_MAX_BAR = 40
_LEAST_EXPONENT, _LAST_EXPONENT = -20, 11  # of the record's buckets
_COLOUR, _PREDICTED_COLOUR = "34", "31"


@dataclasses.dataclass(frozen=True, eq=False)
class RunExchanges:
    """The exchanges of one run, with a simulation of the same job where there is one: the first series of a result."""

    name: str
    times: ExchangeTimes
    prediction: Optional[Result] = None


@dataclasses.dataclass(frozen=True)
class Bar:
    """The share of exchanges in one bucket of times, measured and predicted."""

    least_s: float
    below_s: float
    measured: float
    predicted: Optional[float]


def make_bars(run: RunExchanges) -> List[Bar]:
    """Returns a bar for each bucket from the shortest to the longest time, empty ones between them included."""
    counts = {_exponent(bucket.least_s): bucket.count for bucket in run.times.seconds.buckets if bucket.count > 0}
    total = sum(counts.values())
    predicted: Dict[int, float] = {}
    if run.prediction is not None:
        exponents = [_exponent(float(each)) for each in run.prediction.series[0].seconds]
        predicted = {each: exponents.count(each) / len(exponents) for each in set(exponents)}
    every = [*counts, *predicted]
    if not every:
        return []
    return [
        Bar(
            2.0**exponent,
            2.0 ** (exponent + 1),
            counts.get(exponent, 0) / total if total else 0.0,
            predicted.get(exponent, 0.0) if run.prediction else None,
        )
        for exponent in range(min(every), max(every) + 1)
    ]


def sentences(run: RunExchanges) -> List[str]:
    """Returns what the histogram says: percentiles, prediction, and which instance was last most often."""
    times = run.times.seconds
    p50, p99, longest = times.p50_s, times.p99_s, times.max_s
    if p50 is None or p99 is None or longest is None:
        return [f"{cli.count(run.times.exchanges, 'exchange')}, none of which was compared between instances."]
    found = [
        f"{cli.count(run.times.exchanges, 'exchange')}: p50 {render_seconds(p50)}, p99 {render_seconds(p99)}, "
        f"max {render_seconds(longest)} (p50 and p99 are estimated from the buckets)."
    ]
    if run.prediction is not None:
        summary = statistics.summarise(run.prediction.series[0])
        tail = "" if summary.p99_s is None else f", p99 {render_seconds(summary.p99_s)}"
        title = printable(run.prediction.description.title)
        found.append(f"Predicted ({title}): p50 {render_seconds(summary.p50_s)}{tail}.")
        found += map(printable, run.prediction.description.notes)
    last = run.times.most_often_last
    if last is not None and len(run.times.arrivals) > 1:
        share = run.times.last_pct(last.instance) or 0.0
        waited = render_seconds(last.late.p50_s or 0.0)
        found.append(
            f"Instance {last.instance} was last in {share:.0f} % of {cli.count(run.times.compared, 'exchange')}; "
            f"the others then waited {waited} for it (p50). An equal share is {100 / len(run.times.arrivals):.2g} %."
        )
    return found


def last_shares(run: RunExchanges) -> List[Tuple[int, float]]:
    """Returns for each instance the percentage of exchanges in which it was last."""
    return [(each.instance, run.times.last_pct(each.instance) or 0.0) for each in run.times.arrivals]


def render(run: RunExchanges, options: DisplayOptions) -> List[Line]:
    """Returns the histogram as lines of bars, and what it says below it."""
    bars = make_bars(run)
    lines: List[Line] = [[("Exchanges of gradients", BOLD), (f": {printable(run.name)}", PLAIN)]]
    if run.prediction is not None:
        lines.append(
            [_bar(1, options, ""), (" measured  ", PLAIN), _bar(1, options, "predicted"), (" predicted", PLAIN)]
        )
    labels = [(render_seconds(bar.least_s), render_seconds(bar.below_s)) for bar in bars]
    widths = [max((len(pair[side]) for pair in labels), default=0) for side in (0, 1)]
    largest = max((max(bar.measured, bar.predicted or 0.0) for bar in bars), default=1.0)
    room = min(_MAX_BAR, max(10, (options.width or 80) - sum(widths) - 14))
    for bar, (least, below) in zip(bars, labels):
        label = f"{least:>{widths[0]}} to {below:>{widths[1]}}  "
        lines.append([(label, PLAIN), *_bar_and_share(bar.measured, largest, room, options, "")])
        if bar.predicted is not None:
            blank = (" " * len(label), PLAIN)
            lines.append([blank, *_bar_and_share(bar.predicted, largest, room, options, "predicted")])
    for sentence in sentences(run):
        lines += text_layout.wrap([(sentence, PLAIN)], options.width)
    return lines


def draw(plot: Any, name: str, run: RunExchanges) -> Dict[str, List[str]]:
    """Draws the histogram with a step line for the prediction, and returns the texts of its bars."""
    bars = make_bars(run)
    places = np.arange(len(bars))
    for place, bar in enumerate(bars):
        plot.bar(
            place + 0.5, 100 * bar.measured, width=0.92, color=PALETTE[0], gid=f"{name}-bar{place}",
            label="measured" if not place else None,
        )  # fmt: skip
    if run.prediction is not None:
        heights = [100 * (bar.predicted or 0.0) for bar in bars]
        plot.step(
            [*places, len(bars)], [*heights, heights[-1]], where="post", color=PALETTE[1], linewidth=1.6,
            linestyle=(0, (4, 2)), label="predicted",
        )  # fmt: skip
        plot.legend(fontsize=8, frameon=False)
    step = -(-(len(bars) + 1) // 8)
    edges = [bar.least_s for bar in bars] + [bar.below_s for bar in bars[-1:]]
    plot.set_xticks(range(0, len(edges), step))
    plot.set_xticklabels([render_seconds(edge) for edge in edges[::step]])
    plot.set_xlim(0, max(len(bars), 1))
    plot.set_ylabel("% of exchanges")
    plot.set_xlabel("time of an exchange (each bucket twice as long as the one before)")
    plot.grid(axis="y", alpha=0.6, linewidth=0.5)
    plot.set_axisbelow(True)
    plot.tick_params(colors=INK)
    return {f"{name}-bar{place}": [_bar_text(bar)] for place, bar in enumerate(bars)}


def _exponent(seconds: float) -> int:
    """Returns the bucket of a time as a power of two; what a damaged file may have otherwise is brought into range."""
    return min(max(math.frexp(seconds)[1] - 1, _LEAST_EXPONENT), _LAST_EXPONENT) if seconds > 0 else _LEAST_EXPONENT


def _bar_text(bar: Bar) -> str:
    text = f"{render_seconds(bar.least_s)} to {render_seconds(bar.below_s)}: {100 * bar.measured:.2g} %"
    return text if bar.predicted is None else f"{text}, predicted {100 * bar.predicted:.2g} %"


def _bar_and_share(share: float, largest: float, room: int, options: DisplayOptions, kind: str) -> Line:
    length = round(room * share / largest) if largest else 0
    # A bucket that is not empty has a bar, however short.
    length = max(length, 1 if share else 0)
    return [_bar(length, options, kind), (f" {100 * share:.1f} %", PLAIN)]


def _bar(length: int, options: DisplayOptions, kind: str) -> Tuple[str, str]:
    marks = ("█", "▒") if options.unicode else ("#", "=")
    return (marks[1] if kind else marks[0]) * length, _PREDICTED_COLOUR if kind else _COLOUR
