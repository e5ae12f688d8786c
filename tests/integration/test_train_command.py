"""The train command as a user starts it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tf_ipu_dp.emulator.devices import registry

POPRUN = {
    "POPDIST_NUM_TOTAL_REPLICAS": "8",
    "POPDIST_NUM_LOCAL_REPLICAS": "2",
    "POPDIST_NUM_IPUS_PER_REPLICA": "2",
    "POPDIST_REPLICA_INDEX_OFFSET": "0",
}


def test_help_lists_our_flags_and_not_those_of_absl(train):
    done = train("--help")
    assert done.returncode == 0 and not done.stderr
    assert "--ipus=N" in done.stdout and "--pipeline_schedule=grouped|interleaved|sequential" in done.stdout
    assert "--logtostderr" not in done.stdout and "--run_with_pdb" not in done.stdout


def test_a_dry_run_prints_the_plan_on_stdout_only(train):
    done = train("--ipus=8", "--dry_run")
    assert done.returncode == 0 and not done.stderr
    assert "Global batch" in done.stdout and "replica 7  IPU 7" in done.stdout


def test_a_dry_run_as_json_is_nothing_but_json(train):
    done = train("--ipus=8", "--dry_run", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["topology"]["replicas"] == 8


def test_a_dry_run_as_a_flowchart(train):
    done = train("--ipus=8", "--dry_run", "--format=mermaid")
    assert done.returncode == 0 and done.stdout.startswith("flowchart TB\n")


@pytest.mark.parametrize("flags", [["--help"], ["--ipus=8", "--dry_run"]])
def test_neither_help_nor_the_plan_imports_tensorflow(flags):
    code = f"import sys; from tf_ipu_dp import train; train.main({flags!r}); sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=False).returncode == 0


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--run_dir={tmp}/file/run"], "--run_dir={tmp}/file/run cannot be used ({tmp}/file is a file)."),
        (["--run_dir={tmp}"], "--run_dir={tmp} is neither empty nor the folder of a run: file is in it."),
        (["--dataset=imagenet2012", "--data_dir={tmp}"], "--dataset=imagenet2012 was not found in {tmp}."),
        (["--ipus=8"], "--ipus=8 cannot be attached: there is no device of 8 IPUs"),
        (["--ipus=4"], "--ipus=4 cannot be attached: 2 of the partition's 4 IPUs are held"),
        (["--ipus=4", "--instances=2"], "--ipus=4 cannot be attached: 2 of the partition's 4 IPUs are held"),
    ],
    ids=["file", "foreign folder", "data set", "too many IPUs", "busy IPUs", "busy IPUs of a job"],
)
@pytest.mark.parametrize("command", ["train", "launch"])
def test_folder_data_and_ipus_are_checked_before_tensorflow_is_imported(
    command, flags, sentence, tmp_path, monkeypatch, emulator_dir
):
    monkeypatch.setenv("IPU_EMULATOR_IPUS", "4")
    (tmp_path / "file").write_text("")
    attachment = registry.Partition.from_environment(os.environ).attach(count=2)
    words = [flag.format(tmp=tmp_path) for flag in ["--sdk=emulator", *flags]]
    code = (
        f"import sys; from tf_ipu_dp import cli, {command}\n"
        f"status = cli.run('{command}', lambda: {command}.main({words!r}), None)\n"
        "sys.exit(3 if 'tensorflow' in sys.modules else status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    attachment.release()
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith(f"{command}: {sentence.format(tmp=tmp_path)}") and done.stderr.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_ctrl_c_while_tensorflow_is_imported_is_one_line(start_command, wait_until, tmp_path):
    process = start_command(
        "train", "--sdk=emulator", "--model=mlp", "--dataset=synthetic", f"--run_dir={tmp_path}/run"
    )
    # From the first library on the import takes a second and more.
    wait_until(lambda: "libtensorflow_framework" in (Path("/proc") / str(process.pid) / "maps").read_text())
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 130, stderr
    assert stderr == "train: interrupted before training began; nothing was written.\n"
    assert not (tmp_path / "run").exists()


def test_a_refusal_is_on_stderr_with_exit_code_1_and_no_traceback(train):
    done = train("--ipus=6", "--instances=3")
    assert done.returncode == 1 and not done.stdout
    assert (
        done.stderr.startswith("train: 2 problems:\n  1. --ipus=6 is not possible") and "Traceback" not in done.stderr
    )


def test_under_poprun_the_plan_is_poprun_s(train):
    value = json.loads(train("--dry_run", "--json", **POPRUN).stdout)["topology"]
    assert (value["ipus"], value["instances"], value["launcher"]) == (16, 4, "poprun")


def test_under_poprun_a_flag_that_disagrees_is_refused(train):
    done = train("--dry_run", "--ipus=8", **POPRUN)
    assert done.returncode == 1
    assert done.stderr == (
        "train: --ipus=8 disagrees with poprun, which started 16 (8 replicas x 2 IPUs each). "
        "Use --ipus=16, or leave --ipus out.\n"
    )


def test_an_output_that_cannot_carry_boxes_gets_ascii(train):
    done = train("--ipus=2", "--dry_run", PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and done.stdout.isascii() and "replica 1  IPU 1" in done.stdout


def test_a_flowchart_in_ascii(train):
    flags = ("--ipus=4", "--pipeline_stages=2", "--dry_run", "--format=mermaid")
    done = train(*flags, PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and done.stdout.isascii() and "IPU 2 > 3" in done.stdout


@pytest.mark.parametrize(("target", "code", "message"), [("/dev/full", 1, "cannot be written"), ("&-", 0, "")])
def test_an_output_that_cannot_be_written_causes_no_traceback(target, code, message):
    command = f"{sys.executable} -m tf_ipu_dp.train --ipus=8 --dry_run >{target}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert done.returncode == code and message in done.stderr and "Traceback" not in done.stderr


def test_a_reader_that_goes_away_causes_no_traceback():
    command = f"{sys.executable} -m tf_ipu_dp.train --ipus=8192 --micro_batch_size=1 --dry_run --json | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert done.stdout == "{\n" and not done.stderr
