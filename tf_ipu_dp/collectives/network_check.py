"""Whether an emulated network is what was asked: round trip and throughput between hosts, by own small senders."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import socket
import statistics
import struct
import threading
import time
from typing import Callable, List, Optional, Sequence, Tuple

from tf_ipu_dp.collectives import namespaces, quantities
from tf_ipu_dp.collectives.fabric import Fabric, Link

_PORT = 5201
_ROUND_TRIPS = 30
_ROUND_TRIP_LIMIT_S = 0.3  # for an answer, on a busy machine without delays
_MIN_FLOW_S, _MAX_FLOW_S = 0.4, 3.0
_ROUND_TRIPS_TO_FILL = 40  # until TCP has found the rate of the link
_TOLERANCE = 0.1
_PIECE = 1 << 18
_CORES = "The cores are the limit: lower the rate, or raise the MTU or the dilation."
_SILENCE_S = 30.0  # on a connection before it is given up


@dataclasses.dataclass(frozen=True)
class LinkCheck:
    """What was measured between two hosts. Rates are in bytes of data per second."""

    first: int
    second: int
    round_trip_s: float  # nominal
    measured_min_s: Optional[float]  # None where no answer came
    measured_median_s: Optional[float]
    measured_max_s: Optional[float]
    lost: int  # questions without an answer, of `_ROUND_TRIPS`
    rate: Optional[float]  # nominal, without headers; None where there is no limit
    measured_rate: float

    def render(self) -> str:
        """Returns the check in one line."""
        trip = "no answer"
        if self.measured_median_s is not None and self.measured_min_s is not None and self.measured_max_s is not None:
            numbers = (self.measured_min_s, self.measured_median_s, self.measured_max_s)
            trip = "/".join(quantities.render_seconds(value) for value in numbers)
        rate = "no limit" if self.rate is None else quantities.render_rate(self.rate)
        return (
            f"hosts {self.first} and {self.second}: round trip {trip} min/median/max "
            f"(nominal {quantities.render_seconds(self.round_trip_s)}), one flow "
            f"{quantities.render_rate(self.measured_rate)} (nominal {rate})"
        )


@dataclasses.dataclass(frozen=True)
class RingCheck:
    """What every host reached that sent to the next one, all at the same time, as the ranks of a ring do."""

    rates: Tuple[float, ...]  # of each host, in bytes of data per second
    nominal: Tuple[Optional[float], ...]

    @property
    def worst(self) -> int:
        """The host whose flow is furthest below its link, or the slowest one where there are no limits."""
        shares = [rate / nominal if nominal else rate for rate, nominal in zip(self.rates, self.nominal)]
        return shares.index(min(shares))

    def render(self) -> str:
        """Returns the check in one line."""
        rate, nominal = self.rates[self.worst], self.nominal[self.worst]
        limit = "no limit" if nominal is None else quantities.render_rate(nominal)
        return (
            f"{len(self.rates)} flows at once around the ring: the slowest, from host {self.worst}, "
            f"{quantities.render_rate(rate)} (nominal {limit})"
        )

    def problem(self) -> Optional[str]:
        """Returns a sentence if a flow is more than a tenth below its link; None if not."""
        rate, nominal = self.rates[self.worst], self.nominal[self.worst]
        if nominal is None or rate >= (1 - _TOLERANCE) * nominal:
            return None
        return (
            f"With all {len(self.rates)} hosts sending at once, host {self.worst} reaches "
            f"{quantities.render_rate(rate)}, and not {quantities.render_rate(nominal)}. {_CORES}"
        )


@dataclasses.dataclass(frozen=True)
class SelfCheck:
    """The checked links, all of them at once where there are more than two hosts, and a sentence for each problem."""

    links: Tuple[LinkCheck, ...]
    problems: Tuple[str, ...]
    ring: Optional[RingCheck] = None

    @property
    def lines(self) -> Tuple[str, ...]:
        """What was measured, a line for each check."""
        return (*(link.render() for link in self.links), *([self.ring.render()] if self.ring is not None else ()))


def check(fabric: Fabric, hosts: Sequence[str], namespace_of: Callable[[str], str]) -> SelfCheck:
    """Measures between hosts 0 and 1, and between each host with a link of its own and one of the others."""
    links = [
        _check_pair(fabric, pair, [hosts[number] for number in pair], [namespace_of(hosts[number]) for number in pair])
        for pair in pairs_to_check(fabric)
    ]
    problems = [sentence for link in links for sentence in find_problems(link, fabric)]
    ring = _check_ring(fabric, hosts, namespace_of) if fabric.hosts > 2 else None
    # A link that is too slow by itself has been named.
    problem = ring.problem() if ring is not None and not problems and _is_clean(fabric, fabric.links) else None
    return SelfCheck(tuple(links), (*problems, *([problem] if problem else ())), ring)


def pairs_to_check(fabric: Fabric) -> List[Tuple[int, int]]:
    """Returns the pairs of hosts that show all kinds of links. One host has no link to another."""
    different = [host for host, _ in fabric.host_changes]
    usual = [host for host in range(fabric.hosts) if host not in different] or [0]
    pairs = [(0, 1)] if fabric.hosts > 1 else []
    for host in different:
        other = next((each for each in usual if each != host), None)
        if other is not None and fabric.hosts > 1:
            pairs.append((min(host, other), max(host, other)))
    return sorted(set(pairs))


def find_problems(link: LinkCheck, fabric: Fabric) -> List[str]:
    """Returns a sentence for what is more than a tenth off."""
    who = f"Hosts {link.first} and {link.second}"
    if link.measured_median_s is None or link.measured_min_s is None:
        return [f"{who} do not reach each other: {link.lost} packets had no answer."]
    sentences = []
    links = [fabric.links[number] for number in (link.first, link.second)]
    off = link.measured_median_s - link.round_trip_s
    if link.round_trip_s and abs(off) > _TOLERANCE * link.round_trip_s + sum(each.jitter_s for each in links):
        sentences.append(
            f"{who}: a round trip takes {quantities.render_seconds(link.measured_median_s)}, and not "
            f"{quantities.render_seconds(link.round_trip_s)}. Predict with the measured one."
        )
    if link.rate and _is_clean(fabric, links) and abs(link.measured_rate / link.rate - 1) > _TOLERANCE:
        sentences.append(
            f"{who}: one flow reaches {quantities.render_rate(link.measured_rate)}, and not "
            f"{quantities.render_rate(link.rate)}.{f' {_CORES}' if link.measured_rate < link.rate else ''}"
        )
    return sentences


def _is_clean(fabric: Fabric, links: Sequence[Link]) -> bool:
    """Whether TCP should reach the rate of its link: with loss or outages it is slower, as it should be."""
    return not any(each.loss or each.outage_s for each in links) and fabric.queue is None


def _check_ring(fabric: Fabric, hosts: Sequence[str], namespace_of: Callable[[str], str]) -> RingCheck:
    """Lets every host send to the next one, all at once."""
    count = len(hosts)
    nexts = [(host + 1) % count for host in range(count)]
    duration_s = min(_MAX_FLOW_S, max(_MIN_FLOW_S, _ROUND_TRIPS_TO_FILL * fabric.round_trip_s(0, 1)))
    places = [(namespace_of(hosts[host]), namespace_of(hosts[other])) for host, other in enumerate(nexts)]
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        rates = list(pool.map(lambda n: _measure_rate_or_0(hosts[nexts[n]], places[n], duration_s), range(count)))
    nominal = [fabric.rate_between(host, other) for host, other in enumerate(nexts)]
    shares = tuple(None if rate is None else rate * fabric.payload_share for rate in nominal)
    return RingCheck(tuple(rates), shares)


def _check_pair(fabric: Fabric, pair: Tuple[int, int], hosts: Sequence[str], places: Sequence[str]) -> LinkCheck:
    nominal = fabric.rate_between(*pair)
    trips, lost = measure_round_trips(hosts[1], places[0], places[1], fabric.round_trip_s(*pair))
    trip_s = max(fabric.round_trip_s(*pair), min(trips, default=0.0))
    duration_s = min(_MAX_FLOW_S, max(_MIN_FLOW_S, _ROUND_TRIPS_TO_FILL * trip_s))
    return LinkCheck(
        first=pair[0],
        second=pair[1],
        round_trip_s=fabric.round_trip_s(*pair),
        measured_min_s=min(trips, default=None),
        measured_median_s=statistics.median(trips) if trips else None,
        measured_max_s=max(trips, default=None),
        lost=lost,
        rate=None if nominal is None else nominal * fabric.payload_share,
        measured_rate=_measure_rate_or_0(hosts[1], places, duration_s) if trips else 0.0,
    )


def measure_round_trips(
    address: str, sender: str, receiver: str, nominal_s: float, count: int = _ROUND_TRIPS
) -> Tuple[List[float], int]:
    """Returns the times of UDP packets from one namespace to an address in another and back, and how many were lost."""
    limit_s = _ROUND_TRIP_LIMIT_S + 5 * nominal_s
    echo = namespaces.call_inside(receiver, lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    probe = namespaces.call_inside(sender, lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    with echo, probe:
        echo.bind((address, _PORT))
        probe.connect((address, _PORT))
        answering = threading.Thread(target=_answer, args=(echo,), daemon=True)
        answering.start()
        trips: List[float] = []
        lost = 0
        for number in range(count + 1):
            started_at = time.monotonic()
            answered = _ask(probe, number, started_at + limit_s)
            if number and answered:  # the first one warms the caches
                trips.append(time.monotonic() - started_at)
            lost += bool(number and not answered)
            if lost > 3 and not trips:
                break
        with contextlib.suppress(OSError):
            echo.shutdown(socket.SHUT_RDWR)
        _wake(receiver, address)
        answering.join()
    return trips, lost


def measure_rate(address: str, sender: str, receiver: str, duration_s: float) -> float:
    """Returns the bytes of data per second that one TCP connection delivers, after it has reached its rate."""
    server = namespaces.call_inside(receiver, socket.socket)
    client = namespaces.call_inside(sender, socket.socket)
    with server, client:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((address, _PORT))
        server.listen(1)
        server.settimeout(_SILENCE_S)
        client.settimeout(_SILENCE_S)
        client.connect((address, _PORT))
        accepted, _ = server.accept()
        sending = threading.Thread(target=_send_on, args=(client,), daemon=True)
        sending.start()
        with accepted:
            accepted.settimeout(_SILENCE_S)
            try:
                rate = _receive_rate(accepted, duration_s)
            finally:
                for each in (client, accepted):
                    _drop_unsent(each)
                client.shutdown(socket.SHUT_RDWR)  # ends the sender
        sending.join()
    return rate


def _measure_rate_or_0(address: str, places: Sequence[str], duration_s: float) -> float:
    try:
        return measure_rate(address, places[0], places[1], duration_s)
    except OSError:  # nothing came for too long: heavy loss, or an outage
        return 0.0


def _receive_rate(connection: socket.socket, duration_s: float) -> float:
    """Returns the rate in the second half of a time."""
    buffer = memoryview(bytearray(_PIECE))
    received = 0
    first_at = time.monotonic()
    half_at: Optional[float] = None
    before = 0
    while True:
        count = connection.recv_into(buffer)
        now = time.monotonic()
        received += count
        if half_at is None and now - first_at >= duration_s / 2:
            half_at, before = now, received
        elif half_at is not None and (now - first_at >= duration_s or not count):
            return (received - before) / (now - half_at)


def _send_on(client: socket.socket) -> None:
    data = bytes(_PIECE)
    with contextlib.suppress(OSError):
        while True:
            client.send(data)


def _drop_unsent(connection: socket.socket) -> None:
    """Drops what is still on the way when the connection is closed: nobody waits for it."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _ask(probe: socket.socket, number: int, deadline: float) -> bool:
    with contextlib.suppress(OSError):  # a refusal of an earlier packet
        probe.send(struct.pack("!I", number))
        while time.monotonic() < deadline:
            probe.settimeout(max(1e-3, deadline - time.monotonic()))
            if probe.recv(64) == struct.pack("!I", number):
                return True
    return False


def _answer(echo: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            data, who = echo.recvfrom(64)
            if not data:
                return
            echo.sendto(data, who)


def _wake(namespace: str, address: str) -> None:
    """Ends `_answer` with an empty packet from its own host, which is never lost."""
    with namespaces.call_inside(namespace, lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as own:
        own.sendto(b"", (address, _PORT))
