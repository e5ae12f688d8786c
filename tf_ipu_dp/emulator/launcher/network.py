"""Addresses of this machine and of the other hosts of a job."""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import socket
import time
from typing import List, Optional, Sequence, Tuple

LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo"


class HostError(RuntimeError):
    """A host cannot take part in the job. The text is shown to the user as is."""

    def __init__(self, host: str, text: str) -> None:
        super().__init__(text)
        self.host = host


@dataclasses.dataclass(frozen=True)
class Interface:
    """A network interface and its address."""

    name: str
    address: str
    netmask: str

    @property
    def network(self) -> ipaddress.IPv4Network:
        return ipaddress.IPv4Network(f"{self.address}/{self.netmask}", strict=False)


def is_this_machine(host: str) -> bool:
    """Whether a name or an address is this machine's."""
    if host in ("localhost", LOOPBACK, "::1", socket.gethostname(), socket.gethostname().split(".")[0]):
        return True
    try:
        found = socket.getaddrinfo(host.rpartition("@")[2], 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    for family, kind, _, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
            probe.bind((address[0], 0))  # succeeds for an address of this machine only
            return True
    return False


def read_interfaces() -> List[Interface]:
    """Returns the interfaces of this machine that other hosts can reach."""
    import psutil

    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    return [
        Interface(name, each.address, each.netmask)
        for name, addresses in psutil.net_if_addrs().items()
        for each in addresses
        if name in up and each.family == socket.AF_INET and each.netmask and not each.address.startswith("127.")
    ]


def choose_interface(host: str, theirs: Sequence[Interface], ours: Sequence[Interface], subnet: str) -> Interface:
    """Returns a host's interface for the job: in the subnet, else at its name's address, else in a network of ours."""
    if subnet:
        try:
            network = ipaddress.ip_network(subnet, strict=False)
        except ValueError as error:
            raise HostError(host, f"--host-subnet {subnet} is not a network like 10.1.0.0/16.") from error
        wanted = [each for each in theirs if ipaddress.ip_address(each.address) in network]
    else:
        with contextlib.suppress(OSError):
            known = socket.gethostbyname(host.rpartition("@")[2])
            named = [each for each in theirs if each.address == known]
            if named:
                return named[0]
        networks = [each.network for each in ours]
        wanted = [each for each in theirs if each.network in networks]
    if not wanted:
        has = ", ".join(f"{each.address} ({each.name})" for each in theirs) or "none"
        where = f"in --host-subnet {subnet}" if subnet else "in a network of this machine"
        raise HostError(host, f"Host {host} has no address {where}; it has {has}. Choose one with --host-subnet CIDR.")
    return wanted[0]


def address_towards(host: str, address: str) -> str:
    """Returns the address of this machine as seen from another host. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError as error:
            raise HostError(host, f"There is no route to host {host} at {address} ({error.strerror}).") from error
        return str(probe.getsockname()[0])


def interface_towards(address: str) -> str:
    """Returns the name of the interface of this machine through which an address is reached."""
    if address.startswith("127."):
        return LOOPBACK_INTERFACE
    own = address_towards(address, address)
    return next((each.name for each in read_interfaces() if each.address == own), LOOPBACK_INTERFACE)


def why_unreachable(server: Optional[Tuple[str, int]], timeout_s: float) -> str:
    """Tries to connect to a server until the timeout; returns a sentence if that failed, else an empty string."""
    if server is None:
        return ""
    deadline = time.monotonic() + timeout_s
    while True:
        left_s = deadline - time.monotonic()
        try:
            with socket.create_connection((server[0], server[1]), timeout=max(min(left_s, 5.0), 0.1)):
                return ""
        except OSError as error:
            if time.monotonic() >= deadline - 0.2:
                reason = error.strerror or error
                return f"{server[0]} port {server[1]} could not be reached for {timeout_s:.0f} s ({reason})."
        time.sleep(0.2)
