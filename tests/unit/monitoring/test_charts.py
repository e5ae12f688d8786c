"""Reports drawn from recordings."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import xml.etree.ElementTree as ET

import matplotlib
import matplotlib.colors
import pytest
from html_pages import check_self_contained

from tf_ipu_dp import cli
from tf_ipu_dp.monitoring import charts, devices, drawings, panels, recorder, recording_report, snapshots
from tf_ipu_dp.runs.records import Verdict


def test_a_full_disk_leaves_the_earlier_report(record, snapshot, tmp_path, monkeypatch):
    found = recorder.read(record(snapshot(0), snapshot(1)))
    recording_report.draw(found, tmp_path / "a.svg")
    before = (tmp_path / "a.svg").read_bytes()

    def fail(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(cli.UsageError, match=r"cannot be written \(No space left on device\)"):
        recording_report.draw(recorder.read(record(snapshot(0), snapshot(5), name="b.jsonl")), tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "a.svg", "b.jsonl"]


def test_a_report_of_another_kind_or_place_is_refused_before_anything_is_drawn(tmp_path):
    with pytest.raises(cli.UsageError, match=r"has an unknown file type. Use one of .png, .svg, .html"):
        recording_report.check_report_name(tmp_path / "a.pdf")
    with pytest.raises(cli.UsageError, match=r"there is no folder .*/no. Make it with: mkdir -p .*/no$"):
        recording_report.check_report_name(tmp_path / "no" / "a.png")


def test_a_drawing_has_labelled_axes_and_a_heat_map_for_many_ipus(record, snapshot):
    few = charts.make_figure(recorder.read(record(snapshot(0, "compiling"), snapshot(1), snapshot(2))))
    labels = [axis.get_ylabel() for axis in few.axes]
    assert labels[:2] == ["utilisation (%)", "power (W)"]
    assert few.axes[2].get_xlabel() == "seconds since 2001-09-09 01:46:40 UTC"
    legend = [text.get_text() for text in few.axes[2].get_legend().get_texts()]
    assert legend == ["compiling", "training"]
    assert [text.get_text() for text in few.axes[2].get_yticklabels()] == ["r$1_$ 0"]
    many = charts.make_figure(recorder.read(record(*(snapshot(n, ipus=64) for n in range(3)), name="b.jsonl")))
    assert many.axes[0].get_ylabel() == "IPU" and many.axes[-1].get_ylabel().startswith("utilisation (%)")
    assert 16 <= len(many.axes[0].get_yticks()) <= 32


def test_power_that_was_not_reported_has_no_curve(record):
    idle = snapshots.Snapshot(0.0, "emulator", (devices.Ipu(id=0),), ())
    (panel,) = charts.make_panels(recorder.read(record(idle, idle)))
    assert panel.title.endswith("; power was not reported")


def test_every_format_is_written_and_names_are_escaped(record, snapshot, tmp_path):
    found = recorder.read(record(snapshot(0), snapshot(1), snapshot(2)))
    for name in ("a.png", "a.SVG"):
        recording_report.draw(found, tmp_path / name)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    drawing = (tmp_path / "a.SVG").read_text(encoding="utf-8")
    assert ET.fromstring(drawing).tag.endswith("svg")
    texts = [each.text for each in ET.fromstring(drawing).iter("{http://www.w3.org/2000/svg}text")]
    assert {"r$1_$ 0", "power (W)", "training"} <= set(texts), "text is text"
    page = recording_report.render_page(found)
    assert "&lt;b&gt;ann&lt;/b&gt;" in page and "train\\x1b[31m" in page
    check_self_contained(page)


def test_processes_that_are_not_drawn_are_counted(record, runs_in):
    figure = charts.make_figure(recorder.read(record(*runs_in(*(f"/runs/{n}" for n in range(21))))))
    bands = next(axis for axis in figure.axes if axis.get_legend())
    labels = [label.get_text() for label in bands.get_yticklabels()]
    assert labels[-2:] == ["15 0", "and 5 more"] and len(labels) == 17


def two_runs(seconds, phases=("training", "training"), ipus=16):
    """Returns a snapshot of two runs on eight IPUs each, with throughput and loss."""
    found = [devices.Ipu(id=n, utilisation_pct=50.0 + n, pid=7 + n // 8) for n in range(ipus)]
    processes = [
        snapshots.Process(
            7 + n, "ann", "/opt/bin/python3 -m train", 1.0, tuple(range(8 * n, 8 * n + 8)), "running",
            run_dir=f"/runs/{name}", run=name, instance=0, phase=phases[n], changes=((phases[n], 1e9 + seconds),),
            samples_per_s=1000.0 * (n + 1) + seconds, loss=2.0 / (1 + seconds), host="h",
        )
        for n, name in enumerate(("a", "b{0}"))
    ]  # fmt: skip
    verdicts = {"/runs/a": Verdict("input", f"Input takes {seconds:.0f} % <now>.")}
    return snapshots.Snapshot(1e9 + seconds, "emulator", tuple(found), tuple(processes), verdicts=verdicts)


@pytest.fixture
def both(record):
    return recorder.read(record(two_runs(0, ("compiling", "training")), two_runs(1), two_runs(2)))


def test_a_phase_is_marked_only_in_the_rows_of_its_own_run(both):
    plot = charts.make_figure(both).axes[0]
    marks = [line for line in plot.lines if line.get_linestyle() == "--"]
    assert [(list(line.get_xdata()), list(line.get_ydata())) for line in marks] == [([1.0, 1.0], [-0.5, 7.5])]


def test_curves_of_several_runs_are_not_marked_with_the_phases_of_one(record, snapshot, runs_in):
    one = charts.make_figure(recorder.read(record(snapshot(0, "compiling"), snapshot(1), snapshot(2))))
    assert [line.get_linestyle() for line in one.axes[0].lines].count("--") == 1
    snapshots_of_two = [
        dataclasses.replace(
            each,
            processes=tuple(
                dataclasses.replace(process, phase="compiling" if place == process.pid else "training")
                for process in each.processes
            ),
        )
        for place, each in enumerate(runs_in("/runs/a", "/runs/b"))
    ]
    two = charts.make_figure(recorder.read(record(*snapshots_of_two, name="b.jsonl")))
    assert "--" not in [line.get_linestyle() for line in two.axes[0].lines]


def test_the_page_has_verdict_throughput_and_loss_and_tells_values_under_the_pointer(both):
    page = check_self_contained(recording_report.render_page(both))
    assert page.texts["h2"][0] == "Bottlenecks"
    assert (page.texts["dt"], page.texts["dd"]) == (["a"], ["Input takes 2 % <now>."])
    assert page.texts["h2"][2:] == ["Throughput of the runs", "Loss of the runs", "Phases", "Processes"]
    told = page.texts["title"]
    assert "IPU 0, 0.0 to 0.7 seconds: 50 % busy" in told and "IPU 15, 1.3 to 2.0 seconds: 65 % busy" in told
    assert {"a: 1,001 samples/s at 1.0 seconds", "b{0}: 2,002 samples/s at 2.0 seconds"} <= set(told)
    assert {"a: 2.0000 at 0.0 seconds", "a: 1.0000 at 1.0 seconds"} <= set(told)
    assert "a 0: compiling for 1.0 s, from 0.0 to 1.0 seconds" in told
    assert {"1,002", "0.6667", "python3 -m train"} <= set(page.texts["td"]) and "Host" not in page.texts["th"]


def test_ipus_that_were_never_used_are_named_and_not_drawn(record):
    free = [devices.Ipu(id=n, utilisation_pct=0.0) for n in range(16, 64)]
    samples = [two_runs(seconds) for seconds in range(3)]
    recording = recorder.read(record(*(dataclasses.replace(each, ipus=(*each.ipus, *free)) for each in samples)))
    panel = charts.make_panels(recording)[0]
    assert panel.title.startswith("Utilisation of 64 IPUs")
    assert panel.note.endswith("Free all the time, and not drawn: IPU 16-63.")
    assert charts.make_figure(recording).axes[0].get_ylim() == (15.5, -0.5)
    idle = [dataclasses.replace(each, ipus=tuple(free), processes=()) for each in samples]
    panel = charts.make_panels(recorder.read(record(*idle, name="idle.jsonl")))[0]
    assert "not drawn" not in panel.note


def test_a_flag_is_not_broken_after_its_dashes(both):
    sentence = "Use fewer --instances, or --epochs=<5>."
    assert panels.escape_flags(sentence) == (
        'Use fewer <span class="flag">--instances</span>, or <span class="flag">--epochs=&lt;5&gt;.</span>'
    )
    assert ".flag{display:inline-block" in recording_report.render_page(both)


def test_free_cells_of_a_heat_map_are_paper_on_light_and_dark_screens(both):
    plot = charts.make_figure(both).axes[0]
    mesh = plot.collections[0]
    assert tuple(mesh.cmap(-0.5)) == (0.0, 0.0, 0.0, 0.0), "free: the paper shows through"
    assert plot.get_facecolor()[:3] == matplotlib.colors.to_rgb(drawings.PAPER)


def test_ids_do_not_wrap_and_long_texts_do(both):
    page = recording_report.render_page(both)
    assert ".processes td,.processes th{white-space:nowrap}" in page and "<td>7</td>" in page
    assert '<td class="text">python3 -m train</td>' in page


def test_a_recording_of_an_earlier_version_has_no_throughput_and_no_verdict(record, snapshot):
    path = record(snapshot(0), snapshot(1), snapshot(2))
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for line in lines[1:]:
        del line["verdicts"]
        for process in line["processes"]:
            assert not {"host", "loss", "samples_per_s"} & set(process)
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    page = check_self_contained(recording_report.render_page(recorder.read(path)))
    assert "Bottlenecks" not in page.texts["h2"] and "Loss of the runs" not in page.texts["h2"]
    assert "Last loss" not in page.texts["th"]


@pytest.mark.parametrize("name", ["\ud800", "\x1b[2J", "a\0b", "$x_$", "<script>"])
def test_a_phase_with_any_name_is_drawn(tmp_path, name):
    ipu = devices.Ipu(id=0, pid=7, user=name, board_serial=name, utilisation_pct=5.0)
    process = snapshots.Process(7, name, name, 1.0, (0,), "running", run_dir=name, run=name, instance=0, phase=name)
    writer = recorder.Recorder(tmp_path / "r.jsonl", 1.0)
    for second in range(3):
        writer.write(snapshots.Snapshot(1.7e9 + second, "emulator", (ipu,), (process,)))
    writer.close()
    page = recording_report.render_page(recorder.read(tmp_path / "r.jsonl"))
    assert "<script>" not in page and "\x1b" not in page and "\ud800" not in page
