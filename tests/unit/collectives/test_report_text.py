"""Reports as text: the whole table, plots that fit a terminal, and plain ASCII."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import sample_results
from hypothesis import given
from hypothesis import strategies as st

from tf_ipu_dp.collectives import outliers, report_content, report_text, results, terminal_plots
from tf_ipu_dp.monitoring import text_layout
from tf_ipu_dp.monitoring.text_layout import DisplayOptions

PLAIN = DisplayOptions()


def _content(*seconds, **facts):
    made = [
        results.Series(results.SeriesFacts(4, 971_048, 1.25e8, **facts), np.array(each, dtype=float))
        for each in seconds
    ]
    about = results.Description(results.MEASURED, "small", "engine", "ring", tuple(each.facts for each in made))
    return report_content.make_content([results.Result(about, tuple(made))])


def _before_plots(text):
    return text[: text.index("Share of trials")]


def test_the_whole_table_of_a_small_result():
    text = report_text.render(_content(np.linspace(0.010, 0.0298, 100), [1.0], wrong_sums=1), PLAIN)
    assert _before_plots(text) == (
        "measured: small\n"
        "engine; ring\n"
        "\n"
        "Ranks      Bytes  Trials  min ms    p50   p90   p99  p99.9    max   mean  algbw MB/s  busbw  Ideal %  Wrong\n"
        "    4  971,048 B     100    10.0   19.8  27.8  29.6      -   29.8   19.9        48.6   72.8     58.3      1\n"
        "    4  971,048 B       1   1,000  1,000     -     -      -  1,000  1,000       0.971   1.46      1.2      1\n"
        "A dash instead of p90, p99 or p99.9: too few trials, it would be the slowest one (p90 needs 10 trials, p99 "
        "100, p99.9 1,000).\n"
        "Ideal %: the time that the slowest link alone would take, over the time it took.\n"
        "2 sums were wrong: these times are not those of an all-reduce.\n"
        "\n"
    )


def test_a_narrow_terminal_gets_all_columns_in_several_tables(measured, simulated):
    content = report_content.make_content([measured, simulated])
    text = report_text.render(content, DisplayOptions(width=80))
    assert max(map(len, text.splitlines())) <= 80
    for title, _ in report_text.report_columns(content):
        assert title in text
    assert "Outside: Horovod's own time" in text
    assert "~" not in text, "nothing is cut"


@pytest.mark.parametrize("width", [40, 60, 80, 120, None])
@pytest.mark.parametrize("unicode", [True, False])
@pytest.mark.parametrize("colour", [True, False])
def test_every_line_fits_and_ascii_is_ascii(measured, simulated, width, unicode, colour):
    content = report_content.make_content([measured, simulated])
    text = report_text.render(content, DisplayOptions(width, colour=colour, unicode=unicode))
    assert unicode or text.isascii()
    assert ("\x1b" in text) == colour
    if width and not colour:
        assert max(map(text_layout.cell_width, text.splitlines())) <= width


def test_outliers_are_marked_by_cause_and_counted(measured):
    text = report_text.render(report_content.make_content([measured]), DisplayOptions(80))
    assert "T retransmission timeout   P tail-loss probe   F fast retransmission" in text
    assert "L late rank   ? other" in text
    counted = "10 retransmission timeout, 10 tail-loss probe, 1 fast retransmission, 1 late rank, 1 other."
    assert f"23 outliers (2.3 %, above 15.2 ms): {counted}" in " ".join(text.split())


def test_two_curves_without_colours_have_marks_of_their_own(measured, simulated):
    content = report_content.make_content([measured, simulated])
    text = report_text.render(content, DisplayOptions(80, unicode=False))
    plot = text[text.index("Share of trials") : text.index("Time of each")]
    assert "o A measured, 4 ranks, 971,048 B: p50 12.6 ms, p99 213 ms" in plot
    assert "x B simulated, 4 ranks, 971,048 B: p50 11.9 ms, p99 12" in plot
    assert plot.count("x") > 15 and plot.count("o") > 60


def test_measured_against_predicted_says_how_far_it_is_off(measured, simulated):
    text = report_text.render(report_content.make_content([measured, simulated]), PLAIN)
    assert "Mean error 5.6 %, largest 5.6 %, of 1 pair. Positive: predicted longer than measured.\n" in text


def test_several_results_show_the_facts_in_which_they_differ(measured):
    other = results.Description(
        results.MEASURED, "other", "e", "ring", measured.description.series, facts={"cores": "4", "hosts": "4"}
    )
    content = report_content.make_content([measured, results.Result(other, measured.series)])
    assert report_text.fact_lines(content) == ["cores 2", "cores 4; hosts 4"]
    content = report_content.make_content([measured, measured])
    assert report_text.fact_lines(content) == ["", ""]
    assert report_text.fact_lines(report_content.make_content([measured])) == ["cores 2"]


def test_results_of_other_sizes_are_no_pairs(measured):
    assert report_content.make_content([measured, sample_results.make_simulated(ranks=8)]).pairs == ()


def test_who_was_last_is_drawn_and_said(measured):
    text = report_text.render(report_content.make_content([measured]), DisplayOptions(80))
    assert (
        "A rank was late, by more than 1.26 ms, in 335 of 1,000 trials. Rank 2 was last most often: in 100 % of these; "
        "an equal share is 25 %."
    ) in " ".join(text.split())
    assert sum(line.startswith("rank ") for line in text.splitlines()) == 4


def test_where_nobody_was_late_a_sentence_says_so_and_nothing_is_drawn(measured):
    series = dataclasses.replace(measured.series[0], late_s=np.zeros((1000, 4)))
    text = report_text.render(
        report_content.make_content([results.Result(measured.description, (series,))]), DisplayOptions(80)
    )
    assert "Nobody was late: in all of 1,000 trials the ranks began within 1.26 ms." in " ".join(text.split())
    assert not any(line.startswith("rank ") for line in text.splitlines())


def test_results_of_different_fabrics_are_named_by_them(measured):
    other = dataclasses.replace(measured.description, fabric="lossy")
    content = report_content.make_content([measured, results.Result(other, measured.series)])
    names = [entry.name for entry in content.entries]
    assert names == ["A measured, 4 ranks, 971,048 B, r4", "B measured, 4 ranks, 971,048 B, lossy"]


def test_untrusted_text_cannot_move_the_cursor(measured):
    about = results.Description(results.MEASURED, "evil\x1b[2J", "e\n", "ring", measured.description.series)
    text = report_text.render(report_content.make_content([results.Result(about, measured.series)]), PLAIN)
    assert "\x1b" not in text and "evil\\x1b[2J" in text


def test_many_ranks_are_added_up_in_groups():
    share = np.full(64, 1 / 64)
    found = outliers.LastShares(10, 10, 1e-3, share, np.array([0, 10]), share[:, None])
    names, by_group, shares = report_text.group_ranks(found, 16)
    assert names[:2] == ["0-3", "4-7"] and len(names) == 16
    assert by_group.shape == (16, 1) and shares.sum() == pytest.approx(1)


def test_thirty_series_are_all_in_the_table_and_some_in_the_plot():
    content = report_content.make_content(
        [sample_results.make_simulated(sizes=[4096 << n for n in range(15)] * 2, trials=20)]
    )
    text = report_text.render(content, DisplayOptions(80))
    assert "8 of 30 series; choose with --ranks and --bytes" in text
    assert text.count("64 MiB") >= 2 * 2, "two rows in each of two tables"


@given(st.lists(st.floats(1e-7, 1e3), min_size=1, max_size=50), st.integers(3, 12))
def test_a_time_axis_includes_all_times_and_has_few_different_labels(times, max_ticks):
    axis = terminal_plots.time_axis(np.array(times), max_ticks)
    assert axis.low <= min(times) and max(times) <= axis.high
    assert all(0 <= place <= 1 for place in axis.place(times))
    assert 1 <= len(axis.ticks) <= max_ticks
    labels = [label for _, label in axis.ticks]
    assert len(set(labels)) == len(labels)


@given(st.lists(st.floats(1e-6, 10), min_size=1, max_size=300), st.integers(2, 50))
def test_a_thinned_cdf_has_points_of_the_whole_one_and_the_whole_tail(times, points):
    x, y = report_content.cdf(np.array(times), points)
    assert len(x) <= max(points, 2)
    ordered = sorted(times)
    assert all(ordered[round(share * len(times)) - 1] == time for time, share in zip(x, y))
    tail = min(points // 2, len(times))
    assert x[len(x) - tail :].tolist() == ordered[len(times) - tail :]


@pytest.mark.parametrize(("size", "text"), [(971_048, "971,048 B"), (4 << 20, "4 MiB"), (1 << 30, "1 GiB"), (3, "3 B")])
def test_sizes_are_shown_to_the_byte(size, text):
    assert report_content.render_size(size) == text


def test_a_simulated_time_of_zero_can_be_drawn():
    text = report_text.render(_content([0.0, 0.0]), DisplayOptions(80))
    assert "Share of trials" in text
