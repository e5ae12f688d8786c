"""Emulated hosts: network namespaces on one switch, with the rate, delay and loss that a `Fabric` asks for.

Nothing is made in the machine's own network, and no host has a route out of the emulated one. All of it is removed at
the end, after an exception and after SIGTERM; what a kill leaves behind is removed by the next start.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Dict, List, Optional, Sequence, Tuple, Type

from tf_ipu_dp import cli
from tf_ipu_dp.collectives import link_emulator, namespaces, network_check, packet_loss, shaping
from tf_ipu_dp.collectives.fabric import Fabric, Link

_NETWORK = "10.213.0"
_SWITCH_NUMBER = 254  # of the switch's own address
_DEVICE = "eth0"
_BRIDGE = "switch"
_START_S = 30.0
_CAUGHT = (signal.SIGTERM, signal.SIGHUP)
_AVAILABLE = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
# The host name is the address: Horovod crashes where a host name has none.
_REMOTE_SHELL = """#!/bin/sh
# Runs a command on an emulated host, as ssh does: remote_shell ADDRESS COMMAND...
host=$1
number=$((${{host##*.}} - 1))
TMPDIR={folder}/host$number
export TMPDIR
if [ ! -d "$TMPDIR" ]; then
    echo "There is no emulated host $host." >&2
    exit 255
fi
shift
exec ip netns exec "{prefix}-host$number" unshare --uts \\
    sh -c 'echo "$0" > /proc/sys/kernel/hostname; exec sh -c "$*"' "$host" "$@"
"""


@dataclasses.dataclass(frozen=True)
class HostCounters:
    """What a host has counted since it was made."""

    retransmitted_segments: int
    timeouts: int  # retransmission timeouts of TCP
    sent_bytes: int
    received_bytes: int
    dropped_packets: int  # by the device, in both directions

    def since(self, before: HostCounters) -> HostCounters:
        """Returns what was counted after an earlier reading."""
        mine, theirs = dataclasses.astuple(self), dataclasses.astuple(before)
        return HostCounters(*(now - then for now, then in zip(mine, theirs)))


class EmulatedHosts:
    """The hosts of a network, while the context is open. `fabric` is what was asked, `built` what is there."""

    def __init__(self, fabric: Fabric):
        self.fabric = fabric
        self.built = fabric.dilated()
        self.hosts = tuple(_address(number) for number in range(1, fabric.hosts + 1))  # the names are the addresses
        self.switch_address = _address(_SWITCH_NUMBER)
        self.notes: List[str] = []  # sentences about what other networks have left over
        self.means = ""
        self._claim: Optional[namespaces.Claim] = None
        self._emulator: Optional[subprocess.Popen[str]] = None
        self._handlers: Dict[int, Any] = {}

    def __enter__(self) -> EmulatedHosts:
        self._check()
        self.notes = namespaces.remove_leftovers()
        self._catch_signals()
        try:
            self._claim = namespaces.claim()
            self._make(self._claim)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends all processes on the hosts and removes the hosts. It may be called again."""
        # A signal waits until all is removed.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *_CAUGHT})
        try:
            if self._emulator is not None:
                self._emulator.kill()
                self._emulator.communicate()
                self._emulator = None
            if self._claim is not None:
                self.notes += self._claim.release()
                self._claim = None
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            self._handlers = {}
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    @property
    def switch(self) -> str:
        """The namespace of the switch, which reaches all hosts and is reached by them at `switch_address`."""
        return f"{self._prefix}-switch"

    def namespace_of(self, host: str) -> str:
        """Returns the namespace of a host, given by its name."""
        return f"{self._prefix}-host{self.hosts.index(host)}"

    @property
    def remote_shell(self) -> str:
        """A command that runs a command line on a host, like ssh: the host's name and the line follow it.

        The command has the caller's environment and directory, the host's own host name, and a TMPDIR of its own, for
        programs that would meet in the same one.
        """
        assert self._claim is not None, "the hosts are not there"
        return str(self._claim.folder / "remote_shell")

    def command_inside(self, words: Sequence[str]) -> List[str]:
        """Returns the command that runs another one in the namespace of the switch."""
        return namespaces.command_inside(self.switch, words)

    def command_on(self, host: str, words: Sequence[str]) -> List[str]:
        """Returns the command that runs another one on a host."""
        return namespaces.command_inside(self.namespace_of(host), words)

    def read_pids(self, host: str) -> List[int]:
        """Lists the processes that run on a host."""
        return namespaces.read_pids(self.namespace_of(host))

    def read_counters(self, host: str) -> HostCounters:
        """Returns what a host has counted."""
        folder = Path("/proc/thread-self/net")  # of the thread that is inside
        texts = namespaces.call_inside(
            self.namespace_of(host), lambda: [(folder / name).read_text() for name in ("snmp", "netstat", "dev")]
        )
        return parse_counters(*texts, device=_DEVICE)

    def cut(self, host: str) -> None:
        """Takes the network from a host."""
        namespaces.run("ip", "-n", self.namespace_of(host), "link", "set", _DEVICE, "down")

    def restore(self, host: str) -> None:
        """Gives the network back to a host."""
        namespaces.run("ip", "-n", self.namespace_of(host), "link", "set", _DEVICE, "up")
        self._add_routes(self.hosts.index(host))

    def why_broken(self) -> Optional[str]:
        """Returns a sentence if the process that forwards frames has ended by itself, else None."""
        if self._emulator is None or self._emulator.poll() is None:
            return None
        return f"The link emulator ended with code {self._emulator.returncode}: the hosts cannot reach each other."

    @property
    def emulator_pid(self) -> Optional[int]:
        """The process that forwards frames; None where the kernel does."""
        return None if self._emulator is None else self._emulator.pid

    def facts(self) -> Dict[str, str]:
        """Returns the settings of the network, and what it was made with, to be shown as they are."""
        return {**self.fabric.facts(), "links made of": shaping.DESCRIPTIONS[self.means]}

    def self_check(self) -> network_check.SelfCheck:
        """Measures round trip and throughput between hosts, on the network as it was built, and compares with it."""
        return network_check.check(self.built, self.hosts, self.namespace_of)

    @property
    def _prefix(self) -> str:
        assert self._claim is not None, "the hosts are not there"
        return self._claim.prefix

    def _check(self) -> None:
        problem = namespaces.why_not()
        if problem:
            raise cli.UsageError(problem)
        known = _AVAILABLE.read_text().split()
        if self.fabric.congestion_control not in known:
            raise cli.UsageError(
                f"This kernel has no TCP congestion control {self.fabric.congestion_control}. "
                f"Use {cli.alternatives(known)}."
            )

    def _catch_signals(self) -> None:
        """Turns signals that would end the process at once into an exception, so that the hosts are removed."""

        def end(number: int, _: Optional[FrameType]) -> None:
            raise SystemExit(128 + number)

        if threading.current_thread() is threading.main_thread():
            for number in _CAUGHT:
                if signal.getsignal(number) is signal.SIG_DFL:
                    self._handlers[number] = signal.signal(number, end)

    def _make(self, claim: namespaces.Claim) -> None:
        switch = claim.add("switch")
        namespaces.call_inside(switch, _settle)
        for number in range(self.fabric.hosts):
            namespaces.call_inside(claim.add(f"host{number}"), _settle)
            (claim.folder / f"host{number}").mkdir(mode=0o700)
        script = claim.folder / "remote_shell"
        script.write_text(_REMOTE_SHELL.format(folder=claim.folder, prefix=claim.prefix), encoding="utf-8")
        script.chmod(0o700)
        has_nftables = shaping.needs_loss(self.built) and _has_nftables(switch)
        self.means = shaping.choose(self.built, has_netem=_has_netem(switch), has_nftables=has_nftables)
        if self.means == shaping.USER_SPACE:
            self._start_emulator()
        else:
            self._make_bridge()
        namespaces.run("ip", "-n", switch, "-batch", "-", lines=self._address_lines(_SWITCH_NUMBER, _BRIDGE, ""))
        for number, (host, link) in enumerate(zip(self.hosts, self.built.links)):
            namespace = self.namespace_of(host)
            pieces = shaping.piece_options(self.built, link)
            lines = self._address_lines(number + 1, _DEVICE, pieces)
            namespaces.run("ip", "-n", namespace, "-batch", "-", lines=lines)
            line = shaping.host_line(self.built, link, self.means, _DEVICE)
            if line:
                namespaces.run("tc", "-n", namespace, "-batch", "-", lines=[line])
            if self.means != shaping.USER_SPACE and link.loss and not (self.means == shaping.NETEM and link.loss_burst):
                _drop_received(namespace, link)
        self._wait_for_links()

    def _make_bridge(self) -> None:
        mtu = self.built.mtu
        lines = [f"link add {_BRIDGE} mtu {mtu} type bridge stp_state 0 forward_delay 0 mcast_snooping 0"]
        shapes = []
        for number, (host, link) in enumerate(zip(self.hosts, self.built.links)):
            peer = f"peer name {_DEVICE} netns {self.namespace_of(host)}"
            lines += [f"link add port{number} mtu {mtu} type veth {peer}"]
            lines += [f"link set port{number} master {_BRIDGE} up"]
            line = shaping.switch_line(self.built, link, self.means, f"port{number}")
            shapes += [line] if line else []
        namespaces.run("ip", "-n", self.switch, "-batch", "-", lines=lines)
        namespaces.run("tc", "-n", self.switch, "-batch", "-", lines=shapes)

    def _start_emulator(self) -> None:
        ports = [link_emulator.Port(self.switch, _BRIDGE, _SWITCH_NUMBER)]
        for number, link in enumerate(self.built.links):
            fields = {**dataclasses.asdict(link), "delay_s": link.delay_s / 2, "queue": self.built.queue}
            fields["burst"] = self.built.burst_of(link)
            namespace = self.namespace_of(self.hosts[number])
            ports.append(link_emulator.Port(namespace, _DEVICE, number + 1, **fields))
        emulation = link_emulator.Emulation(
            tuple(ports), self.built.jitter_law, self.built.reordering, shaping.needs_loss(self.built)
        )
        self._emulator = subprocess.Popen(
            [sys.executable, "-m", link_emulator.__name__],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._emulator.stdin is not None and self._emulator.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._emulator.stdin.write(emulation.to_json() + "\n")
            self._emulator.stdin.flush()
        if self._emulator.stdout.readline().strip() != link_emulator.READY:
            reason = self._emulator.communicate()[1].strip().splitlines()[-1:]
            raise cli.UsageError(f"The link emulator cannot start: {' '.join(reason) or 'no reason given'}.")

    def _address_lines(self, number: int, device: str, options: str) -> List[str]:
        """Returns the lines for `ip` that set up the device of a host."""
        address, routes = _address(number), self._route_lines(number, device)
        return [
            "link set lo up",
            f"link set {device} address {_hardware_address(number)} mtu {self.built.mtu} {options}",
            f"address add {address}/24 dev {device} noprefixroute",
            f"link set {device} up",
            *routes,
        ]

    def _route_lines(self, number: int, device: str) -> List[str]:
        """Returns the lines for the one route, with TCP's settings, and the addresses of all hosts.

        Hosts do not ask for each other's addresses: with loss or delay the question would be part of a trial.
        """
        options = f"congctl {self.built.congestion_control}"
        if self.built.dilation != 1:
            options += f" rto_min {round(self.built.tcp_min_timeout_s * 1000)}ms"
        lines = [f"route add {_NETWORK}.0/24 dev {device} scope link src {_address(number)} {options}"]
        others = [each for each in (*range(1, self.fabric.hosts + 1), _SWITCH_NUMBER) if each != number]
        for each in others:
            lines.append(f"neighbour replace {_address(each)} lladdr {_hardware_address(each)} dev {device}")
        return lines

    def _add_routes(self, host: int) -> None:
        namespace = self.namespace_of(self.hosts[host])
        namespaces.run("ip", "-n", namespace, "-batch", "-", lines=self._route_lines(host + 1, _DEVICE))

    def _wait_for_links(self) -> None:
        deadline = time.monotonic() + _START_S
        for host in self.hosts:
            command = ["ip", "-n", self.namespace_of(host), "link", "show", _DEVICE]
            while "LOWER_UP" not in namespaces.run(*command):
                if time.monotonic() > deadline:
                    raise cli.UsageError(f"The link of emulated host {host} did not come up in {_START_S:g} s.")
                time.sleep(0.01)


def parse_counters(snmp: str, netstat: str, dev: str, *, device: str) -> HostCounters:
    """Returns the counters in the texts of /proc/net/snmp, netstat and dev."""
    values: Dict[Tuple[str, str], int] = {}
    for text in (snmp, netstat):
        lines = text.splitlines()
        for names, numbers in zip(lines[::2], lines[1::2]):
            protocol = names.split(":")[0]
            values.update(((protocol, name), int(each)) for name, each in zip(names.split()[1:], numbers.split()[1:]))
    row = next(line.split(":")[1].split() for line in dev.splitlines() if line.strip().startswith(f"{device}:"))
    received, sent = [int(word) for word in row[:8]], [int(word) for word in row[8:]]
    return HostCounters(
        retransmitted_segments=values["Tcp", "RetransSegs"],
        timeouts=values["TcpExt", "TCPTimeouts"],
        sent_bytes=sent[0],
        received_bytes=received[0],
        dropped_packets=received[3] + sent[3],
    )


def _address(number: int) -> str:
    return f"{_NETWORK}.{number}"


def _hardware_address(number: int) -> str:
    return f"02:00:00:00:00:{number:02x}"


def _drop_received(namespace: str, link: Link) -> None:
    namespaces.call_inside(namespace, lambda: packet_loss.drop_received(_DEVICE, link.loss))


def _settle() -> None:
    """Removes what would make trials differ: TCP's memory of earlier connections, and IPv6's own packets."""
    settings = Path("/proc/sys/net")
    (settings / "ipv4/tcp_no_metrics_save").write_text("1")
    for path in settings.glob("ipv6/conf/*/disable_ipv6"):
        path.write_text("1")


def _has_netem(namespace: str) -> bool:
    words = ["tc", "-n", namespace, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
    found = subprocess.run(words, capture_output=True, check=False).returncode == 0
    if found:
        namespaces.run("tc", "-n", namespace, "qdisc", "delete", "dev", "lo", "root")
    return found


def _has_nftables(namespace: str) -> bool:
    try:
        namespaces.call_inside(namespace, lambda: packet_loss.drop_received("lo", 0.0))
    except OSError:
        return False
    return True
