from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf_ipu_dp import cli
from tf_ipu_dp.runs.records import InstanceTimes, TrainingRecord, ValidationRecord
from tf_ipu_dp.runs.run_folder import RunFolder
from tf_ipu_dp.scaling import our_runs
from tf_ipu_dp.scaling.decomposition import Clocks
from tf_ipu_dp.scaling.our_runs import Place
from tf_ipu_dp.scaling.records import Cell, Measurement, Validated

CELL = Cell("tf_ipu_dp-2", "tf_ipu_dp", 2, 2, 2, 2, 16, 1, 32, ("--ipus=2", "--instances=2"))
ALONE = Cell("tf_ipu_dp-1", "tf_ipu_dp", 1, 1, 1, 1, 32, 1, 32, ("--ipus=1", "--instances=1"))
SECONDS = st.floats(0, 100)
TIMED = {"IPU_EMULATOR_TIME_OPTIMIZER": "1"}


def record(step, *seconds, waits=None, elapsed_s=0.0):
    waits = waits or [0.0] * len(seconds)
    times = tuple(InstanceTimes(number, each, each, wait) for number, (each, wait) in enumerate(zip(seconds, waits)))
    return TrainingRecord(step, 0.0, 1.0, 0.5, 0.1, instances=times, elapsed_s=elapsed_s)


@given(times=st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=8))
def test_throughput_is_all_samples_over_the_time_of_the_slowest_instance_after_the_warm_up(times):
    records = [record(10, 1000.0, 0.0), *(record(20 + number, *each) for number, each in enumerate(times))]
    made = our_runs.measure(CELL, records, 10)
    assert made.updates == 9 + len(times) and made.samples == 32 * made.updates
    assert made.seconds == pytest.approx(max(sum(each) for each in zip(*times)))


def test_the_time_on_the_wall_has_that_between_epochs():
    records = [record(10, 1.0, elapsed_s=5.0), record(20, 1.0, elapsed_s=6.5), record(30, 1.0, elapsed_s=8.0)]
    assert our_runs.measure(ALONE, records, 10, on_the_wall=True).seconds == pytest.approx(3.0)
    assert our_runs.measure(ALONE, records, 10).seconds == pytest.approx(2.0)


def test_what_is_between_executions_is_that_of_one_update():
    records = [
        dataclasses.replace(record(step, 1.0), executions=executions) for step, executions in ((10, 4), (30, 10))
    ]
    made = Measurement("a", 0, "done", updates=20, seconds=3.0)
    assert our_runs.read_clocks(made, records, records[1:], 0.7) == Clocks(3.0, pytest.approx(0.025))


def test_input_wait_is_that_of_the_slowest_instance_and_unknown_if_a_record_has_none():
    records = [record(1, 9, 9), record(2, 1, 2, waits=[0.5, 0.25]), record(3, 1, 2, waits=[0.5, 0.5])]
    assert our_runs.measure(CELL, records, 1).input_wait_s == 0.75
    records.append(record(4, 1, 2, waits=[0.5, None]))
    assert our_runs.measure(CELL, records, 1).input_wait_s is None


def test_a_run_without_a_record_at_the_end_of_its_warm_up_is_refused():
    for records in ([], [record(5, 1.0)], [record(3, 1.0)]):
        with pytest.raises(cli.UsageError, match="no record after its warm-up of 3 updates"):
            our_runs.measure(ALONE, records, 3)


def test_one_instance_is_train_and_several_are_launch():
    words, environ = our_runs.make_command(ALONE, ["--model=mlp"], Place())
    assert words[1:] == ["-m", "tf_ipu_dp.train", "--model=mlp", "--ipus=1", "--instances=1"] and environ == TIMED
    words, environ = our_runs.make_command(CELL, ["--model=mlp"], Place())
    assert (
        words[1:] == ["-m", "tf_ipu_dp.launch", "--", "--model=mlp", "--ipus=2", "--instances=2"] and environ == TIMED
    )


def test_mpi_is_another_launcher_and_engine_of_horovod():
    cell = Cell("tf_ipu_dp_mpi-2", our_runs.MPI_ENGINE, 2, 2, 2, 1, 16, 1, 32, ())
    words, environ = our_runs.make_command(cell, [], Place())
    assert "--launcher=mpirun" in words
    assert environ == {**TIMED, "HOROVOD_CPU_OPERATIONS": "mpi", "HOROVOD_CONTROLLER": "mpi"}


def test_a_cell_runs_on_the_first_of_the_hosts_also_one_instance():
    assert our_runs.make_command(CELL, [], Place(("a", "b", "c")))[0][-1] == "--hosts=a,b"
    words, _ = our_runs.make_command(ALONE, [], Place(("a", "b")))
    assert words[2] == "tf_ipu_dp.launch" and words[-1] == "--hosts=a"


def test_validations_have_the_time_until_each_was_done(tmp_path):
    files = RunFolder(tmp_path)
    for each in (
        record(5, 1.0, elapsed_s=10.0), record(10, 1.0, elapsed_s=12.0), ValidationRecord(10, 1.0, 1.0, 0.5, 0.9, 2.0),
        record(20, 1.0, elapsed_s=20.0), ValidationRecord(20, 2.0, None, None, None, 1.0),
    ):  # fmt: skip
        files.append_metrics(each)
    assert our_runs.read_validations(files) == (Validated(10, 14.0, 0.5, 1.0),)


@pytest.mark.parametrize(
    ("output", "status", "reason"),
    [
        (b"loading\ntrain: --ipus=128 is too many.\nbye\n", 1, "--ipus=128 is too many."),
        (b"\rcompiling 1 s\rlaunch: instance 1 was killed (SIGKILL).\n", 1, "instance 1 was killed (SIGKILL)."),
        (b"", -9, "The run was ended by signal 9 (SIGKILL)."),
        (b"Segmentation\nfault\n", 3, "The run exited with status 3: fault"),
        (b"", 3, "The run exited with status 3: it said nothing"),
    ],
)
def test_a_run_that_fails_says_why(tmp_path, output, status, reason):
    (tmp_path / our_runs.OUTPUT).write_bytes(output)
    assert our_runs.find_reason(RunFolder(tmp_path), status) == reason


def test_an_instance_that_left_an_error_is_named(tmp_path):
    files = RunFolder(tmp_path)
    files.write_error(1, "Traceback\n  ...\nValueError: no shape\n")
    assert our_runs.find_reason(files, 1) == "Instance 1 failed: ValueError: no shape"
