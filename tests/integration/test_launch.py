"""The launcher with real jobs: failures, restarts, signals, the wrapper of horovodrun, and the proof of equality."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import pty
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import termios
from datetime import datetime
from pathlib import Path

import pytest

from tf_ipu_dp import compare
from tf_ipu_dp.runs import run_folder

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
JOB = (
    "--sdk=emulator", "--model=mlp", "--dataset=synthetic", "--image_size=28", "--ipus=4", "--micro_batch_size=8",
    "--epochs=150steps", "--checkpoint_every=10", "--log_every=2", "--deterministic",
)  # fmt: skip


FAILS_WHEN_TOLD = """
import signal

def fail(*_):
    raise RuntimeError("the disk is on fire")

signal.signal(signal.SIGUSR1, fail)
"""


@pytest.fixture(autouse=True)
def _no_slurm_job(monkeypatch):
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def start(start_command):
    return functools.partial(start_command, "launch")


def finish(process):
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err


def said(err):
    """Returns the lines of the launcher itself."""
    return [line for line in err.splitlines() if line.startswith("launch: ")]


def make_wrapper(folder, name):
    """Returns a copy of a wrapper in launch/, beside an environment that needs no making."""
    wrappers = folder / "launch"
    wrappers.mkdir()
    shutil.copy(ROOT / "launch" / name, wrappers)
    (wrappers / "environment.sh").write_text(f"python={shlex.quote(sys.executable)}\n")
    return wrappers / name


def assert_same_weights(first, second, limit):
    assert compare.main([f"--limit={limit}", str(first), str(second)]) == 0


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, run_command):
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    job = run_command("launch", "--instances=2", "--", *JOB, f"--run_dir={folder}")
    out, err = job.stdout, job.stderr
    assert job.returncode == 0, err
    layout, done = said(err)
    assert layout == f"launch: 2 instances x 2 replicas; {folder}"
    assert re.fullmatch(f"launch: done in .*; {folder}", done)
    assert "Updates" in out
    return folder


def test_on_a_terminal_the_leader_has_a_bar_and_no_tag(tmp_path):
    main, other = pty.openpty()
    fcntl.ioctl(main, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 90, 0, 0))
    words = (*JOB[:6], "--epochs=20steps", f"--run_dir={tmp_path / 'run'}")
    command = [sys.executable, "-m", "tf_ipu_dp.launch", "--instances=2", "--", *words]
    environ = {**os.environ, "TERM": "xterm", "PYTHONIOENCODING": "utf-8"}
    process = subprocess.Popen(command, stdout=other, stderr=other, env=environ, start_new_session=True)
    os.close(other)
    shown = b""
    with contextlib.suppress(OSError):  # the last process has closed the terminal
        while piece := os.read(main, 1 << 16):
            shown += piece
    os.close(main)
    text = shown.decode()
    assert process.wait(timeout=60) == 0, text
    assert "[1,0]" not in text
    bars = [bar for bar in re.split("[\r\n]+", text) if bar.startswith("Epoch 1 ")]
    assert bars and all(len(bar) <= 90 for bar in bars)
    assert "tf_ipu_dp " in text and "Throughput" in text


def test_a_job_that_makes_progress_is_restarted_after_every_failure_and_ends_in_the_same_weights(
    tmp_path, monkeypatch, undisturbed, start, pids_of, steps_of, wait_for_checkpoint, wait_until
):
    def restarted_pid(folder, before):
        """Returns the process of instance 1 once there is another one than before."""
        with contextlib.suppress(FileNotFoundError):  # removed while it was read
            return next((pid for pid in pids_of(folder)[1:] if pid != before), None)

    (tmp_path / "sitecustomize.py").write_text(FAILS_WHEN_TOLD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    folder = tmp_path / "run"
    process = start("--instances=2", "--max_restarts=1", "--", *JOB, "--time_limit=1h", f"--run_dir={folder}")
    first = wait_for_checkpoint(folder, process)
    failing = pids_of(folder)[1]
    os.kill(failing, signal.SIGUSR1)
    # The instance trains on until Python handles the signal, so that a new checkpoint is no sign of the restart.
    wait_until(lambda: process.poll() is not None or restarted_pid(folder, failing), limit_s=240)
    second = wait_for_checkpoint(folder, process, after=max(steps_of(folder)))
    os.kill(restarted_pid(folder, failing), signal.SIGKILL)
    code, _, err = finish(process)
    assert code == 0, err
    # The other instance's error from Horovod is a secondary failure, whichever was written first.
    assert re.search(
        r"^launch: instance 1 on \S+ failed( \(1 other instance failed as a consequence\))?\. Its last lines:\n"
        r"(  .*\n){1,19}"
        r"  RuntimeError: the disk is on fire\nlaunch: ",
        err,
        re.MULTILINE,
    )
    again = [line for line in said(err) if "restarting" in line]
    assert re.fullmatch(
        r"launch: instance 1 on \S+ failed; restarting from step \d+ on 2 instances x 2 replicas\. "
        r"Restart 1 of 1\.",
        again[0],
    )
    assert re.fullmatch(
        r"launch: instance 1 on \S+ was killed by SIGKILL; restarting from step \d+ on 2 instances x 2 replicas\. "
        r"Restart 1 of 1\.",
        again[1],
    )
    assert [int(re.search(r"from step (\d+)", line)[1]) for line in again] >= [first, second]
    (limit,) = re.findall(r"^--time_limit=(\d+)s$", (folder / "run.flags").read_text(), re.MULTILINE)
    assert 0 < int(limit) < 3600  # what was left of it
    assert_same_weights(undisturbed, folder, 1e-5)


def test_a_stalled_instance_is_named_and_the_job_restarted_to_the_same_weights(
    tmp_path, undisturbed, start, pids_of, wait_for_checkpoint
):
    folder = tmp_path / "run"
    words = ("--instances=2", "--max_restarts=1", "--", *JOB, "--stall_timeout=6s", f"--run_dir={folder}")
    process = start(*words)
    wait_for_checkpoint(folder, process)
    stopped = pids_of(folder)[1]
    os.kill(stopped, signal.SIGSTOP)
    code, _, err = finish(process)
    assert code == 0 and not Path(f"/proc/{stopped}").exists(), err
    again = [line for line in said(err) if "restarting" in line]
    assert len(again) == 1 and re.match(r"launch: instance 1 on \S+ failed; restarting from step \d+ ", again[0]), err
    who = rf"instance 1 on {re.escape(os.uname().nodename)} \(pid {stopped}\): it is stopped"
    assert re.search(rf"^  No heartbeat for \d+ s from {who}", err, re.MULTILINE), err
    assert_same_weights(undisturbed, folder, 1e-5)


def test_a_job_whose_instances_are_all_stopped_is_ended_and_resumed_to_the_same_weights(
    tmp_path, undisturbed, start, pids_of, wait_for_checkpoint
):
    """None of them can report it: poprun does."""
    folder = tmp_path / "run"
    process = start("--instances=2", "--max_restarts=1", "--", *JOB, "--stall_timeout=6s", f"--run_dir={folder}")
    wait_for_checkpoint(folder, process)
    for pid in pids_of(folder):
        os.kill(pid, signal.SIGSTOP)
    code, _, err = finish(process)
    assert code == 0, err
    again = [line for line in said(err) if "restarting" in line]
    assert len(again) == 1 and re.match(
        r"launch: instance 0 \(pid \d+\) has been stopped for \d+ s, by SIGSTOP or a debugger; restarting from step ",
        again[0],
    ), err
    assert_same_weights(undisturbed, folder, 1e-5)


def test_a_signal_lets_the_job_save_and_horovodrun_goes_on_from_there_to_the_same_weights(
    tmp_path, undisturbed, start, wait_for_checkpoint
):
    folder = tmp_path / "run"
    process = start("--instances=2", "--max_restarts=3", "--", *JOB, f"--run_dir={folder}")
    wait_for_checkpoint(folder, process)
    process.send_signal(signal.SIGTERM)
    code, out, err = finish(process)
    assert code == 143, err
    stopped = int(re.search(r"SIGTERM after step (\d+), saved", out)[1])
    assert re.search(
        r"launch: stopped after .*\. Resume with: python -m tf_ipu_dp\.launch --max_restarts=3 -- "
        rf"--run_dir={folder}$",
        said(err)[-1],
    )

    wrapper = make_wrapper(tmp_path, "horovodrun.sh")
    command = ["bash", str(wrapper), *JOB, f"--run_dir={folder}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    out, err = done.stdout, done.stderr
    assert done.returncode == 0, out + err
    assert f"Resuming from step {stopped}" in out + err
    assert_same_weights(undisturbed, folder, 1e-5)


def test_a_failure_that_is_not_transient_is_shown_once_and_not_restarted(tmp_path, start, undisturbed):
    folder = tmp_path / "run"
    shutil.copytree(undisturbed, folder)
    for state in folder.glob("checkpoints/step-*/*.index"):
        state.write_bytes(b"damaged")
    code, _, err = finish(start("--instances=2", "--max_restarts=3", "--", *JOB, f"--run_dir={folder}"))
    assert code == 1, err
    sentence = rf"None of the checkpoints in {folder}/checkpoints can be read, and the run would start over .*"
    failed, how = said(err)[-2:]
    assert re.fullmatch(r"launch: instance \d on \S+ failed\. Its last lines:", failed)
    assert len(re.findall(rf"^  {sentence}$", err, re.MULTILINE)) == 1
    assert "It was not restarted, because it would fail again. Resume with: python" in how


def test_a_folder_in_use_is_refused_before_the_instances_start(tmp_path, start):
    folder = tmp_path / "run"
    with run_folder.open_folder(str(folder), name="x", now=datetime(2026, 1, 5), needed_bytes=0):
        code, _, err = finish(start("--instances=2", "--max_restarts=3", "--", *JOB, f"--run_dir={folder}"))
    assert code == 1
    assert re.fullmatch(
        rf"launch: --run_dir={folder} is in use by process {os.getpid()} on \S+\. Wait until it ends, or choose "
        r"another folder with --run_dir\.\n",
        err,
    )


def test_one_and_several_instances_are_shown_to_end_in_the_same_weights(tmp_path, start):
    words = ["--verify", "--instances=2", "--", *JOB[:-4], "--model=cnn", "--norm=group", "--epochs=2steps"]
    code, out, err = finish(start(*words, cwd=str(tmp_path)))
    assert code == 0, out + err
    header, *layers = out.splitlines()[:-2]
    assert header.split() == ["Layer", "Weights", "Difference", "Relative"]
    assert [line.split()[0] for line in layers][:2] == ["conv1_conv", "conv1_norm"] and len(layers) == 8
    layouts = "1 instance x 4 replicas and 2 instances x 2 replicas"
    assert out.splitlines()[-1] == f"{layouts} after 2 updates: identical weights, bit for bit."
    assert "training 2 updates on 2 instances x 2 replicas..." in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "environ", "words", "code", "text"),
    [
        ("poprun.sh", {"LAUNCHER": "emulator", "LAUNCHER_ARGS": "-v"}, ["--instances=2", "--ipus=4", "--dry_run"], 0,
         "--num-instances 2 --num-replicas 4 --ipus-per-replica 1 -v "),
        ("poprun.sh", {}, ["--ipus=4"], 1, "launch: --launcher=poprun cannot be used: poprun is not on the PATH."),
        ("slurm.sbatch", {}, [], 1, "submit this file with sbatch"),
        ("slurm.sbatch", {"SLURM_SUBMIT_DIR": "HERE", "SLURM_NTASKS": "4"}, ["--dry_run"], 0, "--num-instances 4 "),
    ],
)  # fmt: skip
def test_the_wrappers_are_thin_and_hand_everything_on(tmp_path, name, environ, words, code, text):
    wrapper = make_wrapper(tmp_path, name)
    given = {**os.environ, **{key: value.replace("HERE", str(tmp_path)) for key, value in environ.items()}}
    done = subprocess.run(["bash", str(wrapper), *words], env=given, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    assert text in done.stdout + done.stderr
