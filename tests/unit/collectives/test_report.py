"""The report command: its files, its numbers, and what it refuses."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET

import numpy as np
import pytest
import sample_results
from html_pages import Page, check_self_contained

from tf_ipu_dp import cli
from tf_ipu_dp.collectives import charts, report, report_content, report_page, report_text, results
from tf_ipu_dp.collectives.run_exchanges import RunExchanges, make_bars
from tf_ipu_dp.monitoring import drawings, panels
from tf_ipu_dp.monitoring.text_layout import DisplayOptions
from tf_ipu_dp.runs import run_folder
from tf_ipu_dp.runs.exchange_times import Bucket, ExchangeTimes, Histogram


@pytest.fixture
def run_dir(tmp_path):
    """Returns the folder of a run of two instances, of which the second was last in 3 of 4 exchanges."""
    folder = tmp_path / "run"
    folder.mkdir()
    times = ExchangeTimes.of([[0.013, 0.014, 0.010, 0.3], [0.010, 0.011, 0.013, 0.25]])
    run_folder.RunFolder(folder).write_exchange_times(times)
    return str(folder)


def test_every_file_is_written_and_named(folders, tmp_path, capsys):
    names = ["a.png", "a.svg", "a.html", "a.csv", "a.JSON"]
    assert report.main([*folders, *(f"--out={tmp_path / name}" for name in names)]) == 0
    shown = capsys.readouterr()
    assert shown.err == "".join(f"report: wrote {tmp_path / name}\n" for name in names)
    assert shown.out.startswith("A  measured: R4 on <4> hosts\n")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert ET.fromstring((tmp_path / "a.svg").read_bytes()).tag.endswith("svg")
    assert json.loads((tmp_path / "a.JSON").read_text())["schema"] == 1


def test_the_same_results_give_the_same_bytes(measured):
    content = report_content.make_content([measured])

    def render():
        figure, _ = panels.make_figure(charts.make_panels(content), one_file=True)
        return drawings.render_figure(figure, "svg", "report"), report_page.render_page(content)

    assert render() == render()
    assert report.render_csv(content) == report.render_csv(content)


def test_the_page_is_well_formed_loads_nothing_and_escapes_what_it_shows(measured, simulated):
    text = report_page.render_page(report_content.make_content([measured, simulated]))
    check_self_contained(text)
    assert "<tr><td>cores</td><td>2</td></tr>" in text
    assert "R4 on &lt;4&gt; hosts" in text and "<4>" not in text
    assert drawings.INK not in text.split("</style>")[1], "colours are those of the page"


def test_the_page_has_values_under_the_pointer(measured, simulated):
    page = Page(report_page.render_page(report_content.make_content([measured, simulated])))
    titles = page.texts["title"]
    assert "A measured, 4 ranks, 971,048 B: p50 12.6 ms" in titles
    assert "trial 7: 52.6 ms, late rank 3" in titles
    assert "trial 5: 213 ms, retransmission timeout" in titles
    assert any(title.startswith("rank 2, trials 0 to 19: last in") for title in titles)
    assert any(title.startswith("4 ranks, 971,048 B: measured 12.6 ms, predicted 11.9 ms (-5.6 %)") for title in titles)


def test_a_text_of_the_user_cannot_become_markup(measured):
    about = results.Description(results.MEASURED, "<b>&", "<i>", "</svg>", measured.description.series, notes=("<u>",))
    series = results.Series(
        results.SeriesFacts(4, 971_048, label="</text><script>"),
        measured.series[0].seconds,
        late_s=measured.series[0].late_s,
    )
    text = report_page.render_page(report_content.make_content([results.Result(about, (series,))]))
    Page(text)
    assert not re.search(r"<script|<b>|<i>|<u>", text)


def test_pictures_depend_on_what_is_known(measured, simulated):
    def names(*found):
        return [panel.name for panel in charts.make_panels(report_content.make_content(found))]

    assert names(measured) == ["cdf", "delay0", "last0"]
    assert names(measured, simulated) == ["cdf", "delay0", "delay1", "last0", "pairs"]
    assert names(sample_results.make_simulated(ranks=65_536)) == ["cdf", "delay0"], "ranks are not known"
    by_ranks = [sample_results.make_simulated(ranks=ranks) for ranks in (2, 4, 8)]
    assert "by_ranks" in names(*by_ranks), "also where every number of ranks is a result of its own"
    assert "by_ranks" not in names(*by_ranks[:2], by_ranks[0]), "the same twice is no third point"
    sizes = [4096, 8192, 16384]
    assert names(sample_results.make_simulated(sizes=sizes)) == ["cdf", "by_size", "delay0", "delay1", "delay2"]


@pytest.mark.parametrize(
    ("ranks", "sizes", "trials"), [(1, (8,), 1), (65_536, (971_048,), 10_000), (4, range(8, 68, 2), 3)]
)
def test_one_trial_many_ranks_and_thirty_series_are_drawn(ranks, sizes, trials):
    made = sample_results.make_simulated(ranks=ranks, sizes=sizes, trials=trials)
    Page(report_page.render_page(report_content.make_content([made])))


def test_a_prediction_has_the_colour_of_its_measurement(measured, simulated):
    content = report_content.make_content([simulated, measured, sample_results.make_simulated(ranks=8)])
    first, second, third = charts.entry_colours(content.entries)
    assert first == second != third


def test_p50_and_p99_are_marked_on_the_cdf(measured):
    content = report_content.make_content([measured])
    figure, _ = panels.make_figure(charts.make_panels(content)[:1], one_file=True)
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert texts == ["p50 12.6 ms", "p99 213 ms"]
    assert figure.axes[0].get_xscale() == "log"


def test_csv_has_every_trial_with_its_cause(folders, tmp_path, capsys):
    assert report.main([*folders, "--format=csv"]) == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert len(rows) == 3000
    assert {row["result"] for row in rows} == {"A", "B"}
    assert [rows[n]["outlier"] for n in (4, 5, 7, 9)] == ["", "retransmission timeout", "late rank", "other"]
    assert float(rows[7]["rank3_late_s"]) == pytest.approx(0.039) and rows[1000]["rank3_late_s"] == ""


def test_json_has_the_numbers_at_full_precision(folders, measured, capsys):
    assert report.main([*folders, "--format=json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (series,) = found["results"][0]["series"]
    assert series["p50_s"] == pytest.approx(sorted(measured.series[0].seconds)[499], rel=1e-8)
    assert series["outliers"] == {
        "retransmission timeout": 10, "tail-loss probe": 10, "fast retransmission": 1, "late rank": 1, "other": 1,
    }  # fmt: skip
    predicted = found["results"][1]["series"][0]["p50_s"]
    assert found["pairs"][0]["error_pct"] == pytest.approx(100 * (predicted - series["p50_s"]) / series["p50_s"])
    assert found["runs"] == []


def test_series_are_chosen_by_ranks_and_bytes(tmp_path, capsys):
    results.write(sample_results.make_simulated(sizes=(4096, 8192)), tmp_path)
    report.main([str(tmp_path), "--bytes=8KiB", "--ranks=4", "--format=json"])
    (series,) = json.loads(capsys.readouterr().out)["results"][0]["series"]
    assert series["bytes"] == 8192


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "report needs the folder of a result or of a training run"),
        (["{}/none"], "none has no collective.json. Give a folder that measure or simulate wrote"),
        (["{}/a", "--out={}/a.pdf"], "a.pdf has an unknown file type. Use one of .png, .svg, .html, .csv, .json."),
        (["{}/a", "--out={}/no/a.png"], "cannot be written: there is no folder"),
        (["{}/a", "--format=xml"], "--format=xml is not possible. It takes text, json or csv."),
        (["{}/a", "--ranks=five"], "--ranks=five is not a list of whole numbers like 4 or 2,4,8."),
        (["{}/a", "--bytes=5 apples"], "--bytes=5 apples is not possible: '5 apples' has the unit 'apples'"),
        (["{}/a", "--ranks=5"], "No series has the ranks and bytes that are asked for. There is 4 ranks of 971,048 B."),
        (["{}/a", "--outt=a.png"], "--outt is not a flag. Did you mean --out?"),
        (["{}/run", "--format=csv"], "A run has a histogram of its exchanges, but no trials for a CSV."),
    ],
)
def test_what_cannot_be_reported_is_told_in_a_sentence(folders, run_dir, tmp_path, words, sentence):
    with pytest.raises(cli.UsageError) as caught:
        report.main([word.replace("{}", str(tmp_path)) for word in words])
    assert len(caught.value.sentences) == 1 and sentence in caught.value.sentences[0]


def test_pictures_without_matplotlib_are_refused_before_anything_is_read(tmp_path):
    code = (
        "import sys; sys.modules['matplotlib'] = None;"
        "from tf_ipu_dp import cli; from tf_ipu_dp.collectives import report;"
        f"sys.exit(cli.run('report', lambda: report.main(['{tmp_path}/none', '--out={tmp_path}/a.html']), sys.stderr))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stdout == ""
    assert "a.html needs matplotlib" in done.stderr and "pip install 'matplotlib>=3.6,<3.10'" in done.stderr


def test_text_and_numbers_need_no_matplotlib(folders, tmp_path):
    code = (
        "import sys; sys.modules['matplotlib'] = None; from tf_ipu_dp.collectives import report;"
        f"sys.exit(report.main([{folders[0]!r}, '--out={tmp_path}/a.csv', '--out={tmp_path}/a.json']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("report: wrote")) == (0, 2)


def test_the_command_writes_plain_ascii_where_the_stream_takes_no_more(folders):
    command = [sys.executable, "-m", "tf_ipu_dp.collectives", "report", *folders]
    done = subprocess.run(
        command, capture_output=True, check=False, env={"PYTHONIOENCODING": "ascii", "PYTHONPATH": ":".join(sys.path)}
    )
    assert done.returncode == 0 and done.stdout.isascii() and b"\x1b" not in done.stdout, done.stderr
    assert b"Who was last" in done.stdout


def test_a_run_s_histogram_is_shown_with_who_was_last(run_dir, capsys):
    assert report.main([run_dir]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"Exchanges of gradients: {run_dir}\n")
    lines = [line for line in text.splitlines() if " to " in line]
    assert len(lines) == 6 and lines[0].endswith(" 75.0 %") and lines[-1].endswith(" 25.0 %"), "empty ones included"
    assert "4 exchanges: p50" in text
    assert "Instance 1 was last in 75 % of 4 exchanges" in text


def test_a_simulation_of_as_many_ranks_stands_beside_the_run(run_dir, tmp_path, capsys):
    results.write(sample_results.make_simulated(ranks=2), tmp_path / "two")
    results.write(sample_results.make_simulated(ranks=2, sizes=(8, 16)), tmp_path / "several")
    report.main([run_dir, str(tmp_path / "two")])
    assert "Predicted (predicted): p50 7.96 ms" in capsys.readouterr().out
    report.main([run_dir, str(tmp_path / "several")])
    shown = capsys.readouterr()
    assert "Predicted" not in shown.out and "2 simulated series have 2 ranks; choose one with --bytes" in shown.err
    report.main([run_dir, str(tmp_path / "several"), "--bytes=8"])
    assert "Predicted" in capsys.readouterr().out


def test_bars_add_up_for_measured_and_predicted():
    times = ExchangeTimes.of(np.random.RandomState(1).exponential(0.01, (2, 500)).tolist())
    bars = make_bars(RunExchanges("a", times, sample_results.make_simulated(ranks=2)))
    assert sum(bar.measured for bar in bars) == pytest.approx(1)
    assert sum(bar.predicted for bar in bars) == pytest.approx(1)
    assert all(one.below_s == two.least_s for one, two in zip(bars, bars[1:]))
    assert make_bars(RunExchanges("a", ExchangeTimes())) == []


def test_a_damaged_histogram_is_drawn_as_far_as_it_can_be():
    buckets = (Bucket(0.0, 0.0, 0), Bucket(-1.0, 0.0, 2), Bucket(1e300, 2e300, 2))
    run = RunExchanges("a", ExchangeTimes(4, Histogram(buckets, 1.0, 0.0, 1.0)))
    bars = make_bars(run)
    assert len(bars) == 32 and sum(bar.measured for bar in bars) == 1
    assert report_text.render(report_content.make_content([], [run]), DisplayOptions(80))


def test_a_run_is_drawn_in_every_format(run_dir, tmp_path, capsys):
    for name in ("a.png", "a.svg", "a.html", "a.json"):
        assert report.main([run_dir, f"--out={tmp_path / name}"]) == 0
    page = Page((tmp_path / "a.html").read_text(encoding="utf-8"))
    assert "7.81 ms to 15.6 ms: 75 %" in page.texts["title"]
    assert json.loads((tmp_path / "a.json").read_text())["runs"][0]["exchanges"] == 4


def test_a_run_without_exchanges_is_told_why(tmp_path):
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(
        cli.UsageError, match=r"is a run without exchange_times\.json: exchanges are measured between two"
    ):
        report.main([str(tmp_path)])


def test_help_shows_flags_and_examples(capsys):
    assert report.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "--out=FILE" in text and "Examples" in text and "repeat this option" not in text
