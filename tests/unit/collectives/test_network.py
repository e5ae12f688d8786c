"""What can be said of emulated networks without making one: means, lines for tc, counters, checks, and refusals."""

from __future__ import annotations

import os

import pytest

from tf_ipu_dp import cli
from tf_ipu_dp.collectives import fabric_flags, namespaces, network, network_check, shaping
from tf_ipu_dp.collectives.fabric import Fabric, Link

R4 = fabric_flags.load("r4")


def choose(has_netem=False, has_nftables=True, **settings):
    return shaping.choose(R4.override(settings), has_netem=has_netem, has_nftables=has_nftables)


def test_the_kernel_does_rate_and_loss_alone():
    assert choose() == choose(loss="1%") == choose(has_netem=True, loss="1%") == shaping.KERNEL


def test_delays_go_to_netem_where_the_kernel_has_it():
    assert choose(delay="1ms") == shaping.USER_SPACE
    assert choose(has_netem=True, delay="1ms") == shaping.NETEM
    assert choose(has_netem=True, loss="1%", loss_burst="5") == shaping.NETEM


def test_what_netem_cannot_do_goes_to_user_space():
    assert choose(has_netem=True, delay="1ms", jitter="1ms") == shaping.USER_SPACE  # it would change the order
    assert choose(has_netem=True, delay="1ms", jitter="1ms", reordering="yes") == shaping.NETEM
    law = {"jitter_law": "lognormal", "reordering": "yes"}
    assert choose(has_netem=True, delay="1ms", jitter="1ms", **law) == shaping.USER_SPACE
    assert choose(has_netem=True, outage="1s", outage_every="5s") == shaping.USER_SPACE


def test_loss_without_nftables_goes_to_user_space():
    assert choose(has_nftables=False, loss="1%") == shaping.USER_SPACE and choose(has_nftables=False) == shaping.KERNEL


def test_rates_become_token_buckets_that_do_not_drop():
    line = shaping.host_line(R4, R4.link, shaping.KERNEL, "eth0")
    assert line == "qdisc add dev eth0 root tbf rate 1000000000bit burst 62500b limit 1073741824b"
    asked = R4.override({"queue": "1MiB", "burst": "10000"})
    assert "burst 10000b limit 1048576b" in shaping.switch_line(asked, asked.link, shaping.KERNEL, "port0")
    assert shaping.host_line(R4, Link(), shaping.KERNEL, "eth0") is None


def test_netem_delays_each_link_by_half_and_jitters_what_hosts_send():
    found = R4.override({"delay": "2ms", "jitter": "100us", "loss": "1%", "loss_burst": "4"})
    assert shaping.host_line(found, found.link, shaping.NETEM, "eth0") == (
        "qdisc add dev eth0 root netem limit 1000000 delay 1000us 100us distribution normal rate 1000000000bit"
    )
    assert shaping.switch_line(found, found.link, shaping.NETEM, "port0") == (
        "qdisc add dev port0 root netem limit 1000000 delay 1000us loss gemodel 0.252525% 25.000000% rate 1000000000bit"
    )


def test_packets_that_may_be_lost_are_sent_one_by_one():
    assert shaping.piece_options(R4.override({"loss": "1%"}), R4.link) == "gso_max_segs 1"
    assert shaping.piece_options(R4, R4.link) == "gso_max_size 62500"
    assert shaping.piece_options(R4, Link()) == "gso_max_size 65536"


def test_counters_are_read_from_the_kernels_tables():
    snmp = "Ip: Forwarding TTL\nIp: 1 64\nTcp: InSegs RetransSegs\nTcp: 100 7\n"
    netstat = "TcpExt: SyncookiesSent TCPTimeouts\nTcpExt: 0 3\nIpExt: InOctets\nIpExt: 5\n"
    dev = "Inter-| Receive\n face |bytes\n  lo: 1 1 1 1 0 0 0 0 1 1 1 1 0 0 0 0\n"
    dev += "eth0: 1000 10 0 2 0 0 0 0 2000 20 0 3 0 0 0 0\n"
    found = network.parse_counters(snmp, netstat, dev, device="eth0")
    assert found == network.HostCounters(7, 3, 2000, 1000, 5)
    assert found.since(network.HostCounters(5, 1, 500, 400, 5)) == network.HostCounters(2, 2, 1500, 600, 0)


def test_every_kind_of_link_is_checked_once():
    assert network_check.pairs_to_check(R4) == [(0, 1)]
    assert network_check.pairs_to_check(fabric_flags.load("slow-host")) == [(0, 1), (0, 2)]
    assert network_check.pairs_to_check(R4.override_host(0, {"rate": "1Mbit"})) == [(0, 1)]
    assert network_check.pairs_to_check(Fabric("a", hosts=1)) == []


def check_of(rtt_s=2e-3, measured_s=2.05e-3, rate=1e8, measured=0.98e8, lost=0):
    return network_check.LinkCheck(0, 1, rtt_s, measured_s, measured_s, measured_s, lost, rate, measured)


def test_a_network_within_a_tenth_of_what_was_asked_has_no_problem():
    assert network_check.find_problems(check_of(), R4) == []


def test_a_network_that_is_not_what_was_asked_gets_a_sentence():
    assert network_check.find_problems(check_of(measured_s=2.3e-3), R4) == [
        "Hosts 0 and 1: a round trip takes 2.3 ms, and not 2 ms. Predict with the measured one."
    ]
    assert network_check.find_problems(check_of(measured=0.5e8), R4) == [
        "Hosts 0 and 1: one flow reaches 400 Mbit/s, and not 800 Mbit/s. The cores are the limit: lower the rate, or "
        "raise the MTU or the dilation."
    ]
    assert network_check.find_problems(check_of(measured_s=None, lost=4), R4) == [
        "Hosts 0 and 1 do not reach each other: 4 packets had no answer."
    ]


def test_a_lossy_network_may_be_slower_than_its_links():
    assert network_check.find_problems(check_of(measured=0.5e8), R4.override({"loss": "1%"})) == []


def test_a_check_is_one_line():
    assert check_of().render() == (
        "hosts 0 and 1: round trip 2.05 ms/2.05 ms/2.05 ms min/median/max (nominal 2 ms), one flow 784 Mbit/s "
        "(nominal 800 Mbit/s)"
    )


def test_flows_around_the_ring_name_the_one_that_is_furthest_below_its_link():
    ring = network_check.RingCheck((1.2e7, 0.9e7, 0.3e7), (1.2e7, 1.2e7, 0.3e7))
    assert ring.render() == ("3 flows at once around the ring: the slowest, from host 1, 72 Mbit/s (nominal 96 Mbit/s)")
    assert ring.problem() == (
        "With all 3 hosts sending at once, host 1 reaches 72 Mbit/s, and not 96 Mbit/s. The cores are the limit: lower "
        "the rate, or raise the MTU or the dilation."
    )
    assert network_check.RingCheck((1.1e7, 0.3e7), (1.2e7, 0.3e7)).problem() is None
    assert network_check.RingCheck((1e9, 2e9), (None, None)).problem() is None


WORKS = "Without --fabric, measure runs on this host, and size, simulate and report need no root."


def test_without_root_one_sentence_says_what_still_works(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(cli.UsageError, match=f"Emulated hosts are network namespaces, which need root. {WORKS}"):
        network.EmulatedHosts(R4).__enter__()


def test_a_missing_command_is_named_with_its_package(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "")
    assert namespaces.why_not() == f"Emulated hosts need the command ip, from the package iproute2. {WORKS}"
