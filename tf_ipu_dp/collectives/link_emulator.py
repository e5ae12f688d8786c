"""A switch in user space, for what the kernel's traffic control lacks: delay, jitter, bursts of loss and outages.

It owns a TAP device in the namespace of each host, and forwards every frame to the host that its address names, when
it is due. One process does it for a whole network: `python -m tf_ipu_dp.collectives.link_emulator` reads an `Emulation`
as one line of JSON, answers with a line when the devices are there, and ends with the command that started it.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import fcntl
import functools
import gc
import heapq
import json
import math
import os
import random
import select
import signal
import struct
import sys
import time
from typing import Dict, Iterator, List, Mapping, Optional, Tuple

from tf_ipu_dp.collectives import namespaces

READY = "ready"
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x2, 0x1000, 0x4000
_CHECKSUM, _TCP4_SEGMENTATION = 0x1, 0x2
_PIECE_HEADER = 10  # says whether a frame is a large piece that stands for several packets, and what is left to do
_TCP_HEADERS = 66  # of Ethernet, IPv4, and TCP with time stamps
_PR_SET_PDEATHSIG, _PR_SET_TIMERSLACK = 1, 29
_MAX_READ = 1 << 17
_FRAMES_AT_ONCE = 32
_LEARNING_RATE, _MAX_LATENESS_S = 0.1, 0.5e-3
_TOLERANCE_S = 10e-6
_PRIORITY = 10  # of real-time processes: above ranks that run at the lowest


@dataclasses.dataclass(frozen=True)
class Port:
    """The link of one host, or of the switch's own namespace. Times in seconds, rates in bytes per second."""

    namespace: str
    device: str
    number: int  # the last byte of the host's address
    rate: Optional[float] = None  # of what the host receives; the kernel limits what it sends
    burst: int = 0
    queue: Optional[int] = None
    delay_s: float = 0.0  # on the way from or to this host
    jitter_s: float = 0.0
    loss: float = 0.0
    loss_burst: Optional[float] = None
    outage_s: float = 0.0
    outage_every_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Emulation:
    """All links of a network."""

    ports: Tuple[Port, ...]
    jitter_law: str = "normal"
    reordering: bool = False
    whole_packets: bool = True  # whether a frame is one packet, so that each can be lost by itself
    seed: int = 1

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Emulation:
        value = json.loads(text)
        return cls(**{**value, "ports": tuple(Port(**port) for port in value["ports"])})


class TokenBucket:
    """When frames may leave at a rate. The first bytes, up to `burst`, leave at once, as with the kernel's TBF."""

    def __init__(self, rate: float, burst: int):
        self._rate = rate
        self._burst_s = burst / rate
        self._free_at = -math.inf  # when all frames so far would have left without a burst

    def due(self, now: float, size: int) -> float:
        """Returns when a frame that comes now leaves."""
        self._free_at = max(now, self._free_at) + size / self._rate
        return max(now, self._free_at - self._burst_s)

    def waiting(self, now: float) -> float:
        """Returns the bytes that wait."""
        return max(0.0, (self._free_at - self._burst_s - now) * self._rate)


class LossProcess:
    """Which frames are lost: each by itself, or in rows of a mean length."""

    def __init__(self, loss: float, burst: Optional[float], generator: random.Random):
        self._generator = generator
        self._is_bad = False
        if burst is None or loss == 0:
            self._into_bad, self._out_of_bad = loss, 1 - loss
        else:
            self._out_of_bad = 1 / burst
            self._into_bad = self._out_of_bad * loss / (1 - loss)

    def is_lost(self) -> bool:
        if self._is_bad:
            self._is_bad = self._generator.random() >= self._out_of_bad
        else:
            self._is_bad = self._generator.random() < self._into_bad
        return self._is_bad


def draw_jitter(law: str, scale: float, generator: random.Random) -> float:
    """Returns a deviation of the delay: mean 0, standard deviation `scale`; for `uniform` half of the range."""
    if law == "normal":
        return generator.gauss(0.0, scale)
    if law == "uniform":
        return generator.uniform(-scale, scale)
    # The deviation of this law is always 0.6 of its mean, so that its tail is long at every scale.
    shape = 0.5545
    mean, deviation = math.exp(shape**2 / 2), math.exp(shape**2 / 2) * math.sqrt(math.exp(shape**2) - 1)
    return (generator.lognormvariate(0.0, shape) - mean) * scale / deviation


class Switch:
    """Decides when a frame goes where. The clock and the devices are the caller's."""

    def __init__(self, emulation: Emulation, now: float):
        self._emulation = emulation
        self._generator = random.Random(emulation.seed)  # noqa: S311
        self._ports = {port.number: port for port in emulation.ports}
        self._buckets = {
            port.number: TokenBucket(port.rate, port.burst) for port in emulation.ports if port.rate is not None
        }
        self._losses = {
            port.number: LossProcess(port.loss, port.loss_burst, self._generator)
            for port in emulation.ports
            if port.loss > 0
        }
        self._started_at = now
        self._last_due: Dict[Tuple[int, int], float] = {}
        # Each with its due time, a number that keeps frames of the same time in order, where it goes, and whether it
        # has passed the receiver's rate.
        self._waiting: List[Tuple[float, int, int, bool, bytes]] = []
        self._count = 0

    @property
    def next_due(self) -> Optional[float]:
        return self._waiting[0][0] if self._waiting else None

    def receive(self, source: int, frame: bytes, now: float) -> None:
        """Takes a frame that a host has sent."""
        target = frame[_PIECE_HEADER + 5]
        # Addresses are known beforehand; whatever is sent to all (bit 0 of the first byte) is dropped.
        if frame[_PIECE_HEADER] & 1 or target not in self._ports or target == source:
            return
        sender, receiver = self._ports[source], self._ports[target]
        if self._is_out(sender, now) or self._is_out(receiver, now):
            return
        if target in self._losses and self._losses[target].is_lost():
            return
        due = now + sender.delay_s + receiver.delay_s
        if sender.jitter_s:
            due = max(now, due + draw_jitter(self._emulation.jitter_law, sender.jitter_s, self._generator))
            if not self._emulation.reordering:
                due = max(due, self._last_due.get((source, target), 0.0))
                self._last_due[source, target] = due
        self._push(due, target, target not in self._buckets, frame)

    def take_due(self, now: float) -> List[Tuple[int, bytes]]:
        """Returns the frames to deliver now, with the host that each goes to."""
        found: List[Tuple[int, bytes]] = []
        waiting = self._waiting
        while waiting and waiting[0][0] <= now:
            due, _, target, has_passed_rate, frame = heapq.heappop(waiting)
            if has_passed_rate:
                found.append((target, frame))
                continue
            bucket, queue = self._buckets[target], self._ports[target].queue
            if queue is None or bucket.waiting(due) + len(frame) <= queue:
                # From the time that the frame was due, not from now: a late wake-up must not lower the rate.
                self._push(bucket.due(due, wire_bytes(frame)), target, True, frame)
        return found

    def _push(self, due: float, target: int, has_passed_rate: bool, frame: bytes) -> None:
        self._count += 1
        heapq.heappush(self._waiting, (due, self._count, target, has_passed_rate, frame))

    def _is_out(self, port: Port, now: float) -> bool:
        if not port.outage_s:
            return False
        return (now - self._started_at) % port.outage_every_s >= port.outage_every_s - port.outage_s


def wire_bytes(frame: bytes) -> int:
    """Returns the bytes of a frame on the wire: a large piece is sent as packets with headers of their own."""
    size = len(frame) - _PIECE_HEADER
    packet_data = frame[4] | frame[5] << 8
    if frame[1] and packet_data:
        size += (-(-(size - _TCP_HEADERS) // packet_data) - 1) * _TCP_HEADERS
    return size


def forward(emulation: Emulation, files: Mapping[int, int], stop: int) -> None:
    """Forwards frames between the devices, given by number, until `stop` can be read."""
    switch = Switch(emulation, time.monotonic())
    sources = {file: number for number, file in files.items()}
    watched = [*sources, stop]
    lateness_s = 0.0  # of wake-ups: a process runs about 0.1 ms after its time, so it asks for an earlier one
    while True:
        due = switch.next_due
        wait_s = None if due is None else max(0.0, due - lateness_s - time.monotonic())
        ready, _, _ = select.select(watched, (), (), wait_s)  # not epoll: its timeouts are whole milliseconds
        if due is not None and wait_s and not ready:
            lateness_s += _LEARNING_RATE * (time.monotonic() - due)
            lateness_s = min(max(lateness_s, 0.0), _MAX_LATENESS_S)
        for file in ready:
            if file == stop:
                return
            for frame in _read_frames(file):
                switch.receive(sources[file], frame, time.monotonic())
        # A wake-up that is too early waits here, busy, for a few times 10 us.
        for target, frame in switch.take_due(time.monotonic() + _TOLERANCE_S):
            _write_frame(files[target], frame)


def _read_frames(file: int) -> Iterator[bytes]:
    with contextlib.suppress(OSError):  # there are no more, or the device is down
        for _ in range(_FRAMES_AT_ONCE):
            yield os.read(file, _MAX_READ)


def _write_frame(file: int, frame: bytes) -> None:
    with contextlib.suppress(OSError):  # the device is down: a cut cable
        os.write(file, frame)


def open_device(port: Port, *, whole_packets: bool) -> int:
    """Makes a TAP device in the namespace of the calling thread and returns its file."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
    fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", port.device.encode(), flags))
    # Checksums are left out: nothing between the hosts can damage a frame.
    fcntl.ioctl(file, _TUNSETOFFLOAD, _CHECKSUM if whole_packets else _CHECKSUM | _TCP4_SEGMENTATION)
    return file


def main() -> int:
    """Reads the emulation, makes the devices and forwards until the parent ends."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGHUP):  # of the terminal: the parent decides when it ends
        signal.signal(number, signal.SIG_IGN)
    emulation = Emulation.from_json(sys.stdin.readline())
    files = {
        port.number: namespaces.call_inside(
            port.namespace, functools.partial(open_device, port, whole_packets=emulation.whole_packets)
        )
        for port in emulation.ports
    }
    _prefer_this_process()
    sys.stdout.write(f"{READY}\n")
    sys.stdout.flush()
    forward(emulation, files, sys.stdin.fileno())
    return 0


def _prefer_this_process() -> None:
    """Lets the kernel run this process before others: a late wake-up is a longer delay."""
    gc.collect()
    gc.disable()
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(_PRIORITY))
    except OSError:  # a container may not allow it
        try:
            os.nice(-20)
        except OSError:
            return


if __name__ == "__main__":
    sys.exit(main())
