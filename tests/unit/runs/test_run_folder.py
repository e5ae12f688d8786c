from __future__ import annotations

import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path

import pytest
import sample_records
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_ipu_dp import cli
from tf_ipu_dp.config import train_flags
from tf_ipu_dp.runs import records, run_folder
from tf_ipu_dp.runs.exchange_times import ExchangeTimes
from tf_ipu_dp.runs.heartbeat import Status

NOW = datetime(2026, 1, 5, 10, 0, 0)
HOLDER = """
import sys, datetime
from tf_ipu_dp.runs import run_folder
folder = run_folder.open_folder(sys.argv[1], name="x", now=datetime.datetime(2026, 1, 5), needed_bytes=0)
print("held", flush=True)
sys.stdin.read()
"""


def open_folder(run_dir, needed_bytes=0, name="cnn-fashion_mini"):
    return run_folder.open_folder(run_dir and str(run_dir), name=name, now=NOW, needed_bytes=needed_bytes)


def refusal(run_dir, **options):
    with pytest.raises(cli.UsageError) as caught:
        open_folder(run_dir, **options)
    (sentence,) = caught.value.sentences
    return sentence


@pytest.fixture
def folder(tmp_path):
    with open_folder(tmp_path / "run") as opened:
        yield opened


@pytest.fixture
def with_sample_records():
    """Returns an environment in which another process can import the module of samples."""
    paths = [str(Path(sample_records.__file__).parent), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


@pytest.fixture
def small_disk(tmp_path, with_sample_records):
    """Returns what runs a program where `tmp_path / "small"` is a file system of 64 KB."""
    small = tmp_path / "small"
    small.mkdir()
    script = f'mount -t tmpfs -o size=64k tmpfs {small} && exec "$@"'
    words = ["unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh"]
    try:
        subprocess.run([*words, "true"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("a small file system cannot be mounted here")

    def run(program):
        words_and_program = [*words, sys.executable, "-c", program, str(small)]
        return subprocess.run(
            words_and_program, capture_output=True, text=True, check=True, timeout=240, env=with_sample_records
        ).stdout

    return run


def test_a_new_folder_has_the_runs_name_and_time_and_a_taken_name_gets_a_number(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = [str(open_folder(None).path) for _ in range(3)]
    assert names == [f"runs/cnn-fashion_mini-20260105-100000{suffix}" for suffix in ("", "-2", "-3")]
    assert open_folder(None, name="cnn-set/config:1.0").path == Path("runs/cnn-set-config-1.0-20260105-100000")


def test_runs_that_start_in_the_same_second_get_a_folder_each(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        opened = list(pool.map(lambda _: open_folder(None), range(24)))
    assert len({each.path for each in opened}) == 24


def test_a_given_folder_is_made_with_its_parents_and_taken_up_again(tmp_path):
    with open_folder(tmp_path / "a" / "b") as first:
        assert first.path == tmp_path / "a" / "b"
        first.append_metrics(sample_records.make_training(1))
    with open_folder(tmp_path / "a" / "b") as second:
        assert second.read_metrics() == [sample_records.make_training(1)]


def test_a_folder_that_cannot_be_made_is_refused_in_a_sentence(tmp_path):
    (tmp_path / "file").write_text("here")
    tail = "Choose another folder with --run_dir."
    for given_dir in (tmp_path / "file", tmp_path / "file" / "below"):
        assert refusal(given_dir) == f"--run_dir={given_dir} cannot be used ({tmp_path / 'file'} is a file). {tail}"
    long = tmp_path / ("x" * 300)
    assert refusal(long) == f"--run_dir={long} cannot be used (File name too long). {tail}"
    for impossible in ("", " ", "gs://bucket/run"):
        with pytest.raises(cli.UsageError, match="is not a folder of this machine"):
            run_folder.open_folder(impossible, name="x", now=NOW, needed_bytes=0)


@pytest.mark.parametrize("closed", ["", "checkpoints", "metrics.jsonl"])
def test_a_folder_that_may_not_be_written_is_refused_in_a_sentence(closed):
    # As root everything may be written, so another user does it.
    program = """
import os, sys, datetime
from tf_ipu_dp import cli; from tf_ipu_dp.runs import run_folder
if os.getuid() == 0:
    os.setgid(65534), os.setuid(65534)
try:
    run_folder.open_folder(sys.argv[1], name="x", now=datetime.datetime(2026, 1, 5), needed_bytes=0)
except cli.UsageError as error:
    print(error)
"""
    top = Path(tempfile.mkdtemp())
    try:
        (top / "checkpoints").mkdir()
        (top / "metrics.jsonl").write_text("")
        for path in (top, top / "checkpoints"):
            path.chmod(0o777)
        (top / "metrics.jsonl").chmod(0o666)
        (top / closed).chmod(0o555)
        done = subprocess.run([sys.executable, "-c", program, str(top)], capture_output=True, text=True, check=True)
        reason = f"{closed} in it is not writable" if closed else "Permission denied"
        assert done.stdout == f"--run_dir={top} cannot be used ({reason}). Choose another folder with --run_dir.\n"
    finally:
        top.chmod(0o777)
        shutil.rmtree(top)


def test_too_little_space_is_refused_with_both_numbers_and_nothing_is_made(tmp_path):
    wanted = tmp_path / "a" / "b"
    sentence = refusal(wanted, needed_bytes=10**18)
    free = shutil.disk_usage(tmp_path).free / 1e6
    said = float(sentence.split(" has ")[1].split(" MB")[0].replace(",", ""))
    assert said == pytest.approx(free, rel=0.05)
    assert sentence.endswith(
        " MB free on its disk and the run needs 1,000,000,000,000.0 MB. "
        "Free some space, lower --keep_checkpoints or choose another folder with --run_dir."
    )
    assert not (tmp_path / "a").exists()


def test_a_folder_in_use_is_refused_until_its_process_dies(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "held\n"
        assert refusal(tmp_path) == (
            f"--run_dir={tmp_path} is in use by process {holder.pid} on {socket.gethostname()}. "
            "Wait until it ends, or choose another folder with --run_dir."
        )
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    open_folder(tmp_path).close()


def test_a_closed_folder_can_be_opened_again_in_the_same_process(tmp_path):
    with open_folder(tmp_path):
        assert f"in use by process {os.getpid()}" in refusal(tmp_path)
    open_folder(tmp_path).close()


def test_the_start_of_a_run_is_kept_and_its_flags_make_the_same_config_again(folder):
    cfg = train_flags.parse(["--ipus=8", "--epochs=200steps", "--data_dir=/data/Größe x", "--lr_drop_epochs=1,2.5"])
    planned = sample_records.make_plan("--ipus=8")
    folder.write_start(cfg, planned)
    values = json.loads(folder.config_json.read_text(encoding="utf-8"))
    chosen = {name: values[name] for name in ("ipus", "epochs", "data_dir", "lr_drop_epochs", "instances")}
    assert chosen == {
        "ipus": 8, "epochs": "200steps", "data_dir": "/data/Größe x", "lr_drop_epochs": [1, 2.5], "instances": None,
    }  # fmt: skip
    assert json.loads(folder.plan_json.read_text()) == planned.to_json() and folder.read_plan() == planned
    first = folder.run_flags.read_text(encoding="utf-8").split("\n")[0]
    assert first == f"# Runs this again: python -m tf_ipu_dp.train --flagfile={folder.run_flags}"
    assert train_flags.parse([f"--flagfile={folder.run_flags}"]) == cfg
    assert train_flags.parse(run_folder.read_run_flags(folder.path)) == cfg
    names = {"config.json", "run.flags", "plan.json", ".lock"}
    assert {path.name for path in folder.path.iterdir()} == names


def test_the_flags_of_what_is_no_run_are_refused_in_a_sentence(tmp_path):
    with pytest.raises(cli.UsageError) as caught:
        run_folder.read_run_flags(tmp_path)
    assert str(caught.value) == (
        f"--run_dir={tmp_path} is not the folder of a run: its run.flags cannot be read (No such file or directory). "
        "Give a run's folder, like --run_dir=runs/first."
    )


def test_a_run_is_finished_when_its_result_says_so_until_it_is_started_again(folder):
    cfg = train_flags.parse([])
    assert folder.read_result() is None
    interrupted = records.StopReason(records.StopReason.SIGNAL, True, "SIGTERM after step 160")
    early = records.StopReason(records.StopReason.EARLY_STOPPING, False, "Validation loss has not improved.")
    for stopped, finished in ((interrupted, False), (early, True), (None, True)):
        result = sample_records.make_result(stopped=stopped, utilisation_pct=math.nan)
        folder.write_result(result)
        assert folder.read_result().is_finished is finished
    assert folder.read_result() == sample_records.make_result(utilisation_pct=None)
    folder.write_start(cfg, sample_records.make_plan())
    assert folder.read_result() is None


def test_exchange_times_are_those_of_the_last_start(folder):
    assert folder.read_exchange_times() is None
    times = ExchangeTimes.of([[0.3, 0.2], [0.1, 0.4]])
    folder.write_exchange_times(times)
    assert folder.read_exchange_times() == times
    folder.write_start(train_flags.parse([]), sample_records.make_plan())
    assert folder.read_exchange_times() is None
    folder.exchange_times_json.write_text('{"schema": 1, "exchanges": "many"}')
    assert folder.read_exchange_times() is None


def test_errors_are_kept_per_instance_also_by_one_that_does_not_hold_the_folder(folder):
    before = datetime.now(timezone.utc)
    path = run_folder.RunFolder(folder.path).write_error(3, "Traceback ...\n\nValueError\n")
    assert path == folder.path / "errors" / "instance-003.txt"
    assert path.read_text().endswith("\n\nTraceback ...\n\nValueError\n")
    (error,) = folder.read_errors()
    assert (error.instance, error.host, error.process, error.transient) == (3, socket.gethostname(), os.getpid(), True)
    assert before <= error.time <= datetime.now(timezone.utc) and error.time.microsecond
    assert error.text == "Traceback ...\n\nValueError"


def test_of_one_processs_errors_the_first_stays_and_another_processs_takes_its_place(folder):
    folder.write_error(0, "cause", transient=False)
    folder.write_error(0, "consequence")
    assert [(error.text, error.transient) for error in folder.read_errors()] == [("cause", False)]
    program = "import sys; from pathlib import Path; from tf_ipu_dp.runs import run_folder; "
    program += "run_folder.RunFolder(Path(sys.argv[1])).write_error(0, 'next')"
    subprocess.run([sys.executable, "-c", program, str(folder.path)], check=True)
    assert [error.text for error in folder.read_errors()] == ["next"]


def test_a_stall_is_kept_for_the_stalled_instance_with_who_reported_it(folder):
    folder.write_stall(Status("run", 2, 4, "node07", 42), "No heartbeat for 7 s.", reported_by=0)
    (error,) = folder.read_errors()
    assert (error.instance, error.host, error.reported_by, error.transient) == (2, "node07", 0, True)


def test_a_stalled_process_that_continues_does_not_replace_the_report_of_its_stall(folder):
    folder.write_stall(Status("run", 1, 2, socket.gethostname(), os.getpid()), "No heartbeat for 7 s.", reported_by=0)
    folder.write_error(1, "Connection closed by peer")
    assert [error.text for error in folder.read_errors()] == ["No heartbeat for 7 s."]


def test_errors_come_in_the_order_of_their_times_and_other_files_are_passed_over(folder):
    for instance in (2, 0, 1):
        folder.write_error(instance, str(instance))
    (folder.errors / "instance-007.txt").write_text("no head")
    (folder.errors / "instance-008.txt").write_bytes(b"instance: x\nhost: \xff\n\n")
    assert [error.instance for error in folder.read_errors()] == [2, 0, 1]


def test_errors_of_an_earlier_start_are_set_aside_and_kept(folder):
    folder.set_errors_aside()
    for text in ("first", "second"):
        folder.write_error(0, text)
        folder.set_errors_aside()
        assert folder.read_errors() == []
    kept = [(folder.path / f"errors-{number}" / "instance-000.txt").read_text() for number in (1, 2)]
    assert ["first" in kept[0], "second" in kept[1]] == [True, True]


def test_a_folder_knows_whether_there_is_a_plan_and_something_to_resume_from(folder):
    assert folder.read_plan() is None and not folder.has_checkpoints()
    folder.write_start(train_flags.parse([]), sample_records.make_plan())
    (folder.checkpoints / "step-00000008").mkdir(parents=True)
    assert folder.read_plan() == sample_records.make_plan() and folder.has_checkpoints()
    folder.plan_json.write_text('{"schema": 1}')
    assert folder.read_plan() is None


def test_a_folder_is_made_for_another_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = [run_folder.make_folder("cnn-fashion_mini", NOW) for _ in range(2)]
    assert [str(path) for path in paths] == [f"runs/cnn-fashion_mini-20260105-100000{end}" for end in ("", "-2")]
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    (tmp_path / "other" / "runs").write_text("")
    with pytest.raises(cli.UsageError, match=r"cannot be used \(.*\)\. Choose another folder with --run_dir\."):
        run_folder.make_folder("x", NOW)


def refuse_constant(name):
    raise AssertionError(f"{name} is not JSON")


NUMBERS = st.none() | st.floats()


@settings(max_examples=60)
@given(numbers=st.lists(st.tuples(st.integers(0, 99), NUMBERS, NUMBERS), max_size=5))
def test_metrics_are_one_line_of_strict_json_per_record_with_null_for_what_is_not_finite(numbers):
    with tempfile.TemporaryDirectory() as path:
        folder = run_folder.RunFolder(Path(path))
        for step, loss, rate in numbers:
            folder.append_metrics(sample_records.make_training(step, loss=loss, samples_per_s=rate))
        lines = folder.metrics.read_bytes().decode().split("\n") if numbers else [""]
        assert lines.pop() == ""
        values = [json.loads(line, parse_constant=refuse_constant) for line in lines]
        expected = [(step, *(None if x is None else records.finite(x) for x in pair)) for step, *pair in numbers]
        assert [(value["step"], value["loss"], value["samples_per_s"]) for value in values] == expected
        assert [(each.step, each.loss, each.samples_per_s) for each in folder.read_metrics()] == expected


def test_numbers_of_numpy_are_numbers_in_the_metrics(folder):
    numpy = pytest.importorskip("numpy")
    folder.append_metrics(sample_records.make_training(numpy.int64(3), loss=numpy.float32(0.5)))
    assert (folder.read_metrics()[0].step, folder.read_metrics()[0].loss) == (3, 0.5)


LINE = len(json.dumps(sample_records.make_training(1).to_json())) + 1


@settings(max_examples=60)
@given(cut=st.integers(0, 3 * LINE - 1))
def test_after_a_crash_at_any_byte_of_the_metrics_whole_lines_stay_and_the_next_starts_on_its_own(cut):
    with tempfile.TemporaryDirectory() as path:
        with open_folder(path) as folder:
            for _ in range(3):
                folder.append_metrics(sample_records.make_training(1))
            content = folder.metrics.read_bytes()
            assert len(content) == 3 * LINE
            folder.metrics.write_bytes(content[:cut])
        with open_folder(path) as folder:
            assert folder.metrics.read_bytes() == content[: (cut + 1) // LINE * LINE]
            folder.append_metrics(sample_records.make_training(9))
            assert folder.read_metrics()[-1] == sample_records.make_training(9)


def test_a_tail_of_zeros_as_a_power_cut_leaves_it_is_cut_off(folder):
    folder.append_metrics(sample_records.make_training(1))
    before = folder.metrics.read_bytes()
    with folder.metrics.open("ab") as handle:
        handle.write(b"\0" * 40)
    folder.close()
    with open_folder(folder.path) as again:
        assert again.metrics.read_bytes() == before


def test_what_a_killed_process_left_beside_its_files_is_removed(folder):
    folder.close()
    (folder.path / ".result.json.123.tmp").write_text("{")
    with open_folder(folder.path) as again:
        assert [path.name for path in again.path.iterdir()] == [".lock"]


@settings(max_examples=40)
@given(steps=st.lists(st.integers(0, 20), max_size=12), last=st.integers(0, 20))
def test_records_after_the_checkpoints_step_are_dropped_and_no_others(steps, last):
    with tempfile.TemporaryDirectory() as path:
        folder = run_folder.RunFolder(Path(path))
        made = [sample_records.make_training(step, loss=1 / (step + 1)) for step in steps]
        for record in made:
            folder.append_metrics(record)
        folder.truncate_metrics(after_step=last)
        assert folder.read_metrics() == [record for record in made if record.step <= last]


def test_a_reader_that_follows_the_metrics_finds_a_record_in_every_line_that_has_its_end(tmp_path):
    program = """
import sys
from pathlib import Path
from tf_ipu_dp.runs import records, run_folder
from tf_ipu_dp.runs.heartbeat import Status
folder = run_folder.RunFolder(Path(sys.argv[1]))
utilisation = {str(number): 50.0 for number in range(50)}
for step in range(3000):
    folder.append_metrics(records.TrainingRecord(step, 0.0, 0.5, 0.5, 0.1, ipu_utilisation_pct=utilisation))
sys.stdin.read()
"""
    folder = run_folder.RunFolder(tmp_path)
    folder.metrics.touch()
    writer = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE)
    steps = []
    try:
        rest = b""
        with folder.metrics.open("rb") as reader:
            while len(steps) < 3000 and writer.poll() is None:
                *lines, rest = (rest + reader.read()).split(b"\n")
                steps += [json.loads(line)["step"] for line in lines]
    finally:
        writer.communicate()
    assert steps == list(range(3000))


def test_a_full_disk_is_a_sentence_and_leaves_whole_lines_and_whole_files(small_disk, tmp_path):
    program = """
import json, sys
from pathlib import Path
from tf_ipu_dp import cli; from tf_ipu_dp.runs import records, run_folder
import sample_records
folder = run_folder.RunFolder(Path(sys.argv[1]))
folder.write_result(sample_records.make_result(updates=1))
sentences = []
for size in (3001, 1):
    try:
        while True:
            utilisation = {"x" * size: 50.0}
            folder.append_metrics(sample_records.make_training(1, ipu_utilisation_pct=utilisation))
    except cli.UsageError as error:
        sentences.append(str(error))
try:
    folder.write_result(sample_records.make_result(updates=2, run_dir="x" * 10000))
except cli.UsageError as error:
    sentences.append(str(error))
content = folder.metrics.read_bytes()
print(json.dumps([sentences, content.count(b"\\n") == len(folder.read_metrics()) > 10, content[-2:].decode(),
    folder.read_result().updates, sorted(path.name for path in folder.path.iterdir())]))
"""
    sentences, all_whole, end, updates, names = json.loads(small_disk(program))
    reason = f"The run's folder {tmp_path / 'small'} cannot be written (No space left on device)."
    remedy = "Mend that and start the run again: it resumes from its last checkpoint."
    assert sentences == [f"{reason} {remedy}"] * 3
    assert all_whole
    assert end == "}\n"
    assert updates == 1
    assert names == ["metrics.jsonl", "result.json"]


def test_a_kill_while_a_file_is_replaced_leaves_the_old_or_the_new_one(tmp_path, with_sample_records):
    program = """
import os, signal, sys, random, time
from pathlib import Path
from tf_ipu_dp.runs import run_folder
import sample_records
folder = run_folder.RunFolder(Path(sys.argv[1]))
folder.write_result(sample_records.make_result(updates=0, model="0" * 60000, dataset="0" * 60000))
for _ in range(25):
    child = os.fork()
    if not child:
        number = 0
        while True:
            number = (number + 1) % 10
            text = str(number) * 60000
            folder.write_result(sample_records.make_result(updates=number, model=text, dataset=text))
    time.sleep(random.uniform(0, 0.02))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    result = folder.read_result()
    assert result.model == result.dataset == str(result.updates) * 60000
print("good")
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env=with_sample_records,
    )
    assert (done.stdout, done.stderr) == ("good\n", "")


def test_a_folder_with_other_files_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    assert refusal(tmp_path) == (
        f"--run_dir={tmp_path} is neither empty nor the folder of a run: thesis.tex is in it. "
        f"Give a new folder, like --run_dir={tmp_path / 'run-1'}."
    )
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_log_that_a_shell_has_made_is_no_other_file(tmp_path):
    (tmp_path / "train.log").touch()
    open_folder(tmp_path).close()
    (tmp_path / "notes.txt").touch()
    open_folder(tmp_path).close()  # a run by now


def test_an_error_that_all_instances_have_is_marked_as_such(folder):
    folder.write_error(1, "The loss is not finite.", transient=False, common=True)
    folder.write_error(0, "Something else.")
    assert {error.instance: error.common for error in folder.read_errors()} == {1: True, 0: False}
