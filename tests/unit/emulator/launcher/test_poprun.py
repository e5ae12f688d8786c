"""The stand-in for poprun: its options and rules, and processes that live and die together."""

from __future__ import annotations

import collections
import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf_ipu_dp.emulator import poprun as poprun_command
from tf_ipu_dp.emulator.launcher import job, poprun_options

SMALL = st.integers(1, 64)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_without_a_partition_any_number_of_instances_can_be_started():
    assert job.plan_job(3, 3, 1, ["h0"]).instances == 3


@given(SMALL, SMALL, SMALL, st.sampled_from([1, 2, 3, 4]))
def test_a_job_is_spread_evenly_or_refused(replicas, instances, ipus_per_replica, hosts):
    ipus = replicas * ipus_per_replica
    possible = replicas % instances == 0 and instances % hosts == 0 and bin(ipus).count("1") == 1
    try:
        names = [f"h{number}" for number in range(hosts)]
        planned = job.plan_job(replicas, instances, ipus_per_replica, names, partition=1 << 20)
    except poprun_options.OptionError:
        assert not possible
        return
    assert possible
    places = [planned.variables(instance) for instance in range(instances)]
    offsets = [int(place["POPDIST_REPLICA_INDEX_OFFSET"]) for place in places]
    assert offsets == list(range(0, replicas, replicas // instances))
    assert [int(place["HOROVOD_RANK"]) for place in places] == list(range(instances))
    per_host = collections.Counter(place["HOROVOD_CROSS_RANK"] for place in places)
    assert per_host == {str(host): instances // hosts for host in range(hosts)}
    for place in places:
        assert int(place["HOROVOD_LOCAL_SIZE"]) * int(place["HOROVOD_CROSS_SIZE"]) == instances
        rank = int(place["HOROVOD_CROSS_RANK"]) * (instances // hosts) + int(place["OMPI_COMM_WORLD_LOCAL_RANK"])
        assert str(rank) == place["OMPI_COMM_WORLD_RANK"]


@given(SMALL, SMALL, SMALL)
def test_following_the_advice_leads_to_a_job(replicas, instances, ipus_per_replica):
    asked = {"num-replicas": replicas, "num-instances": instances, "ipus-per-replica": ipus_per_replica}
    for _ in range(4):
        try:
            job.plan_job(*asked.values(), partition=64 * 64)
            return
        except poprun_options.OptionError as error:
            advice = re.findall(r"--([\w-]+) (\d+)", str(error).split(" Use ")[1])
            assert advice, error
            asked.update((name, int(number)) for name, number in advice)
    raise AssertionError(f"no end to the advice for {asked}")


@given(st.lists(st.tuples(st.from_regex("[a-z][a-z0-9.-]{0,5}", fullmatch=True), st.integers(0, 50)), min_size=1))
def test_ranges_of_hosts_are_the_names_written_out(parts):
    written = {f"{head}.{first:02}": f"{head}.[{first:02}-{first + 2:02},77]" for head, first in parts}
    try:
        names = poprun_options.expand_hosts(",".join(written.values()))
    except poprun_options.OptionError as error:
        assert "twice" in str(error)
        return
    expected = [f"{name.rsplit('.', 1)[0]}.{number:02}" for name in written
                for number in (*range(int(name[-2:]), int(name[-2:]) + 3), 77)]  # fmt: skip
    assert names == expected


def test_options_may_be_written_in_every_way_and_end_where_the_program_begins():
    words = (
        "-H a,b --num-replicas=4 --num-instances 2 --print-topology on --reset-partition --remove-partition 0 -vv "
        "--allow-run-as-root python3 --num-replicas 9"
    )
    options = poprun_options.parse(words.split())
    assert options.given == {
        "host": "a,b", "num-replicas": "4", "num-instances": "2", "print-topology": True, "reset-partition": True,
        "remove-partition": False, "verbose": True, "allow-run-as-root": True,
    }  # fmt: skip
    assert options.program == ["python3", "--num-replicas", "9"]
    assert options.without_effect() == ["--reset-partition", "--remove-partition"]


def test_every_option_of_the_sdk_is_known():
    known = {option.name for options in poprun_options.OPTIONS.values() for option in options}
    assert known == {
        "num-replicas", "num-instances", "ipus-per-replica", "host", "num-ilds", "vipu-server-host", "vipu-server-port",
        "vipu-server-timeout", "vipu-partition", "vipu-partition-attempts", "vipu-cluster", "vipu-allocation",
        "update-partition", "reset-partition", "remove-partition", "mpi-global-args", "mpi-local-args",
        "process-placement", "numa-aware", "executable-cache-path", "only-output-from-instance", "offline-mode",
        "print-topology", "allow-run-as-root", "host-subnet", "synchronise-python-venv", "synchronise-poplar-sdk",
        "distribute-ssh-key", "import-config", "export-config", "overwrite-config", "verbose", "help", "version",
        "version-format",
    }  # fmt: skip


def test_the_arguments_for_mpirun_that_have_a_meaning_here_are_read():
    found = poprun_options.read_mpi_arguments(
        "--tag-output --mca plm_rsh_agent 'rsh -n' --mca btl_tcp_if_include 10.1.0.0/16 --mca btl tcp",
        "-x HERE -x 'GIVEN=a b' --oversubscribe",
    )
    assert found.variables == {"HERE": None, "GIVEN": "a b"}
    assert (found.remote_shell, found.subnet) == ("rsh -n", "10.1.0.0/16")
    assert found.rest == ["--oversubscribe", "--mca btl tcp"]


def test_options_survive_a_file_and_the_command_line_wins_over_it(tmp_path):
    path = tmp_path / "job.json"
    words = ["--num-replicas", "4", "--print-topology", "no", "--export-config", str(path), "program", "--flag"]
    poprun_options.export(poprun_options.parse(words))
    again = poprun_options.parse(["--import-config", str(path), "--num-replicas", "8"])
    assert again.program == ["program", "--flag"]
    assert again.given == {"import-config": str(path), "num-replicas": "8", "print-topology": False}
    with pytest.raises(poprun_options.OptionError, match="--overwrite-config"):
        poprun_options.export(poprun_options.parse(words))
    poprun_options.export(poprun_options.parse(["--overwrite-config", *words]))
    path.write_text("{}")
    with pytest.raises(poprun_options.OptionError, match="is not a file that --export-config wrote"):
        poprun_options.parse(["--import-config", str(path)])


PROGRAM = "import os, sys; print(os.environ['POPDIST_REPLICA_INDEX_OFFSET'], sys.argv[1:]); print('e', file=sys.stderr)"


def test_every_instance_gets_its_place_and_its_output_a_tag(poprun):
    code, out, err = poprun(2, 4, sys.executable, "-c", PROGRAM, "--flag", "x")
    assert code == 0
    assert sorted(out.splitlines()) == ["[1,0]<stdout>:0 ['--flag', 'x']", "[1,1]<stdout>:2 ['--flag', 'x']"]
    assert sorted(err.splitlines()) == ["[1,0]<stderr>:e", "[1,1]<stderr>:e"]


def test_the_emulator_is_there_without_the_program_knowing(poprun):
    program = "import popdist, os; print(popdist.getNumTotalReplicas(), os.environ['GIVEN'])"
    code, out, _ = poprun(1, 2, "--mpi-local-args", "-x 'GIVEN=a b'", "python3", "-c", program)
    assert (code, out) == (0, "[1,0]<stdout>:2 a b\n")


def test_the_topology_is_a_table_and_options_without_effect_are_named_once(poprun):
    code, out, err = poprun(
        2, 4, "--ipus-per-replica", 2, "--num-ilds", 2, "--print-topology", "yes",
        "--vipu-partition", "p", "--update-partition=yes", "true",
    )  # fmt: skip
    assert code == 0
    assert out == (
        "host       ILD  instance  replicas  IPUs\n"
        "localhost  0    0         0-1       0-3\n"
        "localhost  1    1         2-3       4-7\n"
    )
    assert err == "poprun: without effect on emulated IPUs: --vipu-partition, --update-partition.\n"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--num-instances 2 --num-replicas 3 x", "Use --num-replicas 2 or 4."),
        ("--num-replicas 3 x", "powers of two. Use --num-replicas 2 or 4."),
        ("--num-replicas 4 --ipus-per-replica 3 x", "Use --ipus-per-replica 2 or 4."),
        ("--num-replicas 128 x", "the emulated partition has 64. Use --num-replicas 64 or IPU_EMULATOR_IPUS=128."),
        ("--host a,b --num-instances 3 --num-replicas 4 x", "spread evenly over 2 hosts. Use --num-instances 2 or 4."),
        ("--num-replicas x y", "--num-replicas x is not a whole number."),
        ("--num-replicas 0 y", "Use --num-replicas 1 or more."),
        ("--num-replica 2 y", "There is no option --num-replica. Did you mean --num-replicas?"),
        ("--print-topology=perhaps y", "--print-topology perhaps is neither yes nor no."),
        ("--host h[0-x] y", "'0-x' is not a range like 0-2."),
        ("--num-replicas 2", "no program"),
        ("--num-replicas", "--num-replicas needs a value"),
        ("--only-output-from-instance 1 x", "There is no instance 1 for --only-output-from-instance"),
        ("--num-replicas 1 no_such_program", "no_such_program cannot be started (No such file or directory)."),
    ],
)  # fmt: skip
def test_impossible_options_are_refused_in_a_sentence(words, text, capfd, monkeypatch):
    monkeypatch.delenv("IPU_EMULATOR_IPUS", raising=False)
    assert poprun_command.main(words.split()) == 1
    out, err = capfd.readouterr()
    assert not out and text in err and err.startswith("poprun: ") and len(err.splitlines()) == 1


FAILING = """
import os, sys, time
if os.environ["OMPI_COMM_WORLD_RANK"] != "1":
    time.sleep(300)
print("last words", file=sys.stderr)
sys.exit(7)
"""


def test_the_first_failure_ends_all_and_is_shown_and_reported(tmp_path, start_poprun):
    report = tmp_path / "report.json"
    process = start_poprun(
        4, 4, "--only-output-from-instance", 0, sys.executable, "-c", FAILING, IPU_EMULATOR_REPORT=str(report)
    )
    _, err = process.communicate(timeout=120)
    assert process.returncode == 7
    assert "[1,1]<stderr>:last words" in err and "instance 1 exited with status 7" in err
    written = json.loads(report.read_text())
    assert (written["instance"], written["status"], written["last_lines"]) == (1, 7, ["last words"])
    assert list(tmp_path.iterdir()) == [report]


LOSING_ITS_PEER = """
import os, socket, sys, time
where = "\\0" + os.environ["WHERE"]
own = socket.socket(socket.AF_UNIX)
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    own.bind(where)
    own.listen()
    other, _ = own.accept()
    print(os.getpid(), flush=True)
    time.sleep(300)
while own.connect_ex(where):
    time.sleep(0.01)
own.recv(1)
os._exit(1)
"""


@pytest.mark.parametrize("attempt", range(3))
def test_a_killed_instance_is_the_first_even_if_its_peer_fails_at_once(attempt, start_poprun):
    process = start_poprun(2, 2, sys.executable, "-c", LOSING_ITS_PEER, WHERE=f"{os.getpid()}-{attempt}")
    os.kill(int(process.stdout.readline().split(":")[1]), signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 137 and "instance 1 was killed by SIGKILL" in err


SENDING_EXIT_NOTICES = """
import os, socket, sys, time
from tf_ipu_dp.emulator.launcher import exit_notices
where = "\\0" + os.environ["WHERE"]
own = socket.socket(socket.AF_UNIX)
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    exit_notices.send(os.environ, 1)
    own.bind(where)
    own.listen()
    other, _ = own.accept()
    time.sleep(1.0)
    sys.exit(int(os.environ["STATUS"]))
while own.connect_ex(where):
    time.sleep(0.01)
exit_notices.send(os.environ, 0)
sys.exit(5)
"""


@pytest.mark.parametrize(("status", "blamed"), [("3", (1, 3)), ("0", (0, 5))])
def test_the_instance_with_the_first_exit_notice_failed_first_if_it_failed_at_all(status, blamed, start_poprun):
    process = start_poprun(
        2, 2, sys.executable, "-c", SENDING_EXIT_NOTICES, WHERE=f"{os.getpid()}-{status}", STATUS=status
    )
    _, err = process.communicate(timeout=120)
    instance, code = blamed
    assert process.returncode == code
    assert (
        err.splitlines()[-1]
        == f"poprun: instance {instance} exited with status {code}; the other instances were stopped."
    )


DEVICES = """
import popdist, time
print(popdist.getDeviceId(), flush=True)
time.sleep(300 * popdist.getInstanceIndex())
"""


def test_jobs_beside_each_other_have_different_ipus(tmp_path, start_poprun):
    partition = {"IPU_EMULATOR_DIR": str(tmp_path / "partition"), "IPU_EMULATOR_IPUS": "8"}
    jobs = [start_poprun(2, 2, sys.executable, "-c", DEVICES, **partition) for _ in range(4)]
    found = [[int(each.stdout.readline().split(":")[1]) for _ in range(2)] for each in jobs]
    for each in jobs:
        each.kill()
        each.communicate()
    assert sorted(map(sorted, found)) == [[0, 1], [2, 3], [4, 5], [6, 7]]


STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(3))
print(os.getpid(), subprocess.Popen(["sleep", "300"], start_new_session=True).pid, flush=True)
time.sleep(300)
"""


def test_processes_that_ignore_sigterm_or_left_their_session_are_ended_too(start_poprun):
    process = start_poprun(2, 2, sys.executable, "-c", STUBBORN)
    pids = [int(pid) for _ in range(2) for pid in process.stdout.readline().split(":")[1].split()]
    os.kill(pids[0], signal.SIGUSR1)
    process.communicate(timeout=120)
    assert process.returncode == 3
    assert not [pid for pid in pids if is_running(pid)]


SLEEPING = """
import os, subprocess, time
children = [subprocess.Popen(["sleep", "300"], start_new_session=new) for new in (False, True)]
print(os.getpid(), *(child.pid for child in children), flush=True)
time.sleep(300)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL], ids=str)
def test_whatever_ends_poprun_ends_the_instances_and_all_that_they_started(number, start_poprun, wait_until):
    process = start_poprun(2, 2, sys.executable, "-c", SLEEPING)
    pids = [int(pid) for _ in range(2) for pid in process.stdout.readline().split(":")[1].split()]
    process.send_signal(number)
    process.communicate(timeout=120)
    try:
        # Their own end comes after five minutes.
        wait_until(lambda: not any(map(is_running, pids)), limit_s=60)
    finally:
        for pid in filter(is_running, pids):
            os.kill(pid, signal.SIGKILL)
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)


SAVING = """
import signal, sys, time
def stop(number, frame):
    print("asked", flush=True)
    time.sleep(float(sys.argv[1]))
    print("saved", flush=True)
    sys.exit(128 + number)
signal.signal(signal.SIGINT, stop)
print("ready", flush=True)
time.sleep(300)
"""


def test_a_signal_is_forwarded_once_and_leaves_time_to_save(start_poprun):
    process = start_poprun(2, 2, sys.executable, "-c", SAVING, 4)
    for _ in range(2):
        process.stdout.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (130, "poprun: stopped by SIGINT.\n")
    assert sorted(line.split(":")[1] for line in out.splitlines()) == ["asked"] * 2 + ["saved"] * 2


def test_a_second_signal_kills_all_at_once(start_poprun):
    process = start_poprun(2, 2, sys.executable, "-c", SAVING, 300)
    for _ in range(2):
        process.stdout.readline()
    process.send_signal(signal.SIGINT)
    for _ in range(2):
        assert process.stdout.readline().endswith("asked\n")
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 130 and not out


PRINTING = """
import os, sys
own = os.environ["OMPI_COMM_WORLD_RANK"].encode()
for number in range(300):
    sys.stdout.buffer.write(own * (number * 37 % 2000))
    sys.stdout.buffer.flush()
    sys.stdout.buffer.write(b"\\xff\\n")
sys.stdout.buffer.write(own * 300_000 + b"\\ra bar\\nno end")
"""


def test_lines_stay_whole_and_keep_every_byte():
    command = [sys.executable, "-m", "tf_ipu_dp.emulator.poprun", "--num-instances", "4", "--num-replicas", "4"]
    done = subprocess.run([*command, sys.executable, "-c", PRINTING], capture_output=True, check=True, timeout=240)
    lines = done.stdout.split(b"\n")
    assert lines.pop() == b""
    for index in range(4):
        tag, own = b"[1,%d]<stdout>:" % index, b"%d" % index
        expected = [tag + own * (number * 37 % 2000) + b"\xff" for number in range(300)]
        expected += [tag + own * 300_000 + b"\ra bar", tag + b"no end"]
        assert [line for line in lines if line.startswith(tag)] == expected
    assert len(lines) == 4 * 302


def test_a_closed_output_ends_the_job_quietly(start_poprun):
    endless = "while True: print('line', flush=True)"
    process = start_poprun(2, 2, sys.executable, "-c", endless)
    process.stdout.readline()
    process.stdout.close()
    process.wait(timeout=120)
    assert process.returncode == 141 and process.stderr.read() == ""
    process.stderr.close()


def test_a_progress_bar_moves_on_a_terminal():
    bar = "import sys, time\nfor n in range(3): print(f'\\r{n} of 3', end='', flush=True); time.sleep(0.2)\nprint('!')"
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "tf_ipu_dp.emulator.poprun", sys.executable, "-c", bar]
    with subprocess.Popen(command, stdout=theirs, stderr=subprocess.DEVNULL) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                shown += os.read(ours, 1000)
            except OSError:  # so a terminal says that all have left
                break
    os.close(ours)
    assert process.returncode == 0
    states = [state.rsplit(b":", 1)[1] for state in shown.strip().split(b"\r") if b":" in state]
    assert states[-3:] == [b"0 of 3", b"1 of 3", b"2 of 3!"]
