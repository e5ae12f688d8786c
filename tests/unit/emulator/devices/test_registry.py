"""The emulated partition, with real processes that hold, race and die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tf_ipu_dp.emulator.devices import registry
from tf_ipu_dp.emulator.sdk_api import gcipuinfo

HOLD = """
import os, sys, time
from tf_ipu_dp.emulator.devices import registry
partition = registry.Partition.from_environment(os.environ)
try:
    attachment = partition.attach(count=int(sys.argv[1]))
except registry.DeviceBusyError:
    print("busy", flush=True)
    sys.exit()
print(*attachment.device.ipus, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def environ(emulator_dir):
    return {"IPU_EMULATOR_IPUS": "16", "IPU_EMULATOR_DIR": str(emulator_dir)}


@pytest.fixture
def partition(environ):
    return registry.Partition.from_environment(environ)


KEEP = """
import os, sys
from tf_ipu_dp.emulator.devices import registry
print(registry.Partition.from_environment(os.environ).reserve(int(sys.argv[1]), 'other'), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def hold(environ):
    """Starts a process that holds so many IPUs until its standard input is closed."""
    processes = []

    def start(count, program=HOLD):
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(count)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, **environ},
        )  # fmt: skip
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_devices_are_single_ipus_then_aligned_groups_of_powers_of_two(partition):
    devices = partition.devices()
    assert [device.ipus for device in devices[:2]] == [(0,), (1,)]
    assert devices[16].ipus == (0, 1) and devices[24].ipus == (0, 1, 2, 3)
    assert devices[-1].ipus == tuple(range(16)) and [device.id for device in devices] == list(range(31))


@pytest.mark.parametrize("request_", [{"count": 3}, {"count": 32}, {"count": 0}, {"device_id": 31}, {"device_id": -1}])
def test_what_the_partition_does_not_have_is_refused_as_such(partition, request_):
    with pytest.raises(registry.NoSuchDeviceError, match="16 IPUs, in devices of 1, 2, 4, 8, 16"):
        partition.attach(**request_)


def test_what_is_kept_for_a_job_is_the_job_s_until_its_keeper_ends(partition, environ, hold):
    keeper = hold(4, KEEP)
    assert keeper.stdout.readline() == "range(0, 4)\n"
    assert partition.reserve(4, "own") == range(4, 8) == partition.reserve(4, "own")
    assert partition.reserve(32, "large") is None and partition.reserve(16, "whole") is None
    assert partition.reserve(4, "other") == range(4)
    outsider = partition.attach(count=2)
    assert outsider.device.ipus == (8, 9)
    with pytest.raises(
        registry.DeviceBusyError, match=r"2 of the partition's 16 IPUs are held .*, 8 reserved for other"
    ):
        partition.attach(count=8)
    own = registry.Partition.from_environment({**environ, registry.BLOCK: "0-3"})
    assert own.reserve(2, "within") == range(2)
    members = [own.attach(count=1), own.attach(count=2), own.attach(count=4)]
    assert [member.device.ipus for member in members] == [(0,), (2, 3), (12, 13, 14, 15)]
    for attachment in (*members, outsider):
        attachment.release()
    keeper.kill()
    keeper.wait()
    last = partition.attach(count=2)
    assert last.device.ipus == (0, 1)
    last.release()


def test_attached_ipus_are_held_until_they_are_released(partition):
    whole = partition.attach(count=16)
    with pytest.raises(registry.DeviceBusyError):
        partition.attach(device_id=0)
    whole.release()
    whole.release()
    assert partition.attach(device_id=5).device.ipus == (5,)


def test_an_owner_is_described_to_other_processes(partition, hold):
    process = hold(4)
    assert process.stdout.readline().split() == ["0", "1", "2", "3"]
    (owner,) = partition.owners()
    assert (owner.pid, owner.ipus) == (process.pid, (0, 1, 2, 3)) and owner.user


def test_the_ipus_of_a_killed_owner_are_free_at_once(partition, hold):
    process = hold(16)
    process.stdout.readline()
    with pytest.raises(registry.DeviceBusyError):
        partition.attach(count=1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    attachment = partition.attach(count=16)
    assert len(attachment.device.ipus) == 16
    attachment.release()


def test_a_forked_worker_does_not_keep_its_dead_parents_ipus(partition, environ):
    forked = "os.write(1, f'{os.fork() or str()}\\n'.encode()); sys.stdin.read()"
    code = HOLD.replace("sys.stdin.read()", forked)
    process = subprocess.Popen(
        [sys.executable, "-c", code, "16"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, **environ},
    )  # fmt: skip
    lines = [process.stdout.readline().strip() for _ in range(3)]
    worker = next(int(line) for line in lines[1:] if line.isdigit())
    process.send_signal(signal.SIGKILL)
    process.wait()
    os.kill(worker, 0)
    try:
        attachment = partition.attach(count=16)
        assert len(attachment.device.ipus) == 16
        attachment.release()
    finally:
        os.kill(worker, signal.SIGKILL)
        process.stdout.close()
        process.stdin.close()


# A user's program may fork at any time, from Python 3.12 on with this warning.
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_worker_cannot_give_its_parents_ipus_back(partition):
    attachment = partition.attach(count=2)
    worker = os.fork()
    if worker == 0:
        try:
            attachment.release()
        finally:
            os._exit(0)
    os.waitpid(worker, 0)
    assert [owner.ipus for owner in partition.owners()] == [(0, 1)]
    attachment.release()
    assert not partition.owners()


def test_what_held_ipus_do_is_not_known_before_their_owner_has_told_it_twice(environ, monkeypatch):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    silent = f"from tf_ipu_dp.emulator.devices import registry; registry.HEARTBEAT_S = 600{HOLD}"
    with subprocess.Popen(
        [sys.executable, "-c", silent, "2"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline().split() == ["0", "1"]
        looking = gcipuinfo.gcipuinfo()
        for label in (gcipuinfo.IpuUtilisation, gcipuinfo.IpuUtilisationSession):
            assert looking.getNamedAttributeForAll(label) == ["N/A"] * 2 + ["0.00%"] * 14
        process.stdin.close()


def test_eight_processes_at_once_get_disjoint_sets_or_a_refusal(hold):
    processes = [hold(4) for _ in range(8)]
    answers = [process.stdout.readline().strip() for process in processes]
    got = [tuple(map(int, answer.split())) for answer in answers if answer != "busy"]
    assert answers.count("busy") == 4
    assert sorted(ipu for ipus in got for ipu in ipus) == list(range(16))


def test_a_directory_that_others_can_enter_is_refused(partition):
    partition.folder.mkdir(mode=0o755)
    partition.folder.chmod(0o755)
    with pytest.raises(registry.RegistryError, match="not a private directory"):
        partition.attach(count=1)


def test_a_link_in_place_of_the_directory_is_not_followed(partition, tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    partition.folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(registry.RegistryError, match="not a private directory"):
        partition.attach(count=1)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_link_in_place_of_an_owner_is_reported_and_not_followed(partition, tmp_path):
    partition.attach(count=1).release()
    (tmp_path / "precious").write_text("x", encoding="utf-8")
    (partition.folder / "owner-1-0.json").symlink_to(tmp_path / "precious")
    with pytest.raises(registry.RegistryError, match="not a file of the emulator"):
        partition.attach(count=1)
    assert (tmp_path / "precious").exists()


@pytest.mark.parametrize("content", ["", "not json", "[]", json.dumps({"pid": 1}), json.dumps({"ipus": 3})])
def test_garbage_under_a_live_lock_is_reported(partition, environ, content):
    partition.attach(count=1).release()
    path = partition.folder / "owner-1-0.json"
    path.write_text(content, encoding="utf-8")
    code = (
        "import fcntl, sys; f = open(sys.argv[1], 'r+'); fcntl.lockf(f, fcntl.LOCK_EX); "
        "print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        process.stdout.readline()
        with pytest.raises(registry.RegistryError, match="not a record of the emulator"):
            partition.attach(count=1)
        process.kill()
    if content:  # nobody holds it any more, and it is still not ours to delete
        with pytest.raises(registry.RegistryError, match="not a record of the emulator"):
            partition.attach(count=1)
        path.unlink()
    partition.attach(count=1).release()


def test_a_lock_that_is_no_file_is_reported(partition):
    partition.attach(count=1).release()
    (partition.folder / "partition.lock").unlink()
    (partition.folder / "partition.lock").mkdir()
    with pytest.raises(registry.RegistryError, match=r"partition\.lock is not a file of the emulator"):
        partition.attach(count=1)


def test_a_meter_tells_of_work_and_waiting_also_while_an_execution_goes_on(partition, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    attachment = partition.attach(count=2)
    attachment.begin_execution(lambda: 0.5)
    now[0] += 2
    assert partition.holdings()[0].meter == registry.Meter(1000.0, 1002.0, busy=1.5, waiting=0.5)
    now[0] += 2
    attachment.end_execution(waited=1.0)
    now[0] += 6
    assert partition.holdings()[0].meter == registry.Meter(1000.0, 1010.0, busy=3.0, waiting=1.0)
    attachment.begin_execution()
    attachment.end_execution(waited=1e6)
    assert partition.holdings()[0].meter.busy == 3.0
    attachment.release()


def test_what_is_told_survives_the_file_and_never_changes_its_length(partition):
    owner = registry.Owner(7, "ann", "x.py", 1.5, (0, 1), 2)
    small, large = registry.Meter(0.0, 0.0), registry.Meter(9e8, 1e9, 1e9, 1e9)
    holding = registry.Holding(owner, large, small)
    assert registry.Holding.from_bytes(holding.to_bytes()) == holding
    assert len(holding.to_line()) == len(registry.Holding(owner, small, small).to_line())


WORK = """
import os, sys
from tf_ipu_dp.emulator.devices import registry
attachment = registry.Partition.from_environment(os.environ).attach(count=2)
attachment.begin_execution(lambda: 1 / 0)
print("ready", flush=True)
sys.stdin.read()
"""


def test_others_see_a_long_execution_go_on_although_its_program_cannot_say_how_it_waits(partition, environ, wait_until):
    process = subprocess.Popen(
        [sys.executable, "-c", WORK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, **environ},
    )  # fmt: skip
    try:
        assert process.stdout.readline() == "ready\n"
        (first,) = partition.holdings()
        wait_until(lambda: partition.holdings()[0].meter.heartbeat >= first.meter.heartbeat + 0.5)
        (later,) = partition.holdings()
        spent = later.meter.heartbeat - first.meter.heartbeat
        assert spent >= 0.5 and later.meter.busy - first.meter.busy == pytest.approx(spent, abs=1e-3)
    finally:
        process.kill()
        process.communicate()


def test_a_file_of_an_earlier_release_is_read_and_cleared_away(partition):
    partition.attach(count=1).release()
    path = partition.folder / "owner-1-0.json"
    owner = {"pid": 1, "user": "ann", "executable": "x", "started": 1.0, "ipus": [0], "replicas": 1}
    path.write_text(f"0000000000001.000000 0000000000002.000000 0000000000000.000000\n{json.dumps(owner)}")
    assert partition.holdings() == [] and not path.exists()


@pytest.mark.parametrize("text", ["3", "0", "many", "-4", "99999999"])
def test_a_partition_of_another_size_than_a_power_of_two_is_refused(text):
    with pytest.raises(registry.RegistryError, match="IPU_EMULATOR_IPUS"):
        registry.Partition.from_environment({"IPU_EMULATOR_IPUS": text})


def test_a_larger_partition_is_offered_where_that_helps(tmp_path):
    partition = registry.Partition(64, tmp_path / "partition")
    with pytest.raises(registry.NoSuchDeviceError, match=r"; set IPU_EMULATOR_IPUS=128 for a larger one$"):
        partition.find(count=128)
    with pytest.raises(registry.NoSuchDeviceError, match=r"in devices of 1, 2, 4, 8, 16, 32, 64$"):
        partition.find(count=3)


def test_nobody_is_told_to_remove_a_directory_of_others(tmp_path):
    tmp_path.chmod(0o755)
    with pytest.raises(registry.RegistryError) as caught, registry.Partition(64, tmp_path).locked():
        pass
    assert str(caught.value) == (
        f"{tmp_path} is not a private directory of this user (mode 0700); set IPU_EMULATOR_DIR to one that does not "
        f"exist yet, like {tmp_path}/ipu_emulator"
    )


def test_the_emulated_ipus_support_remote_buffers(emulator_dir):
    assert set(gcipuinfo.gcipuinfo().getNamedAttributeForAll("remote buffers supported")) == {"1"}


@pytest.mark.parametrize("content", ["", "0-3", "precious results of job 123\n", "ipu_emulator block many"])
def test_files_that_only_have_a_name_like_the_emulator_s_are_left_alone(partition, content):
    partition.attach(count=1).release()
    names = ("job-123.out", "job-123", "owner-notes.json", "owner-1-2-3.json", "owner-.json")
    for name in names:
        (partition.folder / name).write_text(content)
    (partition.folder / "job-folder").mkdir()
    (partition.folder / "job-link").symlink_to(partition.folder / "job-123")
    os.mkfifo(partition.folder / "job-pipe")
    before = sorted(path.name for path in partition.folder.iterdir())
    assert partition.reserve(4, "own") == range(4)
    partition.attach(count=1).release()
    assert partition.holdings() == [] and [(partition.folder / name).read_text() for name in names] == 5 * [content]
    assert sorted({path.name for path in partition.folder.iterdir()} - {"job-own"}) == before
    with pytest.raises(registry.RegistryError, match="job-123 is not a file of the emulator"):
        partition.reserve(4, "123")


def test_an_empty_file_of_the_own_number_does_not_keep_ipus_from_being_attached(partition):
    partition.attach(count=1).release()
    for number in range(1000):
        (partition.folder / f"owner-{os.getpid()}-{number}.json").touch()
    attachment = partition.attach(count=1)
    assert [owner.ipus for owner in partition.owners()] == [(0,)]
    attachment.release()


CROWD = """
import os, sys
from tf_ipu_dp.emulator.devices import registry
partition = registry.Partition.from_environment({**os.environ, "IPU_EMULATOR_IPUS": "256"})
pipes = []
for _ in range(200):
    reading, writing = os.pipe()
    if os.fork() == 0:
        try:
            attachment = partition.attach(count=1)
            answer = str(attachment.device.ipus[0])
            attachment.release()
            attachment = partition.attach(device_id=int(answer))
        except BaseException as error:
            answer = repr(error)
        os.write(writing, answer.encode())
        os._exit(0)
    os.close(writing)
    pipes.append(reading)
print(*(os.read(pipe, 1000).decode() for pipe in pipes), sep="\\n")
"""


def test_two_hundred_processes_at_once_all_get_their_turn(emulator_dir):
    done = subprocess.run([sys.executable, "-c", CROWD], capture_output=True, text=True, check=True, timeout=500)
    answers = done.stdout.split("\n")[:-1]
    # Between the release and the second attachment another process may take that IPU, and then it is busy.
    assert len(answers) == 200
    assert [answer for answer in answers if not answer.isdigit() and "DeviceBusyError" not in answer] == []


LOCK_AND_FORK = """
import os, sys
from tf_ipu_dp.emulator.devices import registry
partition = registry.Partition.from_environment(os.environ)
with partition.locked():
    child = os.fork()
    if child == 0:
        os.close(1)
        sys.stdin.read()
        os._exit(0)
print(child, flush=True)
"""


def test_a_process_that_was_forked_under_the_lock_does_not_keep_it(partition, environ, monkeypatch):
    monkeypatch.setattr(registry, "_LOCK_LIMIT_S", 0.5)
    process = subprocess.Popen(
        [sys.executable, "-c", LOCK_AND_FORK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, **environ},
    )  # fmt: skip
    try:
        os.kill(int(process.stdout.readline()), 0)
        process.wait()
        partition.attach(count=1).release()
    finally:
        process.communicate()


def test_a_lock_that_is_never_given_back_is_blamed_on_its_holder_and_does_not_stop_a_release(
    partition, environ, monkeypatch
):
    code = LOCK_AND_FORK.replace("child = os.fork()", "print('held', flush=True); sys.stdin.read(); child = 1")
    attachment = partition.attach(count=2)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, **environ},
    ) as process:  # fmt: skip
        assert process.stdout.readline() == "held\n"
        monkeypatch.setattr(registry, "_LOCK_LIMIT_S", 0.2)
        with pytest.raises(registry.RegistryError, match=f"has been locked for 0 s by process {process.pid}; end that"):
            partition.attach(count=1)
        attachment.release()
        process.communicate()
    monkeypatch.undo()
    whole = partition.attach(count=16)  # the file that the release left behind is removed
    whole.release()
    assert [path.name for path in partition.folder.iterdir()] == ["partition.lock"]


FULL = """
import os, sys
from pathlib import Path
from tf_ipu_dp.emulator.devices import registry
folder = Path(sys.argv[1]) / "partition"
partition = registry.Partition(4, folder)
partition.attach(count=1).release()
filler = open(Path(sys.argv[1]) / "filler", "wb", buffering=0)
try:
    while filler.write(bytes(512)):
        pass
except OSError:
    pass
for act in (lambda: partition.attach(count=1), lambda: partition.reserve(1, "job")):
    try:
        act()
    except registry.RegistryError as error:
        print(error)
print(sorted(path.name for path in folder.iterdir()), len(os.listdir("/proc/self/fd")))
filler.truncate(0)
partition.attach(count=4).release()
"""


def test_a_full_disk_is_called_that_and_a_failed_attachment_leaves_nothing(tmp_path):
    script = f'mount -t tmpfs -o size=16k tmpfs {tmp_path} && exec "$@"'
    words = ["unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh"]
    try:
        subprocess.run([*words, "true"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("a small file system cannot be mounted here")
    done = subprocess.run(
        [*words, sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, check=True, timeout=240
    )
    first, second, left = done.stdout.splitlines()
    assert (
        first
        == second
        == (
            f"{tmp_path}/partition cannot be written (No space left on device); free some space there, or set "
            "IPU_EMULATOR_DIR to a directory on another disk"
        )
    )
    assert left.startswith("['partition.lock'] ")
