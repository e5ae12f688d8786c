"""The files of a study's report: text that fits, numbers for programs, pictures and a page that loads nothing."""

from __future__ import annotations

import csv
import dataclasses
import json
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest
import sample_study
from html_pages import Page, check_self_contained
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_ipu_dp.monitoring import drawings, panels
from tf_ipu_dp.scaling import (
    analysis,
    charts,
    published,
    records,
    report,
    report_notes,
    report_page,
    report_tables,
    report_text,
)

VERDICT = "It stops paying at 2 instances. The cores of this machine limit it."


def analyse(mode, **changes):
    study = sample_study.make_study(mode, **changes)
    return analysis.analyse(study, sample_study.make_measurements(study))


@pytest.fixture(params=[*records.MODES, "accuracy"])
def found(request):
    if request.param == "accuracy":
        return analysis.analyse(*sample_study.make_accuracy_study())
    return analyse(request.param)


def test_the_report_says_how_long_a_run_was():
    for changes, words in (
        ({"updates": 8}, "3 repeats of 8 updates"),
        ({"updates": 1}, "3 repeats of 1 update"),
        ({"target_accuracy": 0.9, "epochs": "5"}, "3 repeats of --epochs=5"),
    ):
        study = dataclasses.replace(sample_study.make_study(records.WEAK), **changes)
        assert report_text.subtitles(study)[0].endswith(f"; {words}")


def test_predictions_of_other_engines_are_in_the_scorecard_and_not_among_the_parts_of_an_update():
    study = sample_study.make_study(records.WEAK)
    other = dataclasses.replace(study.predictions[0], cell="horovod-1")
    study = dataclasses.replace(study, predictions=(*study.predictions, other))
    made = analysis.analyse(study, sample_study.make_measurements(study))
    assert "horovod" in report_tables.score_table(made).columns[0][1]
    (bars,) = [panel.draw.keywords["bars"] for panel in charts.make_panels(made) if panel.name == "parts"]
    assert {row.cell.engine for row in bars} == {"tf_ipu_dp"}


def test_an_efficiency_above_100_of_a_single_repeat_is_inside_the_picture():
    study = dataclasses.replace(sample_study.make_study(records.WEAK), repeats=1)
    measured = [each for each in sample_study.make_measurements(study) if each.repeat == 0]
    measured = [
        dataclasses.replace(each, seconds=each.seconds / 3) if each.cell == "tf_ipu_dp-2" else each for each in measured
    ]
    made = analysis.analyse(study, measured)
    (panel,) = [each for each in charts.make_panels(made) if each.name == "efficiency"]
    figure, _ = panels.make_figure([panel], one_file=True)
    best = 100 * max(row.efficiency for row in made.rows if row.efficiency is not None)
    assert best > 200 and figure.axes[0].get_ylim()[1] > best


def test_a_table_that_does_not_fit_a_terminal_is_a_list_of_all_its_numbers():
    text = report.render_text(analyse(records.WEAK, engines=("tf_ipu_dp",)), VERDICT, 40)
    parts = text.split("Where the time of one update goes (ms)\n")[1]
    assert parts.startswith("Instances   1\ncompute     ") and "~" not in text
    assert max(map(len, text.splitlines())) <= 40


def test_the_table_says_everything_a_reader_of_a_weak_scaling_needs():
    text = report.render_text(analyse(records.WEAK), VERDICT, 80)
    assert text.startswith(
        """\
Weak scaling: mlp
--model=mlp --dataset=synthetic; 3 repeats of about 8 s
processor Sample <CPU> at 2.0 GHz; cores 2; sdk emulator; TensorFlow 2.15.1

Engine     Instances  samples/s    range  Speed-up  Efficiency %  Error %
tf_ipu_dp         1         442  429-451     1.00         100.0      +2.0
tf_ipu_dp         2*        838  814-855     1.90*         94.8*     +5.0
tf_ipu_dp         4*        861  836-878     1.95*         48.7*     +8.0
horovod           1         404  392-412     1.00         100.0         -
horovod           2*        768  746-784     1.90*         95.2*        -
horovod           4*  instance 3 was killed by signal 9 (out of memory?)
ddp             all   torch is not installed. Install it with: pip install
                      'tf_ipu_dp[ddp]'
Baseline of speed-up and efficiency: each engine at 1 instance. Efficiency is
the speed-up over the ratio of replicas.
Median and range of the repeats. The range of 3 holds the true median with 75 %;
95 % need 6 repeats.
* Limited by the 2 cores of this machine, which the processes share: no
statement about scaling on machines of their own.
"""
    )
    assert text.endswith(f"\nVerdict\n{VERDICT}\n")


def test_a_wide_table_has_all_columns(found):
    header = report.render_text(found, VERDICT, None).split("\n\n")[1].splitlines()[0]
    batch = found.study.mode == records.BATCH
    for title in ("samples/s", "Efficiency %", "Memory MiB", "Input wait %", "Update ms"):
        assert title in header
    assert ("Speed-up" in header) == ("per replica" in header) == (not batch)
    assert ("predicted" in header) == ("Error %" in header) == bool(found.study.predictions)


@pytest.mark.parametrize("width", [60, 80, 100, 132])
def test_text_fits_its_width_and_is_ascii_where_asked(found, width):
    text = report.render_text(found, VERDICT, width, ascii_only=True)
    assert max(map(len, text.splitlines())) <= width
    assert text.isascii()


def test_names_that_are_not_ascii_are_escaped():
    found = analyse(records.WEAK, facts={"processor": "Прибор\x1b[31m"})
    text = report.render_text(found, "Grüße", 80, ascii_only=True)
    assert text.isascii() and "\x1b" not in text
    assert "Grüße" in report.render_text(found, "Grüße", 80)


def test_six_repeats_have_an_interval_of_95_percent_and_one_has_none():
    many = report.render_text(analyse(records.WEAK, repeats=6), "", None)
    assert "95 % interval" in many and "holds the true median with 95 %" in many
    one = report.render_text(analyse(records.WEAK, repeats=1), "", None)
    assert "One repeat has no interval." in one and "range" not in one


def test_a_cell_that_lost_a_repeat_says_so():
    study = sample_study.make_study(records.WEAK, engines=("tf_ipu_dp",))
    measurements = sample_study.make_measurements(study)
    measurements[0] = sample_study.make_failure(study.cells[0])
    text = report.render_text(analysis.analyse(study, measurements), "", None)
    assert "2 of 3" in text and "tf_ipu_dp at 1 instance: 1 repeat is missing. instance 3 was killed" in text


def test_the_knee_is_named_or_said_not_to_be_reached():
    assert "tf_ipu_dp: the knee is at batch 64," in report.render_text(analyse(records.BATCH), "", None)
    study = sample_study.make_study(records.BATCH, engines=("tf_ipu_dp",))
    study = dataclasses.replace(study, cells=study.cells[:4])
    rising = analysis.analyse(study, [sample_study.make_measurement(cell) for cell in study.cells])
    assert "the rate still rises at the largest batch, 8." in report.render_text(rising, "", None)


def test_parts_that_do_not_add_up_are_not_hidden():
    study = sample_study.make_study(records.WEAK, engines=("tf_ipu_dp",), repeats=1)
    measured = sample_study.make_measurement(study.cells[0])
    parts = dataclasses.replace(measured.parts, overhead_s=measured.parts.overhead_s + 0.1 * measured.update_s)
    found = analysis.analyse(study, [dataclasses.replace(measured, parts=parts)])
    assert "not within 3 %: the largest difference is 10.0 %" in report.render_text(found, "", None)


def test_the_scorecard_counts_the_predictions_that_were_good():
    study = sample_study.make_study(records.WEAK, engines=("tf_ipu_dp",), repeats=1)
    predictions = [sample_study.make_prediction(cell, error) for cell, error in zip(study.cells, (0.05, -0.2, 0.09))]
    study = dataclasses.replace(study, predictions=tuple(predictions))
    found = analysis.analyse(study, sample_study.make_measurements(study))
    sentence = report_notes.score_sentence(found)
    assert "for 3 cells: mean error 11.3 %, largest 20.0 % (tf_ipu_dp at 2 instances); 2 of 3 within 10 %." in sentence


def test_the_csv_has_a_line_for_each_cell_with_units_in_its_names(found):
    lines = list(csv.DictReader(report.render_csv(found).splitlines()))
    assert [(line["engine"], int(line["size"])) for line in lines] == [
        (cell.engine, cell.size) for cell in found.study.cells
    ]
    for line, row in zip(lines, found.rows):
        assert line["reason"] == row.reason
        assert line["samples_per_s"] == ("" if row.samples_per_s is None else repr(row.samples_per_s.median))
        assert line["core_limited"] == str(int(row.core_limited))


def test_the_json_has_all_numbers_and_the_study_itself(found):
    value = json.loads(report.render_json(found, VERDICT), parse_constant=pytest.fail)
    assert value["schema"] == 1 and value["verdict"] == VERDICT and value["baseline"] == found.baseline
    assert records.Study.from_json(value["study"]) == found.study
    for line, row in zip(value["rows"], found.rows):
        assert line["cell"]["key"] == row.cell.key and line["efficiency"] == row.efficiency
        assert (line["samples_per_s"] is None) == (not row.is_done)
    assert len(value["time_to_accuracy"]) == len(found.time_to_accuracy)


def test_numbers_that_are_not_finite_become_null_in_json():
    study = sample_study.make_study(records.WEAK, engines=("tf_ipu_dp",), predictions=())
    measured = [sample_study.make_measurement(study.cells[0], busy=float("nan"), input_wait_s=float("inf"))]
    value = json.loads(report.render_json(analysis.analyse(study, measured), ""), parse_constant=pytest.fail)
    assert value["rows"][0]["input_wait_share"] is None


def test_all_files_are_written_and_returned(found, tmp_path):
    files = report.write(found, VERDICT, tmp_path / "new")
    assert sorted(files) == sorted((tmp_path / "new").iterdir())
    names = {path.name for path in files}
    assert {"report.txt", "report.csv", "report.json", "report.html", "parts.png", "parts.svg"} <= names
    for path in files:
        content = path.read_bytes()
        if path.suffix == ".png":
            assert content.startswith(b"\x89PNG")
        if path.suffix == ".svg":
            assert ET.fromstring(content).tag.endswith("svg")


def test_without_matplotlib_the_numbers_are_written_and_one_sentence_says_what_is_missing(tmp_path):
    code = (
        "import sys; sys.modules['matplotlib'] = None; sys.path.insert(0, sys.argv[1])\n"
        "import pathlib, sample_study\n"
        "from tf_ipu_dp import cli\n"
        "from tf_ipu_dp.scaling import analysis, report\n"
        "try:\n"
        "    report.write(analysis.analyse(sample_study.make_study(), []), '', pathlib.Path(sys.argv[2]))\n"
        "except cli.UsageError as error:\n"
        "    print(error)\n"
    )
    words = [sys.executable, "-c", code, str(sample_study.__file__).rpartition("/")[0], str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert "pictures and the page need matplotlib" in done.stdout and len(done.stdout.splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.csv", "report.json", "report.txt"]


def test_pictures_depend_on_the_mode_and_on_what_is_known():
    def names(found):
        return [panel.name for panel in charts.make_panels(found)]

    assert names(analyse(records.WEAK)) == ["throughput", "efficiency", "parts", "extrapolation"]
    assert names(analyse(records.STRONG)) == names(analyse(records.INSTANCES)) == ["throughput", "efficiency", "parts"]
    assert names(analyse(records.BATCH)) == ["batch", "memory", "parts"]
    assert names(analyse(records.COMPARE)) == ["throughput", "parts"]
    assert names(analyse(records.STRONG, engines=("horovod",))) == ["throughput", "efficiency"]
    study = sample_study.make_study(records.STRONG, predictions=())
    assert names(analysis.analyse(study, [])) == []


def _drawn(found, name):
    """Returns the axes of a picture."""
    (panel,) = (panel for panel in charts.make_panels(found) if panel.name == name)
    figure, titles = panels.make_figure([panel], one_file=True)
    return figure.axes[0], titles


def _labels(plot):
    return [text.get_text() for text in plot.get_legend().get_texts()]


def test_throughput_has_ideal_predicted_hollow_and_published_marks():
    plot, titles = _drawn(analyse(records.WEAK), "throughput")
    labels = _labels(plot)
    assert labels[:5] == [
        "tf_ipu_dp",
        "horovod",
        "predicted before measuring",
        "ideal",
        "hollow: limited by the cores of this machine",
    ]
    assert labels[5].startswith("1  Graphcore Bow Pod, MLPerf v2.0, throughput (100 % at 16 IPUs)")
    assert plot.get_xscale() == plot.get_yscale() == "log"
    (texts,) = (texts for gid, texts in titles.items() if gid.endswith("-tf_ipu_dp"))
    assert texts[1] == (
        "tf_ipu_dp at 2 instances: 838 samples/s (814-855), efficiency 94.8 %, 632 MiB, predicted time +5.0 %, "
        "limited by the cores of this machine"
    )


def test_published_curves_begin_at_the_baseline_of_the_study_and_end_with_its_axis():
    plot, _ = _drawn(analyse(records.WEAK), "efficiency")
    curves = {line.get_label(): line for line in plot.get_lines() if str(line.get_label())[:1].isdigit()}
    assert len(curves) >= 2
    for line in curves.values():
        assert (line.get_xdata()[0], line.get_ydata()[0]) == (1, 100)
        assert max(line.get_xdata()) <= plot.get_xlim()[1]
    none, _ = _drawn(analyse(records.INSTANCES), "efficiency")
    assert not any(label[:1].isdigit() for label in _labels(none)), "nothing like it is published"


def test_the_knee_is_marked_where_it_is():
    plot, _ = _drawn(analyse(records.BATCH), "batch")
    assert [text.get_text() for text in plot.texts] == ["knee of tf_ipu_dp: 64", "knee of horovod: 64"]
    assert plot.texts[0].xy[0] == 64


def test_bars_of_an_update_are_as_long_as_its_parts_together():
    found = analyse(records.WEAK)
    plot, titles = _drawn(found, "parts")
    shown = [label.get_text() for label in plot.get_yticklabels()]
    assert shown == ["1 instance", "predicted", "2 instances*", "predicted", "4 instances*", "predicted"]
    row = found.rows[0]
    bars = [bar for bar in plot.patches if str(bar.get_gid()).startswith("parts-0-")]
    assert len(bars) == 6
    assert sum(bar.get_width() for bar in bars) == pytest.approx(1e3 * row.parts.total_s)
    assert bars[-1].get_x() + bars[-1].get_width() == pytest.approx(1e3 * row.parts.total_s)
    assert titles["parts-0-0"] == ["1 instance, measured: compute 68 ms (94.0 %)"]


def test_extrapolations_have_a_band_and_are_labelled_as_predictions():
    plot, _ = _drawn(analyse(records.WEAK), "extrapolation")
    assert _labels(plot)[:3] == ["POD256, predicted", "ethernet-10g, predicted", "measured here"]
    assert len(plot.collections) == 2
    low, high = plot.collections[0].get_paths()[0].get_extents().get_points()[:, 1]
    assert low < 87 < high


def test_the_page_is_well_formed_loads_nothing_and_shows_verdict_reasons_commands_and_facts(found):
    text = report_page.render_page(found, VERDICT)
    page = check_self_contained(text)
    assert f'<p class="verdict">{VERDICT}</p>' in text
    assert "python -m tf_ipu_dp.scaling --mode=" in text
    assert "<tr><td>processor</td><td>Sample &lt;CPU&gt; at 2.0 GHz</td></tr>" in text
    assert drawings.INK not in text.split("</style>")[1], "colours are those of the page"
    assert text.count('<div class="wide">') >= 2, "a table scrolls inside itself"
    assert any("samples/s" in title for title in page.texts["title"])
    if any(not row.is_done for row in found.rows):
        assert "torch is not installed. Install it with: pip install &#x27;tf_ipu_dp[ddp]&#x27;" in text
    assert ("Sources of the published curves" in text) == bool(published.behind(found.study.mode))


def test_a_text_of_the_user_cannot_become_markup():
    study = sample_study.make_study(
        records.WEAK, words=("--model=<b>", "--dataset=</svg>"), facts={"<i>": "<script>"}, command=("<u>",)
    )
    cell = dataclasses.replace(study.cells[0], engine="</text><script>")
    study = dataclasses.replace(study, cells=(cell, *study.cells[1:]), predictions=())
    measured = [sample_study.make_failure(each, reason="<u>") for each in study.cells[1:]]
    measured.append(sample_study.make_measurement(study.cells[1], 1))
    measured.append(dataclasses.replace(measured[-1], cell=cell.key))
    text = report_page.render_page(analysis.analyse(study, measured), "<em>")
    Page(text)
    assert not any(tag in text for tag in ("<script", "<b>", "<i>", "<u>", "<em>"))


def test_the_same_study_gives_the_same_bytes(tmp_path):
    files = [report.write(analyse(records.WEAK), VERDICT, tmp_path / name) for name in ("a", "b")]
    assert [path.read_bytes() for path in files[0]] == [path.read_bytes() for path in files[1]]


@settings(max_examples=12)
@given(
    mode=st.sampled_from(records.MODES),
    kept=st.lists(st.integers(0, 8), max_size=6),
    repeats=st.integers(1, 3),
    seconds=st.floats(1e-6, 1e6),
)
def test_any_part_of_a_study_can_be_shown_and_drawn(mode, kept, repeats, seconds):
    study = sample_study.make_study(mode, engines=("tf_ipu_dp", "keras"), repeats=repeats)
    cells = [study.cells[place] for place in kept if place < len(study.cells)]
    measured = [
        sample_study.make_measurement(cell, repeat, seconds=seconds) for cell in cells for repeat in range(repeats)
    ]
    found = analysis.analyse(study, measured)
    assert max(map(len, report.render_text(found, VERDICT, 80).splitlines())) <= 80
    json.loads(report.render_json(found, VERDICT), parse_constant=pytest.fail)
    for panel in charts.make_panels(found):
        figure, _ = panels.make_figure([panel], one_file=True)
        drawings.render_figure(figure, "svg", panel.name)


def test_an_engine_that_does_not_validate_is_not_said_to_have_missed_the_accuracy():
    study, measured = sample_study.make_accuracy_study(sizes=(1, 2))
    other = sample_study.make_cell("ddp", 1)
    study = dataclasses.replace(study, cells=(*study.cells, other), engines=("tf_ipu_dp", "ddp"))
    found = analysis.analyse(study, [*measured, sample_study.make_measurement(other)])
    text = report.render_text(found, "", 120)
    assert "not evaluated: of this engine samples/s only" in text
    assert text.count("the accuracy was not reached") == 1  # the largest size of ours


def test_extrapolations_say_whose_compute_they_have():
    study = sample_study.make_study(engines=("tf_ipu_dp",))
    cpu = [dataclasses.replace(each, compute=records.THIS_CPU) for each in study.extrapolations]
    given = [dataclasses.replace(each, compute="compute of 2 ms a micro batch") for each in study.extrapolations]
    texts = []
    for made in (cpu, given):
        found = analysis.analyse(dataclasses.replace(study, extrapolations=tuple(made)), [])
        texts.append(report.render_text(found, "", 120))
    assert "POD256, compute of this CPU" in texts[0] and "Give the device's own with --compute_ms." in texts[0]
    assert "POD256, compute of 2 ms a micro batch" in texts[1] and "this machine's CPU" not in texts[1]


def test_other_work_on_the_machine_is_said():
    study = sample_study.make_study(engines=("tf_ipu_dp",), repeats=1)
    for share, is_said in ((0.02, False), (0.31, True)):
        measured = [sample_study.make_measurement(cell, others_busy=share) for cell in study.cells]
        text = report.render_text(analysis.analyse(study, measured), "", 120)
        assert ("Other processes used up to 31 % of this machine's cores during 3 cells" in text) == is_said
