"""Text from a run's folder that would control the terminal is shown escaped, by every command that shows it."""

from __future__ import annotations

import io
import json
from datetime import datetime

import pytest
import sample_records

from tf_ipu_dp import cli, compare, launch, monitor, train
from tf_ipu_dp.config import train_flags
from tf_ipu_dp.datasets import info
from tf_ipu_dp.planning import plan
from tf_ipu_dp.runs import checkpoints, result_report, run_folder
from tf_ipu_dp.runs.plan_record import PlanRecord
from tf_ipu_dp.training.console import Console

# Clears the screen, sets the title, turns the direction of writing, rings, erases what stands before.
HOSTILE = "\x1b[2J\x1b]0;owned\x07\u202eevil\x9b31m\b\b\r"
SHOWN = "\\x1b[2J\\x1b]0;owned\\x07\\u202eevil\\x9b31m\\x08\\x08\\r"


@pytest.fixture
def run_dir(tmp_path):
    path = tmp_path / "run"
    cfg = train_flags.parse(["--ipus=2", "--model=mlp", f"--run_dir={path}"])
    with run_folder.open_folder(str(path), name="x", now=datetime(2026, 1, 5), needed_bytes=0) as folder:
        folder.write_start(cfg, PlanRecord.of(plan.plan_run(cfg, info.DATASETS["fashion_mini"])))
    return path


def shown(capsys, command, *words):
    """Returns all that a command prints."""
    cli.run("command", lambda: command.main(list(words)), None)
    printed = capsys.readouterr()
    text = printed.out + printed.err
    assert all(each == "\n" or each.isprintable() for each in text), repr(text)
    return text


@pytest.mark.parametrize("flag", ["--dataset", "--data_dir", "--hosts", "--model", "--learning_rate", "--epochs"])
def test_saved_flags_are_shown_escaped(run_dir, capsys, flag):
    lines = (run_dir / "run.flags").read_text().splitlines()
    hostile = HOSTILE.replace("\r", "")
    (run_dir / "run.flags").write_text("\n".join([*lines, f"{flag}=a{hostile}"]) + "\n")
    for command in (train, launch):
        shown(capsys, command, f"--run_dir={run_dir}", "--dry_run")
    shown(capsys, train, f"--run_dir={run_dir}", "--evaluate", "--dry_run")


def test_a_plan_with_names_of_hosts_is_shown_escaped(capsys):
    for words in (["--dry_run"], ["--dry_run", "--format=mermaid"], ["--dry_run", "--json"]):
        shown(capsys, train, "--ipus=2", "--instances=2", f"--hosts=a{HOSTILE},b", *words)
    assert SHOWN in shown(capsys, train, f"--run_dir=runs/{HOSTILE}", "--no_such_flag", f"--dataset={HOSTILE}", HOSTILE)


def test_the_result_of_a_run_is_shown_escaped(run_dir, capsys):
    value = json.loads(json.dumps(sample_records.make_result().to_json()))
    value.update(model=HOSTILE, dataset=HOSTILE, run_dir=HOSTILE)
    value["verdict"]["sentence"] = HOSTILE
    value["stopped"] = {"kind": "signal", "transient": True, "message": HOSTILE, "resume": HOSTILE}
    (run_dir / "result.json").write_text(json.dumps(value))
    found = run_folder.RunFolder(run_dir).read_result()
    text = result_report.render_result(found, 80)
    assert SHOWN in text and all(each == "\n" or each.isprintable() for each in text)
    shown(capsys, monitor, f"--explain={run_dir}")


def test_names_in_a_checkpoint_are_shown_escaped(run_dir, capsys):
    folder = run_dir / "checkpoints" / "step-00000004"
    folder.mkdir(parents=True)
    content = {"step": 4, "files": {f"../{HOSTILE}": {"bytes": 1, "sha256": HOSTILE}}, HOSTILE: HOSTILE}
    (folder / "manifest.json").write_text(checkpoints._seal(content))
    (folder / HOSTILE).write_text("")
    assert "is damaged and skipped" in shown(capsys, compare, str(run_dir), str(run_dir))


def test_a_console_prints_its_own_colours_and_nobody_else_s():
    stream = io.StringIO()
    console = Console(stream)
    console.info(f"one\n{HOSTILE}")
    console.warning(HOSTILE)
    console.log(HOSTILE)
    with console.waiting(HOSTILE):
        pass
    assert all(each == "\n" or each.isprintable() for each in stream.getvalue())
    assert stream.getvalue().startswith(f"one\n{SHOWN}\n{SHOWN}\n{SHOWN}\n{SHOWN}...")


def test_notes_and_tables_are_escaped_before_they_are_laid_out(capsys):
    cli.announce("runs", f"kept {HOSTILE}")
    assert capsys.readouterr().err == f"runs: kept {SHOWN}\n"
    lines = cli.render_table(("Run", "State"), [(HOSTILE, "failed"), ("b", HOSTILE)], 2 * len(SHOWN) + 2).splitlines()
    assert lines == [f"{'Run':{len(SHOWN)}}  State", f"{SHOWN}  failed", f"{'b':{len(SHOWN)}}  {SHOWN}"]
