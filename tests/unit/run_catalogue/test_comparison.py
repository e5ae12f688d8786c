from __future__ import annotations

import json

import pytest
from html_pages import check_self_contained

from tf_ipu_dp import cli
from tf_ipu_dp.monitoring.text_layout import DisplayOptions
from tf_ipu_dp.run_catalogue import comparison, comparison_page, comparison_text


def test_flags_that_differ_are_found_whichever_release_wrote_them():
    found = comparison.find_differences(
        [{"model": "cnn", "ipus": "8", "seed": "42", "later_flag": "x"}, {"model": "mlp", "ipus": "8", "run_dir": "b"}]
    )
    assert [(each.name, each.values) for each in found] == [("model", ("cnn", "mlp")), ("later_flag", ("x", "-"))]


def test_runs_are_compared_by_results_flags_and_curves(make_run, tmp_path):
    a = make_run("a", "--learning_rate=0.1", accuracy=0.9)
    b = make_run("b", "--ipus=4", accuracy=0.6)
    found = comparison.compare([a, b], comparison.STEP)
    assert {each.name: each.values for each in found.differences} == {"ipus": ("-", "4"), "learning_rate": ("0.1", "-")}
    assert list(found.curves) == [
        "validation_accuracy", "validation_loss", "loss", "accuracy", "samples_per_s", "learning_rate",
    ]  # fmt: skip
    assert found.curves["validation_accuracy"][1] == comparison.Curve(1, (32.0, 64.0), (30.0, 60.0))
    epochs = comparison.compare([a, b], comparison.EPOCH)
    assert epochs.curves["loss"][0].x == (0.5, 1.0)


OPTIONS = {
    "marks": DisplayOptions(80),
    "colours": DisplayOptions(80, colour=True),
    "ascii": DisplayOptions(60, unicode=False),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_terminal_gets_tables_and_plots(make_run, options):
    found = comparison.compare([make_run("a", accuracy=0.9), make_run("b\x1b[2J")], comparison.STEP)
    text = comparison_text.render(found, comparison.IN_A_TERMINAL, options)
    assert "Validation accuracy (%) over step" in text and "Training loss over step" in text
    assert "The flags do not differ." in text and "\x1b[2J" not in text
    assert options.unicode or text.isascii()


def test_tables_that_do_not_fit_a_narrow_terminal_are_lists(make_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = [path.relative_to(tmp_path) for path in (make_run("a", "--ipus=2"), make_run("b"))]
    found = comparison.compare(runs, comparison.STEP)
    text = comparison_text.render(found, comparison.IN_A_TERMINAL, DisplayOptions(40))
    assert max(map(len, text.splitlines())) <= 40 and "~" not in text
    assert "Best accuracy %  50.00\n" in text and "--ipus" in text


def test_a_page_is_self_contained_and_has_every_value_under_the_pointer(make_run, tmp_path):
    found = comparison.compare([make_run("a<script>", "--ipus=2"), make_run("_b")], comparison.SECONDS)
    page = check_self_contained(comparison_page.render_page(found))
    assert any(text.endswith("a<script>: 50.0 at seconds 0") for text in page.texts["title"])
    assert "--ipus" in page.texts["td"] and page.texts["h1"] == ["Comparison of 2 runs"]
    for kind, begin in (("png", b"\x89PNG"), ("svg", b"<?xml"), ("html", b"<!DOCTYPE html>")):
        comparison_page.write(found, tmp_path / f"c.{kind}")
        assert (tmp_path / f"c.{kind}").read_bytes().startswith(begin)


def test_damaged_records_are_left_out_of_the_curves(make_run):
    path = make_run("a", result=False)
    with (path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"kind": "train"}\n\xff\n' + json.dumps({
            "kind": "train", "step": 10**400, "epoch": 1e300, "loss": 1e308, "accuracy": None, "learning_rate": 0.0,
        }).encode() + b"\n" + b"x" * (2 << 20) + b"\n")  # fmt: skip
    found = comparison.compare([path, path], comparison.EPOCH)
    assert len(found.curves["loss"][0].x) == 2
    assert comparison_text.render_json(found) and comparison_page.render_page(found)


def test_a_run_without_records_is_compared_too(make_run):
    found = comparison.compare(
        [make_run("a", steps=(), result=False, accuracy=0), make_run("b", steps=(), result=False)], "step"
    )
    assert "no records to draw" in comparison_page.render_page(found)
    assert comparison_text.render(found, comparison.IN_A_TERMINAL, DisplayOptions(80))


def test_what_is_not_a_run_is_refused(tmp_path):
    with pytest.raises(cli.UsageError, match=r"is not the folder of a run: it has no run\.flags"):
        comparison.compare([tmp_path, tmp_path], comparison.STEP)
