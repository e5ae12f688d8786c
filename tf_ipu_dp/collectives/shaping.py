"""How the links of a network get their rate, delay and loss: the choice of means, and the lines for `tc`. Pure."""

from __future__ import annotations

from typing import List, Optional

from tf_ipu_dp.collectives.fabric import Fabric, Link

KERNEL = "kernel"  # TBF for the rate, nftables for the loss
NETEM = "netem"  # the kernel's own delays, where it was built with them
USER_SPACE = "user space"  # TAP devices and a process that forwards frames between them
DESCRIPTIONS = {
    KERNEL: "veth and a bridge, rate by TBF, loss by nftables",
    NETEM: "veth and a bridge, rate and delay by netem, loss by nftables",
    USER_SPACE: "TAP devices and a link emulator in user space, rate of senders by TBF",
}
_NO_DROPS = 2**30  # bytes: more than TCP ever has on the way
_NO_DROPS_PACKETS = 10**6
_MAX_PIECE = 65_536


def choose(fabric: Fabric, *, has_netem: bool, has_nftables: bool) -> str:
    """Returns the means that can do all that the links ask for, with the least work for the cores."""
    links = fabric.links
    needs_delay = any(link.delay_s or link.jitter_s or (link.loss and link.loss_burst is not None) for link in links)
    if any(link.outage_s for link in links) or (needs_loss(fabric) and not has_nftables):
        return USER_SPACE
    if not needs_delay:
        return KERNEL
    # netem has no lognormal law, and a packet may overtake others in it whenever there is jitter.
    suits_netem = fabric.jitter_law != "lognormal" and (fabric.reordering or not any(link.jitter_s for link in links))
    return NETEM if has_netem and suits_netem else USER_SPACE


def needs_loss(fabric: Fabric) -> bool:
    """Whether packets are lost on any link."""
    return any(link.loss for link in fabric.links)


def piece_options(fabric: Fabric, link: Link) -> str:
    """Returns the options of `ip link set` for how much data a host hands to its device at once.

    One packet where packets are lost, for each is lost by itself. Else as much as the rate's burst: larger pieces would
    be cut again, which costs the cores what large pieces save.
    """
    if needs_loss(fabric):
        return "gso_max_segs 1"
    if link.rate is None:
        return f"gso_max_size {_MAX_PIECE}"
    return f"gso_max_size {max(2 * fabric.mtu, min(_MAX_PIECE, fabric.burst_of(link)))}"


def host_line(fabric: Fabric, link: Link, means: str, device: str) -> Optional[str]:
    """Returns the line for what a host sends; None where nothing limits it."""
    if means == NETEM:
        return _netem_line(fabric, link, device, jitter=True)
    return _tbf_line(fabric, link, device)


def switch_line(fabric: Fabric, link: Link, means: str, device: str) -> Optional[str]:
    """Returns the line for what the switch sends to a host; None where nothing limits it."""
    if means == NETEM:
        return _netem_line(fabric, link, device, jitter=False)
    return _tbf_line(fabric, link, device)


def _tbf_line(fabric: Fabric, link: Link, device: str) -> Optional[str]:
    if link.rate is None:
        return None
    limit = fabric.queue or _NO_DROPS
    bits = round(link.rate * 8)
    return f"qdisc add dev {device} root tbf rate {bits}bit burst {fabric.burst_of(link)}b limit {limit}b"


def _netem_line(fabric: Fabric, link: Link, device: str, *, jitter: bool) -> Optional[str]:
    words: List[str] = []
    if link.delay_s or (jitter and link.jitter_s):
        words.append(f"delay {_microseconds(link.delay_s / 2)}")
        if jitter and link.jitter_s:
            words.append(_microseconds(link.jitter_s))
            words += ["distribution normal"] if fabric.jitter_law == "normal" else []
    if not jitter and link.loss and link.loss_burst is not None:
        out_of_bad = 1 / link.loss_burst
        into_bad = out_of_bad * link.loss / (1 - link.loss)
        words.append(f"loss gemodel {into_bad * 100:.6f}% {out_of_bad * 100:.6f}%")
    if link.rate is not None:
        words.append(f"rate {round(link.rate * 8)}bit")
    packets = _NO_DROPS_PACKETS if fabric.queue is None else max(1, fabric.queue // fabric.mtu)
    return f"qdisc add dev {device} root netem limit {packets} {' '.join(words)}" if words else None


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.0f}us"
