"""What lost packets add to messages over TCP or RoCE: recoveries, probes and timeouts. Pure, numpy.

A message of q packets loses each with probability p. A lost packet in the stream costs one recovery. A lost last packet
waits for the tail-loss probe, or for the timeout if it was the only one. A retransmission that is lost too ends in a
timeout, which doubles each time: 0.2, 0.6, 1.4, 3.0, 6.2 s in all.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Optional, Tuple

import numpy as np

from tf_ipu_dp import cli

Array = Any  # numpy has no types that hold for both releases
Generator = Any

CUBIC, BBR, ROCE = "cubic", "bbr", "roce"
TRANSPORTS = (CUBIC, BBR, ROCE)
_TICK_S = 4e-3
_MAX_TIMEOUTS = 8
_ROCE_UNIT_S = 4.096e-6
# Of the retransmissions that are lost again, this share ended in a timeout in a lossy run on 4 hosts (BBR, 1 %): the
# others are found by later packets of the stream. A calibration replaces it.
_TIMEOUT_SHARE = 0.4


@dataclasses.dataclass(frozen=True)
class Loss:
    """Lost packets and what they cost. The round trip is that of the links, without queues."""

    probability: float = 0.0
    burst: float = 1.0  # packets lost in a row, on average; 1: independent of each other
    packet_bytes: int = 1448
    transport: str = CUBIC
    timeout_s: float = 0.2
    round_trip_s: float = 0.0
    packet_s: float = 0.0  # one packet on the link
    # Of the lost packets with others behind them. None: by the rule above.
    timeout_given_loss: Optional[float] = None
    # Timeouts of the end of a message, and of each of its packets; they replace the rule and `timeout_given_loss`.
    timeout_per_message: Optional[float] = None
    timeout_per_packet: float = 0.0
    timeout_per_single_packet: float = 0.0  # of Horovod's negotiation: each is alone on its way
    recovery_s: Optional[float] = None  # of a packet lost in the stream

    def __post_init__(self) -> None:
        if not 0 <= self.probability < 1:
            raise cli.UsageError(f"A loss of {self.probability:g} is not possible. Use a share from 0 to less than 1.")
        if not self.burst >= 1:
            raise cli.UsageError(f"A burst of {self.burst:g} packets is not possible. Use 1 or more.")
        if self.transport not in TRANSPORTS:
            raise cli.UsageError(f"{self.transport} is not a transport. Use {cli.alternatives(TRANSPORTS)}.")
        if self.timeout_given_loss is not None and not 0 <= self.timeout_given_loss <= 1:
            raise cli.UsageError(f"A timeout probability of {self.timeout_given_loss:g} is not from 0 to 1.")
        for value in (self.timeout_per_message or 0.0, self.timeout_per_packet, self.timeout_per_single_packet):
            if not 0 <= value < 1:
                raise cli.UsageError(f"{value:g} timeouts per message or packet are not possible. Use 0 to 1.")
        if self.packet_bytes < 1 or min(self.timeout_s, self.round_trip_s, self.recovery_s or 0.0) < 0:
            raise cli.UsageError("Packets have at least 1 byte, and timeouts and recoveries take no negative time.")

    def __str__(self) -> str:
        return f"{self.probability:g}" + (f":{self.burst:g}" if self.burst > 1 else "")

    @property
    def is_none(self) -> bool:
        """Whether nothing is lost."""
        return self.probability == 0

    @property
    def event_probability(self) -> float:
        """How often a packet begins a loss: of a burst only the first counts."""
        return self.probability / self.burst

    @property
    def repeat_probability(self) -> float:
        """How often a retransmission is lost too: a burst lasts until packets have passed."""
        return max(self.probability, 1 - 1 / self.burst)

    @property
    def timeout_share(self) -> float:
        """The share of losses with packets behind them that end in a timeout."""
        if self.timeout_given_loss is not None:
            return self.timeout_given_loss
        return 1.0 if self.transport == ROCE else min(1.0, _TIMEOUT_SHARE * self.repeat_probability)

    @property
    def stream_recovery_s(self) -> float:
        """What a packet costs that is lost in the stream and found by those behind it."""
        if self.recovery_s is not None:
            return self.recovery_s
        if self.transport != CUBIC:
            return 0.0
        # CUBIC's window at this loss rate has about sqrt(1.5 / p) packets; the link idles for a part of it.
        return self.round_trip_s + math.sqrt(1.5 / self.probability) * self.packet_s

    @property
    def probe_s(self) -> float:
        """How long a lost last packet waits for the tail-loss probe."""
        return 2 * self.round_trip_s + 2 * _TICK_S

    def packets(self, message_bytes: float) -> int:
        """Returns the packets of a message."""
        return max(1, math.ceil(message_bytes / self.packet_bytes))

    def timeout_probability(self, message_bytes: float, messages: int = 1, share: float = 1.0) -> float:
        """Returns how often the chunk of a step meets a timeout.

        The chunk goes in one or more messages, and a share of the chunks over links that lose packets.
        """
        if self.is_none or not share:
            return 0.0
        if self.timeout_per_message is not None:
            rest = self.packets(message_bytes) * math.log1p(-self.timeout_per_packet)
            return share * (1 - (1 - self.timeout_per_message) * math.exp(rest))
        packets = self.packets(message_bytes / messages)
        timeouts = self.timeout_share if packets > 1 or self.transport == ROCE else 1.0
        none = messages * packets * math.log1p(-min(self.event_probability * timeouts, 1 - 1e-12))
        return share * -math.expm1(none)

    def sample_timeout_delay(self, rng: Generator, size: Any) -> Array:
        """Returns the delays of messages that met a timeout; repeated ones double."""
        if self.transport == ROCE:
            return np.minimum(rng.geometric(1 - self.repeat_probability, size), _MAX_TIMEOUTS) * self.timeout_s
        count = np.minimum(rng.geometric(1 - self.repeat_probability, size), _MAX_TIMEOUTS)
        return self.timeout_s * (np.exp2(count) - 1)

    def sample_negotiation(self, rng: Generator, trials: int, packets: int) -> Tuple[Array, Array]:
        """Returns how many packets of a negotiation, one after the other, meet a timeout, and the delays."""
        counts = rng.binomial(packets, 0.0 if self.is_none else self.timeout_per_single_packet, trials)
        delays = self.sample_timeout_delay(rng, int(counts.sum()))
        return counts, np.bincount(np.repeat(np.arange(trials), counts), weights=delays, minlength=trials)

    def small_rates(self, message_bytes: float, messages: int = 1, share: float = 1.0) -> Tuple[float, float]:
        """Returns how many probes and recoveries a chunk of a step meets, timeouts left out."""
        packets = self.packets(message_bytes / messages)
        if self.is_none or not share or packets == 1 or self.transport == ROCE:
            return 0.0, 0.0
        rate = messages * self.event_probability * share
        return rate, (packets - 1) * rate if self.stream_recovery_s else 0.0

    def sample_small_delays(
        self, rng: Generator, size: Any, message_bytes: float, messages: int = 1, share: float = 1.0
    ) -> Optional[Array]:
        """Returns what probes and recoveries add to the chunks of steps; None if nothing."""
        probes, recoveries = self.small_rates(message_bytes, messages, share)
        if not probes:
            return None
        delays = self.probe_s * rng.poisson(probes, size)
        if recoveries:
            delays = delays + self.stream_recovery_s * rng.poisson(recoveries, size)
        return delays


def roce_timeout_s(exponent: int) -> float:
    """Returns RoCE's local timeout: 4.096 us x 2^T."""
    if not 1 <= exponent <= 31:
        raise cli.UsageError(f"RoCE's timeout exponent is from 1 to 31, not {exponent}.")
    return float(_ROCE_UNIT_S * 2**exponent)


def parse_loss(text: str) -> Loss:
    """Returns the loss of a text like 0.01, 1% or 0.01:8 (bursts of 8 packets)."""
    rate, colon, burst = text.strip().partition(":")
    percent = rate.endswith("%")
    try:
        probability = float(rate.rstrip("%")) / (100 if percent else 1)
        length = float(burst) if colon else 1.0
    except ValueError:
        raise ValueError(f"{text!r} is not a loss like 0.01, 1% or 0.01:8 (in bursts of 8 packets).") from None
    try:
        return Loss(probability, length)
    except cli.UsageError as error:
        raise ValueError(str(error)) from None


@dataclasses.dataclass(frozen=True)
class Transport:
    """What recovers lost packets, and its first timeout."""

    name: str = CUBIC
    timeout_s: float = 0.2

    def __str__(self) -> str:
        return self.name


def parse_transport(text: str) -> Transport:
    """Returns the transport of a text like cubic, bbr, roce or roce:18 (4.096 us x 2^18)."""
    name, colon, exponent = text.strip().partition(":")
    if name not in TRANSPORTS or (colon and (name != ROCE or not exponent.isdigit())):
        raise ValueError(f"{text!r} is not a transport. Use cubic, bbr, or roce with its timeout exponent: roce:14.")
    return Transport(name, roce_timeout_s(int(exponent) if colon else 14)) if name == ROCE else Transport(name)
