"""Reports drawn from recordings."""

from __future__ import annotations

import errno
import os
import re
import xml.etree.ElementTree as ET

import pytest

from tf_ipu_dp import cli
from tf_ipu_dp.monitoring import charts, devices, recorder, snapshots


def test_a_full_disk_leaves_the_earlier_report(record, snapshot, tmp_path, monkeypatch):
    found = recorder.read(record(snapshot(0), snapshot(1)))
    charts.draw(found, tmp_path / "a.svg")
    before = (tmp_path / "a.svg").read_bytes()

    def fail(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(cli.UsageError, match=r"cannot be written \(No space left on device\)"):
        charts.draw(recorder.read(record(snapshot(0), snapshot(5), name="b.jsonl")), tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "a.svg", "b.jsonl"]


def test_a_report_of_another_kind_or_place_is_refused_before_anything_is_drawn(tmp_path):
    with pytest.raises(cli.UsageError, match=r"has an unknown file type. Use one of .png, .svg, .html"):
        charts.check_report_name(tmp_path / "a.pdf")
    with pytest.raises(cli.UsageError, match="there is no folder"):
        charts.check_report_name(tmp_path / "no" / "a.png")


def test_a_drawing_has_labelled_axes_and_a_heat_map_for_many_ipus(record, snapshot):
    few = charts.make_figure(recorder.read(record(snapshot(0, "compiling"), snapshot(1), snapshot(2))))
    labels = [axis.get_ylabel() for axis in few.axes]
    assert labels[:2] == ["utilisation (%)", "power (W)"]
    assert few.axes[2].get_xlabel() == "seconds since 2001-09-09 01:46:40 UTC"
    legend = [text.get_text() for text in few.axes[2].get_legend().get_texts()]
    assert legend == ["compiling", "training", "next phase"]
    assert [text.get_text() for text in few.axes[2].get_yticklabels()] == ["r$1_$ 0"]
    many = charts.make_figure(recorder.read(record(*(snapshot(n, ipus=64) for n in range(3)), name="b.jsonl")))
    assert many.axes[0].get_ylabel() == "IPU" and many.axes[-1].get_ylabel().startswith("utilisation (%)")
    assert 16 <= len(many.axes[0].get_yticks()) <= 32


def test_power_that_was_not_reported_has_no_curve(record):
    idle = snapshots.Snapshot(0.0, "emulator", (devices.Ipu(id=0),), ())
    figure = charts.make_figure(recorder.read(record(idle, idle)))
    assert len(figure.axes) == 1 and figure._suptitle.get_text().endswith("; power was not reported")


def test_every_format_is_written_and_names_are_escaped(record, snapshot, tmp_path):
    found = recorder.read(record(snapshot(0), snapshot(1), snapshot(2)))
    for name in ("a.png", "a.SVG"):
        charts.draw(found, tmp_path / name)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    drawing = (tmp_path / "a.SVG").read_text(encoding="utf-8")
    assert ET.fromstring(drawing).tag.endswith("svg")
    texts = [each.text for each in ET.fromstring(drawing).iter("{http://www.w3.org/2000/svg}text")]
    assert {"r$1_$ 0", "power (W)", "training"} <= set(texts), "text is text"
    page = charts.render_page(found, drawing)
    assert "&lt;b&gt;ann&lt;/b&gt;" in page and "train\\x1b[31m" in page
    assert not re.search(r"(src|href)=\"http", page), "it loads nothing"


def test_processes_that_are_not_drawn_are_counted(record, runs_in):
    figure = charts.make_figure(recorder.read(record(*runs_in(*(f"/runs/{n}" for n in range(21))))))
    bands = next(axis for axis in figure.axes if axis.get_legend())
    labels = [label.get_text() for label in bands.get_yticklabels()]
    assert labels[-2:] == ["15 0", "and 5 more"] and len(labels) == 17
