from __future__ import annotations

import dataclasses
import re

from sample_records import TIMES, make_result, make_validation

from tf_ipu_dp.runs import records, result_report


def test_the_result_reads_like_this():
    assert result_report.render_result(make_result(), 100) == (
        "\n"
        "cnn on fashion_mini, in runs/a\n"
        "\n"
        "Updates             160  of 160\n"
        "Start-up            9.5  s, imports, IPUs, data and model\n"
        "Compiling          20.0  s, with the first execution\n"
        "Training           62.0  s, of which\n"
        "  input wait        3.0  s\n"
        "  between           1.0  s, between executions\n"
        "  saving            1.0  s, logging and checkpoints\n"
        "Evaluation          8.0  s\n"
        "Other               0.5  s\n"
        "Total             100.0  s\n"
        "Throughput        1,000  samples/s\n"
        "Per replica       125.0  samples/s, 8 replicas\n"
        "IPU utilisation    91.9  %\n"
        "Loss             0.3428  on 2,048 validation samples\n"
        "Accuracy          87.65  %\n"
        "Top 5             99.85  %\n"
        "\n"
        "No bottleneck: the device was busy 92 % of training.\n"
    )


def test_a_run_of_several_instances_shows_its_exchanges():
    exchanges = records.ExchangeSummary(2000, 2000, 0.0041, 0.0123, 0.0451, 12.34, 2, 84.2)
    times = dataclasses.replace(TIMES, collective_s=4.25)
    text = result_report.render_result(make_result(exchanges=exchanges, times=times), 100)
    assert "  collectives       4.2  s, with waiting for other instances\n" in text
    assert (
        "IPU utilisation    91.9  %\n"
        "Exchange            4.1  ms, median of 2,000; p99 12.3 ms, longest 45.1 ms\n"
        "Last to arrive       84  % of the exchanges: instance 2\n"
        "Loss             0.3428  on 2,048 validation samples\n"
    ) in text
    assert result_report.render_exchanges(exchanges) == (
        "Exchanges of gradients: 2,000; median 4.1 ms, p99 12.3 ms, longest 45.1 ms. Instance 2 was last in 84 % of "
        "them; in all, the others waited 12.3 s for the last."
    )
    some = dataclasses.replace(exchanges, compared=1024)
    assert "2,000, of which 1,024 were compared; median" in result_report.render_exchanges(some)


def test_what_is_not_reported_is_a_dash():
    unknown = make_result(
        utilisation_pct=None, scores=None, samples_per_s=None, times=dataclasses.replace(TIMES, input_wait_s=None)
    )
    text = result_report.render_result(unknown, 100)
    for row in ("  input wait", "IPU utilisation", "Throughput", "Per replica"):
        assert re.search(rf"^{row} +-  ", text, re.MULTILINE), row


def test_a_run_that_was_interrupted_says_how_to_resume_and_early_stopping_has_a_verdict_too():
    signal = records.StopReason(records.StopReason.SIGNAL, True, "SIGTERM after step 40. Resume with --run_dir=a.")
    text = result_report.render_result(make_result(stopped=signal), 100)
    assert text.endswith("\nStopped: SIGTERM after step 40. Resume with --run_dir=a.\n")
    early = records.StopReason(records.StopReason.EARLY_STOPPING, False, "Validation loss has not improved.")
    text = result_report.render_result(make_result(stopped=early), 100)
    assert text.endswith(f"\nStopped: {early.message}\n{make_result().verdict.sentence}\n")


def test_a_validation_is_a_line():
    record = dataclasses.replace(make_validation(3), samples=2048)
    line = "loss 0.5000  accuracy 75.00 %  top 5 99.00 %  (2,048 samples)"
    assert result_report.render_validation(record) == line
    assert result_report.render_scores(records.Scores(2048, 0.5, 0.75, 0.99)) == line


def test_the_verdict_is_green_if_there_is_nothing_to_change_and_else_yellow():
    plain = result_report.render_result(make_result(), 100)
    sentence = "No bottleneck: the device was busy 92 % of training."
    assert result_report.render_result(make_result(), 100, colour=True) == plain.replace(
        sentence, f"\033[32m{sentence}\033[0m"
    )
    slow = records.Verdict("input", "The bottleneck is the input.", 40.0, flag="prefetch")
    assert "\033[33mThe bottleneck is the input.\033[0m\n" in result_report.render_result(
        make_result(verdict=slow), 100, colour=True
    )
