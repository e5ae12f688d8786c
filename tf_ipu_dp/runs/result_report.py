"""The result of a run as a table. Pure: returns text."""

from __future__ import annotations

from typing import List, Mapping, Optional, Tuple

from tf_ipu_dp import cli
from tf_ipu_dp.runs.records import ExchangeSummary, RunResult, RunTimes, Scores, ValidationRecord


def render_result(result: RunResult, width: Optional[int], colour: bool = False) -> str:
    """Returns the table that ends a run, in a terminal's width. With `colour`, a verdict without advice is green."""
    rate = result.samples_per_s
    scores = result.scores
    rows = [
        ("Updates", f"{result.updates:,}", f"of {result.planned_updates:,}"),
        *_time_rows(result.times),
        ("Throughput", number(rate, 0), "samples/s"),
        (
            "Per replica",
            number(result.samples_per_s_per_replica, 1),
            f"samples/s, {cli.count(result.replicas, 'replica')}",
        ),
        ("IPU utilisation", number(result.utilisation_pct, 1), "%"),
    ]
    if result.exchanges:
        rows += _exchange_rows(result.exchanges)
    if scores:
        rows += [
            ("Loss", number(scores.loss, 4), f"on {scores.samples:,} validation samples"),
            *(
                (title, number(100 * share, 2), "%")
                for title, share in (("Accuracy", scores.top1), ("Top 5", scores.top5))
                if share is not None
            ),
            *((name, number(value, 4), "") for name, value in scores.metrics.items()),
        ]
    if result.best:
        best = result.best
        kept = f"validation {best.metric or 'loss'} after step {best.step:,}, kept in {best.checkpoint}"
        rows.append(("Best", number(best.value if best.metric else best.loss, 4), kept))
    title = cli.printable(f"{result.model} on {result.dataset}, in {result.run_dir}")
    sentences = [cli.printable(f"Stopped: {result.stopped.message}")] if result.stopped else []
    table = cli.render_table(("", "", ""), rows, width, right=(1,))
    last = "".join(f"{cli.wrap(sentence, width, indent='')}\n" for sentence in sentences)
    if result.is_finished:
        hue = "yellow" if result.verdict.flag else "green"
        last += cli.paint(cli.wrap(cli.printable(result.verdict.sentence), width, indent=""), hue, colour) + "\n"
    if result.stopped and result.stopped.resume:  # in a line of its own, to be copied
        last += cli.printable(f"Resume with: {result.stopped.resume}") + "\n"
    return f"\n{cli.wrap(title, width)}\n\n{table}\n{last}"


def render_exchanges(exchanges: ExchangeSummary) -> str:
    """Returns the exchanges of a run in a sentence."""
    compared = "" if exchanges.compared == exchanges.exchanges else f", of which {exchanges.compared:,} were compared"
    return (
        f"Exchanges of gradients: {exchanges.exchanges:,}{compared}; median {_milliseconds(exchanges.p50_s)} ms, p99 "
        f"{_milliseconds(exchanges.p99_s)} ms, longest {_milliseconds(exchanges.max_s)} ms. Instance "
        f"{exchanges.last_instance} was last in {exchanges.last_pct:.0f} % of them; in all, the others waited "
        f"{_seconds(exchanges.waited_s)} s for the last."
    )


def render_scores(scores: Scores) -> str:
    """Returns a validation's results in a line."""
    return _scores_line(scores.loss, scores.top1, scores.top5, scores.samples, scores.metrics)


def render_validation(record: ValidationRecord) -> str:
    """Returns a validation's record in a line."""
    return _scores_line(record.loss, record.accuracy, record.top5, record.samples, record.metrics)


def _scores_line(
    loss: Optional[float],
    top1: Optional[float],
    top5: Optional[float],
    samples: Optional[int],
    metrics: Mapping[str, Optional[float]],
) -> str:
    first, fifth = (number(None if share is None else 100 * share, 2) for share in (top1, top5))
    count = f"  ({samples:,} samples)" if samples is not None else ""
    shares = "" if top1 is None and metrics else f"  accuracy {first} %  top 5 {fifth} %"
    others = "".join(f"  {name} {number(value, 4)}" for name, value in metrics.items())
    return f"loss {number(loss, 4)}{shares}{others}{count}"


def _time_rows(times: RunTimes) -> List[Tuple[str, str, str]]:
    """Returns where the time went: start-up, compiling, training, evaluation, export and other sum to the total."""
    rows = [
        ("Start-up", _seconds(times.startup_s), "s, imports, IPUs, data and model"),
        ("Compiling", _seconds(times.compile_s), "s, with the first execution"),
        ("Training", _seconds(times.training_s), "s, of which"),
        ("  input wait", _seconds(times.input_wait_s), "s"),
    ]
    if times.collective_s is not None:
        rows.append(("  collectives", _seconds(times.collective_s), "s, with waiting for other instances"))
    return [
        *rows,
        ("  between", _seconds(times.between_s), "s, between executions"),
        ("  saving", _seconds(times.bookkeeping_s), "s, logging and checkpoints"),
        ("Evaluation", _seconds(times.evaluation_s), "s"),
        *([] if times.export_s is None else [("Export", _seconds(times.export_s), "s")]),
        ("Other", _seconds(times.other_s), "s"),
        ("Total", _seconds(times.total_s), "s"),
    ]


def _exchange_rows(exchanges: ExchangeSummary) -> List[Tuple[str, str, str]]:
    rest = f"p99 {_milliseconds(exchanges.p99_s)} ms, longest {_milliseconds(exchanges.max_s)} ms"
    return [
        ("Exchange", _milliseconds(exchanges.p50_s), f"ms, median of {exchanges.compared:,}; {rest}"),
        ("Last to arrive", f"{exchanges.last_pct:.0f}", f"% of the exchanges: instance {exchanges.last_instance}"),
    ]


def _milliseconds(seconds: float) -> str:
    return number(1000 * seconds, 1)


def number(value: Optional[float], digits: int) -> str:
    """Returns a number as text, or a dash for None, which means not reported."""
    return "-" if value is None else f"{value:,.{digits}f}"


def _seconds(value: Optional[float]) -> str:
    return number(value, 1)
