"""Emulated hosts on this machine: real namespaces, real links, and nothing of them left afterwards.

The machine may be busy, so that limits are wide: a rate may be missed from below, but never exceeded.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import emulated_hosts_needed
import pytest

from tf_ipu_dp import cli
from tf_ipu_dp.collectives import fabric_flags, namespaces, network, network_check

MOUNTS, FOLDER = Path("/run/netns"), Path("/run/tf_ipu_dp/networks")
WAITING = """
import sys, time
from tf_ipu_dp.collectives import fabric_flags, network
with network.EmulatedHosts(fabric_flags.load("r4").override(dict(word.split("=") for word in sys.argv[1:]))) as hosts:
    print(hosts.switch, flush=True)
    time.sleep(300)
"""
RATE = 20e6 / 8


@pytest.fixture(scope="module", autouse=True)
def _needs_root():
    emulated_hosts_needed.require_emulated_hosts()


@pytest.mark.parametrize(
    ("reason", "environ", "is_root", "decision"),
    [
        (None, {}, True, "run"),
        ("no root", {}, False, "skip"),
        ("no root", {"CI": "true"}, False, "skip"),
        ("no command ip", {"CI": "true"}, True, "fail"),
        ("no command ip", {"CI": "false"}, True, "skip"),
        ("no command ip", {}, True, "skip"),
    ],
)
def test_where_ci_is_root_a_missing_command_is_a_failure(reason, environ, is_root, decision):
    assert emulated_hosts_needed.decide(reason, environ, is_root) == decision


def make(**settings):
    return network.EmulatedHosts(
        fabric_flags.load("r4").override({"hosts": "2", "mtu": "1500", "rate": "20Mbit", "dilation": "1", **settings})
    )


def names_of(prefix):
    return sorted(path.name for path in MOUNTS.glob(f"{prefix}-*"))


@pytest.fixture
def start_waiting():
    """Starts a process that keeps emulated hosts, and returns it with the prefix of their names."""
    processes = []

    def start(**settings):
        words = [f"{name}={value}" for name, value in settings.items()]
        process = subprocess.Popen([sys.executable, "-c", WAITING, *words], stdout=subprocess.PIPE, text=True)
        processes.append(process)
        return process, process.stdout.readline().strip().rpartition("-")[0]

    yield start
    for process in processes:
        process.terminate()
        process.communicate()


def measure_rate(hosts, first=0, second=1, duration_s=0.6):
    places = [hosts.namespace_of(hosts.hosts[number]) for number in (first, second)]
    return network_check.measure_rate(hosts.hosts[second], *places, duration_s)


def measure_round_trips(hosts, nominal_s, count=30):
    places = [hosts.namespace_of(name) for name in hosts.hosts[:2]]
    return network_check.measure_round_trips(hosts.hosts[1], *places, nominal_s, count)


def test_a_link_has_its_rate_and_a_slow_host_a_lower_one():
    fabric = make(hosts="3").fabric.override_host(2, {"rate": "5Mbit"})
    with network.EmulatedHosts(fabric) as hosts:
        share = fabric.payload_share
        for pair, rate in (((0, 1), RATE), ((0, 2), RATE / 4), ((2, 1), RATE / 4)):
            assert 0.8 * rate * share < measure_rate(hosts, *pair) < 1.1 * rate * share


@pytest.mark.parametrize("means", ["kernel", "user space"])
def test_packets_are_lost_as_often_as_asked(means):
    settings = {"loss": "20%", **({"delay": "100us"} if means == "user space" else {})}
    with make(rate="unlimited", **settings) as hosts:
        assert hosts.means == means
        count = 4000
        receiver, sender = (
            namespaces.call_inside(hosts.namespace_of(name), lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            for name in hosts.hosts
        )
        with receiver, sender:
            receiver.bind((hosts.hosts[0], 5202))
            received = 0
            # In groups that fit into the socket's buffer; a quiet link says that a group is over.
            for _ in range(count // 50):
                for _ in range(50):
                    sender.sendto(b"x", (hosts.hosts[0], 5202))
                receiver.settimeout(0.02)
                try:
                    while True:
                        receiver.recv(16)
                        received += 1
                except socket.timeout:
                    continue
        assert 0.75 < received / count < 0.85


@pytest.mark.parametrize("delay_ms", [1, 5])
def test_a_round_trip_takes_two_delays(delay_ms):
    with make(rate="unlimited", delay=f"{delay_ms}ms") as hosts:
        trips, lost = measure_round_trips(hosts, 2e-3 * delay_ms)
        assert lost == 0 and 2e-3 * delay_ms < min(trips) < 2e-3 * delay_ms + 2e-3


def test_the_link_emulator_limits_the_rate_too():
    with make(delay="1ms") as hosts:
        assert hosts.means == "user space" and hosts.why_broken() is None
        share = hosts.fabric.payload_share
        assert 0.8 * RATE * share < measure_rate(hosts) < 1.1 * RATE * share


def test_dilation_slows_the_network_that_is_built():
    with make(rate="200Mbit", dilation="10") as hosts:
        assert measure_rate(hosts) < 1.1 * RATE
        route = namespaces.run("ip", "-n", hosts.namespace_of(hosts.hosts[0]), "route")
        assert "rto_min lock 2s" in route


def test_the_self_check_measures_what_was_asked():
    with make(delay="2ms") as hosts:
        check = hosts.self_check()
        (link,) = check.links
        assert link.round_trip_s == pytest.approx(4e-3) and 4e-3 < link.measured_min_s < 8e-3
        assert 0.7 * link.rate < link.measured_rate < 1.1 * link.rate
        assert hosts.facts()["links made of"].startswith("TAP devices") and check.ring is None


def test_the_self_check_loads_all_links_at_once_as_a_ring_does():
    with make(hosts="3") as hosts:
        ring = hosts.self_check().ring
        assert len(ring.rates) == 3 and all(rate < 1.1 * RATE for rate in ring.rates)
        assert ring.nominal == (pytest.approx(RATE * hosts.fabric.payload_share),) * 3


def test_congestion_control_and_mtu_are_those_of_the_fabric():
    with make(congestion_control="reno", mtu="9000") as hosts:
        routes = namespaces.run(*hosts.command_on(hosts.hosts[0], ["ip", "route"]))
        assert "congctl reno" in routes and "default" not in routes
        server, client = (namespaces.call_inside(hosts.namespace_of(name), socket.socket) for name in hosts.hosts)
        with server, client:
            server.bind((hosts.hosts[0], 5203))
            server.listen(1)
            client.connect((hosts.hosts[0], 5203))
            assert client.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0") == b"reno"
            assert client.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG) == 9000 - 52
    with pytest.raises(cli.UsageError, match="This kernel has no TCP congestion control dctcpx"):
        make(congestion_control="dctcpx").__enter__()


@pytest.mark.parametrize("settings", [{}, {"delay": "1ms"}])
def test_no_packet_can_leave_the_machine(settings):
    with make(**settings) as hosts:
        for namespace in (hosts.switch, *map(hosts.namespace_of, hosts.hosts)):
            routes = namespaces.run("ip", "-n", namespace, "route").splitlines()
            assert len(routes) == 1 and routes[0].startswith("10.213.0.0/24 ")
            outside = namespaces.call_inside(namespace, socket.socket)
            with outside, pytest.raises(OSError, match="Network is unreachable"):
                outside.connect(("192.0.2.1", 80))
        own = {line.split(":")[1].strip() for line in namespaces.run("ip", "-o", "link").splitlines()}
        assert not {name for name in own if "port" in name or "switch" in name}


def test_hosts_have_own_names_and_folders_and_reach_the_switch():
    with make() as hosts:
        line = "hostname=$(cat /proc/sys/kernel/hostname); echo $hostname $TMPDIR $OWN; pwd"
        done = subprocess.run(
            [hosts.remote_shell, hosts.hosts[1], line],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "OWN": "own"},
        )
        name, folder, own, directory = done.stdout.split()
        assert (name, own, directory) == (hosts.hosts[1], "own", str(Path.cwd())) and Path(folder).is_dir()
        assert socket.gethostname() != name
        program = "import socket, sys; s = socket.create_server(('', 5204)); print(1, flush=True); s.accept()"
        command = hosts.command_inside([sys.executable, "-c", program])
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout.readline() == "1\n"
            with namespaces.call_inside(hosts.namespace_of(hosts.hosts[0]), socket.socket) as client:
                client.connect((hosts.switch_address, 5204))
        assert server.returncode == 0
        done = subprocess.run([hosts.remote_shell, "10.213.0.9", "true"], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (255, "There is no emulated host 10.213.0.9.\n")


def test_hosts_count_what_they_send_and_send_again():
    with make(loss="10%") as hosts:
        before = [hosts.read_counters(name) for name in hosts.hosts]
        measure_rate(hosts, duration_s=0.4)
        sender, receiver = (hosts.read_counters(name).since(then) for name, then in zip(hosts.hosts, before))
        assert sender.sent_bytes > 20_000 and receiver.received_bytes > 20_000 and sender.retransmitted_segments > 0


def test_a_cut_host_is_back_after_it_is_restored():
    with make() as hosts:
        hosts.cut(hosts.hosts[1])
        assert measure_round_trips(hosts, 0.0, 4)[0] == []
        hosts.restore(hosts.hosts[1])
        assert len(measure_round_trips(hosts, 0.0, 4)[0]) == 4


def test_two_networks_are_there_at_the_same_time(start_waiting):
    process, theirs = start_waiting()
    with make() as first, make(delay="1ms") as second:
        assert first.hosts == second.hosts and first.switch != second.switch
        for each in (first, second):
            assert len(measure_round_trips(each, 2e-3, 5)[0]) == 5
    assert process.poll() is None and len(names_of(theirs)) == 5


@pytest.mark.parametrize("settings", [{}, {"delay": "1ms"}])
def test_nothing_is_left_after_the_end_and_after_an_exception(settings, wait_until):
    with make(**settings) as hosts:
        prefix = hosts.switch.rpartition("-")[0]
        left = subprocess.Popen(hosts.command_on(hosts.hosts[0], ["sleep", "300"]))
        wait_until(lambda: left.pid in hosts.read_pids(hosts.hosts[0]))
        assert len(names_of(prefix)) == 3
    assert left.wait() == -signal.SIGKILL
    assert names_of(prefix) == [] and not (FOLDER / prefix).exists()
    with pytest.raises(KeyError, match=r"tfipu-\d+-\d+") as failure, make(**settings) as hosts:
        raise KeyError(hosts.switch.rpartition("-")[0])
    (prefix,) = failure.value.args
    assert names_of(prefix) == [] and not (FOLDER / prefix).exists()


def test_a_terminated_command_leaves_nothing(start_waiting):
    process, prefix = start_waiting(delay="1ms")
    assert len(names_of(prefix)) == 5
    process.terminate()
    assert process.wait() == 128 + signal.SIGTERM
    assert names_of(prefix) == [] and not (FOLDER / prefix).exists()


def test_a_killed_command_is_cleaned_up_after_by_the_next_one(start_waiting, wait_until):
    process, prefix = start_waiting(delay="1ms")
    living, theirs = start_waiting()
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    foreign = f"own-{os.getpid()}"
    namespaces.run("ip", "netns", "add", foreign)
    try:
        process.kill()
        process.wait()
        assert len(names_of(prefix)) == 5 and len(children) == 1
        wait_until(lambda: not Path(f"/proc/{children[0]}").exists())  # the link emulator ends by itself
        with make() as hosts:
            assert hosts.notes == [] and names_of(prefix) == [] and not (FOLDER / prefix).exists()
            assert len(names_of(theirs)) == 5 and living.poll() is None and (MOUNTS / foreign).exists()
    finally:
        namespaces.run("ip", "netns", "delete", foreign)


def test_a_namespace_that_cannot_be_removed_is_named_and_does_not_stop_the_next_network():
    prefix = f"tfipu-{os.getpid()}-999"
    stuck = MOUNTS / f"{prefix}-host0"
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / prefix).mkdir()
    stuck.mkdir()
    try:
        with make() as hosts:
            (note,) = [each for each in hosts.notes if prefix in each]
            assert note.startswith(f"The network namespace {prefix}-host0 is left over and cannot be removed (")
            assert note.endswith(f"Try ip netns delete {prefix}-host0.")
    finally:
        stuck.rmdir()
        shutil.rmtree(FOLDER / prefix)
