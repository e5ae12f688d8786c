"""What the monitor's command line takes."""

from __future__ import annotations

import io
import socket
import subprocess
import sys
import time

import pytest

from tf_ipu_dp import cli, monitor
from tf_ipu_dp.monitoring import bottleneck, diagnosis, snapshots
from tf_ipu_dp.runs import heartbeat


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
        (["--pid=1", "--run_dir=x", "--watch"], "--pid=1 and --run_dir=x do not go together: use the one"),
        (["--explain="], "--explain= names nothing: give it a run's folder"),
        (["--events=x"], "Use --health --events=x"),
        (["--wach"], "Did you mean --watch"),
        (["5"], "'5' is not expected here"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_does(words, sentence):
    with pytest.raises(cli.UsageError, match=sentence):
        monitor.parse(words)


class Terminal(io.TextIOWrapper):
    """A stream that says that it is a terminal."""

    def isatty(self):
        return True


@pytest.mark.parametrize(("term", "able"), [("xterm", True), ("dumb", False), ("", False), (None, False)])
def test_a_terminal_that_does_not_say_what_it_is_gets_plain_text(monkeypatch, term, able):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("TERM", raising=False)
    if term is not None:
        monkeypatch.setenv("TERM", term)
    stream = Terminal(io.BytesIO(), encoding="utf-8")
    assert (monitor._moves_cursor(stream), monitor._look_of(stream).colour) == (able, able)


def test_a_run_that_was_stopped_for_long_is_not_over_and_one_that_was_killed_is(tmp_path, monkeypatch, capsys):
    over = monitor._ending(monitor.parse(["--watch", f"--run_dir={tmp_path}"]))
    assert "waiting for the run" in capsys.readouterr().err and not over()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        (tmp_path / "status").mkdir()
        status = heartbeat.Status(str(tmp_path), 0, 1, socket.gethostname(), process.pid, time=time.time())
        heartbeat._replace(heartbeat._path_of(tmp_path, 0), vars(status))
        assert not over()
        monkeypatch.setattr(snapshots, "STALE_S", -1.0)
        assert not over()
        process.kill()
        process.wait()
        assert over()


def test_runs_of_the_same_name_have_a_sentence_each(monkeypatch):
    sentences = {"/x/a": "Held back by x.", "/y/a": "Held back by y.", "/x/b": "Well fed."}

    def explain(folder):
        return bottleneck.Verdict("well fed", sentences[str(folder)])

    monkeypatch.setattr(diagnosis, "explain_lately", explain)
    runs = [
        snapshots.Process(number, "ann", "x", 1.0, (number,), "running", run_dir=folder, run=folder[-1])
        for number, folder in enumerate(sentences)
    ]
    found = monitor._read_verdicts(snapshots.Snapshot(0.0, "poplar", (), tuple(runs)))
    assert found == {"/x/a": "Held back by x.", "/y/a": "Held back by y.", "b": "Well fed."}


def test_the_help_shows_which_values_may_be_left_out(capsys):
    assert monitor.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "--watch[=SECONDS]" in text and "--export[=[HOST:]PORT]" in text and "--[no]json" in text
