"""What the monitor's command line takes."""

from __future__ import annotations

import pytest

from tf_ipu_dp import activity, cli, explanation, monitor, verdict


@pytest.mark.parametrize(
    ("words", "watch", "export"),
    [
        ([], None, None),
        (["--watch"], 1.0, None),
        (["--watch=2.5"], 2.5, None),
        (["--nowatch"], None, None),
        (["--export"], None, ("127.0.0.1", 9510)),
        (["--export=8000"], None, ("127.0.0.1", 8000)),
        (["--export=0.0.0.0:8000", "--watch"], 1.0, ("0.0.0.0", 8000)),
        (["--export=[::1]:8000"], None, ("::1", 8000)),
    ],
)
def test_flags_with_a_value_that_may_be_left_out(words, watch, export):
    cfg = monitor.parse(words)
    assert (cfg.watch, cfg.export) == (watch, export)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--watch=0"], "--watch=0 is not possible: .*It takes a number of seconds from 0.1 to 86400"),
        (["--watch=soon"], "--watch=soon is not possible"),
        (["--watch=nan"], "--watch=nan is not possible"),
        (["--export=70000"], "--export=70000 is not possible"),
        (["--export=host:"], "--export=host: is not possible"),
        (["--need=3"], "Use --free --need=3"),
        (["--free", "--health"], "--free and --health do not go together. Use --free alone"),
        (["--explain=x", "--watch"], "--explain and --watch do not go together. Use --explain alone"),
        (["--report=a.png"], "--report=a.png is drawn from a recording. Add --record=FILE"),
        (["--pid=1"], "--pid=1 says when to end. Use it with --record, --watch or --export"),
        (["--events=x"], "Use --health --events=x"),
        (["--wach"], "Did you mean --watch"),
        (["5"], "'5' is not expected here"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_does(words, sentence):
    with pytest.raises(cli.UsageError, match=sentence):
        monitor.parse(words)


def test_runs_of_the_same_name_have_a_sentence_each(monkeypatch):
    sentences = {"/x/a": "Held back by x.", "/y/a": "Held back by y.", "/x/b": "Well fed."}

    def explain(folder):
        return verdict.Verdict("well fed", sentences[str(folder)])

    monkeypatch.setattr(explanation, "explain_lately", explain)
    runs = [
        activity.Process(number, "ann", "x", 1.0, (number,), "running", run_dir=folder, run=folder[-1])
        for number, folder in enumerate(sentences)
    ]
    found = monitor._read_verdicts(activity.Snapshot(0.0, "poplar", (), tuple(runs)))
    assert found == {"/x/a": "Held back by x.", "/y/a": "Held back by y.", "b": "Well fed."}


def test_the_help_shows_which_values_may_be_left_out(capsys):
    assert monitor.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "--watch[=SECONDS]" in text and "--export[=[HOST:]PORT]" in text and "--[no]json" in text
