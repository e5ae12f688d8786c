"""What reports share: panels in files and on pages, tables whose rows may be a sentence, text that cannot be markup."""

from __future__ import annotations

from html_pages import Page

from tf_ipu_dp.monitoring import drawings, panels


def _panel(name, note=""):
    def draw(plot, gid):
        plot.plot([1, 2], linestyle="", marker="o", gid=f"{gid}-marks")
        return {f"{gid}-marks": [f"{name} first", f"{name} second"]}

    return panels.Panel(name, f"Title of <{name}>", 2.0, draw, note)


def test_a_row_with_a_text_has_it_in_place_of_its_numbers():
    columns = [("Engine", ["a", "b"]), ("rate", ["1", "-"]), ("memory", ["2", "-"])]
    table = panels.render_table(columns, {1: "<failed>"}, keys=1)
    assert "<tr><td>a</td><td>1</td><td>2</td></tr>" in table
    assert '<tr><td>b</td><td class="text" colspan="2"><span>&lt;failed&gt;</span></td></tr>' in table
    assert "<tr><td>b</td><td>-</td><td>-</td></tr>" in panels.render_table(columns)


def test_a_page_has_a_drawing_for_each_panel_with_its_note_and_texts_under_the_pointer():
    body = panels.render_panels([_panel("one", "A <note>."), _panel("two")])
    page = Page(panels.render_page("a & b", body))
    assert page.texts["title"] == ["a & b", "one first", "one second", "two first", "two second"]
    assert page.texts["h2"] == ["Title of <one>", "Title of <two>"]
    assert page.texts["figcaption"] == ["A <note>."]


def test_a_file_has_titles_and_wraps_notes():
    figure, titles = panels.make_figure([_panel("one", "word " * 60)], one_file=True)
    first, *note = figure.texts[0].get_text().split("\n")
    assert first == "Title of <one>" and len(note) > 1 and max(map(len, note)) <= 110
    assert titles == {"one-marks": ["one first", "one second"]}
    several, _ = panels.make_figure([_panel("one"), _panel("two")], one_file=True)
    assert [plot.get_title(loc="left") for plot in several.axes] == ["Title of <one>", "Title of <two>"]
    assert drawings.render_figure(several, "png", "report").startswith(b"\x89PNG")
