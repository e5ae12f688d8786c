"""What drawings share: pages that load nothing, colours of the screen, texts under the pointer."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import matplotlib
import pytest
from matplotlib.figure import Figure

from tf_ipu_dp import cli
from tf_ipu_dp.monitoring import drawings


def _drawing(name="one", marks=3):
    with matplotlib.rc_context(drawings.STYLE):
        figure = Figure()
        plot = figure.subplots()
        plot.plot(range(marks), linestyle="", marker="o", color=drawings.PALETTE[0], gid="marks")
        plot.set_title("a < b & c")
    return drawings.render_figure(figure, "svg", name).decode()


def _titles(svg):
    return [each.text for each in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}title")]


def test_the_same_drawing_gives_the_same_bytes_without_a_date():
    assert _drawing() == _drawing()
    assert "dc:date" not in _drawing()


def test_every_mark_has_its_text_and_a_group_has_one_for_all():
    assert _titles(drawings.make_inline(_drawing(), {"marks": ["a", "<b>", "c"]}, "label")) == ["a", "<b>", "c"]
    assert _titles(drawings.make_inline(_drawing(), {"marks": ["all"]}, "label")) == ["all"]
    assert _titles(drawings.make_inline(_drawing(), {"other": ["none"]}, "label")) == []


def test_colours_of_a_page_follow_the_screen():
    svg = drawings.make_inline(_drawing(), {}, "label")
    assert "var(--ink)" in svg and "var(--colour0)" in svg
    assert not any(colour in svg for colour in (drawings.INK, drawings.PAPER, drawings.PALETTE[0]))
    page = drawings.render_page("title", svg)
    assert f"--ink:{drawings.INK};" in page and "prefers-color-scheme:dark" in page


def test_drawings_on_one_page_share_no_id_and_load_nothing():
    both = drawings.make_inline(_drawing("one"), {}, "") + drawings.make_inline(_drawing("two"), {}, "")
    ids = re.findall(r' id="([^"]+)"', both)
    assert ids and len(set(ids)) == len(ids)
    assert not re.search(r'(src|href)="(?!#)', both) and "<metadata" not in both


def test_a_label_is_escaped():
    svg = drawings.make_inline(_drawing(), {}, '"><script>')
    assert "<script>" not in svg and ET.fromstring(svg).get("aria-label") == '"><script>'


def test_a_file_is_refused_by_the_flag_that_names_it(tmp_path):
    with pytest.raises(cli.UsageError, match=r"--out=.*a\.txt has an unknown file type\. Use one of \.csv\."):
        drawings.check_file("out", tmp_path / "a.txt", (".csv",), ())
    drawings.check_file("out", tmp_path / "a.csv", (".csv",), ())
    with pytest.raises(cli.UsageError, match=r"--out=.* cannot be written \(.*\)\. Use another path\."):
        drawings.write_file("out", tmp_path / "none" / "a.csv", b"")


def test_ids_of_clip_paths_do_not_depend_on_matplotlib_s_own():
    one = drawings._number_clips(b'<g clip-path="url(#p12)"/><clipPath id="p12">', "a")
    assert one == drawings._number_clips(b'<g clip-path="url(#pff)"/><clipPath id="pff">', "a")
    assert one == b'<g clip-path="url(#a-clip0)"/><clipPath id="a-clip0">'
