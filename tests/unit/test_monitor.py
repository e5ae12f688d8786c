"""What the monitor's command line takes."""

from __future__ import annotations

import dataclasses
import json
import socket
import subprocess
import sys
import time

import pytest

from tf_ipu_dp import cli, monitor
from tf_ipu_dp.monitoring import bottleneck, diagnosis, run_verdicts, snapshots, tables
from tf_ipu_dp.monitoring.text_layout import DisplayOptions
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
        (["--free", "--health"], "--free and --health cannot be combined: .* Use --free alone"),
        (["--explain=x", "--watch"], "--explain and --watch cannot be combined: --explain explains one run, .* Use"),
        (["--report=a.png"], "--report=a.png needs a recording. Add --record=FILE"),
        (["--pid=1"], "--pid=1 sets when to stop. Use it with --record, --watch or --export"),
        (
            ["--pid=1", "--run_dir=x", "--watch"],
            "--pid=1 and --run_dir=x cannot be combined: --pid=1 stops with that process, --run_dir=x stops with "
            "that run. Use one of them",
        ),
        (
            ["--gc", "--json"],
            "--gc and --json cannot be combined: --gc prints .*, --json prints .* Use --inventory --js",
        ),
        (
            ["--inventory", "--gc"],
            "--inventory and --gc cannot be combined: --inventory prints .* Use --inventory alone",
        ),
        (["--free", "--user=ann"], "--user=ann chooses rows of the tables, and --free prints .* Use one of them alone"),
        (["--record=x", "--run=a"], "--run=a chooses .* --record keeps all. Leave it out, or add --watch"),
        (["--sort=size"], "--sort=size .*ipus"),
        (["--explain="], "--explain needs the folder of a run, for example --explain=runs/first"),
        (["--events=x"], "Use --health --events=x"),
        (["--wach"], "Did you mean --watch"),
        (["5"], "'5' is not expected here"),
    ],
)
def test_flags_that_cannot_be_combined_are_refused_with_what_works(words, sentence):
    with pytest.raises(cli.UsageError, match=sentence):
        monitor.parse(words)


def test_a_run_that_is_stopped_has_not_ended_and_one_that_was_killed_has(tmp_path, monkeypatch, capsys):
    has_ended = monitor._make_end_check(monitor.parse(["--watch", f"--run_dir={tmp_path}"]))
    assert "waiting for the run" in capsys.readouterr().err and not has_ended()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        (tmp_path / "status").mkdir()
        status = heartbeat.Status(str(tmp_path), 0, 1, socket.gethostname(), process.pid, time=time.time())
        heartbeat.path_of(tmp_path, 0).write_text(json.dumps(status.to_json()))
        assert not has_ended()
        monkeypatch.setattr(snapshots, "STALE_S", -1.0)
        assert not has_ended()
        process.kill()
        process.wait()
        assert has_ended()


def test_runs_of_the_same_name_have_a_sentence_each(monkeypatch):
    sentences = {"/x/a": "Input of x.", "/y/a": "Input of y.", "/x/b": "No bottleneck."}

    def explain(folder):
        return bottleneck.Verdict("input", sentences[str(folder)])

    monkeypatch.setattr(diagnosis, "explain_recent", explain)
    runs = [
        snapshots.Process(number, "ann", "x", 1.0, (number,), "running", run_dir=folder, run=folder[-1])
        for number, folder in enumerate(sentences)
    ]
    found = run_verdicts.add_verdicts(snapshots.Snapshot(0.0, "poplar", (), tuple(runs)))
    assert tables.render(found, DisplayOptions()).split("\n\n")[2].splitlines()[:3] == [
        "/x/a: Input of x.",
        "/y/a: Input of y.",
        "b: No bottleneck.",
    ]
    value = found.to_json()["runs"][0]
    assert (value["run"], value["verdict"]["kind"], value["verdict"]["sentence"]) == ("a", "input", "Input of x.")


def test_a_run_that_has_ended_has_the_verdict_on_all_of_it(monkeypatch):
    recent, final = bottleneck.Verdict("input", "Recent."), bottleneck.Verdict("none", "Final.")
    monkeypatch.setattr(diagnosis, "explain_recent", lambda _: recent)
    monkeypatch.setattr(diagnosis, "explain", lambda folder: diagnosis.Explanation(str(folder), final, True, 5))
    gone = snapshots.Process(7, "ann", "x", 1.0, (), "gone", run_dir="/runs/a", run="a", instance=0)
    found = run_verdicts.add_verdicts(snapshots.Snapshot(0.0, "poplar", (), (gone,)))
    assert found.verdicts == {"/runs/a": final}
    running = dataclasses.replace(gone, pid=8, instance=1, state="running")
    found = run_verdicts.add_verdicts(snapshots.Snapshot(0.0, "poplar", (), (gone, running)))
    assert found.verdicts == {"/runs/a": recent}


def test_the_help_shows_which_values_may_be_left_out(capsys):
    assert monitor.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "--watch[=SECONDS]" in text and "--export[=[HOST:]PORT]" in text and "--[no]json" in text
