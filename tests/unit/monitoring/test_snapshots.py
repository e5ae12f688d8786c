"""Who uses which IPU: real processes on the emulated partition, with and without a run."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tf_ipu_dp.monitoring import device_reader, process_info, snapshots
from tf_ipu_dp.runs import heartbeat

HOLD = """
import os, sys
from pathlib import Path
from tf_ipu_dp.runs import heartbeat
from tf_ipu_dp.emulator.devices import registry
attachment = registry.Partition.from_environment(os.environ).attach(count=2)
if sys.argv[1] != "-":
    waits = {"input": heartbeat.INPUT, "others": heartbeat.OTHERS, "nothing": heartbeat.NOTHING}.get(sys.argv[3])
    reporter = heartbeat.StatusReporter(
        Path(sys.argv[1]), instance=int(sys.argv[2]), instances=2, planned_steps=640, waits_for=lambda: waits
    )
    reporter.start()
    reporter.update(sys.argv[4], 120, 1842.0)
    reporter.report_training(0.25, 95.0)
    reporter.write()
print("ready", flush=True)
if sys.stdin.readline():
    attachment.release()
    print("released", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def hold(tmp_path, monkeypatch, emulator_dir):
    """Starts a process that holds two IPUs, as an instance of a run or as something else."""
    monkeypatch.setenv("IPU_EMULATOR_IPUS", "8")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    processes = []

    def start(run="-", instance=0, waits="-", phase="training"):
        command = [sys.executable, "-c", HOLD, str(run), str(instance), waits, phase]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def reader(hold):
    return snapshots.SnapshotReader(device_reader.open_reader("emulator"))


def test_nothing_running_is_a_partition_of_free_ipus(reader):
    snapshot = reader.read()
    assert snapshot.free == tuple(range(8)) and snapshot.processes == () and snapshot.sdk == "emulator"


def test_a_process_that_is_no_run_is_shown_with_its_command_and_nothing_else(reader, hold):
    process = hold()
    (found,) = reader.read().processes
    assert (found.pid, found.ipus, found.state, found.run) == (process.pid, (0, 1), "running", None)
    assert found.command.startswith(sys.executable) and found.command.endswith("training") and found.elapsed_s < 60
    assert found.user and found.waits_for is None
    assert reader.read().free == tuple(range(2, 8))


@pytest.mark.parametrize(
    ("waits", "phase", "shown"),
    [
        ("nothing", "training", "nothing"),
        ("-", "training", None),
        ("input", "training", "input"),
        ("others", "training", "collective"),
        ("-", "compiling", "compiling"),
    ],
)
def test_a_run_shows_its_progress_and_what_it_is_waiting_for(reader, hold, tmp_path, waits, phase, shown):
    hold(tmp_path / "runs" / "a", waits=waits, phase=phase)
    (found,) = reader.read().processes
    assert (found.run, found.instance, found.instances, found.phase) == ("a", 0, 2, phase)
    assert (found.step, found.planned_steps, found.waits_for) == (120, 640, shown)
    assert (found.loss, found.done_pct, found.host) == (0.25, 18.75, socket.gethostname()) and 80 < found.eta_s <= 95


@pytest.mark.parametrize(
    ("phase", "still_s", "shown"),
    [("training", 2.0, 1842.0), ("training", 60.0, None), ("evaluating", 0.0, None), ("saving", 0.0, None)],
)
def test_the_speed_is_shown_only_while_steps_are_made(phase, still_s, shown):
    process = snapshots.Process(7, "ann", "x", 1.0, (0,), "running")
    status = heartbeat.Status("/runs/a", 0, 1, "h", 7, phase, 120, 640, 1842.0, None, still_s, time=100.0)
    assert snapshots._add_run_status(process, status, 100.5).samples_per_s == shown


@pytest.mark.parametrize(
    ("phase", "still_s", "shown"),
    [("training", 2.0, 28.0), ("training", 25.0, 5.0), ("training", 60.0, None), ("evaluating", 60.0, 30.0)],
)
def test_the_time_left_passes_while_a_run_trains_and_is_not_known_after_that_without_a_step(phase, still_s, shown):
    process = snapshots.Process(7, "ann", "x", 1.0, (0,), "running")
    status = heartbeat.Status("/runs/a", 0, 1, "h", 7, phase, 120, 640, 1842.0, None, still_s, time=100.0, eta_s=30.0)
    assert snapshots._add_run_status(process, status, 100.5).eta_s == shown


def test_the_folder_of_a_run_that_was_started_elsewhere_is_found(reader, hold, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setenv("PYTHONPATH", str(Path(snapshots.__file__).parents[2]))
    hold("runs/a")
    monkeypatch.chdir(tmp_path)
    assert reader.read().processes[0].run_dir == str(elsewhere / "runs" / "a")


def test_an_instance_that_was_killed_is_gone_and_the_others_are_not(reader, hold, tmp_path):
    hold(tmp_path / "a", instance=0)
    killed = hold(tmp_path / "a", instance=1)
    reader.read()
    killed.kill()
    killed.wait()
    for each in (reader, snapshots.SnapshotReader(device_reader.open_reader("emulator"))):
        snapshot = each.read()
        assert [(each.instance, each.state, each.ipus) for each in snapshot.processes] == [
            (0, "running", (0, 1)),
            (1, "gone", ()),
        ]
        assert 2 in snapshot.free


def test_a_process_that_ends_between_two_snapshots_is_shown_as_gone(reader, hold):
    process = hold()
    reader.read()
    process.kill()
    process.wait()
    assert [(each.pid, each.state) for each in reader.read().processes] == [(process.pid, "gone")]


@pytest.mark.parametrize(("later_s", "shown"), [(0, ["gone"]), (11, [])])
def test_a_process_that_ends_soon_after_it_released_its_ipus_is_shown_as_gone(
    reader, hold, monkeypatch, later_s, shown
):
    process = hold()
    reader.read()
    process.stdin.write("release\n")
    process.stdin.flush()
    assert process.stdout.readline() == "released\n"
    assert reader.read().processes == ()
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + later_s)
    assert reader.read().processes == ()
    process.kill()
    process.wait()
    assert [each.state for each in reader.read().processes] == shown


def test_a_process_that_is_stopped_is_stale_after_five_seconds(reader, hold, tmp_path, monkeypatch):
    process = hold(tmp_path / "a")
    process.send_signal(signal.SIGSTOP)
    monotonic, now = time.monotonic, time.time
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + 7)
    monkeypatch.setattr(time, "time", lambda: now() + 7)
    (found,) = reader.read().processes
    assert (found.state, found.samples_per_s, found.waits_for) == ("stale", None, None) and found.silent_s > 5
    process.send_signal(signal.SIGCONT)


def test_a_run_of_this_host_lasts_as_long_as_its_process_and_another_while_it_has_heartbeats(hold, tmp_path):
    run = tmp_path / "a"
    process = hold(run)
    process.send_signal(signal.SIGSTOP)
    (status,) = heartbeat.read_run(run)
    elsewhere = dataclasses.replace(status, host=f"not-{status.host}")
    later = status.time + snapshots.STALE_S + 1
    assert snapshots.is_instance_running(status, later) and not snapshots.is_instance_running(elsewhere, later)
    assert snapshots.is_instance_running(elsewhere, elsewhere.time + 0.1)
    younger = dataclasses.replace(status, time=status.time - 10**6)
    assert not snapshots.is_instance_running(younger, time.time()), "its number was given to another process"
    process.kill()
    process.wait()
    assert not snapshots.is_instance_running(status, status.time)


def test_the_value_for_programs_is_json_with_units_and_nulls(reader, hold, tmp_path):
    hold(tmp_path / "a")
    value = json.loads(json.dumps(reader.read().to_json()))
    assert value["schema"] == 1 and value["time"].endswith("Z")
    ipu, process = value["ipus"][0], value["processes"][0]
    assert ipu["power_w"] is None and type(ipu["clock_mhz"]) is float and ipu["other"]["target"] == "Fabric"
    assert value["ipus"][7]["utilisation_pct"] == 0.0
    assert process["ipus"] == [0, 1] and process["run_dir"] == str(Path(tmp_path / "a"))


def write_status(run, instance, host, pid, **facts):
    """Writes the heartbeat of an instance on another host."""
    facts = {"time": time.time(), "step": 118, "planned_steps": 640, "phase": "training", **facts}
    status = heartbeat.Status(str(run), instance, facts.pop("instances", 2), host, pid, **facts)
    heartbeat.path_of(run, instance).parent.mkdir(parents=True, exist_ok=True)
    heartbeat.path_of(run, instance).write_text(json.dumps(status.to_json()), encoding="utf-8")


def test_instances_on_other_hosts_are_in_the_view_of_their_run(reader, hold, tmp_path):
    run = tmp_path / "a"
    here = hold(run)
    write_status(run, 1, "node07", here.pid, loss=0.5, samples_per_s=10.0)  # the same number on another host
    snapshot = reader.read()
    mine, other = snapshot.processes
    assert (mine.host, mine.pid, mine.ipus, mine.instance) == (socket.gethostname(), here.pid, (0, 1), 0)
    assert (other.host, other.pid, other.ipus, other.instance) == ("node07", here.pid, (), 1)
    assert (other.state, other.step, other.loss, other.cpu_pct, other.memory_gib) == ("running", 118, 0.5, None, None)
    (shown,) = snapshot.runs
    assert (shown.hosts, shown.leader) == ((socket.gethostname(), "node07"), mine)
    assert snapshot.to_json()["runs"][0]["hosts"] == [socket.gethostname(), "node07"]
    write_status(run, 1, "node07", here.pid, time=time.time() - 60)
    assert [each.state for each in reader.read().processes] == ["running", "stale"]
    heartbeat.path_of(run, 1).unlink()
    assert [each.state for each in reader.read().processes] == ["running", "gone"]


def test_the_file_of_an_earlier_start_with_more_instances_is_no_instance(reader, hold, tmp_path):
    hold(tmp_path / "a")
    write_status(tmp_path / "a", 3, "node07", 99, instances=4)
    assert [each.instance for each in reader.read().processes] == [0]


def test_a_run_is_shown_from_its_folder_where_none_of_its_instances_is_here(hold, tmp_path):
    run = tmp_path / "a"
    for instance, host in enumerate(("node07", "node08")):
        write_status(run, instance, host, 99)
    folders = [run]
    reader = snapshots.SnapshotReader(device_reader.open_reader("emulator"), folders=folders)
    assert [(each.host, each.run) for each in reader.read().processes] == [("node07", "a"), ("node08", "a")]
    alone = snapshots.SnapshotReader(device_reader.open_reader("emulator"))
    assert alone.read().processes == ()


def test_a_status_file_of_an_earlier_version_has_neither_loss_nor_eta(hold, tmp_path):
    write_status(tmp_path / "a", 0, "node07", 99, instances=1)
    path = heartbeat.path_of(tmp_path / "a", 0)
    value = json.loads(path.read_text(encoding="utf-8"))
    del value["loss"], value["eta_s"]
    path.write_text(json.dumps(value), encoding="utf-8")
    reader = snapshots.SnapshotReader(device_reader.open_reader("emulator"), folders=[tmp_path / "a"])
    (found,) = reader.read().processes
    assert (found.step, found.loss, found.eta_s) == (118, None, None)


def test_the_cpu_use_of_a_process_is_measured_between_two_readings(reader, hold, monkeypatch):
    process = hold()
    first = reader.read()
    (found,) = first.processes
    assert found.cpu_pct is None and 0 < found.memory_gib < 4
    used = process_info.read_host_use(process.pid, None)
    monkeypatch.setattr(
        process_info, "read_host_use", lambda *_: process_info.HostUse(used.cpu_s + 3.0, used.memory_gib)
    )
    monotonic = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + 10)
    (later,) = reader.measure_host_use(first).processes
    assert 20 < later.cpu_pct <= 30.5


def test_reading_a_snapshot_writes_nothing(tmp_path, emulator_dir):
    snapshots.SnapshotReader(device_reader.open_reader("emulator")).read()
    assert list(tmp_path.iterdir()) == []
    assert heartbeat.find(os.getpid(), {"XDG_RUNTIME_DIR": str(tmp_path)}) is None
