"""A network to emulate: its hosts, and rate, delay and loss of the link of each. Pure: text in, frozen records out.

A profile is a text of lines `name = value`, with a section `[host 2]` for each host that differs from the others:

    hosts = 4
    rate = 1Gbit
    [host 2]
    rate = 25Mbit
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
import re
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Tuple

from tf_ipu_dp import cli
from tf_ipu_dp.collectives import quantities

PLACEMENTS = ("block", "round-robin")
JITTER_LAWS = ("normal", "lognormal", "uniform")
MAX_HOSTS = 64
_TCP_MIN_TIMEOUT_S = 0.2  # of Linux
_MIN_MTU, _MAX_MTU = 576, 9216
_MAX_DELAY_S = 600.0
_MIN_RATE, _MAX_RATE = 1e3, 1e12  # bytes per second
_MAX_DILATION = 1000.0
_ETHERNET_HEADER = 14
_TCP_HEADERS = 52  # IPv4, and TCP with time stamps
_BURST_S = 0.5e-3  # shorter ones cost more wake-ups than two cores can carry at 1 Gbit/s
_MAX_PIECE = 65_536  # bytes that Linux hands to a device at once


class FabricError(cli.UsageError):
    """A network that cannot be. The text is one sentence for the user; it begins with the setting if there is one."""

    def __init__(self, text: str, setting: str = "") -> None:
        super().__init__(text)
        self.setting = setting


@dataclasses.dataclass(frozen=True)
class Link:
    """The link between one host and the switch, in both directions."""

    rate: Optional[float] = None  # bytes per second in each direction; None where only the cores are a limit
    delay_s: float = 0.0  # one way between two hosts of this delay; each link has half of it
    jitter_s: float = 0.0  # of what the host sends: standard deviation, or half of the range of the uniform law
    loss: float = 0.0  # share of the packets to the host that do not arrive
    loss_burst: Optional[float] = None  # mean number of packets lost in a row; None where each is lost by itself
    outage_s: float = 0.0  # how long nothing passes
    outage_every_s: float = 0.0  # from the beginning of one outage to that of the next

    def __post_init__(self) -> None:
        if self.rate is not None and not _MIN_RATE <= self.rate <= _MAX_RATE:
            _refuse("rate", self.rate, "is not from 8Kbit to 8Tbit")
        for name in ("delay_s", "jitter_s", "outage_s", "outage_every_s"):
            if not 0 <= getattr(self, name) <= _MAX_DELAY_S:
                _refuse(name, getattr(self, name), f"is not from 0 to {_MAX_DELAY_S:g} s")
        if not 0 <= self.loss < 1:
            _refuse("loss", self.loss, "is not from 0 to less than 100 %")
        if self.loss_burst is not None and not 1 <= self.loss_burst <= 1e6:
            _refuse("loss_burst", self.loss_burst, "is not a mean number of packets, from 1 on")
        if self.loss_burst is not None and self.loss > 0.5:
            _refuse("loss", self.loss, "is more than 50 %, which loss_burst does not go with")
        if self.outage_s and not self.outage_s < self.outage_every_s:
            _refuse("outage", self.outage_s, "is not shorter than outage_every")


Changes = Tuple[Tuple[str, Any], ...]


@dataclasses.dataclass(frozen=True)
class Fabric:
    """Hosts on one switch. `dilated` is what is really built where links are faster than the cores can carry."""

    name: str
    hosts: int
    link: Link = Link()
    # What is different on single hosts: host, and fields of its link.
    host_changes: Tuple[Tuple[int, Changes], ...] = ()
    ranks_per_host: int = 1
    placement: str = PLACEMENTS[0]
    jitter_law: str = JITTER_LAWS[0]
    reordering: bool = False  # whether jitter lets a packet overtake another
    mtu: int = 1500
    congestion_control: str = "cubic"
    burst: Optional[int] = None  # bytes that pass before the rate applies; None for as few as the cores allow
    queue: Optional[int] = None  # bytes that may wait at each end of a link; None for all that come
    dilation: float = 1.0  # how many times slower the network that is built is

    def __post_init__(self) -> None:
        if not 1 <= self.hosts <= MAX_HOSTS:
            _refuse("hosts", self.hosts, f"is not from 1 to {MAX_HOSTS}")
        if not 1 <= self.ranks_per_host <= 1024:
            _refuse("ranks_per_host", self.ranks_per_host, "is not from 1 to 1,024")
        if not _MIN_MTU <= self.mtu <= _MAX_MTU:
            _refuse("mtu", self.mtu, f"is not from {_MIN_MTU} to {_MAX_MTU}")
        for name, choices in (("placement", PLACEMENTS), ("jitter_law", JITTER_LAWS)):
            if getattr(self, name) not in choices:
                _refuse(name, getattr(self, name), f"is not {cli.alternatives(choices)}")
        if not re.fullmatch("[a-z][a-z0-9_-]{0,14}", self.congestion_control):
            _refuse("congestion_control", self.congestion_control, "is not a name like cubic, bbr or reno")
        for name in ("burst", "queue"):
            value = getattr(self, name)
            if value is not None and not self.mtu + _ETHERNET_HEADER <= value < 2**31:
                _refuse(name, value, f"does not hold one packet of MTU {self.mtu} and {_ETHERNET_HEADER} B of header")
        if not 1 <= self.dilation <= _MAX_DILATION:
            _refuse("dilation", self.dilation, f"is not from 1 to {_MAX_DILATION:g}")
        for host, changes in self.host_changes:
            if not 0 <= host < self.hosts:
                last = self.hosts - 1
                raise FabricError(f"There is no host {host}: {cli.count(self.hosts, 'host')} are numbered 0 to {last}.")
            dataclasses.replace(self.link, **dict(changes))

    @property
    def links(self) -> Tuple[Link, ...]:
        """The links of all hosts, in their order."""
        changes = dict(self.host_changes)
        return tuple(dataclasses.replace(self.link, **dict(changes.get(host, ()))) for host in range(self.hosts))

    @property
    def ranks(self) -> int:
        return self.hosts * self.ranks_per_host

    def host_of(self, rank: int) -> int:
        """Returns the host that a rank runs on."""
        return rank // self.ranks_per_host if self.placement == "block" else rank % self.hosts

    @property
    def slowest_rate(self) -> Optional[float]:
        """Bytes per second of the slowest link; None where no link has a limit."""
        return min((link.rate for link in self.links if link.rate is not None), default=None)

    def rate_between(self, first: int, second: int) -> Optional[float]:
        """Returns the bytes per second between two hosts, headers included."""
        rates = [self.links[host].rate for host in (first, second)]
        return min((rate for rate in rates if rate is not None), default=None)

    def round_trip_s(self, first: int, second: int) -> float:
        """Returns the nominal round trip between two hosts."""
        return self.links[first].delay_s + self.links[second].delay_s

    @property
    def payload_share(self) -> float:
        """The part of a rate that is data of TCP: a rate counts the headers of Ethernet, IP and TCP too."""
        return (self.mtu - _TCP_HEADERS) / (self.mtu + _ETHERNET_HEADER)

    @property
    def tcp_min_timeout_s(self) -> float:
        """The shortest retransmission timeout of TCP on the network that is built: dilated like all its times."""
        return _TCP_MIN_TIMEOUT_S * self.dilation

    @property
    def packet_bytes(self) -> int:
        """The data of TCP in the largest packet."""
        return self.mtu - _TCP_HEADERS

    def burst_of(self, link: Link) -> int:
        """Returns the bytes that pass at once on a link with a rate: two packets at least, if it is not set."""
        packet = self.mtu + _ETHERNET_HEADER
        return self.burst or max(2 * packet, int(min(_MAX_PIECE, (link.rate or math.inf) * _BURST_S)))

    def dilated(self) -> Fabric:
        """Returns the network to build: rates divided, times multiplied. Measured times are divided by `dilation`."""

        def stretch(name: str, value: Any) -> Any:
            if name == "rate":
                return None if value is None else value / self.dilation
            return value * self.dilation if name.endswith("_s") else value

        link = Link(**{name: stretch(name, value) for name, value in dataclasses.asdict(self.link).items()})
        changes = [
            (host, tuple((name, stretch(name, value)) for name, value in each)) for host, each in self.host_changes
        ]
        return dataclasses.replace(self, link=link, host_changes=tuple(changes))

    def override(self, settings: Mapping[str, str], name_of: Callable[[str], str] = str) -> Fabric:
        """Returns the network with other settings, written as in a profile; `name_of` is how the user wrote a name."""
        fields: Dict[str, Any] = {}
        link_fields: Dict[str, Any] = {}
        for name, text in settings.items():
            setting = _find(name, SETTINGS, name_of)
            (link_fields if setting.of_link else fields)[setting.field] = _read(setting, text, name_of)
        with _named_by(name_of):
            return dataclasses.replace(self, link=dataclasses.replace(self.link, **link_fields), **fields)

    def override_host(self, host: int, settings: Mapping[str, str], name_of: Callable[[str], str] = str) -> Fabric:
        """Returns the network with another link of one host, written as in a profile."""
        of_link = {name: each for name, each in SETTINGS.items() if each.of_link}
        found = {
            _find(name, of_link, name_of).field: _read(of_link[name], text, name_of) for name, text in settings.items()
        }
        changes = {number: dict(each) for number, each in self.host_changes}
        changes[host] = {**changes.get(host, {}), **found}
        ordered = tuple((number, tuple(sorted(changes[number].items()))) for number in sorted(changes))
        with _named_by(name_of):
            return dataclasses.replace(self, host_changes=ordered)

    def render(self) -> str:
        """Returns the network in one line."""
        parts = [f"{cli.count(self.hosts, 'host')} x {cli.count(self.ranks_per_host, 'rank')}"]
        if self.placement != PLACEMENTS[0] and self.ranks_per_host > 1:
            parts.append(f"placed {self.placement}")
        parts += [*self._describe(dataclasses.asdict(self.link)), f"MTU {self.mtu}", self.congestion_control]
        if self.link.rate is None:
            parts.insert(1, "no rate limit")
        parts += [f"host {host}: {' and '.join(self._describe(dict(each)))}" for host, each in self.host_changes]
        if self.dilation != 1:
            parts.append(f"time dilated {self.dilation:g} times")
        return f"{self.name}: {', '.join(parts)}"

    def facts(self) -> Dict[str, str]:
        """Returns name and value of every setting, written as in a profile."""
        facts = {"fabric": self.name}
        for name, setting in SETTINGS.items():
            facts[name] = setting.write(getattr(self.link if setting.of_link else self, setting.field))
        for host, changes in self.host_changes:
            facts[f"host {host}"] = ", ".join(f"{name} = {text}" for name, text in _written(changes))
        return facts

    def to_text(self) -> str:
        """Returns the profile that `parse` reads."""
        lines = [f"{name} = {text}" for name, text in self.facts().items() if name in SETTINGS]
        for host, changes in self.host_changes:
            lines += ["", f"[host {host}]", *(f"{name} = {text}" for name, text in _written(changes))]
        return "\n".join(lines) + "\n"

    def _describe(self, link: Mapping[str, Any]) -> List[str]:
        """Returns what fields of a link mean, without those that say nothing."""
        parts = []
        seconds = {name: quantities.render_seconds(value) for name, value in link.items() if name.endswith("_s")}
        if link.get("rate"):
            parts.append(quantities.render_rate(link["rate"]))
        if link.get("delay_s"):
            parts.append(f"delay {seconds['delay_s']}")
        if link.get("jitter_s"):
            parts.append(f"{self.jitter_law} jitter {seconds['jitter_s']}")
        if link.get("loss"):
            parts.append(f"loss {link['loss'] * 100:.3g} %")
        if link.get("loss_burst"):
            parts.append(f"lost {link['loss_burst']:g} in a row")
        if link.get("outage_s"):
            parts.append(f"out for {seconds['outage_s']}")
        if link.get("outage_every_s"):
            parts.append(f"every {seconds['outage_every_s']}")
        return parts


@dataclasses.dataclass(frozen=True)
class Setting:
    """One line of a profile."""

    field: str
    read: Callable[[str], Any]  # raises ValueError with a sentence
    write: Callable[[Any], str]
    of_link: bool = False


def parse(text: str, name: str) -> Fabric:
    """Returns the network that a profile describes; FabricError names the line of a mistake."""
    known: Dict[str, Dict[str, Tuple[int, str]]] = {}
    host: Optional[int] = None
    fabric = Fabric(name, hosts=2)
    lines: List[Tuple[int, Optional[int], str, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        bare = line.split("#")[0].strip()
        section = re.fullmatch(r"\[\s*host\s+([0-9]{1,6})\s*\]", bare)
        key, equals, value = (part.strip() for part in bare.partition("="))
        where = f"{name}, line {number}"
        if section:
            host = int(section[1])
        elif bare.startswith("["):
            raise FabricError(f"{where}: {bare} is not a section. Write [host 2] for the link of host 2.")
        elif bare and not (equals and value):
            raise FabricError(f"{where}: {bare!r} has no value. Write {key or 'rate'} = VALUE.")
        elif bare:
            before = known.setdefault(str(host), {}).get(key)
            if before:
                raise FabricError(f"{where}: {key} is set in line {before[0]} already. Remove one of the two.")
            known[str(host)][key] = (number, value)
            lines.append((number, host, key, value))
    if "hosts" not in known.get("None", {}):
        raise FabricError(f"{name} does not say how many hosts there are. Add a line like hosts = 4.")
    # In the order of SETTINGS, where a setting comes after those that it is checked against.
    order = {key: place for place, key in enumerate(SETTINGS)}
    for number, host, key, value in sorted(lines, key=lambda each: (each[1] is not None, order.get(each[2], -1))):
        try:
            fabric = fabric.override({key: value}) if host is None else fabric.override_host(host, {key: value})
        except FabricError as error:
            raise FabricError(f"{name}, line {number}: {error}") from None
    return fabric


def nearest(word: str, known: Mapping[str, object]) -> str:
    """Returns the advice for a name that is not known."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"Did you mean {near[0]}?" if near else f"Use {cli.alternatives(list(known))}."


def parse_loss(text: str) -> float:
    """Returns a share of packets, from `1%` or `0.01`."""
    percent = text.strip().endswith("%")
    try:
        value = float(text.strip().rstrip("%")) / (100 if percent else 1)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise ValueError(f"{text!r} is not a loss like 1% or 0.01.")
    if not 0 <= value < 1:
        advice = f" Write {text.strip()}% for percent." if not percent and 1 <= value < 100 else ""
        raise ValueError(f"{text.strip()} is not from 0 to less than 100 %.{advice}")
    return value


def _find(name: str, settings: Mapping[str, Setting], name_of: Callable[[str], str]) -> Setting:
    if name not in settings:
        what = "a setting of a single host" if name in SETTINGS else "a setting"
        raise FabricError(f"{name_of(name)} is not {what}. {nearest(name, settings)}")
    return settings[name]


def _read(setting: Setting, text: str, name_of: Callable[[str], str]) -> Any:
    name = next(name for name, each in SETTINGS.items() if each is setting)
    try:
        return setting.read(text)
    except ValueError as error:
        raise FabricError(f"{name_of(name)}={text}: {error}") from None


@contextlib.contextmanager
def _named_by(name_of: Callable[[str], str]) -> Iterator[None]:
    """Writes the setting in a refusal of the records as the user wrote it."""
    try:
        yield
    except FabricError as error:
        if not error.setting:
            raise
        raise FabricError(name_of(error.setting) + str(error)[len(error.setting) :], error.setting) from None


def _refuse(field: str, value: Any, why: str) -> None:
    name, setting = next((name, each) for name, each in SETTINGS.items() if field in (name, each.field))
    try:
        written = setting.write(value)
    except (TypeError, ValueError):
        written = str(value)
    raise FabricError(f"{name}={written} {why}.", name)


def _written(changes: Changes) -> List[Tuple[str, str]]:
    by_field = {each.field: (name, each) for name, each in SETTINGS.items()}
    return [(by_field[field][0], by_field[field][1].write(value)) for field, value in changes]


def _whole(text: str) -> int:
    if not re.fullmatch("-?[0-9]{1,12}", text.strip(), re.ASCII):
        raise ValueError("it takes a whole number.")
    return int(text)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError("it takes a number.")
    return value


def _yes_or_no(text: str) -> bool:
    if text.strip() not in ("yes", "no"):
        raise ValueError("it takes yes or no.")
    return text.strip() == "yes"


def _or_none(word: str, read: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda text: None if text.strip() == word else read(text)


def _write_or(word: str, write: Callable[[Any], str]) -> Callable[[Any], str]:
    return lambda value: word if value is None else write(value)


def _write_exactly(value: float, units: Mapping[str, float], read: Callable[[str], float], last: str) -> str:
    """Returns the shortest form that is read as the same number."""
    for unit, factor in units.items():
        text = f"{value / factor:.6g}{unit}"
        if value >= factor and read(text) == value:
            return text
    return last


def _write_rate(value: float) -> str:
    units = {"Gbit": 1e9 / 8, "Mbit": 1e6 / 8, "Kbit": 1e3 / 8}
    return _write_exactly(value, units, quantities.parse_rate, f"{value * 8!r}bit")


def _write_seconds(value: float) -> str:
    units = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
    return "0" if value == 0 else _write_exactly(value, units, quantities.parse_seconds, f"{value!r}s")


def _write_loss(value: float) -> str:
    text = f"{value * 100:.6g}%"
    return text if float(text[:-1]) / 100 == value else repr(value)


def _write_number(value: float) -> str:
    return f"{value:g}" if float(f"{value:g}") == value else repr(value)


SETTINGS: Dict[str, Setting] = {
    "hosts": Setting("hosts", _whole, str),
    "ranks_per_host": Setting("ranks_per_host", _whole, str),
    "placement": Setting("placement", str.strip, str),
    "rate": Setting(
        "rate", _or_none("unlimited", quantities.parse_rate), _write_or("unlimited", _write_rate), of_link=True
    ),
    "delay": Setting("delay_s", quantities.parse_seconds, _write_seconds, of_link=True),
    "jitter": Setting("jitter_s", quantities.parse_seconds, _write_seconds, of_link=True),
    "jitter_law": Setting("jitter_law", str.strip, str),
    "reordering": Setting("reordering", _yes_or_no, lambda value: "yes" if value else "no"),
    "loss": Setting("loss", parse_loss, _write_loss, of_link=True),
    "loss_burst": Setting("loss_burst", _or_none("none", _number), _write_or("none", _write_number), of_link=True),
    "outage_every": Setting("outage_every_s", quantities.parse_seconds, _write_seconds, of_link=True),
    "outage": Setting("outage_s", quantities.parse_seconds, _write_seconds, of_link=True),
    "mtu": Setting("mtu", _whole, str),
    "congestion_control": Setting("congestion_control", str.strip, str),
    "burst": Setting("burst", _or_none("automatic", quantities.parse_bytes), _write_or("automatic", str)),
    "queue": Setting("queue", _or_none("unlimited", quantities.parse_bytes), _write_or("unlimited", str)),
    "dilation": Setting("dilation", _number, _write_number),
}
