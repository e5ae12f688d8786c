"""Whole scaling studies of small models with real processes: repeated, failing, interrupted, killed and continued.

Prediction, report and the other engine are the stand-ins of `scaling_stand_ins.py`, but in the studies of the command
itself.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import scaling_stand_ins

from tf_ipu_dp.collectives import namespaces
from tf_ipu_dp.scaling import process_use
from tf_ipu_dp.scaling.study_folder import StudyFolder

PROGRAM = [sys.executable, scaling_stand_ins.__file__]
SMALL = ("--model=mlp", "--dataset=fashion_mini", "--updates=6")
needs_emulated_hosts = pytest.mark.skipif(namespaces.why_not() is not None, reason=str(namespaces.why_not()))


def run_study(*words, **environ):
    return subprocess.run(
        [*PROGRAM, *map(str, words)], capture_output=True, text=True, check=False, timeout=600,
        env={**os.environ, **environ},
    )  # fmt: skip


@pytest.fixture
def start_study():
    """Starts a study and returns the process, which is killed if it outlives the test."""
    started = []

    def start(*words):
        # A shell lets its background jobs ignore Ctrl-C, and the study would inherit that.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        command = [*PROGRAM, *map(str, words)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        signal.signal(signal.SIGINT, before)
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A whole study: 2 sizes x 2 repeats of our engine and of another one, one of whose cells fails."""
    folder = tmp_path_factory.mktemp("scaling") / "study"
    words = (*SMALL, "--mode=weak", "--sizes=1,2", "--repeats=2", "--engines=tf_ipu_dp,ddp,keras", "--json",
             f"--study_dir={folder}")  # fmt: skip
    return StudyFolder(folder), words, run_study(*words, SCALING_TEST_FAIL="ddp-2")


def test_every_repeat_of_every_cell_is_measured(study):
    folder, _, done = study
    assert done.returncode == 0, done.stderr
    found = {(each.cell, each.repeat): each for each in folder.read_measurements()}
    assert len(found) == 12
    for size in (1, 2):
        for repeat in (0, 1):
            made = found[f"tf_ipu_dp-{size}", repeat]
            assert (made.state, made.updates, made.samples) == ("done", 6, 6 * 32 * size)
            assert 0 < made.seconds < made.total_s and made.memory_bytes > 50 << 20
            assert made.parts.total_s == pytest.approx(made.update_s, rel=0.5)
            run = folder.path / made.run_dir
            assert json.loads((run / "result.json").read_text(encoding="utf-8"))["replicas"] == size
            assert not (run / "checkpoints").exists()


def test_a_cell_that_fails_is_a_row_with_its_reason_and_an_engine_that_is_missing_says_how_to_install_it(study):
    folder, _, done = study
    found = {(each.cell, each.repeat): each for each in folder.read_measurements()}
    assert (found["ddp-2", 0].state, found["ddp-2", 0].reason) == ("failed", "Process 1 failed: it was asked to.")
    assert (found["keras-1", 1].state, found["keras-1", 1].reason) == (
        "not installed",
        scaling_stand_ins.INSTALL["keras"],
    )
    made = found["ddp-1", 1]
    assert (made.state, made.samples, made.seconds) == ("done", 6 * 32, 0.5)
    assert "ddp, 2 instances, repeat 1: failed: Process 1 failed: it was asked to" in done.stderr


def test_progress_says_how_long_it_takes_and_stdout_has_the_report_alone(study):
    folder, _, done = study
    lines = [line for line in done.stderr.splitlines() if " of 12: " in line]
    assert [line.split(" of ")[0] for line in lines] == [f"scaling: {number}" for number in range(1, 13)]
    assert all("left" in line for line in lines[:-1]) and "left" not in lines[-1]
    assert len(json.loads(done.stdout)) == 12
    assert f"written: {folder.path / 'report.txt'}" in done.stderr


def test_other_engines_are_asked_for_the_same_model_batch_and_threads(study):
    folder, _, _ = study
    order = json.loads((folder.runs / "ddp-2-repeat0" / "order.json").read_text(encoding="utf-8"))
    asked = [order[name] for name in ("model", "dataset", "batch_size", "processes", "updates", "seed", "momentum")]
    assert asked == ["mlp", "fashion_mini", 32, 2, 6, 42, 0.9]
    assert order["threads"] == max(len(os.sched_getaffinity(0)) // 2, 1) and order["learning_rate"] > 0


def test_the_study_keeps_what_was_asked_predicted_and_found_of_the_machine(study):
    folder, words, _ = study
    kept = folder.read_study()
    assert (kept.mode, kept.unit, kept.sizes, kept.repeats) == ("weak", "instances", (1, 2), 2)
    assert kept.command == words and kept.words == ("--model=mlp", "--augment=none", "--device_iterations=1")
    assert [each.cell for each in kept.predictions] == [cell.key for cell in kept.cells]
    assert kept.facts["processor"] and kept.facts["cores"] == str(os.cpu_count())


def test_a_study_that_is_complete_but_for_what_failed_only_measures_that_again(study):
    folder, words, _ = study
    before = {(each.cell, each.repeat): each for each in folder.read_measurements()}
    done = run_study(*words)
    assert done.returncode == 0, done.stderr
    assert "6 of 12 runs are already measured." in done.stderr and "predicting" not in done.stderr
    after = {(each.cell, each.repeat): each for each in folder.read_measurements()}
    assert all(after[key] == each for key, each in before.items() if each.is_done)
    assert after["ddp-2", 0].is_done and after["ddp-2", 1].is_done


def test_a_study_is_drawn_again_without_a_run(study):
    folder, _, _ = study
    done = run_study("report", folder.path, "--json")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)) == 12


def test_another_study_in_the_same_folder_is_refused(study):
    folder, words, _ = study
    before = folder.cells_jsonl.read_bytes()
    done = run_study(*words, "--sizes=1,2,4")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"scaling: --study_dir={folder.path} holds another study: its --sizes are 1,2, and not 1,2,4. Choose another "
        "folder.\n"
    )
    assert folder.cells_jsonl.read_bytes() == before


def test_a_run_of_ours_that_fails_is_a_row_and_the_others_go_on(tmp_path):
    # The emulated partition has 2 IPUs, and the second cell needs 4.
    done = run_study(
        *SMALL, "--mode=weak", "--unit=replicas", "--sizes=1,4", "--repeats=1", "--json",
        f"--study_dir={tmp_path / 's'}", IPU_EMULATOR_IPUS="2",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = {each["cell"]: each for each in json.loads(done.stdout)}
    assert found["tf_ipu_dp-1"]["state"] == "done"
    assert found["tf_ipu_dp-4"]["state"] == "failed" and "IPU" in found["tf_ipu_dp-4"]["reason"]
    assert "\n" not in found["tf_ipu_dp-4"]["reason"]


@pytest.fixture
def measuring(start_study, tmp_path, wait_until):
    """A study whose first run is measured and whose second one trains: the process, the folder and the words."""
    folder = StudyFolder(tmp_path / "study")
    words = (*SMALL, "--mode=batch", "--sizes=8,16", "--repeats=1", f"--study_dir={folder.path}")
    process = start_study(*words)
    wait_until(lambda: process.poll() is not None or folder.read_measurements(), limit_s=300)
    wait_until(lambda: process.poll() is not None or len(process_use.find_tree(process.pid)) > 1, limit_s=60)
    assert process.poll() is None, process.communicate()
    return process, folder, words


def test_ctrl_c_keeps_and_reports_what_is_measured_and_ends_the_run(measuring, wait_until):
    process, folder, words = measuring
    children = process_use.find_tree(process.pid)[1:]
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130 and "Traceback" not in err, err
    (kept,) = folder.read_measurements()
    assert out == f"{kept.cell} done\n"
    assert "scaling: interrupted: 1 of 2 runs are measured and kept. Continue with: python -m tf_ipu_dp.scaling" in err
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), limit_s=60)
    done = run_study(*words)
    assert done.returncode == 0 and "1 of 2 runs are already measured." in done.stderr, done.stderr
    assert folder.read_measurements()[0] == kept and len(folder.read_measurements()) == 2


def test_a_study_that_is_killed_ends_its_run_and_nothing_is_measured_again(measuring, wait_until):
    process, folder, words = measuring
    children = process_use.find_tree(process.pid)[1:]
    (kept,) = folder.read_measurements()
    process.kill()
    process.communicate()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), limit_s=60)
    done = run_study(*words, "--json")
    assert done.returncode == 0, done.stderr
    assert "1 of 2 runs are already measured." in done.stderr and "predicting" not in done.stderr
    first, second = folder.read_measurements()
    assert first == kept and second.is_done and second.cell != kept.cell


def test_time_to_accuracy_has_the_validations_of_the_run(tmp_path):
    done = run_study(
        "--model=mlp", "--mode=weak", "--sizes=1", "--repeats=1", "--micro_batch_size=512", "--epochs=2",
        "--target_accuracy=50", "--json", f"--study_dir={tmp_path / 's'}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (made,) = json.loads(done.stdout)
    assert [each["step"] for each in made["validations"]] == [16, 32]
    first, second = (each["elapsed_s"] for each in made["validations"])
    assert 0 < first < second < made["total_s"] and 0 < made["validations"][1]["accuracy"] < 1
    assert made["updates"] == 29  # 32 without the warm-up


@needs_emulated_hosts
def test_instances_train_on_emulated_hosts_of_their_own(tmp_path):
    done = run_study(
        *SMALL, "--mode=weak", "--sizes=2", "--repeats=1", "--fabric=r4", "--json", f"--study_dir={tmp_path / 's'}"
    )
    assert done.returncode == 0, done.stderr
    found = {each["cell"]: each for each in json.loads(done.stdout)}
    assert {name: (each["state"], each["reason"]) for name, each in found.items()} == {"tf_ipu_dp-2": ("done", "")}
    plan = json.loads((tmp_path / "s" / "runs" / "tf_ipu_dp-2-repeat0" / "plan.json").read_text(encoding="utf-8"))
    assert plan["topology"]["host_names"] == ["10.213.0.1", "10.213.0.2"]
    study = StudyFolder(tmp_path / "s").read_study()
    assert study.fabric.startswith("r4: 4 hosts") and "dilated" not in study.fabric
    assert "all of them share the cores of this machine" in done.stderr


def test_instances_train_on_hosts_by_name(tmp_path, two_hosts):
    done = run_study(
        *SMALL, "--mode=weak", "--sizes=1,2", "--repeats=1", f"--hosts={','.join(two_hosts.names)}", "--json",
        f"--study_dir={tmp_path / 's'}", OMPI_MCA_plm_rsh_agent=two_hosts.agent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = {each["cell"]: (each["state"], each["reason"]) for each in json.loads(done.stdout)}
    assert found == {"tf_ipu_dp-1": ("done", ""), "tf_ipu_dp-2": ("done", "")}
    for instances in (1, 2):
        folder = tmp_path / "s" / "runs" / f"tf_ipu_dp-{instances}-repeat0"
        plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
        assert plan["topology"]["host_names"] == two_hosts.names[:instances]


def test_a_study_of_the_command_itself_predicts_measures_explains_and_reports(tmp_path):
    environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    words = [sys.executable, "-m", "tf_ipu_dp.scaling", "--sdk=emulator", "--model=mlp", "--dataset=synthetic",
             "--image_size=28", "--micro_batch_size=64", "--mode=weak", "--sizes=1,2", "--repeats=1", "--seconds=1",
             "--predict=16", "--predict_on=pod16", "--compute_ms=2", "--json", f"--study_dir={tmp_path / 's'}",
             ]  # fmt: skip
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=600, env=environ)
    assert done.returncode == 0, done.stderr
    value = json.loads(done.stdout)
    alone, two = value["rows"]
    assert (alone["cell"]["key"], two["cell"]["key"]) == ("tf_ipu_dp-1", "tf_ipu_dp-2")
    for row in (alone, two):
        assert row["samples_per_s"]["median"] > 0 and row["reason"] == ""
        assert row["error"] == pytest.approx(row["predicted"]["update_s"] / row["update_s"] - 1)
        parts = [row["parts"][name] for name in ("compute_s", "optimizer_s", "overhead_s")]
        assert min(parts) > 0 and 0 <= row["others_busy"] <= 1
    assert (alone["core_limited"], two["core_limited"]) == (False, True)
    assert alone["parts"]["collective_s"] == 0 < two["parts"]["collective_s"]
    assert value["study"]["facts"]["sdk"] == "emulator"
    assert value["verdict"].startswith("This says nothing about scaling: at 2 instances the cores of this machine are")
    assert "One emulated IPU trains" in value["verdict"]
    (further,) = value["study"]["extrapolations"]
    assert (further["fabric"], further["compute"]) == ("pod16", "compute of 2 ms a micro batch")
    names = {path.name for path in (tmp_path / "s").iterdir()}
    assert {"report.txt", "report.csv", "report.html", "throughput.png", "parts.svg", "extrapolation.svg"} <= names
    text = (tmp_path / "s" / "report.txt").read_text(encoding="utf-8")
    assert "Scorecard of the predictions" in text and "Where the time of one update goes (ms)" in text
    again = subprocess.run([*words, "--updates=50"], capture_output=True, text=True, check=False, env=environ)
    assert (again.returncode, again.stderr) == (
        1,
        f"scaling: --study_dir={tmp_path / 's'} holds another study: its --updates are none, and not 50. Choose "
        "another folder.\n",
    )
